"""A user's algorithm: registered by the config file that --config names, trained by the command."""

import json

import pytest

from rlhf_jax import config, train
from rlhf_jax.stages import ALGORITHMS

REINFORCE = '''
"""REINFORCE with the batch's mean score as baseline (Williams 1992), one optimizer step a batch."""

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax import advantages as adv
from rlhf_jax import losses
from rlhf_jax.algorithms import microbatch, nonfinite
from rlhf_jax.algorithms.actor_critic import full_sequence, response_hidden, response_logprobs
from rlhf_jax.config import PolicyConfig
from rlhf_jax.stages import Algorithm, register_algorithm


@dataclasses.dataclass(frozen=True)
class ReinforceConfig(PolicyConfig):
    """REINFORCE."""

    kl_coef: float = 0.05
    """KL penalty, reward units per nat."""


def response_logprobs_of(models, network, tokens, mask, t, config):
    hidden = response_hidden(network.model, network.params, tokens, mask, t, config)
    return response_logprobs(network.model, network.params, hidden, tokens[:, -t:], config.temperature)[0]


def make_experience(models, scored, *, config, kl_coef):
    rollout, t = scored.rollout, scored.rollout.response.shape[1]
    tokens, mask = full_sequence(rollout)
    response_mask = adv.response_mask(rollout.lengths, t)
    logprobs, ref_logprobs = (
        response_logprobs_of(models, network, tokens, mask, t, config) for network in (models.policy, models.reference)
    )
    kl = jnp.sum(jnp.where(response_mask, logprobs - ref_logprobs, 0.0), axis=1)
    rewards = scored.scores - kl_coef * kl
    experience = {"tokens": tokens, "mask": mask, "response_mask": response_mask}
    experience["advantages"] = rewards - rewards.mean()
    return experience, {"objective/kl": kl.mean(), "objective/scores": scored.scores.mean()}


def update(models, state, experience, *, config, optimizer, key, causes):
    rows, t = experience["response_mask"].shape
    micros = microbatch.split_micro(experience, config.micro_batch_size)

    def loss_fn(params, micro, index):
        policy = models.with_trained(params).policy
        logprobs = response_logprobs_of(models, policy, micro["tokens"], micro["mask"], t, config)
        logprobs = jnp.sum(jnp.where(micro["response_mask"], logprobs, 0.0), axis=1)
        loss = jnp.sum(losses.reinforce_loss_terms(logprobs, micro["advantages"])) / rows
        return loss, {"loss": loss}

    grads, metrics = microbatch.accumulate_gradients(loss_fn, state.params, micros)
    enabled = nonfinite.updates_enabled(state, causes, config)
    params, opt_state, _, applied = nonfinite.apply_if_finite(
        optimizer, state.params, state.opt_state, grads, step=state.step, loss=metrics["loss"], steps_enabled=enabled
    )
    trained, counts = {"params": params, "opt_state": opt_state}, {"step": 1, "episodes": rows}
    state = nonfinite.finish_update(state, causes | applied["nonfinite/causes"], config, trained=trained, counts=counts)
    return state, {**metrics, **applied}


register_algorithm(Algorithm("reinforce", ReinforceConfig, make_experience, update, progress=("loss", "objective/kl")))


def get_config(variant=None):
    return ReinforceConfig(
        scratch_model="1x32x2",
        tokenizer_name_or_path="synthetic",
        dataset_name="synthetic",
        reward_model_path=None,
        reward_funcs=("rlhf_jax.data.synthetic:gold_reward",),
        query_length=44,
        length_buckets=(44,),
        response_length=4,
        batch_size=64,
        total_episodes=64 * 30,
        learning_rate=1e-2,
        kl_coef=0.0,
        max_eval_samples=64,
        report_to=(),
    )
'''


@pytest.fixture
def registries(monkeypatch):
    """The registries as they are without the test's algorithm, afterwards."""
    monkeypatch.setattr(config.dataclasses, "STAGES", config.dataclasses.STAGES)
    stages, algorithms = dict(config.STAGES), dict(ALGORITHMS)
    yield
    for registry, before in ((config.STAGES, stages), (ALGORITHMS, algorithms)):
        registry.clear()
        registry.update(before)


def test_an_algorithm_of_ones_own_trains_by_the_command(tmp_path, registries):
    assert len([line for line in REINFORCE.splitlines() if line.strip()]) < 90
    (tmp_path / "reinforce.py").write_text(REINFORCE)
    run_dir = tmp_path / "run"
    assert train.main(["--config", str(tmp_path / "reinforce.py"), "--run_dir", str(run_dir)]) == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = [line["objective/scores"] for line in lines]
    assert len(lines) == 30 and sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.2
    assert json.loads((run_dir / "config.json").read_text())["stage"] == "reinforce"
    assert (run_dir / "policy" / "model.safetensors").exists()
