"""Configs in and out of files, pipelines, and fields that mean something."""

import ast
import dataclasses
import pathlib

import pytest

import rlhf_jax
from rlhf_jax import arithmetic, configfile
from rlhf_jax.config import REWARD_EXPORT, SFT_EXPORT, STAGES, Pipeline, PPOConfig, RewardConfig, SFTConfig, stages_of
from rlhf_jax.types import UserError

PACKAGE = pathlib.Path(rlhf_jax.__file__).parent


def config_file(folder, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"from rlhf_jax.config import *\n{body}\n")
    return str(path)


# --- round trips


@pytest.mark.parametrize("spec", [*configfile.shipped_configs(), "tldr_sft:2.8b", "tldr_reward:6.9b", "tldr_ppo:6.9b"])
def test_shipped_configs_load_check_and_survive_config_json(spec):
    config = configfile.load_config(spec)
    arithmetic.check(config)
    assert configfile.from_json(configfile.to_json(config)) == config


def test_config_json_round_trips_every_kind_of_value(tmp_path):
    config = PPOConfig(length_buckets=(128, 512), report_to=(), kl_target=6.0, stop_token=None, learning_rate=1.3e-7)
    (tmp_path / "config.json").write_text(configfile.to_json(config))
    assert configfile.load_config(str(tmp_path / "config.json")) == config
    assert configfile.load_config(str(tmp_path)) == config  # the run's folder will do


def test_names_find_shipped_configs_with_and_without_py():
    assert configfile.load_config("tldr_ppo") == configfile.load_config("tldr_ppo.py")
    assert configfile.load_config("tldr_ppo:1b") == configfile.load_config("tldr_ppo")
    assert "2.8b" in configfile.load_config("tldr_ppo.py:2.8b").sft_model_path


def test_a_path_may_have_a_variant_and_ints_become_floats(tmp_path):
    body = (
        "VARIANTS = ('a',)\ndef get_config(variant=None): return PPOConfig(kl_coef=1, batch_size=8 if variant else 4)"
    )
    path = config_file(tmp_path, body)
    assert configfile.load_config(path).batch_size == 4
    config = configfile.load_config(f"{path}:a")
    assert config.batch_size == 8 and type(config.kl_coef) is float


def test_shipped_configs_fit_a_screen_and_say_what_they_are():
    lines = configfile.shipped_configs()
    assert set(lines) == {"tldr_sft.py", "tldr_reward.py", "tldr_ppo.py", "tldr_ppo_nplus.py", "quickstart.py"}
    for name, line in lines.items():
        assert line.endswith(".")
        assert len((configfile.config_folder() / name).read_text().splitlines()) <= 70


# --- pipelines


def test_a_pipeline_gives_each_stage_its_folder_and_the_exports_of_the_one_before():
    stages = stages_of(Pipeline(run_dir="R"))
    assert list(stages) == ["sft", "reward", "ppo"]
    assert [stage.run_dir for stage in stages.values()] == ["R/sft", "R/reward", "R/ppo"]
    assert stages["reward"].model_name_or_path == stages["ppo"].sft_model_path == "R/sft/policy"
    assert stages["ppo"].reward_model_path == "R/reward/reward_model"


def test_a_pipelines_seed_resume_and_dry_run_go_to_every_stage():
    for stage in stages_of(Pipeline(seed=7, resume="must", dry_run=True)).values():
        assert (stage.seed, stage.resume, stage.dry_run) == (7, "must", True)
    own = stages_of(Pipeline(sft=SFTConfig(seed=3, dry_run=True)))
    assert (own["sft"].seed, own["sft"].dry_run, own["ppo"].seed) == (3, True, 42)


def test_a_pipelines_config_json_works_in_another_folder():
    config = configfile.from_json(configfile.to_json(Pipeline(run_dir="R")))
    assert stages_of(dataclasses.replace(config, run_dir="Q"))["ppo"].sft_model_path == "Q/sft/policy"


def test_a_stage_in_a_pipeline_may_not_have_a_folder_of_its_own():
    with pytest.raises(UserError, match="ppo.run_dir is 'X'.*its folder 'R/ppo'"):
        stages_of(Pipeline(run_dir="R", ppo=PPOConfig(run_dir="X")))


def test_a_pipeline_whose_ppo_ignores_its_stages_is_refused():
    with pytest.raises(UserError, match="sft_model_path is 'cleanrl/.*'{run_dir}/sft/policy'"):
        arithmetic.check(Pipeline(ppo=PPOConfig(reward_model_path=REWARD_EXPORT)))
    with pytest.raises(UserError, match="reward_model_path is 'cleanrl/"):
        arithmetic.check(Pipeline(ppo=PPOConfig(sft_model_path=SFT_EXPORT)))


# --- bad files


