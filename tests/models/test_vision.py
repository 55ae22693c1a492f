"""Image features, and models that read images, equal transformers' in float32: logits, gradients, greedy generation."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlhf_jax.generate import Sampling, generate
from rlhf_jax.models import vision
from rlhf_jax.models.io import hf
from rlhf_jax.types import Images, PromptBatch
from tests.helpers import vision as tiny
from tests.helpers.arrays import distance
from tests.helpers.models_common import reference_inputs
from tests.helpers.optional import optional

torch = optional("torch")
QUICK = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(transformers' model, ours, its params)"""
    theirs, folder = tiny.shared(), tmp_path_factory.mktemp("smolvlm")
    theirs.save_pretrained(folder)
    return theirs, *hf.load(folder, images=True)


def theirs_logits(theirs, tokens, mask, pixels=None):
    inputs = reference_inputs(tokens, mask)
    inputs["input_ids"] = torch.tensor(np.where(mask, tokens, tiny.PAD), dtype=torch.long)
    return theirs(**inputs, pixel_values=None if pixels is None else torch.tensor(pixels)).logits


def test_patches_of_published_grids_have_a_position_each_in_transformers():
    for side in (4, 16, 26, 27, 32):
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        starts = torch.arange(side, dtype=torch.float32)[None] * (1.0 / torch.tensor([side]))[:, None]
        rows = torch.bucketize(torch.clamp(starts, max=1.0 - 1e-6), boundaries, right=True)[0].numpy()
        np.testing.assert_array_equal(rows, np.arange(side), str(side))


def test_pixel_shuffle_puts_each_square_into_one_token():
    x = jnp.arange(16, dtype=jnp.float32).reshape(1, 16, 1)
    squares = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    np.testing.assert_array_equal(vision.pixel_shuffle(x, 4, 2)[0], squares)


@pytest.mark.parametrize("side, block", [(4, 16), (16, 256), (26, 52), (27, 243), (32, 256), (300, 300)])
def test_scores_are_held_of_whole_rows_of_a_tile_few_at_a_time(side, block):
    assert vision.attention_block(side) == block and side**2 % block == 0


@pytest.mark.parametrize("side", [4, 26, 32])
def test_attention_by_blocks_equals_torch_in_values_and_gradients(side):
    rng = np.random.default_rng(0)
    given = [rng.normal(size=(2, side**2, 3, 4)).astype(np.float32) for _ in range(4)]
    block = vision.attention_block(side)
    out, pull = jax.vjp(lambda *qkv: vision.attention(*qkv, block), *given[:3])
    tensors = [torch.tensor(x).transpose(1, 2).requires_grad_() for x in given]
    theirs = torch.nn.functional.scaled_dot_product_attention(*tensors[:3])
    theirs.backward(tensors[3].detach())
    assert distance(out, theirs.detach().transpose(1, 2).numpy()) < 1e-5
    for ours, tensor in zip(pull(given[3]), tensors):
        assert distance(ours, tensor.grad.transpose(1, 2).numpy()) < 1e-5


def test_no_array_of_the_backward_pass_holds_more_scores_than_a_block_of_queries():
    side, heads = 32, 3
    qkv = [jax.ShapeDtypeStruct((2, side**2, heads, 4), jnp.float32)] * 3
    block = vision.attention_block(side)
    text = str(jax.make_jaxpr(jax.grad(lambda *qkv: vision.attention(*qkv, block).sum(), (0, 1, 2)))(*qkv))
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert max(sizes) == 2 * heads * block * side**2


def test_uint8_pixels_are_normalized_as_the_processor_does():
    pixels = np.random.default_rng(0).integers(0, 256, (1, 2, 3, 4, 4), np.uint8)
    images = Images(jnp.asarray(pixels), 1 / 255, (0.5, 0.4, 0.3), (0.5, 0.25, 0.2))
    mean, std = (np.array(x).reshape(1, 1, 3, 1, 1) for x in ((0.5, 0.4, 0.3), (0.5, 0.25, 0.2)))
    np.testing.assert_allclose(vision.normalized(images, jnp.float32), (pixels / 255 - mean) / std, atol=1e-6)


@settings(QUICK, max_examples=6)
@given(counts=st.lists(st.integers(0, 3), min_size=3, max_size=3), seed=st.integers(0, 2**16))
def test_features_and_logits_equal_transformers(loaded, counts, seed):
    """0 to 3 tiles a row in one batch; tiles that pad are zeros, which transformers drops."""
    theirs, model, params = loaded
    tokens, mask, pixels = tiny.prompt_rows(np.random.default_rng(seed), counts, 3, 26)
    with torch.no_grad():
        wanted = theirs_logits(theirs, tokens, mask, pixels if any(counts) else None).numpy()
    images = Images(jnp.asarray(pixels))
    ours = model.logits(params, model.hidden(params, tokens, mask, images=images))
    assert distance(np.asarray(ours)[mask], wanted[mask]) < 1e-5
    if any(counts):
        with torch.no_grad():
            features = theirs.model.get_image_features(torch.tensor(pixels)).pooler_output
        ours = np.asarray(model.image_features(params, images))
        for row, count in enumerate(counts):
            if count:
                assert distance(ours[row, : count * tiny.TOKENS], features[row].numpy()) < 1e-5


