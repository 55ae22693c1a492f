"""stages/work.py: the work of an update, by hand and against the params of models."""

import jax
import pytest

from rlhf_jax import models
from rlhf_jax.stages.work import Shape, decode_bytes, rollout_work, supervised_work

SHAPE = Shape(layers=2, width=8, hidden=32, vocab=100)


@pytest.mark.parametrize("spec", ["6x128x4", "llama:2x64x8x2", "gemma2:2x64x4x1", "gpt2:2x64x4"])
def test_matrices_of_the_formula_are_those_of_the_params(spec):
    model = models.custom_shape(spec, 512)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    layers = jax.tree.leaves(params["backbone"]["layers"])
    assert Shape.of(model).matrices == sum(x.size for x in layers if x.ndim == 3)


def test_work_counts_a_prompt_once_for_its_group_and_no_padding():
    shapes = dict.fromkeys(("policy", "reference", "reward"), SHAPE)
    found = rollout_work(shapes, [3, 5], group=2, response=4, epochs=3)
    matrices = 2 * (3 * 64 + 64 + 2 * 8 * 32)
    tokens = 3 + 5 + 4 * 4
    # Keys of each query: 1 to p in a prompt, p + 1 to p + 4 in each of its two responses.
    pairs = sum(sum(range(1, p + 1)) + 2 * sum(range(p + 1, p + 5)) for p in (3, 5))
    first = matrices * tokens + 4 * 8 * pairs  # of two layers
    qkv, rest = 3 * 64, 64 + 2 * 8 * 32

    def last(asked, keys):
        return 2 * qkv * tokens + 2 * rest * asked + 4 * 8 * keys

    # A prompt's last token predicts for both of its responses, their first three for themselves.
    keys = sum(p + 2 * sum(range(p + 1, p + 4)) for p in (3, 5))
    body = first + last(2 + 4 * 3, keys) + 2 * 8 * 100 * 16
    assert found["score"][:2] == (first + last(4, 2 * (3 + 4 + 5 + 4)), tokens)
    assert found["reference"][:2] == (body, tokens)
    assert found["experience"][:2] == (2 * body, tokens)
    assert found["update"][:2] == (3 * 3 * body, 3 * tokens)
    assert found["prefill"].flops + found["decode"].flops == found["generate"].flops
    # The last token is sampled and goes through no model any more: here but for its queries, keys and values.
    unsampled = (matrices + 2 * qkv) * 4 + 4 * 8 * 2 * (3 + 4 + 5 + 4)
    assert found["reference"].flops - found["generate"].flops == unsampled
    assert found["generate"].tokens == 16 and "value" not in found
    ppo = rollout_work({**shapes, "value": SHAPE}, [3, 5], group=1, response=4, epochs=3)
    assert ppo["update"].flops == 9 * (ppo["reference"].flops + ppo["value"].flops)
    assert ppo["experience"].flops == 2 * ppo["reference"].flops + ppo["value"].flops


def test_decode_bytes_are_matrices_each_step_and_the_cache_so_far():
    shape = Shape(layers=1, width=4, hidden=16, vocab=10)
    weights = 4 * 16 + 2 * 4 * 16 + 4 * 10
    # Two steps; prompts' keys and values once a group, own ones of 1 and 2 tokens for each of 4 rows.
    entries = 2 * (weights + 2 * 4 * (3 + 5)) + 2 * 4 * 4 * (1 + 2)
    assert decode_bytes(shape, [3, 5], [3, 3, 3, 3], itemsize=4) == 4 * entries
    assert rollout_work({"policy": shape}, [3, 5], 2, 3, 1, itemsize=2)["generate"].bytes == 2 * entries


def test_decode_bytes_end_with_each_row_and_count_the_steps_that_the_rows_took():
    shape = Shape(layers=3, width=4, hidden=16, vocab=10)
    weights, entries = shape.matrices + 4 * 10, 3 * 2 * 4
    # Each step reads the matrices, each prompt that a row still continues, and the earlier tokens of each such row.
    prompts, responses = [3, 5], [4, 1, 2, 6]
    read = 0
    for step in range(1, 6):
        live = [n > step for n in responses]
        read += weights + entries * step * sum(live)
        read += entries * sum(c for c, rows in zip(prompts, (live[:2], live[2:]), strict=True) if any(rows))
    assert decode_bytes(shape, prompts, responses, 2) == 2 * read
    assert decode_bytes(shape, prompts, responses, 2, steps=9) == 2 * (read + 4 * weights)


def test_adapters_and_skipped_passes_leave_work_out():
    shapes = {"policy": SHAPE, "value": SHAPE}
    whole = rollout_work(shapes, [3, 5], 1, 4, 2)
    adapted = rollout_work(shapes, [3, 5], 1, 4, 2, frozen=["policy", "value"], recomputes=False)
    assert whole["update"].flops == 1.5 * adapted["update"].flops and whole["score"].flops == 0
    assert adapted["experience"].flops == adapted["value"].flops


def test_mean_length_of_responses_may_be_a_fraction():
    shapes = {"policy": SHAPE}
    low, middle, high = (rollout_work(shapes, [3, 5], 1, n, 1)["update"].flops for n in (3, 3.5, 4))
    assert low < middle < high


def test_supervised_work_is_three_passes_and_of_a_score_the_last_token_alone():
    matrices, qkv = SHAPE.matrices // 2, SHAPE.qkv
    tokens, pairs = 12, 4 * (1 + 2 + 3)
    body = 2 * 2 * matrices * tokens + 4 * 8 * 2 * pairs
    assert supervised_work(SHAPE, 4, 12, logits=12) == (3 * (body + 2 * 8 * 100 * 12), 12, 0)
    scored = 2 * (2 * matrices * tokens - (matrices - qkv) * (tokens - 4)) + 4 * 8 * (pairs + 12)
    assert supervised_work(SHAPE, 4, 12, frozen=True) == (2 * scored, 12, 0)