BAD_SPECS = {
    "qickstart": "no such config. Did you mean quickstart.* Shipped: quickstart.py, tldr_ppo.py",
    "nothing/like_it.py": "no such file",
    "tldr_ppo.py:7b": "tldr_ppo.py has no variant '7b'. It has 1b, 2.8b, 6.9b",
    "quickstart.py:big": "quickstart.py has no variant 'big'. It has none",
    "no_such_run/config.json": "cannot read",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_bad_config_name_is_told_with_the_nearest(spec):
    with pytest.raises(UserError, match=BAD_SPECS[spec]):
        configfile.load_config(spec)


BAD_FILES = {
    "x = 1": "defines no get_config",
    "def get_config(variant=None: pass": "line 2: ",
    "def get_config(variant=None): return {'kl_coef': 1}": "returned dict; it must return one of SFTConfig",
    "def get_config(variant=None):\n    return PPOConfig(kl_cof=1)": "line 3: TypeError.*'kl_cof'.*you mean kl_coef",
    "import no_such_module": "line 2: ModuleNotFoundError: No module named 'no_such_module'",
    "def get_config(variant=None): return PPOConfig(kl_coef='a')": "kl_coef = 'a': it must be a number",
    "def get_config(variant=None): return PPOConfig(batch_size=1.5)": "batch_size = 1.5: it must be a whole number",
    "def get_config(variant=None): return PPOConfig(batch_size=True)": "batch_size = True: it must be a whole number",
    "def get_config(variant=None): return PPOConfig(learning_rate=float('nan'))": "learning_rate = nan.*finite",
    "def get_config(variant=None): return PPOConfig(whiten_rewards=1)": "whiten_rewards = 1: it must be true or false",
    "def get_config(variant=None): return PPOConfig(gamma=None)": "gamma = None: it must be a number",
    "def get_config(variant=None): return SFTConfig(dtype='bf16')": "dtype = 'bf16': it must .*Did you mean bfloat16",
    "def get_config(variant=None): return SFTConfig(length_buckets=64)": "length_buckets = 64: it must be a list",
    "def get_config(variant=None): return SFTConfig(length_buckets=('64',))": "length_buckets = '64': it must be a",
    "def get_config(variant=None): return Pipeline(ppo=SFTConfig())": "ppo must be a PPOConfig, not SFTConfig",
    "def get_config(variant=None): return Pipeline(ppo=PPOConfig(lam='x'))": "ppo.lam = 'x': it must be a number",
}


@pytest.mark.parametrize("body", BAD_FILES)
def test_a_bad_config_file_is_told_with_its_path(body, tmp_path):
    path = config_file(tmp_path, body)
    with pytest.raises(UserError, match=BAD_FILES[body]) as error:
        configfile.load_config(path)
    assert path in str(error.value)


BAD_JSON = {
    "{": "is not JSON",
    "[1]": "'stage' must be one of sft, reward, ppo, pipeline, not 'list'",
    '{"stage": "dpo"}': "'stage' must be one of .*, not 'dpo'",
    '{"stage": "ppo", "kl_cof": 1}': "unknown field kl_cof. Did you mean kl_coef",
    '{"stage": "ppo", "kl_coef": "1"}': "kl_coef = '1': it must be a number",
    '{"stage": "pipeline", "sft": 3}': "sft must be an object",
    '{"stage": "pipeline", "sft": {"seeed": 3}}': "unknown field sft.seeed. Did you mean seed",
}


@pytest.mark.parametrize("text", BAD_JSON)
def test_a_bad_config_json_is_told_with_its_path(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=BAD_JSON[text]) as error:
        configfile.load_config(str(path))
    assert str(path) in str(error.value)


def test_a_folder_without_a_config_json_is_told(tmp_path):
    with pytest.raises(UserError, match=r"the folder has no config\.json"):
        configfile.load_config(str(tmp_path))


# --- fields


def test_every_field_has_a_line_of_meaning():
    documented = set()
    for node in ast.parse((PACKAGE / "config.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            for field, doc in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    documented.add((node.name, field.target.id))
    for config_type in (*STAGES.values(), Pipeline):
        for name in config_type.__dataclass_fields__:
            owners = [base.__name__ for base in config_type.__mro__ if name in vars(base).get("__annotations__", {})]
            assert (owners[0], name) in documented


def test_every_field_is_read_somewhere():
    """An option that nothing reads is TRL's max_grad_norm all over again."""
    read = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("config.py", "arithmetic.py", "plan.py"):
            tree = ast.parse(path.read_text())
            read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
            # getattr(config, "name"), for options that not every stage has
            calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) > 1]
            gets = [n.args[1] for n in calls if isinstance(n.func, ast.Name) and n.func.id == "getattr"]
            read |= {arg.value for arg in gets if isinstance(arg, ast.Constant)}
    fields = {name for config_type in (SFTConfig, RewardConfig, PPOConfig) for name in config_type.__dataclass_fields__}
    in_arithmetic_alone = {"total_episodes", "max_steps", "num_train_epochs", "dataset_streaming"}
    assert fields - read <= in_arithmetic_alone, f"nothing reads {sorted(fields - read - in_arithmetic_alone)}"
