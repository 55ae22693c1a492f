"""Models of images and text: their text part equals transformers' on text, whatever version wrote the files."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import warnings

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from rlhf_jax.errors import UserError
from rlhf_jax.models import FAMILIES, Model
from rlhf_jax.models.families import image_text
from rlhf_jax.models.io import hf
from tests.helpers import families
from tests.helpers.arrays import distance, same_bits
from tests.helpers.models_common import padded_rows, reference_inputs
from tests.helpers.optional import optional

torch, peft = optional("torch"), optional("peft")
LENGTH = 40
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
# A wrapper's model_type, the family of its text, its vision config, and other arguments.
WRAPPERS = {
    "gemma3": ("gemma3_text", {"model_type": "siglip_vision_model", **VISION}, {"mm_tokens_per_image": 4}),
    "mistral3": ("mistral", {"model_type": "pixtral", **VISION, "head_dim": 8}, {"tie_word_embeddings": False}),
    "llava": ("llama", {"model_type": "clip_vision_model", **VISION}, {}),
    "llava_next": ("mistral", {"model_type": "clip_vision_model", **VISION}, {"image_grid_pinpoints": [[8, 8]]}),
    "internvl": (
        "qwen2",
        {"model_type": "internvl_vision", **VISION, "image_size": [8, 8], "patch_size": [4, 4]},
        {},
    ),
    "idefics3": ("llama", {"model_type": "idefics3_vision", **VISION}, {"scale_factor": 2}),
    "smolvlm": ("llama", {"model_type": "smolvlm_vision", **VISION}, {"scale_factor": 2}),
}


def reference(kind):
    """A tiny model of images and text, every weight random."""
    generator = torch.Generator().manual_seed(0)
    family, vision, arguments = WRAPPERS[kind]
    text = families.config_of(family).to_dict()
    config_class = type(transformers.AutoConfig.for_model(kind))
    config = config_class(text_config=text, vision_config=vision, image_token_id=57, **arguments)
    config._attn_implementation = config.text_config._attn_implementation = "eager"
    model = getattr(transformers, image_text.WRAPPERS[kind].architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight") and not family.startswith("gemma")
            parameter.copy_(1.0 + 0.2 * noise if is_norm else 0.2 * noise)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(transformers' model, its folder), made once."""

    @functools.cache
    def of(kind):
        theirs, folder = reference(kind), tmp_path_factory.mktemp(kind)
        theirs.save_pretrained(folder)
        return theirs, folder

    return of


def load(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hf.load(folder, **options)


def rows():
    return padded_rows([LENGTH, 20], [0, LENGTH - 20], LENGTH)


def logits(model, params):
    tokens, mask = rows()
    return np.where(mask[..., None], model.logits(params, model.hidden(params, tokens, mask)), 0)


def renamed(folder, other, rename):
    """A copy of a checkpoint with other names of tensors."""
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file(
        {rename(name): x for name, x in load_file(folder / "model.safetensors").items()}, other / "model.safetensors"
    )
    return other


def version_4(name):
    """transformers 4's name of a tensor."""
    if name.startswith("model.text_model."):
        return name
    name = name.replace("model.language_model.", "language_model.model.")
    name = "language_model.lm_head.weight" if name == "lm_head.weight" else name
    return name.removeprefix("model.") if name.startswith("model.") else name


def version_5(name):
    """transformers 5's name of a tensor."""
    if name.startswith(("model.", "lm_head.")):
        return name
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
        return name if name.startswith("lm_head.") else name.replace("model.", "model.language_model.", 1)
    return f"model.{name}"


@pytest.mark.parametrize("kind", WRAPPERS)
def test_logits_on_text_equal_those_of_transformers(kind, checkpoints):
    theirs, folder = checkpoints(kind)
    model, params = load(folder)
    assert model.family.name == WRAPPERS[kind][0]
    tokens, mask = rows()
    with torch.no_grad():
        expected = theirs(**reference_inputs(tokens, mask)).logits.numpy()
    assert distance(logits(model, params), np.where(mask[..., None], expected, 0)) < 1e-5


@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_of_transformers_4_and_5_are_read_alike(kind, checkpoints, tmp_path):
    _, folder = checkpoints(kind)
    _, expected = load(folder)
    names = []
    for number, rename in enumerate((version_4, version_5)):
        other = renamed(folder, tmp_path / str(number), rename)
        names.append(set(load_file(other / "model.safetensors")))
        assert same_bits(load(other)[1], expected)
    starts = {name for name in names[0] | names[1] if "layers.0" in name}
    assert any(name.startswith("model.") for name in starts)
    assert names[0] != names[1] or kind in ("idefics3", "smolvlm")


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "smolvlm"])
def test_exports_are_the_text_model_alone(kind, checkpoints, tmp_path):
    theirs, folder = checkpoints(kind)
    model, params = load(folder)
    hf.save(tmp_path / "export", model, params, kind="causal")
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert written["model_type"] == model.family.name and "vision_config" not in written
    assert written["architectures"] == [model.family.architectures[0]]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    assert type(again).__name__ == model.family.architectures[0]
    tokens, mask = rows()
    with torch.no_grad():
        outputs = [m(**reference_inputs(tokens, mask)).logits.numpy() for m in (theirs, again)]
    np.testing.assert_allclose(*(np.where(mask[..., None], x, 0) for x in outputs), atol=1e-5)
    assert same_bits(hf.load(tmp_path / "export")[1], params)


