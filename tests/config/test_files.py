"""Configs in and out of files, and pipelines."""

import dataclasses
import json
import runpy

import pytest

from rlhf_jax.config import (
    REWARD_EXPORT,
    SFT_EXPORT,
    GRPOConfig,
    Pipeline,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
    batch_sizes,
    shipped,
    stages_of,
)
from rlhf_jax.config import files as config_files
from rlhf_jax.config.check import check
from rlhf_jax.data import arithmetic, load_tokenizer
from rlhf_jax.data.chat import ChatTemplate
from rlhf_jax.data.loading import load_rows
from rlhf_jax.errors import UserError
from rlhf_jax.option import checked_types
from rlhf_jax.runtime import config_diff


def config_file(folder, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"from rlhf_jax.config import *\n{body}\n")
    return str(path)


# --- round trips


VARIANTS = tuple(
    f"{name}:{variant}"
    for name in config_files.shipped_configs()
    for variant in shipped.variants(config_files.config_folder() / name) or ()
)
WITH_RLOO = Pipeline(ppo=None, rloo=RLOOConfig(sft_model_path=SFT_EXPORT, reward_model_path=REWARD_EXPORT))


@pytest.mark.parametrize("spec", [*config_files.shipped_configs(), *VARIANTS])
def test_shipped_configs_load_check_and_survive_config_json(spec):
    config = config_files.load_config(spec)
    check(config)
    assert config_files.from_json(config_files.to_json(config)) == config


def test_config_json_round_trips_every_kind_of_value(tmp_path):
    config = PPOConfig(length_buckets=(128, 512), report_to=(), kl_target=6.0, stop_token=None, learning_rate=1.3e-7)
    config = dataclasses.replace(config, stop_token_ids=(1, 106))
    (tmp_path / "config.json").write_text(config_files.to_json(config))
    assert config_files.load_config(str(tmp_path / "config.json")) == config
    assert config_files.load_config(str(tmp_path)) == config  # the run's folder will do


def test_config_json_round_trips_rloo_and_its_dicts_and_lists(tmp_path):
    config = RLOOConfig(
        generation_kwargs={"top_k": 50, "min_p": None},
        chat_template_kwargs={"tools": [{"name": "a"}], "thinking": False},
        reward_clip_range=(-5.0, 5.0),
        reward_weights=(0.5, 1.0),
        more_reward_models=("a", "b"),
        reward_funcs=("m:f",),
        eval_steps=0.25,
    )
    (tmp_path / "config.json").write_text(config_files.to_json(config))
    assert config_files.load_config(str(tmp_path)) == config == checked_types(config)
    pipeline = config_files.from_json(config_files.to_json(WITH_RLOO))
    assert pipeline == WITH_RLOO and pipeline.ppo is None


def test_a_config_json_of_an_earlier_version_may_have_an_option_that_was_removed():
    text = config_files.to_json(PPOConfig())
    old = json.dumps({**json.loads(text), "metrics": "correct"})
    assert config_files.from_json(old) == PPOConfig()
    assert config_diff.differences(json.loads(old), json.loads(text)) == []
    with pytest.raises(UserError, match="unknown field metrics. It was removed"):
        config_files.from_json(old.replace("correct", "trl"))
    changed = config_diff.differences(json.loads(old.replace("correct", "trl")), json.loads(text))
    assert changed == ['metrics: "trl" -> (no such option)']


def test_one_word_or_number_for_a_list_is_a_list_of_one():
    given = RLOOConfig(report_to="tensorboard", more_reward_models="x", reward_funcs="m:f", reward_clip_range=10)
    config = checked_types(given)
    assert config.report_to == ("tensorboard",) and config.more_reward_models == ("x",)
    assert config.reward_funcs == ("m:f",) and config.reward_clip_range == (10.0,)
    assert type(config.reward_clip_range[0]) is float
    assert checked_types(SFTConfig(report_to="none")).report_to == ()
    assert checked_types(SFTConfig(report_to=["none"])).report_to == ()


def test_a_dict_becomes_what_config_json_would_give_back():
    config = checked_types(PPOConfig(chat_template_kwargs={"a": (1, 2), "b": {"c": None}}))
    assert config.chat_template_kwargs == {"a": [1, 2], "b": {"c": None}}


def test_names_find_shipped_configs_with_and_without_py():
    assert config_files.load_config("tldr_ppo") == config_files.load_config("tldr_ppo.py")
    assert config_files.load_config("tldr_ppo:1b") == config_files.load_config("tldr_ppo")
    assert "2.8b" in config_files.load_config("tldr_ppo.py:2.8b").sft_model_path