def test_text_alone_is_that_of_the_text_model(loaded):
    theirs, model, params = loaded
    tokens, mask, _ = tiny.prompt_rows(np.random.default_rng(0), [0, 0], 1, 8)
    with torch.no_grad():
        wanted = theirs_logits(theirs, tokens, mask).numpy()
    assert distance(np.asarray(model.logits(params, model.hidden(params, tokens, mask)))[mask], wanted[mask]) < 1e-5


def test_images_change_the_logits_of_what_follows_them(loaded):
    _, model, params = loaded
    tokens, mask, pixels = tiny.prompt_rows(np.random.default_rng(0), [1], 1, 12)

    def logits(pixels):
        return np.asarray(model.logits(params, model.hidden(params, tokens, mask, images=Images(jnp.asarray(pixels)))))

    before = mask[0] & (np.cumsum(tokens[0] == tiny.IMAGE) == 0)
    a, b = logits(pixels), logits(pixels[..., ::-1].copy())
    assert before.any()
    np.testing.assert_array_equal(a[:, before], b[:, before])
    assert distance(a[:, -1], b[:, -1]) > 0.01


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_equal_transformers(loaded, remat):
    """Of every weight: tower, connector, text."""
    theirs, model, params = loaded
    tokens, mask, pixels = tiny.prompt_rows(np.random.default_rng(1), [2, 0, 1], 2, 20)
    theirs.zero_grad()
    weights = np.random.default_rng(2).normal(size=(3, 20, 60)).astype(np.float32) * mask[..., None]
    (theirs_logits(theirs, tokens, mask, pixels) * torch.tensor(weights)).sum().backward()

    @jax.jit
    def gradient(params):
        def loss(params):
            hidden = model.hidden(params, tokens, mask, images=Images(jnp.asarray(pixels)), remat=remat)
            return jnp.sum(model.logits(params, hidden) * weights)

        return jax.grad(loss)(params)

    grads = gradient(params)
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    for spec in model.family.tensors(model.config):
        leaf = grads["backbone"]
        for key in spec.path:
            leaf = leaf[key]
        leaf = np.asarray(leaf if spec.layer is None else leaf[spec.layer])
        other = wanted[model.family.prefix + spec.name]
        if spec.name.endswith("k_proj.bias"):  # 0 in exact arithmetic: a bias of all keys shifts all scores alike
            assert np.abs(leaf).max() < 1e-3 and np.abs(other).max() < 1e-3
        else:
            assert distance(leaf.T if spec.transpose else leaf, other) < 1e-4, spec.name


def test_a_prompt_computed_once_for_its_responses_equals_rows_side_by_side(loaded):
    _, model, params = loaded
    rng = np.random.default_rng(3)
    tokens, mask, pixels = tiny.prompt_rows(rng, [1, 2], 2, 18)
    responses, kept = rng.integers(1, 30, (4, 5)).astype(np.int32), np.ones((4, 5), bool)
    last, hidden = model.hidden_after_prompts(params, tokens, mask, responses, kept, images=Images(jnp.asarray(pixels)))
    rows = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), (tokens, mask, pixels))
    both = np.concatenate([rows[0], responses], axis=1), np.concatenate([rows[1], kept], axis=1)
    whole = model.hidden(params, *both, images=Images(jnp.asarray(rows[2])))
    assert distance(hidden, whole[:, -5:]) < 1e-5 and distance(last, whole[::2, 17]) < 1e-5


def test_greedy_generation_equals_transformers_and_never_samples_the_placeholder(loaded):
    theirs, model, params = loaded
    tokens, mask, pixels = tiny.prompt_rows(np.random.default_rng(5), [1, 0, 2], 2, 18)
    inputs = {name: x for name, x in reference_inputs(tokens, mask).items() if name != "position_ids"}
    inputs["input_ids"] = torch.tensor(np.where(mask, tokens, tiny.PAD), dtype=torch.long)
    with torch.no_grad():
        wanted = theirs.generate(
            **inputs,
            pixel_values=torch.tensor(pixels),
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=[tiny.IMAGE],
            eos_token_id=None,
        ).numpy()[:, 18:]
    sampling = Sampling(8, temperature=0.0, suppress_ids=(tiny.IMAGE,))
    prompts = PromptBatch(tokens, mask.sum(1).astype(np.int32), np.arange(3), Images(jnp.asarray(pixels)))
    rollout = generate(model, params, prompts, jax.random.key(0), sampling)
    np.testing.assert_array_equal(rollout.response, wanted)


def test_gradients_are_only_taken_where_params_are_trained(loaded):
    """Without a gradient of tower and connector their forward pass is all that is computed."""
    _, model, params = loaded
    tokens, mask, pixels = tiny.prompt_rows(np.random.default_rng(1), [1], 1, 12)

    def loss(text, rest):
        whole = {**params, "backbone": {**params["backbone"], **rest, "layers": text}}
        return jnp.sum(model.hidden(whole, tokens, mask, images=Images(jnp.asarray(pixels))) ** 2)

    def of_tower(text, tower):
        return loss(text, {"vision": tower})

    flops = []
    for argument in (0, (0, 1)):
        program = jax.jit(jax.grad(of_tower, argument)).lower(
            params["backbone"]["layers"], params["backbone"]["vision"]
        )
        flops.append(program.compile().cost_analysis()["flops"])
    assert flops[0] < 0.8 * flops[1]
