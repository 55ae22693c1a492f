"""Turns on eight (forced host) devices: the tokens, messages and calls of one device."""

import json
import math
import sys

import jax
import numpy as np
import pytest

from tests.helpers import tool_tokenizer as tt
from tests.helpers.children import child, last_line
from tests.helpers.runs import compilations

MESHES = {"one": (1, 1, 1), "8x1x1": (8, 1, 1), "2x2x2": (2, 2, 2)}


def told(completions, environments, **_):
    return [float(len(messages) + each.count) for messages, each in zip(completions, environments, strict=True)]


def responses(folder: str, mesh: tuple[int, int, int]) -> dict:
    """Of the first update, with tools and an environment, and what an update makes of them."""
    from rlhf_jax import stages
    from rlhf_jax.config import GRPOConfig
    from rlhf_jax.models.placement import Weights
    from rlhf_jax.parallel import sharding

    config = GRPOConfig(
        run_dir=None,
        sft_model_path=None,
        scratch_model="2x32x2",
        tokenizer_name_or_path=f"{folder}/tokenizer",
        dataset_name=f"{folder}/prompts.jsonl",
        dataset_test_split=None,
        query_length=32,
        length_buckets=(32,),
        response_length=64,
        stop_token_ids=tt.SHORT_TURNS,
        batch_size=16,
        num_generations=2,
        total_episodes=32,
        temperature=1.0,
        num_sample_generations=0,
        report_to=(),
        save_steps=0,
    )
    weights = Weights(sharding.make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)]))
    tools, factory = [tt.tell, tt.fail], tt.Counter
    stage = stages.open_stage(config, reward_funcs=[told], tools=tools, environment_factory=factory, weights=weights)
    _, metrics, _ = stage.train_step(stage.state, 0)
    rollout = jax.device_get(stage._recent_batches[1][0].rollout)
    found = {name: getattr(rollout, name).tolist() for name in ("response", "lengths", "ended", "sampled", "logprobs")}
    names = ("tools/call_frequency", "tools/failure_frequency", "reward", "grad_norm")
    found["metrics"] = {name: float(sharding.fetch(metrics[name])) for name in names}
    found["compilations"] = compilations(stage)
    stage.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    tt.save(folder, rows=16)
    return last_line(child("tests.stages.test_turns_devices", folder, devices=8))


@pytest.mark.parametrize("mesh", ["8x1x1", "2x2x2"])
def test_turns_do_not_depend_on_the_devices(found, mesh):
    one, many = found["one"], found[mesh]
    assert many["compilations"] == {"generate": 1, "experience": 1, "update": 1}
    assert one["metrics"]["tools/call_frequency"] > 0.2
    for name in ("response", "lengths", "ended", "sampled"):
        assert many[name] == one[name], name
    np.testing.assert_allclose(many["logprobs"], one["logprobs"], atol=1e-5)
    for name, value in one["metrics"].items():
        assert many["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    print(json.dumps({name: responses(sys.argv[1], mesh) for name, mesh in MESHES.items()}))