def test_a_path_may_have_a_variant_and_ints_become_floats(tmp_path):
    body = (
        "VARIANTS = ('a',)\ndef get_config(variant=None): return PPOConfig(kl_coef=1, batch_size=8 if variant else 4)"
    )
    path = config_file(tmp_path, body)
    assert config_files.load_config(path).batch_size == 4
    config = config_files.load_config(f"{path}:a")
    assert config.batch_size == 8 and type(config.kl_coef) is float


def test_shipped_configs_fit_a_screen_and_say_what_they_are():
    lines = config_files.shipped_configs()
    more = {"rloo_deepmath.py", "rloo_qwen3.py", "ppo_llama.py"}
    more |= {"tldr_rloo.py", "tldr_rloo_paper.py", "quickstart_rloo.py", "quickstart_lora.py", "goldrush.py"}
    more |= {
        "quickstart_math.py",
        "grpo_deepmath.py",
        "quickstart_vision.py",
        "rloo_smolvlm.py",
        "quickstart_smollm2.py",
        "quickstart_tools.py",
        "tldr_smollm2.py",
    }
    assert set(lines) == {"tldr_sft.py", "tldr_reward.py", "tldr_ppo.py", "tldr_ppo_nplus.py", "quickstart.py"} | more
    for name, line in lines.items():
        assert line.endswith(".")
        assert len((config_files.config_folder() / name).read_text().splitlines()) <= 75


def test_tldr_rloo_is_the_documented_run():
    config = config_files.load_config("tldr_rloo")
    sums = batch_sizes.batch_arithmetic(config)
    assert (sums.batch, sums.prompts, sums.minibatch, sums.updates, sums.optimizer_steps) == (
        4096,
        2048,
        2048,
        245,
        980,
    )
    assert (config.beta, config.learning_rate, config.max_grad_norm) == (0.03, 3e-6, None)