def test_what_is_ignored_is_said(checkpoints):
    with pytest.warns(UserWarning, match="model of images and text .gemma3.*gemma3_text.*tensors are ignored"):
        hf.load(checkpoints("gemma3")[1])


def test_the_text_models_backbone_is_read_alone(checkpoints):
    model, params = load(checkpoints("gemma3")[1], kind="backbone")
    assert set(params) == {"backbone"} and not model.reads_images


def test_an_adapter_that_was_trained_on_the_whole_model_is_read(checkpoints, tmp_path):
    theirs, folder = checkpoints("gemma3")
    targets = r".*language_model.*\.(q_proj|down_proj)"
    adapted = peft.get_peft_model(reference("gemma3"), peft.LoraConfig(r=2, target_modules=targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(folder)}))
    model, params = load(tmp_path / "adapter")
    tokens, mask = rows()
    with torch.no_grad():
        expected = adapted.eval()(**reference_inputs(tokens, mask)).logits.numpy()
    assert distance(logits(model, params), np.where(mask[..., None], expected, 0)) < 1e-5


@pytest.mark.parametrize("name", sorted({family for family, _, _ in WRAPPERS.values()} | {"qwen3"}))
def test_keys_absent_in_a_text_config_are_the_defaults_of_transformers_class(name):
    theirs = transformers.AutoConfig.for_model(name).to_dict()
    defaults = FAMILIES[name].nested_defaults
    assert defaults == {key: theirs[key] for key in defaults}
    wrapper = {"model_type": "llava", "text_config": {"model_type": name}}
    text = image_text.text_config(wrapper, "config.json", {name: defaults})
    assert text["hidden_size"] == theirs["hidden_size"]


def test_a_config_of_few_keys_as_gemma_3_is_published_is_that_of_transformers():
    few = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    few |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    ours = Model.from_hf_config({"model_type": "gemma3", "text_config": few})
    whole = transformers.Gemma3Config(text_config=few).text_config.to_dict()
    theirs = Model.from_hf_config({**whole, "model_type": "gemma3_text"})
    assert dataclasses.replace(ours.config, source="") == dataclasses.replace(theirs.config, source="")
    shapes = jax.tree.leaves(jax.eval_shape(ours.init, jax.random.key(0)))
    assert round(sum(math.prod(leaf.shape) for leaf in shapes) / 1e9, 2) == 3.88


def spoiled(folder, other, **changes):
    renamed(folder, other, lambda name: name)
    config = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    return other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, "text_config is None"),
        ({"text_config": {"model_type": "gpt2"}}, "text_config: model_type 'gpt2'"),
        ({"text_config": {"model_type": "qwen2_vl_text"}}, "text_config: model_type 'qwen2_vl_text'"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, "architectures 'Qwen2VLForConditionalGeneration'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
    ids=str,
)
def test_a_wrapper_that_is_not_supported_is_refused_by_name(checkpoints, tmp_path, changes, words):
    path = spoiled(checkpoints("gemma3")[1], tmp_path / "spoiled", **changes)
    with pytest.raises(UserError, match=words):
        hf.load_model(path)


def test_tensors_of_no_known_part_and_a_head_beside_a_tied_embedding_are_refused(checkpoints, tmp_path):
    _, folder = checkpoints("gemma3")
    with pytest.raises(UserError, match="audio_tower"):
        load(renamed(folder, tmp_path / "a", lambda name: name.replace("vision_tower", "audio_tower")))
    own = json.loads((checkpoints("mistral3")[1] / "config.json").read_text())
    path = spoiled(checkpoints("mistral3")[1], tmp_path / "b", **{**own, "tie_word_embeddings": True})
    with pytest.raises(UserError, match="lm_head.*tie_word_embeddings"):
        load(path)
