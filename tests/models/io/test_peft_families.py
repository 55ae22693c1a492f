"""Adapters of PEFT on every layout of linear layers, in and out: separate, fused, and GPT-2's Conv1D."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.errors import UserError
from rlhf_jax.models import lora
from rlhf_jax.models.io import hf
from rlhf_jax.models.io import peft as peft_files
from tests.helpers import families, models_common
from tests.helpers.adapters import assert_gradients_equal
from tests.helpers.arrays import distance, same_bits
from tests.helpers.models_common import padded_rows, reference_inputs
from tests.helpers.optional import optional

peft, torch = optional("peft"), optional("torch")
TOKENS, MASK = padded_rows([20, 13], [0, 7], 20)
# (family, target_modules of PEFT, linear layers of ours)
CASES = (
    ("llama", None, ("q_proj", "v_proj")),
    ("qwen2", "all-linear", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    ("phi3", "all-linear", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ("gpt2", None, ("c_attn",)),
    ("gpt2", ["c_proj"], ("attn.c_proj", "mlp.c_proj")),
    ("gpt2", "all-linear", ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")),
)


@functools.partial(jax.jit, static_argnums=0)
def logits_and_gradients(model, base, adapters):
    def total(adapters):
        params = model.with_lora(base, adapters)
        logits = jnp.where(MASK[..., None], model.logits(params, model.hidden(params, TOKENS, MASK)), 0.0)
        return jnp.sum(jnp.sin(logits)), logits

    gradients, logits = jax.grad(total, has_aux=True)(adapters)
    return logits, gradients


def random_adapter(base, task: str, targets):
    """PEFT's model with every number of its adapter random."""
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, task_type=task))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def their_logits(model):
    return model(**reference_inputs(TOKENS, MASK)).logits * torch.tensor(MASK)[..., None]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT sets it for Conv1D and says so
@pytest.mark.parametrize("family, targets, linears", CASES)
def test_an_adapter_of_peft_gives_its_logits_and_gradients_and_goes_back_as_it_was(family, targets, linears, tmp_path):
    families.reference(family).save_pretrained(tmp_path / "base")
    theirs = random_adapter(families.reference(family), "CAUSAL_LM", targets)
    theirs.save_pretrained(tmp_path / "adapter")
    model, base = hf.load(tmp_path / "base")
    form, adapters = hf.load_adapter(tmp_path / "adapter", model)
    assert (form.r, form.alpha, form.target_modules) == (3, 6, linears)
    model = dataclasses.replace(model, lora=form)
    found, gradients = logits_and_gradients(model, base, adapters)
    wanted = their_logits(theirs)
    assert distance(found, wanted.detach()) < 1e-5
    torch.sin(wanted).sum().backward()
    assert_gradients_equal(tmp_path / "gradients", model, gradients, theirs, 1e-4)

    peft_files.save(tmp_path / "ours", model, adapters, kind="causal", base=str(tmp_path / "base"))
    again = peft.PeftModel.from_pretrained(families.reference(family), tmp_path / "ours").eval()
    assert torch.equal(their_logits(again), wanted)
    # As a checkpoint, it is merged into its base.
    merged = hf.load(tmp_path / "ours")[1]
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert distance(merged, hf.load(tmp_path / "merged")[1]) < 1e-6
    plain, leaves = hf.open_params(tmp_path / "ours")
    by_layer = plain.unstack(jax.tree.map(jnp.asarray, merged))
    assert same_bits(plain.read_unstacked(leaves, jnp.asarray), by_layer)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_an_adapter_of_pefts_classifier_brings_its_head_and_goes_back_as_it_was(family, tmp_path):
    families.reference(family, "scalar").save_pretrained(tmp_path / "base")
    theirs = random_adapter(families.reference(family, "scalar"), "SEQ_CLS", None)
    theirs.save_pretrained(tmp_path / "adapter")
    model, base = hf.load(tmp_path / "base", kind="scalar")
    form, adapters = hf.load_adapter(tmp_path / "adapter", model)
    assert form.modules_to_save == ("score",)
    head = theirs.base_model.model.score.modules_to_save.default.weight
    np.testing.assert_array_equal(adapters["score"]["kernel"], head.detach().numpy().T)
    model = dataclasses.replace(model, lora=form)
    peft_files.save(tmp_path / "ours", model, adapters, kind="scalar", base=str(tmp_path / "base"))
    again = peft.PeftModel.from_pretrained(families.reference(family, "scalar"), tmp_path / "ours").eval()
    inputs = reference_inputs(TOKENS, MASK)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, theirs(**inputs).logits)


def test_a_new_adapter_of_ours_is_read_by_peft(tmp_path):
    """GPT-2's, whose layers PEFT has to hold transposed."""
    theirs = families.reference("gpt2")
    theirs.save_pretrained(tmp_path / "base")
    model, base = hf.load(tmp_path / "base")
    names = lora.resolve_targets(model, ["all-linear"], "lora_target_modules")
    model = dataclasses.replace(model, lora=lora.Lora(r=4, alpha=8, dropout=0.0, target_modules=names))
    adapters = lora.init(model, jax.random.key(0), base)
    noise = np.random.default_rng(0)
    adapters = jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape).astype(np.float32), adapters)
    peft_files.save(tmp_path / "ours", model, adapters, kind="causal", base=str(tmp_path / "base"))
    assert json.loads((tmp_path / "ours" / peft_files.CONFIG).read_text())["fan_in_fan_out"] is True
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    found = logits_and_gradients(model, base, adapters)[0]
    assert distance(found, their_logits(adapted).detach()) < 1e-5


