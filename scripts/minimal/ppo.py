"""PPO for language models: the whole training loop, from the package's public functions alone.

    python scripts/minimal/ppo.py
    python scripts/minimal/ppo.py --model SFT_FOLDER --reward_model REWARD_FOLDER --output runs/minimal_ppo

Proximal Policy Optimization (Schulman et al. 2017, arXiv 1707.06347) with a reward model, a value model and a KL
penalty to the policy that training starts from, as Stiennon et al. 2020 (arXiv 2009.01325) and Huang et al. 2024 (the
N+ study, arXiv 2403.17031) use it for summaries.

The task is the built-in one: posts to summarise. Without --reward_model the reward is the task's exact one. Without
--model the policy has one layer and random weights; it learns empty responses, which score 0, since wrong words score
less. Prompts, samples and updates are those of `rlhf-jax train` with the same checkpoints, seed and options, and the
metrics have the same names.

Shapes: B responses, C prompt columns, T response columns.
"""

from __future__ import annotations

import argparse
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data, models
from rlhf_jax.algorithms import ppo, reward_model
from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.algorithms.optimizer import Optimizer, make_optimizer
from rlhf_jax.config import PPOConfig
from rlhf_jax.data.synthetic import gold_reward
from rlhf_jax.generate import Sampling, generate
from rlhf_jax.models.io import hf
from rlhf_jax.types import Array, Experience, Metrics, Params, PromptBatch, Rollout, ScoredRollout, TrainState

CONFIG = PPOConfig(
    dataset_name="synthetic",  # built-in posts
    query_length=44,  # C, tokens of a post
    length_buckets=(44,),  # a single padded length
    response_length=8,  # T, tokens of a summary
    temperature=1.0,  # of sampling and log-probabilities
    batch_size=64,  # B, responses of an update
    num_ppo_epochs=4,  # epochs over each batch
    num_mini_batches=2,  # optimizer steps of an epoch
    micro_batch_size=32,  # responses of a forward and backward pass
    learning_rate=3e-3,  # of AdamW, linear decay to 0
    max_grad_norm=1.0,  # gradient clipping
    cliprange=0.2,  # epsilon of the clipped ratio
    cliprange_value=0.2,  # the same for values
    vf_coef=0.1,  # weight of the value loss
    kl_coef=0.05,  # beta of the KL penalty, in the reward of each token
    gamma=1.0,  # discount
    lam=0.95,  # lambda of generalized advantage estimation
    missing_eos_penalty=1.0,  # subtracted from the score of a response that did not end
)
SHOWN = ("objective/scores", "objective/kl", "policy/approxkl_avg", "policy/clipfrac_avg", "loss/value_avg")


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def sample(model: models.Model, params: Params, prompts: PromptBatch, key: Array, sampling: Sampling) -> Rollout:
    """One response y ~ pi(. | x) to each prompt: response [B, T], lengths [B]."""
    return generate(model, params, prompts, key, sampling)


@functools.partial(jax.jit, static_argnames="model")
def score(model: models.Model, params: Params, rollout: Rollout) -> Array:
    """r(x, y) of the reward model, its scalar head at the last token of each response: [B]."""
    return reward_model.score_rollout(model, params, rollout, dtype=jnp.float32)


