"""What TRL's PPO and its RLOO before 0.22 share: the module functions whose inputs and outputs a replay needs.

trace.npz, for update U: query_responses_U [B, C + T], context_length_U, gen_logits_U [B, T, V] (divided by the
temperature); in the order of the calls: get_reward_N [B] (PPO: value model, then reward model), permutation_N [B],
whiten_in_N, whiten_mask_N, whiten_out_N [B, T] (PPO).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import numpy as np
import torch

from tests.parity.recording.tiny import Setting, crafted_responses


@contextlib.contextmanager
def listening(module: ModuleType, trace: dict[str, np.ndarray], setting: Setting, batch: int, stops: bool) -> Iterator:
    """Wraps the functions of `module`, TRL's trainer, while the context lasts.

    Args:
      module: has batch_generation, get_reward, forward, and masked_whiten if it is PPO's.
      trace: gets the arrays.
      setting: crafted responses take the place of sampled ones if it says so.
      batch: rows of a shuffle.
      stops: sampling ends a row at eos, and fills it.
    """
    counts = {"update": 0, "reward": 0, "shuffle": 0, "whiten": 0}
    rng = np.random.default_rng(setting.seed + 1)

    def tick(name: str) -> int:
        counts[name] += 1
        return counts[name] - 1

    generation, get_reward, permutation = module.batch_generation, module.get_reward, np.random.permutation
    whiten = getattr(module, "masked_whiten", None)

    def crafted_generation(model, queries, chunk, pad, config):
        after = "junk" if not stops else "eos" if setting.eos_fill else "pad"
        ids = crafted_responses(rng, queries.shape[0], config.max_new_tokens, setting, after)
        sequences = torch.cat((queries, torch.from_numpy(ids)), dim=1)
        with torch.no_grad():
            logits = module.forward(model, sequences, pad).logits[:, queries.shape[1] - 1 : -1]
        return sequences, logits / config.temperature

    def recorded_generation(model, queries, *rest):
        make = crafted_generation if setting.crafted else generation
        sequences, logits = make(model, queries, *rest)
        update = tick("update")
        trace[f"query_responses_{update}"] = sequences.numpy()
        trace[f"context_length_{update}"] = np.asarray(queries.shape[1])
        trace[f"gen_logits_{update}"] = logits.float().numpy()
        return sequences, logits

    def recorded_reward(*rest):
        out = get_reward(*rest)
        trace[f"get_reward_{tick('reward')}"] = out[1].detach().numpy().copy()
        return out

    def recorded_permutation(n):
        order = permutation(n)
        if n == batch:
            trace[f"permutation_{tick('shuffle')}"] = order
        return order

    def recorded_whiten(values, mask, shift_mean=True):
        out = whiten(values, mask, shift_mean)
        call = tick("whiten")
        for name, x in (("in", values), ("mask", mask), ("out", out)):
            trace[f"whiten_{name}_{call}"] = x.numpy().copy()
        return out

    with contextlib.ExitStack() as stack:
        put = [(module, "batch_generation", recorded_generation), (module, "get_reward", recorded_reward)]
        put += [(np.random, "permutation", recorded_permutation)]
        put += [] if whiten is None else [(module, "masked_whiten", recorded_whiten)]
        for where, name, function in put:
            stack.enter_context(mock.patch.object(where, name, function))
        yield


def keep_log(trainer, logged: list[dict[str, float]]) -> None:
    """The trainer's log goes to `logged`, and nowhere else."""

    def log(logs, start_time=None):
        logged.append({name: float(x) for name, x in logs.items() if name != "epoch"})

    trainer.log = log
