"""Random shapes and switches of every family equal transformers in float32: `pytest -m runs`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rlhf_jax.models.io import hf
from tests.helpers import families
from tests.helpers.arrays import distance

pytest.importorskip("torch")
pytestmark = pytest.mark.runs

VOCAB, PAD = families.SIZES["vocab_size"], families.SIZES["pad_token_id"]
HEADS = ((4, 1), (9, 3), (14, 2), (15, 5))  # query heads, heads of keys and values
ROPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
# Shrinking would compile a model a step.
QUICK = settings(
    max_examples=2,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),
)


def rope_of(kind: str, theta: float) -> dict:
    """rope_parameters of a type."""
    return {"rope_type": kind, "rope_theta": theta, **ROPES[kind]}


@st.composite
def configs(draw, family: str, heads: tuple[int, int], rope: str):
    """Arguments of the family's config; what is simplest to hypothesis has the most switches on."""
    own_size = family not in ("qwen2", "smollm3", "olmo2", "phi3", "gpt2")
    size = draw(st.sampled_from((16, 24)))
    layers = draw(st.integers(2, 3))
    window = draw(st.integers(3, 14))
    theta = draw(st.sampled_from((1e3, 2e4)))
    on = st.sampled_from((True, False))
    ids = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": 0, "bos_token_id": 0}
    units = draw(st.integers(17, 45))
    fields = {**ids, "tie_word_embeddings": draw(on)}
    if family == "gpt2":
        activation = draw(st.sampled_from(("gelu_new", "gelu", "silu")))
        sizes = {"n_embd": heads[0] * size, "n_head": heads[0], "n_layer": layers, "n_inner": units}
        return {**fields, **sizes, "activation_function": activation, "n_positions": 128}
    fields |= {
        "hidden_size": heads[0] * draw(st.integers(3, 6)) if own_size else heads[0] * size,
        "intermediate_size": units,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 256,
        "rms_norm_eps": draw(st.sampled_from((1e-2, 1e-6))),
        **({"head_dim": size} if own_size else {}),
    }
    if family != "gemma3_text":
        fields["rope_parameters"] = rope_of(rope, theta)
    if family in ("llama", "qwen3", "smollm3", "olmo2", "gemma2", "gemma3_text"):
        fields["attention_bias"] = draw(on)
    if family in ("llama", "smollm3"):
        fields["mlp_bias"] = draw(on)
    if family in ("mistral", "phi3"):
        fields["sliding_window"] = window if draw(on) else None
    if family in ("qwen2", "qwen3"):
        first = draw(st.integers(0, layers))
        fields |= {"use_sliding_window": draw(on), "sliding_window": window, "max_window_layers": first}
    if family == "smollm3":
        fields |= {"use_sliding_window": draw(on), "sliding_window": window}
        fields["no_rope_layer_interval"] = draw(st.integers(2, 4))
    if family == "phi3":
        fields["rope_parameters"] = rope_of("default", theta)  # it has no other but longrope
        fields["rope_parameters"]["partial_rotary_factor"] = draw(st.sampled_from((0.75, 0.5, 1.0)))
    if family.startswith("gemma"):
        fields |= {"sliding_window": window, "query_pre_attn_scalar": draw(st.integers(8, 40))}
        caps = st.sampled_from((2.0, 5.0, None))
        fields |= {"attn_logit_softcapping": draw(caps), "final_logit_softcapping": draw(caps)}
    if family == "gemma3_text":
        kinds = ("sliding_attention", "full_attention")
        fields["layer_types"] = [*kinds, *(draw(st.sampled_from(kinds)) for _ in range(layers - 2))]
        fields["rope_parameters"] = {kinds[0]: rope_of("default", theta), kinds[1]: rope_of(rope, 1e5)}
    return fields


def check(family: str, fields: dict, context: int, seed: int, folder) -> None:
    """Hidden states, logits, scores, gradients and decoding of one model."""
    reference = families.reference(family, seed=seed, settings=fields)
    scalar = families.scalar_of(family, reference, settings=fields)
    reference.save_pretrained(folder / "causal")
    scalar.save_pretrained(folder / "scalar")
    model, params = hf.load(folder / "causal")
    rows = families.text(VOCAB, PAD, context, 78, seed)
    got, want = families.ours(model, params, rows), families.theirs(reference, rows, folder / "gradients")

    def computed_again() -> str:
        ours, theirs = families.ours(model, params, rows), families.theirs(reference, rows, folder / "again")
        moved = [distance(new.hidden[rows.mask], old.hidden[rows.mask]) for new, old in ((ours, got), (theirs, want))]
        worst = np.abs(got.hidden - want.hidden).max(axis=-1, where=rows.mask[..., None], initial=0)
        return f"at {np.argwhere(worst > 1e-4)[:9].tolist()}; again: ours moves by {moved[0]}, theirs {moved[1]}"

    assert distance(got.hidden[rows.mask], want.hidden[rows.mask]) < 1e-5, computed_again()
    assert distance(got.logits[rows.mask], want.logits[rows.mask]) < 1e-5
    for (path, gradient), ours in zip(
        jax.tree_util.tree_leaves_with_path(want.gradients), jax.tree.leaves(got.gradients), strict=True
    ):
        assert distance(ours, gradient) < 1e-4, jax.tree_util.keystr(path)
    head, with_score = hf.load(folder / "scalar", kind="scalar")
    scores = families.at_last_token(head.scalars(with_score, got.hidden), rows.mask)
    assert distance(scores, families.their_scores(scalar, rows)) < 1e-5
    columns = slice(context - 1, None)
    full, kept = got.hidden[:4, columns], rows.mask[:4, columns]
    decoded = families.decoded(model, params, rows)
    for column in range(full.shape[1]):
        now = kept[:, column]
        assert distance(decoded[now, column], full[now, column]) < 1e-5, column


CASES = [
    (family, *pair)
    for family in sorted(families.FAMILIES)
    for pair in zip(HEADS, ROPES, strict=True)
    if family not in ("gpt2", "phi3") or pair[1] in ("default", "llama3")  # they have no scaled embedding
]


@pytest.mark.parametrize("family, heads, rope", CASES)
def test_a_random_shape_equals_transformers(family, heads, rope, tmp_path_factory):
    @QUICK
    @given(configs(family, heads, rope), st.integers(9, 21), st.integers(0, 2**31))
    def run(fields, context, seed):
        check(family, fields, context, seed, tmp_path_factory.mktemp(family))

    run()
