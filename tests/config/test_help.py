"""Help texts: every option with its value in the config; --help in groups of one line each, --help_all in full."""

import dataclasses
import re

import pytest

from rlhf_jax.config import STAGES, Pipeline, RLOOConfig, command_line, help
from rlhf_jax.config import files as config_files
from rlhf_jax.option import field_types, metadata

SHIPPED = list(config_files.shipped_configs())


def printed(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        command_line.parse(words)
    assert end.value.code == 0
    return capsys.readouterr().out


def stages_of(spec: str) -> dict:
    config = config_files.load_config(spec)
    if not isinstance(config, Pipeline):
        return {"": config}
    return {f"{name}.": getattr(config, name) for name in STAGES if getattr(config, name) is not None}


@pytest.mark.parametrize("spec", SHIPPED)
def test_help_all_of_a_config_has_every_option_with_its_value_and_meaning(spec, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100000")
    lines = printed(capsys, "--config", spec, "--help_all").splitlines()
    for prefix, stage in stages_of(spec).items():
        for name in field_types(type(stage)):
            at = lines.index(f"  --{prefix}{name} {help.value_text(getattr(stage, name))}")
            meaning = help.meaning(type(stage), name)
            assert lines[at + 1].strip().startswith(f"{meaning} ["), name


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("spec", SHIPPED)
def test_help_of_a_config_has_a_line_for_each_option_that_is_not_rare(spec, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(capsys, "--config", spec, "--help")
    flags = re.findall(r"^  --([\w.]+) ", text, re.M)
    assert len(flags) == len(set(flags))
    (policy, config), *_ = [*stages_of(spec).items()][::-1]  # of a pipeline its last stage; others have fewer lines
    pipelines = field_types(Pipeline) if policy else {}
    for name in field_types(type(config)):
        rare = metadata(type(config), name).rare
        hidden = rare and getattr(config, name) == getattr(type(config)(), name)
        assert (f"{policy}{name}" in flags) == (not hidden and name not in pipelines), name
    for line in text.splitlines():
        assert len(line) <= width or not line.endswith("..."), line


def test_an_algorithms_own_options_come_first(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    for spec, own, shared in (
        ("tldr_ppo.py", "--kl_coef 0.05 ", "--response_length"),
        ("grpo_deepmath.py", "--loss_type dapo ", "--response_length"),
        ("tldr_ppo.py", "--response_length", "--mesh_fsdp"),
        ("rloo_deepmath.py", "--policy_loss clipped ", "--reward_model_path"),
        ("rloo_deepmath.py", "--beta 0.05 ", "--reward_model_path"),
        ("tldr_reward.py", "--chosen_column chosen ", "--dataset_name"),
        ("quickstart.py", "--ppo.kl_coef 0.1 ", "--sft.max_steps"),
    ):
        text = printed(capsys, "--config", spec, "--help")
        assert text.index(own) < text.index(shared)
    lines = printed(capsys, "--config", "tldr_ppo.py", "--help").splitlines()
    headings = [lines.index(heading) for heading in ("PPO", "Episodes", "Sampling", "The run")]
    assert headings == sorted(headings)
    assert any(re.fullmatch(r"  --kl_coef 0.05 +Coefficient of the KL penalty in the reward", line) for line in lines)


def test_rare_options_are_shown_where_a_config_sets_them():
    assert "--reshuffle" not in help.text(RLOOConfig(), "x")
    assert "--reshuffle per_epoch " in help.text(RLOOConfig(reshuffle="per_epoch"), "x")


def test_values_are_written_as_the_command_line_reads_them():
    config = RLOOConfig(
        generation_kwargs={"top_k": 50}, reward_clip_range=(-1.0, 2.5), length_buckets=(8, 16), learning_rate=1e-6
    )
    for name, hint in field_types(RLOOConfig).items():
        value = getattr(config, name)
        assert command_line.value_from_words(f"--{name}", hint, help.value_text(value).split(" ")) == value, name


def test_a_class_without_a_file_has_its_options_without_meanings():
    @dataclasses.dataclass(frozen=True)
    class Local:
        """A command."""

        size: int = 3

    Local.__module__ = "nowhere"
    made = dataclasses.make_dataclass("Made", [("size", int, 3)])
    assert "--size 3" in help.text(made(), "x")