def test_tldr_rloo_current_has_the_defaults_of_trls_present_trainer():
    trl = pytest.importorskip("trl")
    config, theirs = config_files.load_config("tldr_rloo:current"), trl.RLOOConfig("nowhere", bf16=False)
    names = ("num_generations", "num_iterations", "learning_rate", "max_grad_norm", "temperature", "beta", "epsilon")
    names += ("top_p", "top_k", "min_p", "adam_beta2", "adam_epsilon", "weight_decay", "normalize_advantages")
    names += ("mask_truncated_completions", "num_train_epochs", "warmup_steps", "disable_dropout", "repetition_penalty")
    assert {name: getattr(config, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert config.response_length == theirs.max_completion_length
    assert config.batch_size == 8 * theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps


def test_the_rloo_quickstart_has_the_stages_of_the_other():
    ppo, rloo = config_files.load_config("quickstart"), config_files.load_config("quickstart_rloo")
    assert (rloo.sft, rloo.reward, rloo.ppo, ppo.rloo) == (ppo.sft, ppo.reward, None, None)
    assert batch_sizes.batch_arithmetic(rloo.rloo).prompts == 32


def test_the_quickstart_with_adapters_is_the_other_but_for_adapters_and_ppos_learning_rate():
    plain, lora = config_files.load_config("quickstart"), config_files.load_config("quickstart_lora")
    assert lora.sft == plain.sft and lora.rloo is None
    adapters = {"use_peft", "lora_target_modules", "lora_dropout"}
    for stage, more in (("reward", set()), ("ppo", {"lora_value", "learning_rate"})):
        ours, theirs = vars(getattr(lora, stage)), vars(getattr(plain, stage))
        assert {name for name in ours if ours[name] != theirs[name]} == adapters | more


def test_the_study_of_over_optimisation_has_its_stages_in_the_order_in_which_they_need_each_other():
    scope = runpy.run_path(str(config_files.config_folder() / "goldrush.py"))
    made = {f"{scope['RUNS']}/{name}": config_files.load_config(f"goldrush:{name}") for name in scope["VARIANTS"]}
    known: set[str] = set()
    for run_dir, config in made.items():
        check(config)
        assert config.run_dir == run_dir
        needed = [getattr(config, of, None) for of in ("sft_model_path", "reward_model_path", "value_model_path")]
        needed += getattr(config, "more_reward_models", ())
        assert all(path.rpartition("/")[0] in known for path in needed if path is not None), run_dir
        known.add(run_dir)
    members = [made[f"{scope['RUNS']}/{name}"] for name in scope["MEMBERS"]]
    assert len({config.seed for config in members}) == 3 and len({config.scratch_model for config in members}) == 1


# --- pipelines


def test_a_pipeline_gives_each_stage_its_folder_and_the_exports_of_the_one_before():
    stages = stages_of(Pipeline(run_dir="R"))
    assert list(stages) == ["sft", "reward", "ppo"]
    assert [stage.run_dir for stage in stages.values()] == ["R/sft", "R/reward", "R/ppo"]
    assert stages["reward"].model_name_or_path == stages["ppo"].sft_model_path == "R/sft/policy"
    assert stages["ppo"].reward_model_path == "R/reward/reward_model"


def test_a_pipeline_may_have_rloo_in_place_of_ppo():
    stages = stages_of(dataclasses.replace(WITH_RLOO, run_dir="R"))
    assert list(stages) == ["sft", "reward", "rloo"] and stages["rloo"].run_dir == "R/rloo"
    assert stages["rloo"].reward_model_path == "R/reward/reward_model"
    check(WITH_RLOO)


def test_a_pipeline_has_exactly_one_policy_stage():
    with pytest.raises(UserError, match="one of ppo, rloo and grpo, not ppo and rloo: set the others"):
        check(dataclasses.replace(WITH_RLOO, ppo=Pipeline().ppo))
    with pytest.raises(UserError, match="one of ppo, rloo and grpo, not none"):
        check(Pipeline(ppo=None))


def test_a_pipelines_seed_resume_and_dry_run_go_to_every_stage():
    for stage in stages_of(Pipeline(seed=7, resume="must", dry_run=True)).values():
        assert (stage.seed, stage.resume, stage.dry_run) == (7, "must", True)
    own = stages_of(Pipeline(sft=SFTConfig(seed=3, dry_run=True)))
    assert (own["sft"].seed, own["sft"].dry_run, own["ppo"].seed) == (3, True, 42)


def test_a_pipelines_config_json_works_in_another_folder():
    config = config_files.from_json(config_files.to_json(Pipeline(run_dir="R")))
    assert stages_of(dataclasses.replace(config, run_dir="Q"))["ppo"].sft_model_path == "Q/sft/policy"


def test_a_stage_in_a_pipeline_may_not_have_a_folder_of_its_own():
    with pytest.raises(UserError, match="ppo.run_dir is 'X'.*'R/ppo'"):
        stages_of(Pipeline(run_dir="R", ppo=PPOConfig(run_dir="X")))


def test_paths_of_a_pipeline_may_have_another_form():
    ppo = PPOConfig(run_dir="./R/ppo/", sft_model_path="R//sft/policy", reward_model_path="./R/reward/reward_model")
    pipeline = Pipeline(run_dir="R/", ppo=ppo)
    check(pipeline)
    assert stages_of(pipeline)["ppo"].run_dir == "R/ppo" and stages_of(pipeline)["sft"].run_dir == "R/sft"


def test_a_pipeline_whose_ppo_ignores_its_stages_is_refused():
    with pytest.raises(UserError, match="sft_model_path is 'cleanrl/.*'{run_dir}/sft/policy'"):
        check(Pipeline(ppo=PPOConfig(reward_model_path=REWARD_EXPORT)))
    with pytest.raises(UserError, match="reward_model_path is None, not this pipeline's own"):
        check(Pipeline(ppo=PPOConfig(sft_model_path=SFT_EXPORT)))
    with pytest.raises(UserError, match="rloo: sft_model_path is 'cleanrl/"):
        check(Pipeline(ppo=None, rloo=RLOOConfig(reward_model_path=REWARD_EXPORT)))


def test_a_pipeline_may_start_from_a_model_in_place_of_an_sft_stage():
    start = {"sft_model_path": "a/chat", "reward_model_path": None, "reward_funcs": ("think_format_reward",)}
    pipeline = Pipeline(run_dir="R", sft=None, reward=None, ppo=None, grpo=GRPOConfig(**start))
    check(pipeline)
    assert list(stages_of(pipeline)) == ["grpo"]
    assert config_files.from_json(config_files.to_json(pipeline)).sft is None
    for path in (SFT_EXPORT, "R/sft/policy"):
        with pytest.raises(UserError, match="grpo: sft_model_path is '.*', but the pipeline has no SFT stage"):
            check(dataclasses.replace(pipeline, grpo=GRPOConfig(**{**start, "sft_model_path": path})))
    ppo = PPOConfig(sft_model_path="a/chat", reward_model_path=REWARD_EXPORT)
    with pytest.raises(UserError, match="reward: model_name_or_path is '.*', but the pipeline has no SFT stage"):
        check(Pipeline(sft=None, ppo=ppo))
    check(Pipeline(sft=None, ppo=ppo, reward=RewardConfig(model_name_or_path="a/chat")))


def test_a_pipeline_without_a_reward_stage_has_rewards_of_another_kind():
    scored = RLOOConfig(sft_model_path=SFT_EXPORT, reward_model_path=None, reward_funcs=("think_format_reward",))
    pipeline = Pipeline(run_dir="R", reward=None, ppo=None, rloo=scored)
    check(pipeline)
    assert list(stages_of(pipeline)) == ["sft", "rloo"]
    assert config_files.from_json(config_files.to_json(pipeline)).reward is None
    ppo = PPOConfig(sft_model_path=SFT_EXPORT, reward_model_path=None, reward_server="http://localhost:1/score")
    check(Pipeline(reward=None, ppo=ppo))
    with pytest.raises(
        UserError, match="rloo: without a reward stage .* needs reward_funcs, .* or environment_factory"
    ):
        check(dataclasses.replace(pipeline, rloo=dataclasses.replace(scored, reward_funcs=())))
    with pytest.raises(UserError, match="reward_model_path is '{run_dir}/reward/.*no reward stage.*set it to None"):
        check(Pipeline(reward=None))
    with pytest.raises(UserError, match="reward_model_path is None, not this pipeline's own"):
        check(dataclasses.replace(pipeline, reward=Pipeline().reward))


@pytest.mark.parametrize("variant", ["grpo", "dapo", "rloo", "ppo"])
def test_the_quickstart_of_verifiable_rewards_has_a_variant_of_each_algorithm(variant):
    config = config_files.load_config(f"quickstart_math:{variant}")
    check(config)
    stages = stages_of(config)
    name, stage = list(stages.items())[-1]
    assert list(stages) == ["sft", name] and name == {"dapo": "grpo"}.get(variant, variant)
    assert config.sft == config_files.load_config("quickstart_math").sft
    tokenizer, rows = load_tokenizer("arithmetic"), arithmetic.demonstrations(300, split="test")
    assert max(len(tokenizer.encode(row["prompt"])) for row in rows) <= stage.query_length
    assert max(len(tokenizer.encode(row["completion"])) for row in rows) + 1 <= stage.response_length
    assert config.sft.max_length >= stage.query_length + stage.response_length - 3


@pytest.mark.parametrize("task", ["boxes", "guess"])
@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "ppo"])
def test_the_quickstart_of_tools_has_each_task_with_each_algorithm(task, algorithm):
    config = config_files.load_config(f"quickstart_tools:{task}{'' if algorithm == 'grpo' else f'_{algorithm}'}")
    check(config)
    stages = stages_of(config)
    assert list(stages) == ["sft", algorithm] and stages["sft"].chat_template_kwargs["tools"]
    stage, sft = stages[algorithm], stages["sft"]
    shown = ChatTemplate(load_tokenizer("tool_tasks"), sft.chat_template_kwargs)
    for row in load_rows(stage.dataset_name, kind="demonstrations", split="test", max_samples=300):
        prompt = shown.tokenizer.encode(shown.render(row["prompt"], generation_prompt=True))
        ids, _ = shown.encode_with_assistant_mask(row["prompt"] + row["completion"])
        assert len(prompt) <= stage.query_length
        calls = len(row["completion"]) // 2
        assert calls > 5 or len(ids) - len(prompt) <= stage.response_length and len(ids) <= sft.max_length


