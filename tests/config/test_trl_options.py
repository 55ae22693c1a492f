"""docs/migrating.md and the parser agree on every option that TRL has or had."""

import dataclasses
import fnmatch
import inspect
import itertools
import pathlib
import re
import typing

import pytest

from rlhf_jax import run
from rlhf_jax.config import STAGES, command_line, trl_options
from rlhf_jax.errors import UserError
from rlhf_jax.option import field_types, is_dict, is_json, without_none

ROWS = sorted({(name, stage) for table in trl_options.TABLES for name in table.options for stage in table.stages})
SAMPLES = {str: "x", int: "1", float: "0.5", bool: "true"}


def sample_word(field: str, hint) -> str:
    """A command-line word that the field takes."""
    inner = without_none(hint)[0]
    if is_json(hint):
        return '{"top_k": 3}' if is_dict(hint) else '[{"path": "posts.jsonl"}]'
    if typing.get_origin(inner) is tuple:
        inner = inner.__args__[0]
    if inner in SAMPLES and field != "report_to":
        return SAMPLES[inner]
    return "tensorboard" if field == "report_to" else str(inner.__args__[0])


def test_the_page_is_what_the_tables_say():
    page = pathlib.Path(__file__).parents[2] / "docs" / "migrating.md"
    assert page.read_text(encoding="utf-8") == trl_options.page(), (
        "run python -m rlhf_jax.config.trl_options > docs/migrating.md"
    )


@pytest.mark.parametrize("table", trl_options.TABLES, ids=[table.title for table in trl_options.TABLES])
def test_every_row_is_on_the_page_once(table):
    section = trl_options.page().split(f"\n## {table.title}\n")[1].split("\n## ")[0]
    assert len(set(table.options)) == len(table.options)
    for name in table.options:
        assert section.count(f"\n| `{name}` |") == 1