@jax.jit
def make_experience(networks: Models, trained: Params, scored: ScoredRollout) -> tuple[Experience, Metrics]:
    """Log-probabilities and values of the responses; the reward of each token, r(x, y) at the end and
    -beta (log pi - log pi_ref) everywhere; advantages and returns by GAE."""
    return ppo.make_experience(networks.with_trained(trained), scored, config=CONFIG, kl_coef=CONFIG.kl_coef)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def update(
    networks: Models, state: TrainState, experience: Experience, key: Array, optimizer: Optimizer
) -> tuple[TrainState, Metrics]:
    """num_ppo_epochs * num_mini_batches steps on the clipped policy loss + vf_coef * the clipped value loss; metrics
    are means over the steps."""
    return ppo.update(networks, state, experience, config=CONFIG, optimizer=optimizer, key=key)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Trains by command-line arguments. Returns the metrics of each update."""
    parser = argparse.ArgumentParser(description="PPO: the whole training loop.")
    parser.add_argument("--model", help="folder of the policy to start from; default: random weights")
    parser.add_argument("--reward_model", help="folder of the reward model; default: the task's exact reward")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", help="folder for policy/ and value/; default: they are not saved")
    args = parser.parse_args(argv)

    # Policy, reference (its frozen copy), reward model and value model. The value model starts from the reward model,
    # or else from the policy with a head of zeros. Each has buffers of its own: updates overwrite the trained ones.
    if args.model:
        model, policy = hf.load(args.model, kind="causal")
        tokenizer = data.load_tokenizer(args.model, vocab_size=model.config.vocab_size)
    else:
        tokenizer = data.load_tokenizer("synthetic")
        model = models.custom_shape("1x32x2", tokenizer.vocab_size, max_positions=64)
        policy = model.init(jax.random.key(args.seed), heads=("causal",))
    if args.reward_model:
        value_model, reward_params = hf.load(args.reward_model, kind="scalar")
        value = reward_params
    else:
        head = {"kernel": jnp.zeros((model.config.hidden_size, 1))}
        value_model, value = model, {"backbone": policy["backbone"], "score": head}
    trained, reference = jax.tree.map(jnp.array, ({"policy": policy, "value": value}, policy))
    networks = Models(policy=Network(model), reference=Network(model, reference), value=Network(value_model))

    optimizer = make_optimizer(CONFIG, args.updates, CONFIG.num_ppo_epochs * CONFIG.num_mini_batches)
    state = TrainState(
        params=trained,
        opt_state=optimizer.init(trained),
        step=jnp.int32(0),
        episodes=jnp.int32(0),
        seed=jnp.uint32(args.seed),
        kl_coef=jnp.float32(CONFIG.kl_coef),
        tokens=jnp.uint32(0),
    )
    prompt_data = data.load(data.PromptData, CONFIG, tokenizer)
    sampling = Sampling(
        max_new_tokens=CONFIG.response_length,
        temperature=CONFIG.temperature,
        stop_ids=tokenizer.eos_ids,
        fill_id=tokenizer.eos_id,
        suppress_ids=model.suppress_ids,
    )

    history = []
    for step in range(args.updates):
        key = jax.random.fold_in(jax.random.key(args.seed), step)
        prompts = prompt_data.batch(args.seed, step, CONFIG.batch_size)
        rollout = sample(model, state.params["policy"], prompts, jax.random.fold_in(key, 0), sampling)
        if args.reward_model:
            scores = score(value_model, reward_params, rollout)
        else:
            responses = [row[:length] for row, length in zip(*jax.device_get((rollout.response, rollout.lengths)))]
            texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
            scores = np.asarray(gold_reward(prompt_data.texts(prompts.rows), texts), np.float32)
        scored = ScoredRollout(rollout, scores, eos_ids=tokenizer.eos_ids)
        experience, rollout_metrics = make_experience(networks, state.params, scored)
        state, update_metrics = update(networks, state, experience, jax.random.fold_in(key, 1), optimizer)
        history.append({name: float(x) for name, x in {**rollout_metrics, **update_metrics}.items()})
        print(f"update {step + 1}/{args.updates}", *(f"{name} {history[-1][name]:.4g}" for name in SHOWN), flush=True)

    if args.output:
        ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        for role, role_model, kind in (("policy", model, "causal"), ("value", value_model, "scalar")):
            folder = os.path.join(args.output, role)
            hf.save(folder, role_model, state.params[role], kind=kind, extra_config=ids)
            data.save_tokenizer(tokenizer, folder)
    return history


if __name__ == "__main__":
    main()