# --- bad files


BAD_SPECS = {
    "tldr_grpo.py": "no such config. grpo has grpo_deepmath.py, quickstart_math.py",
    "tldr_dpo.py": "no such config. DPO is not implemented; the stages are sft, reward, ppo, rloo, grpo",
    "qickstart": "no such config. Did you mean quickstart.* Shipped: goldrush.py, grpo_deepmath.py, ppo_llama.py",
    "nothing/like_it.py": "no such file",
    "tldr_ppo.py:7b": "tldr_ppo.py has no variant '7b'. It has 1b, 2.8b, 6.9b, 12b",
    "quickstart.py:big": "quickstart.py has no variant 'big'. It has none",
    "no_such_run/config.json": "cannot read",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_bad_config_name_is_told_with_the_nearest(spec):
    with pytest.raises(UserError, match=BAD_SPECS[spec]):
        config_files.load_config(spec)


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
    "def get_config(variant=None): return Pipeline(ppo=SFTConfig())": "ppo must be a PPOConfig or None, not SFTConfig",
    "def get_config(variant=None): return Pipeline(sft=3)": "sft must be a SFTConfig or None, not int",
    "def get_config(variant=None): return Pipeline(rloo=PPOConfig())": "rloo must be a RLOOConfig or None, not PPO",
    "def get_config(variant=None): return RLOOConfig(rloo_k=4)": "line 2: TypeError.* It is num_generations here",
    "def get_config(variant=None): return RLOOConfig(kl_coef=4)": "line 2: TypeError.* It is beta here",
    "def get_config(variant=None): return PPOConfig(beta=4)": "line 2: TypeError.* It is kl_coef here",
    "def get_config(variant=None): return RLOOConfig(use_vllm=True)": "Generation is in-process",
    "def get_config(variant=None): return RLOOConfig(steps_per_generation=4)": "it sets batch_size = micro_batch_size",
    "def get_config(variant=None): return RLOOConfig(num_generation=4)": "Did you mean num_generations",
    "def get_config(variant=None): return PPOConfig(generation_kwargs=5)": "generation_kwargs = 5: it must be a dict",
    "def get_config(variant=None): return PPOConfig(generation_kwargs={'a': {1}})": r"\['a'\] = .1.: it must be plain",
    "def get_config(variant=None): return PPOConfig(generation_kwargs={1: 2})": "generation_kwargs = {1: 2}: it must",
    "def get_config(variant=None): return PPOConfig(reward_weights=('a',))": "reward_weights = 'a': it must be a num",
    "def get_config(variant=None): return PPOConfig(reward_weights='a')": "reward_weights = 'a': it must be a list of",
    "def get_config(variant=None): return RLOOConfig(reward_clip_range=True)": "reward_clip_range = True: it must be",
    "def get_config(variant=None): return Pipeline(ppo=PPOConfig(lam='x'))": "ppo.lam = 'x': it must be a number",
}