@pytest.mark.parametrize(("name", "stage"), ROWS, ids=["-".join(row) for row in ROWS])
def test_the_parser_gives_every_name_the_pages_answer(name, stage, capsys):
    config = STAGES[stage]()
    hints = field_types(STAGES[stage])
    typed = name.replace("*", "num_workers")
    answer = trl_options.answer(typed, stage)
    if answer.kind == "unsupported":
        with pytest.raises(UserError) as error:
            command_line.with_flag(config, typed, ["1"])
        assert str(error.value) == f"--{typed} is not supported. {answer.text}"
        assert len(answer.text) > 20
    elif answer.kind == "translated":
        changed = command_line.with_flag(
            dataclasses.replace(config, micro_batch_size=32), typed, [str(config.batch_size)]
        )
        rows = config.batch_size * (32 if typed == "steps_per_generation" else 1)
        assert changed.batch_size == rows == changed.num_mini_batches * (config.batch_size // config.num_mini_batches)
        assert f"note: --{typed} " in capsys.readouterr().err
    elif answer.kind == "renamed":
        target = answer.renamed.to
        values = answer.renamed.values
        word, value = ("true", values["true"]) if values else (sample_word(target, hints[target]), None)
        changed = command_line.with_flag(config, typed, [word])
        expected = command_line.value_from_words(target, hints[target], [value or word])
        assert getattr(changed, target) == expected
        assert f"note: --{typed} is --{target} here" in capsys.readouterr().err
    else:
        word = sample_word(typed, hints[typed])
        changed = command_line.with_flag(config, typed, [word])
        assert getattr(changed, typed) == command_line.value_from_words(typed, hints[typed], [word])


@pytest.mark.parametrize(
    ("words", "value"), [([], "group"), (["True"], "group"), (["false"], "none"), (["batch"], "batch")]
)
def test_scale_rewards_takes_trls_booleans(words, value):
    assert command_line.with_flag(STAGES["grpo"](), "scale_rewards", words).scale_rewards == value


@pytest.mark.parametrize("name, dtype", [("bf16", "bfloat16"), ("fp16", "float16")])
def test_half_precision_alone_is_its_dtype_and_false_is_float32(name, dtype):
    config = STAGES["ppo"]()
    assert command_line.with_flag(config, name, []).dtype == dtype
    assert command_line.with_flag(config, name, ["False"]).dtype == "float32"


def test_the_reasons_name_what_to_do():
    for name, words in {
        "per_device_train_batch_size": "micro_batch_size = per_device_train_batch_size x devices",
        "gradient_accumulation_steps": "= per_device_train_batch_size x gradient_accumulation_steps x devices",
        "max_steps": "total_episodes = max_steps x batch_size",
        "num_total_batches": "ceil\\(total_episodes / batch_size\\)",
        "rloo_k": "one response per prompt",
        "mask_truncated_completions": "missing_eos_penalty",
        "use_dora": "plain LoRA",
        "vllm_mode": "in-process",
        "deepspeed": "mesh_fsdp",
        "resume_from_checkpoint": "resume auto",
    }.items():
        with pytest.raises(UserError, match=words):
            command_line.with_flag(STAGES["ppo"](), name, ["2"])


def test_rloo_has_reasons_of_its_own():
    for name, words in {
        "max_steps": "batch_size / \\(num_iterations x num_mini_batches\\)",
        "whiten_rewards": "normalize_reward",
        "per_device_train_batch_size": "Until 0.21 TRL's batch is x num_mini_batches",
        "value_model_path": "no value model",
    }.items():
        with pytest.raises(UserError, match=words):
            command_line.with_flag(STAGES["rloo"](), name, ["2"])


def test_grpo_has_reasons_of_its_own():
    for name, words in {
        "max_steps": "batch_size / \\(num_iterations x num_mini_batches\\)",
        "gradient_accumulation_steps": "num_mini_batches = steps_per_generation / gradient_accumulation_steps",
        "normalize_advantages": "whiten_advantages",
        "lam": "no value model",
        "log_completions_hub_repo": "push_to_hub",
        "cast_lm_head_to_fp32": "float32 whatever dtype",
    }.items():
        with pytest.raises(UserError, match=words):
            command_line.with_flag(STAGES["grpo"](), name, ["2"])


RENAMES = [
    ("rloo", "rloo_k", "num_generations", 4),
    ("rloo", "num_ppo_epochs", "num_iterations", 4),
    ("rloo", "cliprange", "epsilon", 4.0),
    ("rloo", "kl_coef", "beta", 4.0),
    ("rloo", "normalize_advantage", "normalize_advantages", None),
    ("rloo", "max_completion_length", "response_length", 4),
    ("rloo", "model_name_or_path", "sft_model_path", "4"),
    ("rloo", "reward_model_name_or_path", "reward_model_path", "4"),
    ("grpo", "max_completion_length", "response_length", 4),
    ("grpo", "kl_coef", "beta", 4.0),
    ("grpo", "vllm_importance_sampling_clip_min", "importance_sampling_clip_min", 4.0),
    ("grpo", "vllm_importance_sampling_cap", "importance_sampling_clip_max", 4.0),
    ("ppo", "beta", "kl_coef", 4.0),
    ("ppo", "epsilon", "cliprange", 4.0),
    ("ppo", "num_iterations", "num_ppo_epochs", 4),
]


@pytest.mark.parametrize(("stage", "name", "target", "value"), RENAMES, ids=["-".join(row[:2]) for row in RENAMES])
def test_each_algorithm_takes_the_others_names(stage, name, target, value, capsys):
    changed = command_line.with_flag(STAGES[stage](), name, [] if value is None else ["4"])
    assert getattr(changed, target) == (True if value is None else value)
    assert f"note: --{name} is --{target} here" in capsys.readouterr().err


def test_a_name_that_is_an_option_is_never_renamed(capsys):
    assert command_line.with_flag(STAGES["rloo"](), "beta", ["4"]).beta == 4.0
    assert command_line.with_flag(STAGES["ppo"](), "kl_coef", ["4"]).kl_coef == 4.0
    assert capsys.readouterr().err == ""


def test_an_option_of_another_stage_says_whose_it_is():
    with pytest.raises(UserError, match="It is an option of rloo and grpo, not of sft"):
        command_line.with_flag(STAGES["sft"](), "beta", ["0.1"])
    with pytest.raises(UserError, match="It is num_generations here, an option of rloo and grpo, not of reward"):
        command_line.with_flag(STAGES["reward"](), "rloo_k", ["2"])
    with pytest.raises(UserError, match="It is an option of ppo, rloo and grpo, not of sft"):
        command_line.with_flag(STAGES["sft"](), "steps_per_generation", ["2"])
    with pytest.raises(UserError, match="It is an option of ppo, not of rloo"):
        command_line.with_flag(STAGES["rloo"](), "vf_coef", ["2"])


def test_the_page_corrects_the_three_wrong_rows_of_trls_guide():
    page = trl_options.page()
    for words in ("it normalized scores", "`gradient_accumulation_steps` x `num_mini_batches`", "count `num_iter"):
        assert words in page.split("migration guide are wrong")[1].split("\n## ")[0]


def test_no_reason_or_note_is_for_a_name_that_nothing_can_reach():
    fields = {name for stage in STAGES.values() for name in stage.__dataclass_fields__}
    assert set(trl_options.NOTES) | set(trl_options.VALUES) <= fields
    for stage, notes in trl_options.NOTES_BY_STAGE.items():
        assert set(notes) <= set(STAGES[stage].__dataclass_fields__)
    assert {renamed.to for renamed in trl_options.RENAMED.values()} <= fields
    everywhere = {name for row in trl_options.UNSUPPORTED if row.stages is None for name in row.options}
    assert not (set(trl_options.RENAMED) | set(trl_options.TRANSLATED)) & everywhere
    assert all(any(name not in stage.__dataclass_fields__ for stage in STAGES.values()) for name in everywhere)
    for row in trl_options.UNSUPPORTED:
        for name, stage in itertools.product(row.options, row.stages or ()):
            answer = trl_options.answer(name, stage)
            assert answer.kind == "unsupported" and answer.text == row.reason, (stage, name)


def test_hints_are_names_that_nothing_else_answers():
    fields = {name for stage in STAGES.values() for name in stage.__dataclass_fields__}
    for name, known in trl_options.HINTS.items():
        assert known and set(known) <= fields, name
        assert all(trl_options.answer(name, stage) is None for stage in STAGES), name


def test_every_argument_of_the_trainers_constructors_is_on_the_page():
    trl, ppo = pytest.importorskip("trl"), pytest.importorskip("trl.experimental.ppo")
    trainers = {"SFT": trl.SFTTrainer, "Reward": trl.RewardTrainer, "PPO": ppo.PPOTrainer}
    trainers |= {"RLOO": trl.RLOOTrainer, "GRPO": trl.GRPOTrainer}
    for name, trainer in trainers.items():
        theirs = set(inspect.signature(trainer.__init__).parameters) - {"self"}
        assert theirs == {argument.name for argument in trl_options.ARGUMENTS if name in argument.trainers}, name
    section = trl_options.page().split("\n## Arguments of the trainers' constructors\n")[1]
    assert all(section.count(f"\n| `{argument.name}` |") == 1 for argument in trl_options.ARGUMENTS)


def test_options_that_stand_in_place_of_an_argument_exist():
    known = {name for stage in STAGES.values() for name in stage.__dataclass_fields__}
    known |= {argument.name for argument in trl_options.ARGUMENTS}
    known |= {"prompt", "completion", "messages", "save_pretrained", "on_evaluate", "--config"}
    for argument in trl_options.ARGUMENTS:
        names = [name for name in re.findall(r"`([^`]+)`", argument.here) if re.fullmatch(r"[-\w]+", name)]
        assert set(names) <= known, argument.name
        for call in re.findall(r"rlhf_jax\.run\(config, (\w+)=", argument.here):
            assert call in inspect.signature(run).parameters


def test_no_option_of_trl_is_missing():
    """Every field of TRL's own dataclasses has a row, those of TrainingArguments included."""
    import transformers

    trl, ppo = pytest.importorskip("trl"), pytest.importorskip("trl.experimental.ppo")
    options = {table.title: table.options for table in trl_options.TABLES}
    inherited = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    for title, config_type in (
        ("SFTConfig", trl.SFTConfig),
        ("PPOConfig", ppo.PPOConfig),
        ("RLOOConfig since 0.22", trl.RLOOConfig),
        ("GRPOConfig", trl.GRPOConfig),
        ("RewardConfig", trl.RewardConfig),
        ("Options of the scripts", trl.ModelConfig),
        ("Options of the scripts", trl.ScriptArguments),
    ):
        own = {field.name for field in dataclasses.fields(config_type)} - inherited
        assert own - set(options[title]) == set(), title
    patterns = {name for table in trl_options.TABLES if set(table.stages) == set(STAGES) for name in table.options}
    missing = {name for name in inherited if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    assert missing == set()


def test_the_page_lists_every_default_of_grpo_that_differs():
    """TRL's default, ours, and no row for an option whose default is the same."""
    trl = pytest.importorskip("trl")
    rows = trl_options.page().split("\n## GRPO: defaults that differ\n")[1].split("\n\n## ")[0].split("\n| `")[1:]
    listed = {cells[0].strip("`"): cells[1:] for cells in (row.split("\n")[0].split(" | ") for row in rows)}
    config, defaults = STAGES["grpo"](), {}
    for config_type in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments):
        for field in dataclasses.fields(config_type):
            answer = trl_options.answer(field.name, "grpo")
            if answer and answer.kind in ("same", "renamed") and field.default is not dataclasses.MISSING:
                defaults[field.name] = field.default, answer.renamed.to if answer.renamed else field.name
    del defaults["vllm_importance_sampling_cap"]  # None: the cap that is not deprecated
    differ = {name: row for name, row in defaults.items() if row[0] != getattr(config, row[1])}
    assert set(differ) == set(listed) & set(defaults)
    for name, (theirs, option) in differ.items():
        ours = getattr(config, option)
        words = f"`{option}` " if option != name else ""
        words += ", ".join(ours) if isinstance(ours, tuple) else str(ours)
        assert re.match(rf"{re.escape(str(theirs))}\b", listed[name][0]), name
        assert re.match(rf"{re.escape(words)}\b", listed[name][1]), name
    assert f"`batch_size` {config.batch_size} rows" in listed["per_device_train_batch_size"][1]
    assert f"`query_length` {config.query_length}:" in listed["max_prompt_length"][1]
