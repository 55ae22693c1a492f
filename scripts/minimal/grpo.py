"""GRPO for language models: the whole training loop, from the package's public functions alone.

    python scripts/minimal/grpo.py
    python scripts/minimal/grpo.py --model SFT_FOLDER --updates 100 --output runs/minimal_grpo

Group Relative Policy Optimization (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300): there is no value model. The
advantage of a response is its reward minus the mean of its group, the responses to the same prompt, divided by their
standard deviation. The KL to the policy that training starts from is a term of the loss.

The task is the built-in one: posts to summarise, with a reward function of texts. Without --model the policy has one
layer and random weights; it learns empty responses, which score 0, since wrong words score less. Prompts, samples and
updates are those of `rlhf-jax train` with the same checkpoint, seed and options, and the metrics have the same names.

Shapes: G responses to each of P prompts, B = P * G responses, T response columns; rows of a group are adjacent.
"""

from __future__ import annotations

import argparse
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import data, models
from rlhf_jax.algorithms import grpo
from rlhf_jax.algorithms.networks import Models, Network
from rlhf_jax.algorithms.optimizer import Optimizer, make_optimizer
from rlhf_jax.config import GRPOConfig
from rlhf_jax.data.synthetic import gold_reward
from rlhf_jax.generate import Sampling, generate
from rlhf_jax.models.io import hf
from rlhf_jax.types import Array, Experience, Metrics, Params, PromptBatch, Rollout, ScoredRollout, TrainState

CONFIG = GRPOConfig(
    dataset_name="synthetic",  # built-in posts
    query_length=44,  # tokens of a post
    length_buckets=(44,),  # a single padded length
    response_length=8,  # T, tokens of a summary
    temperature=1.0,  # of sampling and log-probabilities
    batch_size=64,  # B, responses of an update
    num_generations=8,  # G, responses to a prompt
    num_iterations=2,  # mu, epochs over each batch
    num_mini_batches=2,  # optimizer steps of an epoch
    micro_batch_size=32,  # responses of a forward and backward pass
    learning_rate=3e-3,  # of AdamW, linear decay to 0
    max_grad_norm=1.0,  # gradient clipping
    loss_type="grpo",  # mean over responses of the mean over their tokens
    scale_rewards="group",  # divide by the standard deviation of the group
    epsilon=0.2,  # of the clipped ratio
    beta=0.04,  # weight of the KL in the loss
    use_bias_correction_kl=False,  # the paper's estimator of the KL
)
SHOWN = ("reward", "reward_std", "frac_reward_zero_std", "kl", "policy/approxkl_avg", "entropy")


@functools.partial(jax.jit, static_argnames=("model", "sampling"))
def sample(model: models.Model, params: Params, prompts: PromptBatch, key: Array, sampling: Sampling) -> Rollout:
    """G responses y ~ pi(. | x) to each prompt: response [B, T], lengths [B]."""
    return generate(model, params, prompts, key, sampling, group=CONFIG.num_generations)


@jax.jit
def make_experience(networks: Models, trained: Params, scored: ScoredRollout) -> tuple[Experience, Metrics]:
    """Log-probabilities of policy and reference; the advantage of each response, (r - mean) / std of its group."""
    return grpo.make_experience(networks.with_trained(trained), scored, config=CONFIG)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def update(
    networks: Models, state: TrainState, experience: Experience, key: Array, optimizer: Optimizer
) -> tuple[TrainState, Metrics]:
    """num_iterations * num_mini_batches steps on the clipped policy loss + beta * KL; metrics are means over the
    steps."""
    return grpo.update(networks, state, experience, config=CONFIG, optimizer=optimizer, key=key)


def main(argv: list[str] | None = None) -> list[dict[str, float]]:
    """Trains by command-line arguments. Returns the metrics of each update."""
    parser = argparse.ArgumentParser(description="GRPO: the whole training loop.")
    parser.add_argument("--model", help="folder of the policy to start from; default: random weights")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", help="folder for policy/; default: it is not saved")
    args = parser.parse_args(argv)

    # The policy and its frozen copy, the reference, which has buffers of its own, since updates overwrite the policy's.
    if args.model:
        model, policy = hf.load(args.model, kind="causal")
        tokenizer = data.load_tokenizer(args.model, vocab_size=model.config.vocab_size)
    else:
        tokenizer = data.load_tokenizer("synthetic")
        model = models.custom_shape("1x32x2", tokenizer.vocab_size, max_positions=64)
        policy = model.init(jax.random.key(args.seed), heads=("causal",))
    trained, reference = jax.tree.map(jnp.array, ({"policy": policy}, policy))
    networks = Models(policy=Network(model), reference=Network(model, reference))

    optimizer = make_optimizer(CONFIG, args.updates, CONFIG.num_iterations * CONFIG.num_mini_batches)
    state = TrainState(
        params=trained,
        opt_state=optimizer.init(trained),
        step=jnp.int32(0),
        episodes=jnp.int32(0),
        seed=jnp.uint32(args.seed),
        kl_coef=jnp.float32(0.0),
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
        prompts = prompt_data.batch(args.seed, step, CONFIG.batch_size // CONFIG.num_generations)
        rollout = sample(model, state.params["policy"], prompts, jax.random.fold_in(key, 0), sampling)
        posts = prompt_data.texts(np.repeat(prompts.rows, CONFIG.num_generations))
        responses = [row[:length] for row, length in zip(*jax.device_get((rollout.response, rollout.lengths)))]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
        scores = np.asarray(gold_reward(posts, texts), np.float32)
        scored = ScoredRollout(rollout, scores, eos_ids=tokenizer.eos_ids, group_size=CONFIG.num_generations)
        experience, rollout_metrics = make_experience(networks, state.params, scored)
        state, update_metrics = update(networks, state, experience, jax.random.fold_in(key, 1), optimizer)
        history.append({name: float(x) for name, x in {**rollout_metrics, **update_metrics}.items()})
        print(f"update {step + 1}/{args.updates}", *(f"{name} {history[-1][name]:.4g}" for name in SHOWN), flush=True)

    if args.output:
        folder = os.path.join(args.output, "policy")
        ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
        hf.save(folder, model, state.params["policy"], kind="causal", extra_config=ids)
        data.save_tokenizer(tokenizer, folder)
    return history


if __name__ == "__main__":
    main()