@pytest.mark.parametrize("body", BAD_FILES)
def test_a_bad_config_file_is_told_with_its_path(body, tmp_path):
    path = config_file(tmp_path, body)
    with pytest.raises(UserError, match=BAD_FILES[body]) as error:
        config_files.load_config(path)
    assert path in str(error.value)


BAD_JSON = {
    "{": "is not JSON",
    "[1]": "'stage' must be one of sft, reward, ppo, rloo, grpo, pipeline, not 'list'",
    '{"stage": "dpo"}': "'stage' must be one of .*, not 'dpo'",
    '{"stage": "ppo", "kl_cof": 1}': "unknown field kl_cof. Did you mean kl_coef",
    '{"stage": "ppo", "kl_coef": "1"}': "kl_coef = '1': it must be a number",
    '{"stage": "rloo", "rloo_k": 4}': "unknown field rloo_k. It is num_generations here",
    '{"stage": "rloo", "reward_clip_range": ["a", 1]}': "reward_clip_range = 'a': it must be a number",
    '{"stage": "pipeline", "rloo": 3}': "rloo must be a RLOOConfig or None, not int",
    '{"stage": "pipeline", "sft": 3}': "sft must be a SFTConfig or None, not int",
    '{"stage": "pipeline", "ppo": {"lam": "x"}}': "ppo.lam = 'x': it must be a number",
    '{"stage": "pipeline", "sft": {"seeed": 3}}': "unknown field sft.seeed. Did you mean seed",
}


@pytest.mark.parametrize("text", BAD_JSON)
def test_a_bad_config_json_is_told_with_its_path(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=BAD_JSON[text]) as error:
        config_files.load_config(str(path))
    assert str(path) in str(error.value)


def test_a_folder_without_a_config_json_is_told(tmp_path):
    with pytest.raises(UserError, match=r"the folder has no config\.json"):
        config_files.load_config(str(tmp_path))


def test_config_json_begins_with_the_stages_own_options():
    names = list(json.loads(config_files.to_json(PPOConfig())))
    assert sorted(names) == sorted({"stage", *PPOConfig.__dataclass_fields__})
    assert names[0] == "stage" and names.index("kl_coef") < names.index("temperature") < names.index("run_dir")
