"""The head that a reward model starts from, and that it ends with."""

import dataclasses

import jax
import numpy as np
import pytest
import safetensors.numpy

from rlhf_jax import data
from rlhf_jax.config import RewardConfig, resolve
from rlhf_jax.dry_run import memory
from rlhf_jax.errors import UserError
from rlhf_jax.models import custom_shape, lora
from rlhf_jax.models.io import hf, peft
from rlhf_jax.parallel import sharding
from rlhf_jax.stages import open_stage
from tests.helpers.models_common import random_params
from tests.helpers.optional import optional
from tests.helpers.runs import OPTIONS, TEXTS

transformers, torch, peft_library = (optional(name) for name in ("transformers", "torch", "peft"))

FIXED = {**OPTIONS, **TEXTS, "micro_batch_size": 8, "max_steps": 2, "dataset_test_split": None}
LORA = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.0, "lora_target_modules": ("all-linear",)}
FAMILIES = ("gpt_neox", "llama")
BIAS = np.asarray([0.7], np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """FAMILY-KIND: a policy, a reward model, one whose head has a bias, one of two labels, an adapter with a head."""
    path, tokenizer = tmp_path_factory.mktemp("models"), data.load_tokenizer("synthetic")
    for family in FAMILIES:
        model = custom_shape(f"{family}:2x16x2", 128 * -(-tokenizer.vocab_size // 128))
        params = random_params(model, ("causal", "scalar"))
        biased = {**params, "score": {**params["score"], "bias": BIAS}}
        for name, kind, saved in (
            ("policy", "causal", params),
            ("reward", "scalar", params),
            ("biased", "scalar", biased),
        ):
            hf.save(path / f"{family}-{name}", model, saved, kind=kind)
            data.save_tokenizer(tokenizer, str(path / f"{family}-{name}"))
        form = lora.Lora(2, 4, 0.0, tuple(model.family.linears), False, ())
        adapted = dataclasses.replace(model, lora=form)
        adapter = {**lora.init(adapted, jax.random.key(1), params), "score": {"kernel": 2 * params["score"]["kernel"]}}
        folder = path / f"{family}-adapter"
        peft.save(folder, adapted, adapter, kind="scalar", base=str(path / f"{family}-policy"))
        data.save_tokenizer(tokenizer, str(folder))
    two = path / "llama-two"
    hf.save(two, model, params, kind="scalar")
    data.save_tokenizer(tokenizer, str(two))
    tensors = safetensors.numpy.load_file(two / "model.safetensors")
    tensors["score.weight"] = np.repeat(tensors["score.weight"], 2, axis=0)
    safetensors.numpy.save_file(tensors, two / "model.safetensors", metadata={"format": "pt"})
    (two / "config.json").write_text(
        (two / "config.json")
        .read_text()
        .replace('"LABEL_0": 0', '"LABEL_0": 0, "LABEL_1": 1')
        .replace('"0": "LABEL_0"', '"0": "LABEL_0", "1": "LABEL_1"')
    )
    return path


def config(models, start, **options):
    given = {**FIXED, "model_name_or_path": str(models / start), **options}
    return resolve(RewardConfig(**given))


def opened(models, start, **options):
    return open_stage(config(models, start, **options))


def head(stage):
    return jax.device_get(stage.state.params["model"]["score"])


@pytest.mark.parametrize("options", [{}, LORA])
@pytest.mark.parametrize("start", ["reward", "biased", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_starts_from_the_score_head_of_the_checkpoint_and_a_line_says_so(models, family, start, options):
    stage = opened(models, f"{family}-{start}", **options)
    _, expected = hf.load(models / f"{family}-{start}", kind="scalar")
    jax.tree.map(np.testing.assert_array_equal, head(stage), expected["score"])
    assert ("bias" in expected["score"]) == (family == "llama" and start == "biased")  # LayerNorm holds it
    assert f"the score head is that of {models / f'{family}-{start}'}" in stage.messages


@pytest.mark.parametrize("options", [{}, LORA])
def test_a_language_model_gets_a_new_head_and_a_line_says_so(models, options):
    stage = opened(models, "llama-policy", **options)
    assert set(head(stage)) == {"kernel"} and np.abs(head(stage)["kernel"]).max() > 0
    assert f"the score head is new: {models / 'llama-policy'} has none" in stage.messages
    wide = opened(models, "llama-policy", score_init_std=2.0, **options)
    np.testing.assert_allclose(head(wide)["kernel"], head(stage)["kernel"] * 2.0 * np.sqrt(17), rtol=1e-6)


@pytest.mark.parametrize("start", ["reward", "adapter"])
def test_score_init_std_beside_a_head_is_refused_by_name(models, start):
    with pytest.raises(UserError, match=f"score_init_std 0.5 would not be used: .*llama-{start} has a score head"):
        opened(models, f"llama-{start}", score_init_std=0.5)


def test_a_head_of_two_labels_is_refused_by_name(models):
    with pytest.raises(UserError, match="llama-two/config.json: num_labels is 2; a reward or value model has 1"):
        opened(models, "llama-two")


def test_a_reward_model_that_trains_on_without_a_step_scores_as_before(models):
    """As in transformers, which keeps the head of a checkpoint."""
    stage = opened(models, "llama-reward")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(models / "llama-reward", num_labels=1)
    np.testing.assert_array_equal(head(stage)["kernel"].T, theirs.score.weight.detach().numpy())


@pytest.mark.parametrize("start", ["reward", "policy", "adapter"])
def test_a_dry_run_opens_what_a_run_opens(models, start):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    stage = memory.abstract_stage(config(models, f"llama-{start}"), mesh)
    real = opened(models, f"llama-{start}")
    assert stage.messages[-1] == real.messages[-1]
    assert jax.tree.map(lambda x: x.shape, stage.state.params) == jax.tree.map(lambda x: x.shape, real.state.params)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_with_a_biased_head_is_read_as_it_was_trained_and_by_peft_up_to_the_bias(models, family, tmp_path):
    stage = opened(models, f"{family}-biased", **LORA)
    state, *_ = stage.train_step(stage.state, 0)
    params = jax.device_get(state.params["model"])
    params["score"]["bias"] = BIAS + 1
    state = state.replace(params={"model": stage.context.place_params(stage.network.model, params)})
    paths = stage.export(state, str(tmp_path))
    tokens, mask = np.arange(1, 13, dtype=np.int32)[None], np.ones((1, 12), bool)

    def scores(path):
        model, read = hf.load(path, kind="scalar")
        return np.asarray(model.scalars(read, model.hidden(read, tokens, mask)))[0, -1]

    whole = stage.network.with_trained(params).params
    expected = np.asarray(stage.network.model.scalars(whole, stage.network.model.hidden(whole, tokens, mask)))[0, -1]
    np.testing.assert_allclose([scores(path) for path in paths.values()], expected, rtol=1e-5)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(models / f"{family}-biased", num_labels=1)
    theirs = peft_library.PeftModel.from_pretrained(base, paths["reward_model_adapter"]).eval()
    with torch.no_grad():
        score = theirs(torch.tensor(tokens).long()).logits.item()
    shift = 0.0 if family == "gpt_neox" else float(BIAS[0] + 1)
    np.testing.assert_allclose(score + shift, expected, rtol=1e-4)