# (family, embedding, head by PEFT's name, linear layer); gemma3_text scales its embedding
TIED = (
    ("llama", "embed_tokens", "lm_head", "q_proj"),
    ("qwen3", "embed_tokens", "lm_head", "q_proj"),
    ("gemma3_text", "embed_tokens", "lm_head", "q_proj"),
    ("gpt2", "wte", "lm_head", "c_attn"),
    ("gpt_neox", "embed_in", "lm_head", "query_key_value"),
)


def tied_reference(family):
    """transformers' model of a family, its head tied to its embedding."""
    if family == "gpt_neox":
        return models_common.reference("causal", tie_word_embeddings=True)
    return families.reference(family, settings={**families.FAMILIES[family][1], "tie_word_embeddings": True})


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:You have requested")
@pytest.mark.parametrize(("family", "embedding", "head", "linear"), TIED)
def test_an_adapter_with_the_embedding_of_a_tied_model_is_the_same_model_in_peft(
    family, embedding, head, linear, tmp_path
):
    tied_reference(family).save_pretrained(tmp_path / "base")
    model, base = hf.load(tmp_path / "base")
    assert model.config.tie_word_embeddings
    form = lora.Lora(r=2, alpha=4, dropout=0.0, target_modules=(linear,), modules_to_save=(embedding,))
    model = dataclasses.replace(model, lora=form)
    noise = np.random.default_rng(0)
    adapters = lora.init(model, jax.random.key(0), base)
    adapters = jax.tree.map(lambda x: x + 0.1 * noise.standard_normal(x.shape).astype(np.float32), adapters)
    peft_files.save(tmp_path / "ours", model, adapters, kind="causal", base=str(tmp_path / "base"))
    found = logits_and_gradients(model, base, adapters)[0]
    theirs = peft.PeftModel.from_pretrained(tied_reference(family), tmp_path / "ours").eval()
    assert distance(found, their_logits(theirs).detach()) < 1e-5
    assert theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight
    # Read again: the same adapter, and as a checkpoint the same model.
    again, read = hf.load_adapter(tmp_path / "ours", dataclasses.replace(model, lora=None))
    assert again == form and distance(read, adapters) < 1e-6
    merged_model, merged = hf.load(tmp_path / "ours")
    assert merged_model.config.tie_word_embeddings and "embed_out" not in merged
    hf.save(tmp_path / "merged", merged_model, merged, kind="causal")
    whole = type(tied_reference(family)).from_pretrained(tmp_path / "merged").eval()
    assert distance(found, their_logits(whole).detach()) < 1e-5


@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:You have requested", "ignore:Model has")
@pytest.mark.parametrize("tying", [True, False])
@pytest.mark.parametrize(
    ("family", "embedding", "head", "linear", "saved"),
    [
        *[(*TIED[0], saved) for saved in ("embedding", "head", "both")],
        *[(*TIED[number], "both") for number in (3, 4)],
        (*TIED[3], "embedding"),  # which PEFT does not tie by this name
    ],
)
def test_an_adapter_of_peft_on_a_tied_model_is_read_as_peft_computes_it(
    family, embedding, head, linear, saved, tying, tmp_path
):
    """Without ensure_weight_tying embedding and head become two, unless both or none are trained."""
    tied_reference(family).save_pretrained(tmp_path / "base")
    names = {"embedding": [embedding], "head": [head], "both": [embedding, head]}[saved]
    config = peft.LoraConfig(
        r=2, target_modules=[linear], modules_to_save=names, ensure_weight_tying=tying, task_type="CAUSAL_LM"
    )
    base = type(tied_reference(family)).from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    theirs.eval().save_pretrained(tmp_path / "adapter")
    wanted = their_logits(theirs).detach()
    apart = theirs.get_input_embeddings().weight is not theirs.get_output_embeddings().weight
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, params = hf.load(tmp_path / "adapter")
    said = [str(warning.message) for warning in caught if "ensure_weight_tying" in str(warning.message)]
    assert bool(said) == apart == (not model.config.tie_word_embeddings)
    logits = jnp.where(MASK[..., None], model.logits(params, model.hidden(params, TOKENS, MASK)), 0.0)
    assert distance(logits, wanted) < 1e-5
    hf.save(tmp_path / "merged", model, params, kind="causal")
    whole = type(tied_reference(family)).from_pretrained(tmp_path / "merged").eval()
    assert distance(logits, their_logits(whole).detach()) < 1e-5
    if apart:
        assert hf.load_model(tmp_path / "adapter").config == model.config
        with pytest.raises(UserError, match=f"modules_to_save has '{names[0]}' without ensure_weight_tying"):
            hf.load_adapter(tmp_path / "adapter", hf.load_model(tmp_path / "base"))
