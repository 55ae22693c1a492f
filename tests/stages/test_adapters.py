"""Stages with adapters: nothing is held twice, the reference is what it should be, what is written can be read."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax import data
from rlhf_jax.config import PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from rlhf_jax.config.check import check
from rlhf_jax.dry_run import memory
from rlhf_jax.errors import UserError
from rlhf_jax.models import custom_shape, lora
from rlhf_jax.models.io import hf, peft
from rlhf_jax.models.placement import AbstractWeights
from rlhf_jax.stages import adapters, open_stage
from rlhf_jax.stages.export import adapter_origin
from rlhf_jax.stages.open_models import Source
from tests.helpers.arrays import distance
from tests.helpers.runs import RLOO_OPTIONS, compilations, rollout_of

PEFT = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.0}
GOLD = ("rlhf_jax.data.synthetic:gold_reward",)
OPTIONS = {**RLOO_OPTIONS, **PEFT, "reward_funcs": GOLD, "scratch_model": None}


def checked(config):
    check(config)
    return config


def leaves(tree):
    return jax.tree.leaves(jax.device_get(tree))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base and two adapters on it, of another rank than the options', as folders."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = data.load_tokenizer("synthetic")
    model = custom_shape("2x32x2", 128 * -(-tokenizer.vocab_size // 128))
    params = model.init(jax.random.key(0), heads=("causal", "scalar"))
    for name, kind in (("base", "causal"), ("reward", "scalar")):
        hf.save(folder / name, model, params, kind=kind)
        data.save_tokenizer(tokenizer, str(folder / name))
    for number, name in enumerate(("one", "two")):
        form = lora.Lora(r=3, alpha=6, dropout=0.0, target_modules=("query_key_value", "dense_4h_to_h"))
        adapted = dataclasses.replace(model, lora=form)
        adapters = lora.init(adapted, jax.random.key(number), params)
        adapters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
        peft.save(folder / name, adapted, adapters, kind="causal", base=str(folder / "base"))
        data.save_tokenizer(tokenizer, str(folder / name))
    return folder


def rloo_stage(models, start="base", **options):
    given = {**OPTIONS, "sft_model_path": str(models / start), "num_generations": 2, "beta": 0.05, **options}
    return open_stage(checked(RLOOConfig(**given)))


def ppo_stage(models, start="base", **options):
    given = {**OPTIONS, "sft_model_path": str(models / start), "reward_model_path": str(models / "reward"), **options}
    return open_stage(checked(PPOConfig(**given)))


def first_kl(stage):
    """Mean KL to the reference of the responses that the first update would learn from."""
    state = stage.state
    prompts = stage.train_data.batch(0, 0, stage.rows_per_update)
    rollout = rollout_of(stage, prompts, group_size=stage.group_size)
    return float(stage.programs.token_kl(state.params["policy"], rollout, state).sum(axis=1).mean())


def test_an_update_moves_adapters_alone_and_each_program_compiles_once(models):
    stage = ppo_stage(models, lora_value="own")
    base = leaves(stage.models.base)
    assert all(
        x is y for x, y in zip(*map(jax.tree.leaves, (stage.models.base["value"], stage.scorer.models[0].params)))
    )
    before = jax.tree.map(np.array, jax.device_get(stage.state.params))
    assert lora.get_path(before, ("policy", "backbone", "layers", "attention", "query_key_value")).keys() == {
        "lora_a",
        "lora_b",
    }
    assert set(before["policy"]) == {"backbone"} and set(before["value"]) == {"backbone", "score"}
    state, metrics, _ = stage.train_step(stage.state, 0)
    assert abs(float(metrics["val/first_ratio_error"])) < 1e-5 and abs(float(metrics["objective/kl"])) < 1e-4
    state, metrics, _ = stage.train_step(state, 1)
    assert float(metrics["objective/kl"]) > 0 or float(metrics["policy/approxkl_avg"]) > 0
    for old, new in zip(leaves(before), leaves(state.params), strict=True):
        assert not np.array_equal(old, new)
    for old, new in zip(base, leaves(stage.models.base), strict=True):
        np.testing.assert_array_equal(old, new)
    assert compilations(stage) == {"generate": 1, "experience": 1, "update": 1}


@pytest.mark.parametrize(("value", "copies"), [("shared", 1), ("own", 2), ("full", 2)])
def test_ppo_holds_no_second_copy_of_the_base(models, value, copies):
    """Bytes of policy, reference, value and reward model; the reward model is counted where the value stands on it."""

    def held(**options):
        given = {**OPTIONS, "sft_model_path": str(models / "base"), "reward_model_path": str(models / "reward")}
        config = checked(PPOConfig(**{**given, **options}))
        stage = memory.abstract_stage(config, memory.stage_mesh(config))
        assert isinstance(stage.weights, AbstractWeights)
        found = memory.resident_bytes(stage)
        return found, sum(size for name, size in found.items() if name not in ("reward", "optimizer"))

    backbone = held(use_peft=False)[0]["reference"]
    found, total = held(lora_value=value)
    assert "reference" not in found and found["base"] == backbone
    if value != "full":
        assert total < 1.1 * backbone
        assert found["optimizer"] < 0.2 * backbone
    assert total + (0 if value == "shared" else found["reward"]) < (copies + 1 + (value == "full")) * backbone


def test_rloo_trains_on_with_an_adapter_against_its_frozen_copy(models):
    stage = rloo_stage(models, "one")
    assert stage.opened.policy.lora.r == 3 and any("trains adapter default" in line for line in stage.messages)
    jax.tree.map(np.testing.assert_array_equal, stage.state.params["policy"], stage.models.reference.params)
    assert abs(first_kl(stage)) < 1e-4
    against_base = first_kl(rloo_stage(models, "one", ref_adapter_name="base"))
    assert abs(against_base) > 1e-2


def test_ppo_merges_an_adapter_and_trains_a_new_one_on_it(models):
    stage = ppo_stage(models, "one")
    assert stage.opened.policy.lora.r == 2 and not stage.models.reference.params
    assert abs(first_kl(stage)) < 1e-4
    _, merged = hf.load(models / "one")
    for a, b in zip(leaves(stage.models.base["policy"]), jax.tree.leaves(merged), strict=True):
        np.testing.assert_array_equal(a, b)
    trained_on = ppo_stage(models, "one", start_adapter="continue")
    # TRL's PPO: the base is the reference.
    assert trained_on.opened.policy.lora.r == 3 and abs(first_kl(trained_on)) > 1e-2


def test_named_adapters_are_trained_and_are_the_reference(models):
    named = (f"a={models / 'one'}", f"b={models / 'two'}")
    same = rloo_stage(models, adapters=named, model_adapter_name="a")
    assert abs(first_kl(same)) < 1e-4
    other = ppo_stage(models, adapters=named, model_adapter_name="a", ref_adapter_name="b")
    assert abs(first_kl(other)) > 1e-2
    base, reference = other.models.base["policy"], other.models.reference
    _, whole = hf.load(models / "two")
    found = lora.merge_lora(jax.device_get(reference.model.with_lora(base, reference.params)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ref_adapter_name": "c"}, "ref_adapter_name 'c' is no adapter of this run"),
        ({"model_adapter_name": "default"}, "model_adapter_name 'default'"),
        ({"start_adapter": "continue"}, "start_adapter .*sft_model_path .*is no adapter"),
        ({"adapters": ("one",)}, "NAME=PATH"),
        ({"adapters": ("base=x",)}, "'base' has a meaning of its own"),
        ({"lora_target_modules": ("c_attn",)}, "lora_target_modules: 'c_attn'"),
        ({"modules_to_save": ("score",)}, "modules_to_save: 'score'"),
        ({"sync_ref_model": True}, "sync_ref_model with use_peft"),
        ({"use_peft": False, "ref_adapter_name": "a"}, "ref_adapter_name 'a' needs use_peft"),
        ({"ref_model_path": "x", "ref_adapter_name": "base"}, "ref_adapter_name and ref_model_path"),
        ({"lora_r": 0}, "lora_r is 0"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0"),
    ],
)
def test_options_that_do_not_go_together_are_named_before_a_weight_is_read(models, options, words):
    with pytest.raises(UserError, match=words):
        rloo_stage(models, **options)


@pytest.mark.parametrize(
    ("shape", "tied", "name", "module"),
    [
        ("llama", False, "lm_head", "lm_head"),
        ("llama", True, "embed_tokens", "embed_tokens"),
        ("gpt_neox", False, "lm_head", "embed_out"),
        ("gpt_neox", False, "embed_out", "embed_out"),
    ],
)
def test_the_head_is_named_as_in_the_checkpoint_or_as_peft_names_it(shape, tied, name, module):
    model = custom_shape(f"{shape}:2x32x2", 61, tie_word_embeddings=tied)
    assert adapters.lora_form(RLOOConfig(**PEFT, modules_to_save=(name,)), model, "causal").modules_to_save == (module,)


@pytest.mark.parametrize(
    ("shape", "name", "embedding"),
    [("llama", "lm_head", "embed_tokens"), ("gpt2", "lm_head", "wte"), ("gpt_neox", "lm_head", "embed_in")],
)
def test_the_head_of_a_tied_model_is_refused_by_the_name_that_was_given(shape, name, embedding):
    model = custom_shape(f"{shape}:2x32x2", 61, tie_word_embeddings=True)
    config = RLOOConfig(**PEFT, modules_to_save=(name,))
    with pytest.raises(UserError, match=f"modules_to_save: '{name}' is the embedding .*name '{embedding}'"):
        adapters.lora_form(config, model, "causal")
    with pytest.raises(UserError, match=f"modules_to_save: '{name}' is no module of this stage's model"):
        adapters.lora_form(config, model, "scalar")


def test_an_adapter_that_unties_the_embedding_is_merged_and_not_trained_further(tmp_path):
    tokenizer = data.load_tokenizer("synthetic")
    model = custom_shape("llama:1x16x2", 128 * -(-tokenizer.vocab_size // 128))
    params = model.init(jax.random.key(0))
    hf.save(tmp_path / "base", model, params, kind="causal")
    form = lora.Lora(r=2, alpha=4, dropout=0.0, target_modules=("q_proj",), modules_to_save=("embed_tokens",))
    adapted = dataclasses.replace(model, lora=form)
    peft.save(
        tmp_path / "one",
        adapted,
        lora.init(adapted, jax.random.key(1), params),
        kind="causal",
        base=str(tmp_path / "base"),
    )
    file = tmp_path / "one" / peft.CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), "ensure_weight_tying": False}))
    for folder in ("base", "one"):
        data.save_tokenizer(tokenizer, str(tmp_path / folder))
    with pytest.warns(UserWarning, match="modules_to_save has embed_tokens without ensure_weight_tying"):
        stage = rloo_stage(tmp_path, "one", start_adapter="merge")
    assert not stage.opened.policy.config.tie_word_embeddings and "embed_out" in stage.models.base["policy"]
    with pytest.raises(UserError, match="one trains embedding and head apart.* give start_adapter merge"):
        rloo_stage(tmp_path, "one", start_adapter="continue")


def test_what_a_run_writes_is_its_policy_merged_and_as_an_adapter(models, tmp_path):
    shared = {"run_dir": str(tmp_path / "run"), "max_train_samples": 16, "total_episodes": 8}
    given = {**OPTIONS, "sft_model_path": str(models / "base"), **shared}
    paths = rlhf_jax.run(checked(RLOOConfig(**given, num_generations=2))).paths
    assert set(paths) == {"policy", "policy_adapter"}
    config = json.loads((pathlib.Path(paths["policy_adapter"]) / peft.CONFIG).read_text())
    assert config["base_model_name_or_path"] == str(models / "base") and config["r"] == 2
    merged, read = (hf.load(path)[1] for path in (paths["policy"], paths["policy_adapter"]))
    _, base = hf.load(models / "base")
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(read), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    moved = lora.get_path(merged, ("backbone", "layers", "attention", "query_key_value", "kernel"))
    assert distance(moved, lora.get_path(base, ("backbone", "layers", "attention", "query_key_value", "kernel"))) > 1e-5
    card = (pathlib.Path(paths["policy_adapter"]) / "README.md").read_text()
    assert "library_name: peft" in card and "AutoPeftModelForCausalLM" in card


@pytest.mark.parametrize(("option", "share"), [("load_in_8bit", 0.35), ("load_in_4bit", 0.24)])
def test_a_quantized_base_is_policy_and_reference_and_each_program_compiles_once(models, option, share):
    held = lambda base: sum(x.nbytes for x in jax.tree.leaves(base["policy"]["backbone"]["layers"]))  # noqa: E731
    plain = ppo_stage(models, lora_value="shared")
    stages = [ppo_stage(models, lora_value="shared", **{option: True}) for _ in range(2)]
    for first, second in zip(*(leaves(stage.models.base) for stage in stages), strict=True):
        np.testing.assert_array_equal(first, second)  # what a continued run stands on
    stage = stages[0]
    assert set(stage.models.base) == {"policy"} and held(stage.models.base) < share * held(plain.models.base)
    base, before = leaves(stage.models.base), leaves(stage.state.params)
    state, metrics, _ = stage.train_step(stage.state, 0)
    assert abs(float(metrics["val/first_ratio_error"])) < 1e-5 and abs(float(metrics["objective/kl"])) < 1e-4
    state, metrics, _ = stage.train_step(state, 1)
    for old, new in zip(before, leaves(state.params), strict=True):
        assert not np.array_equal(old, new)
    for old, new in zip(base, leaves(stage.models.base), strict=True):
        np.testing.assert_array_equal(old, new)
    assert compilations(stage) == {"generate": 1, "experience": 1, "update": 1}


@pytest.mark.parametrize(
    ("value", "option"),
    [("full", "load_in_8bit"), ("own", "load_in_8bit"), ("shared", "load_in_8bit"), ("shared", "load_in_4bit")],
)
def test_what_is_trained_in_full_starts_from_the_float32_params_of_its_model(models, value, option):
    """Though the frozen ones are rounded as they are read."""
    stage = ppo_stage(models, lora_value=value, dtype="bfloat16", modules_to_save=("embed_in",), **{option: True})
    policy, reward = (hf.load(models / name, kind=kind)[1] for name, kind in (("base", "causal"), ("reward", "scalar")))
    started = jax.device_get(stage.state.params)
    embedding = ("backbone", "embed_in", "embedding")
    for found, wanted in (("policy", policy), ("value", policy if value == "shared" else reward)):
        exact = lora.get_path(wanted, embedding)
        assert not np.array_equal(exact, exact.astype(jax.numpy.bfloat16).astype(np.float32))
        np.testing.assert_array_equal(lora.get_path(started[found], embedding), exact)
    if value == "full":
        jax.tree.map(np.testing.assert_array_equal, started["value"], reward)
    if value == "own":
        jax.tree.map(np.testing.assert_array_equal, started["value"]["score"], reward["score"])
    frozen = jax.tree.leaves(stage.scorer.models[0].params["backbone"]["embed_in"])
    assert [x.dtype for x in frozen] == ["bfloat16"]


@pytest.mark.parametrize("options", [{"use_peft": False}, {"lora_value": "full"}, {"lora_value": "own"}])
@pytest.mark.parametrize(("start", "kept"), [("reward", True), ("base", False)])
def test_a_value_model_starts_from_the_score_head_of_its_checkpoint_or_from_zeros(models, start, kept, options):
    stage = ppo_stage(models, value_model_path=str(models / start), **options)
    head = jax.device_get(stage.state.params["value"]["score"])
    expected = hf.load(models / "reward", kind="scalar")[1]["score"]
    np.testing.assert_array_equal(head["kernel"], expected["kernel"] if kept else np.zeros_like(head["kernel"]))
    said = f"that of {models / start}" if kept else f"new: {models / start} has none"
    assert f"value model: the score head is {said}" in stage.messages


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"value_model": "shared_backbone", "use_peft": False}, "value model: a new score head on the policy"),
        ({"lora_value": "shared"}, "value model: the score head is new"),
        ({"use_peft": False}, "value model: the score head is that of {reward}"),
    ],
)
def test_a_line_says_which_score_head_a_value_model_starts_from(models, options, line):
    stage = ppo_stage(models, reward_model_path=str(models / "reward"), **options)
    assert line.format(reward=models / "reward") in stage.messages
    values = stage.state.params.get("value", stage.state.params["policy"])
    assert np.any(values["score"]["kernel"]) == ("that of" in line)  # a new head is 0


@pytest.mark.parametrize(("option", "kind", "error"), [("load_in_8bit", "int8", 0.02), ("load_in_4bit", "nf4", 0.12)])
def test_what_a_run_on_a_quantized_base_writes_is_what_it_trained(models, tmp_path, option, kind, error):
    given = {**OPTIONS, "run_dir": str(tmp_path), "max_train_samples": 16, "total_episodes": 8, option: True}
    given |= {"reward_model_path": str(models / "reward"), "value_model_path": str(models / "reward")}
    # The start is an adapter, merged: what the new one stands on is written beside it, as it stood there.
    config = checked(PPOConfig(**{**given, "sft_model_path": str(models / "one"), "lora_value": "own"}))
    paths = rlhf_jax.run(config).paths
    assert set(paths) == {"policy", "policy_adapter", "policy_base", "value", "value_adapter"}
    merged, read = (hf.load(paths[name])[1] for name in ("policy", "policy_adapter"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), merged, read)
    path = ("backbone", "layers", "mlp", "dense_h_to_4h", "kernel")
    model, params = hf.load(models / "one")
    exact, base = lora.get_path(params, path), lora.get_path(hf.load(paths["policy_base"])[1], path)
    stood = lora.merge_lora(model.quantize(jax.tree.map(jax.numpy.asarray, params), jax.numpy.float32, kind))
    np.testing.assert_allclose(base, lora.get_path(stood, path), rtol=1e-6, atol=1e-8)
    assert 1e-4 < distance(base, exact) < error


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_supervised_stages_write_adapters_that_the_next_stage_reads(models, tmp_path, stage):
    shared = {
        name: RLOO_OPTIONS[name] for name in ("tokenizer_name_or_path", "dataset_name", "query_length", "report_to")
    }
    shared |= {"dataset_test_split": None, "max_train_samples": 16, "batch_size": 8, "max_steps": 2, "max_length": 64}
    shared |= {"model_name_or_path": str(models / "one"), "run_dir": str(tmp_path), "learning_rate": 1e-2}
    config_type, name, kind = {
        "sft": (SFTConfig, "policy", "causal"),
        "reward": (RewardConfig, "reward_model", "scalar"),
    }[stage]
    more = {"normalize_dataset_name": "synthetic", "normalize_samples": 8} if stage == "reward" else {}
    paths = rlhf_jax.run(checked(config_type(**shared, **PEFT, **more, export_merged=False))).paths
    # The start was an adapter itself, merged: what the new one stands on is written beside it.
    assert set(paths) == {name, f"{name}_base"}
    assert hf.is_adapter(paths[name])
    model, params = hf.load(paths[name], kind=kind)
    _, base = hf.load(paths[f"{name}_base"], kind=kind)
    path = ("backbone", "layers", "attention", "query_key_value", "kernel")
    assert distance(lora.get_path(params, path), lora.get_path(base, path)) > 1e-4
    np.testing.assert_array_equal(lora.get_path(base, path), lora.get_path(hf.load(models / "one")[1], path))


def exported_adapter(start):
    """Exports RUN/policy, an adapter alone, and RUN/policy_base at the relative path RUN of a working folder."""
    options = {"sft_model_path": start, "run_dir": "runs/a", "export_merged": False, "num_generations": 2}
    options |= {"start_adapter": "merge"}
    stage = open_stage(checked(RLOOConfig(**{**OPTIONS, **options})))
    paths = stage.export(stage.state, "runs/a")
    return hf.load(paths["policy"])[1]


def test_an_adapter_finds_the_base_beside_it_after_a_move_and_from_any_working_folder(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = exported_adapter(str(models / "one"))
    assert json.loads((tmp_path / "runs/a/policy/adapter_config.json").read_text())["base_model_name_or_path"] == (
        "runs/a/policy_base"
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for old, new in (("runs/a", "runs/a"), ("runs/a", "runs/b"), ("runs", "moved")):
        if old != new:
            (tmp_path / old).rename(tmp_path / new)
        folder = tmp_path / ("runs/a" if old == new else "runs/b" if new == "runs/b" else "moved/b")
        assert hf.adapter_base(folder / "policy") == (str(folder / "policy_base"), None)
        jax.tree.map(np.testing.assert_array_equal, hf.load(folder / "policy")[1], expected)


def test_an_adapter_finds_its_base_in_another_stage_of_a_pipeline_that_was_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("pipe/sft/policy", "pipe/ppo/policy", "models/llama", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    adapter = tmp_path / "pipe/ppo/policy"
    (tmp_path / "pipe/ppo/config.json").write_text(json.dumps({"stage": "ppo", "run_dir": "pipe/ppo"}))

    def base(path):
        content = {"peft_type": "LORA", "base_model_name_or_path": path}
        (adapter / "adapter_config.json").write_text(json.dumps(content))
        return hf.adapter_base(adapter)[0]

    assert base("pipe/sft/policy") == "pipe/sft/policy" and base("models/llama") == "models/llama"
    assert base("EleutherAI/pythia-14m") == "EleutherAI/pythia-14m"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert base("pipe/sft/policy") == str(tmp_path / "pipe/sft/policy")
    assert base("models/llama") == str(tmp_path / "models/llama")
    assert base("EleutherAI/pythia-14m") == "EleutherAI/pythia-14m"
    (tmp_path / "pipe").rename(tmp_path / "moved")
    adapter = tmp_path / "moved/ppo/policy"
    assert base("pipe/sft/policy") == str(tmp_path / "moved/sft/policy")
    (tmp_path / "moved/ppo/config.json").write_text("of something else")
    assert base("pipe/sft/policy") == "pipe/sft/policy"


def test_an_adapter_names_no_base_in_which_peft_would_look_for_other_names(models, tmp_path):
    folder = tmp_path / "image_text"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {}}))
    base = Source(str(models / "base"), "main")
    assert adapter_origin(base) == base
    for source in (Source(str(folder)), Source(str(models / "one")), Source(None), base._replace(shape="14m")):
        assert adapter_origin(source) is None


def test_a_regular_expression_names_the_layers_that_get_an_adapter(models):
    stage = rloo_stage(models, lora_target_modules=(r".*\.mlp\.dense_.*",))
    assert stage.opened.policy.lora.target_modules == ("dense_h_to_4h", "dense_4h_to_h")
    with pytest.raises(UserError, match="lora_target_modules.* in 1 of 2 layers"):
        rloo_stage(models, lora_target_modules=(r"gpt_neox\.layers\.1\.mlp.*",))
