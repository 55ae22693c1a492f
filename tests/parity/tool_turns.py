"""Turns of recorded runs with tools: calls, results, suffixes, masks and rewards are made again from the ids that TRL's
sampler returned in each turn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.config import GRPOConfig
from rlhf_jax.data import PromptData, from_rows, load_tokenizer
from rlhf_jax.data.files import from_list
from rlhf_jax.parallel.sharding import make_mesh
from rlhf_jax.rewards.interface import TrainerState, completion_ids
from rlhf_jax.rewards.python_functions import HostRewards
from rlhf_jax.stages.open_tools import open_tools
from rlhf_jax.stages.turns import Turns
from rlhf_jax.types import PartialResponses, PromptBatch, Rollout
from tests.parity.report import Report, distance

TURNS = "turns.json"


def has_tools(folder: Path) -> bool:
    """Whether a record is of a policy that calls tools."""
    return (folder / TURNS).is_file()


def module_of(folder: Path) -> Any:
    """The record's tools.py, as module `tools`, whose name is in the texts of errors."""
    spec = importlib.util.spec_from_file_location("tools", folder / "tools.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RecordedTurns:
    """The turns of a record.

    Args:
      folder: the record.
      options: of case.json.
      trace: its arrays.
    """

    def __init__(self, folder: Path, options: dict[str, Any], trace: Any):
        self.trace, module = trace, module_of(folder)
        self.generations = json.loads((folder / TURNS).read_text())["generations"]
        self.length = options["max_completion_length"]
        vocabulary = json.loads((folder / "policy" / "config.json").read_text())
        self.tokenizer = load_tokenizer(str(folder / "tokenizer"), vocab_size=vocabulary["vocab_size"])
        config = GRPOConfig(
            run_dir="unused",
            reward_funcs=("exact_match_reward",),
            response_length=self.length,
            max_tool_calling_iterations=options.get("max_tool_calling_iterations"),
            chat_template_kwargs=options.get("chat_template_kwargs"),
            query_length=100_000,
        )
        rows = from_list(json.loads((folder / "prompts.json").read_text()), "prompts.json")

        def opened() -> tuple[Any, PromptData, Turns]:
            tools = open_tools(config, module.TOOLS, module.ENVIRONMENTS)
            prompts = from_rows(PromptData, rows, tools.prompt_config, self.tokenizer)
            mesh, positions = make_mesh(1, 1, 1, devices=jax.devices()[:1]), vocabulary["max_position_embeddings"]
            turns = tools.turns([prompts], self.tokenizer, positions=positions, mesh=mesh)
            assert turns is not None
            return tools, prompts, turns

        tools, self.prompts, self.turns = opened()
        environments = tools.environments
        self.rewards = HostRewards([*module.REWARDS, *([] if environments is None else environments.reward_functions)])
        self.tokens = list(self.prompts.tokens)
        if environments is not None:  # of other instances, as these are reset for responses alone
            every = np.arange(len(self.prompts))
            self.tokens = opened()[2]._begin(self.prompts, every, every.tolist(), len(every))[0].tokens

    def rollout(self, generation: int, report: Report, whole: Rollout) -> tuple[Rollout, dict[str, float]]:
        """A generation batch, compared, and the metrics of tools and of reward functions; `whole`: as recorded."""
        where, recorded = f"generation {generation}", self.generations[generation]
        prompt_ids, mask = (self.trace[f"prompt_{name}_{generation}"] for name in ("ids", "mask"))
        ours = {tokens.tobytes(): row for row, tokens in enumerate(self.tokens)}
        wanted = [ids[keep.astype(bool)].astype(np.int32) for ids, keep in zip(prompt_ids, mask, strict=True)]
        rows = np.array([ours.get(ids.tobytes(), -1) for ids in wanted])
        report.add("tools: prompts", float((rows < 0).sum()), 0.0, where)
        batch = self.prompts.batch_from_rows(rows.astype(np.int32), slice(None))
        sampler = Sampler([row["turns"] for row in recorded["rows"]], self.tokenizer.eos_id, self.length)
        responses = self.turns.respond(
            sampler, lambda batch: batch, self.prompts, batch, rows, real=len(rows), tick=lambda: None, at=""
        )
        rollout, said = responses.rollout, responses.conversations
        assert rollout.sampled is not None
        ids = completion_ids(np.asarray(rollout.response), np.asarray(rollout.lengths))
        theirs, tool_mask = (self.trace[f"{name}_{generation}"] for name in ("completion_ids", "tool_mask"))
        inside = self.trace[f"completion_mask_{generation}"].astype(bool)
        different = sum(own != row[keep].tolist() for own, row, keep in zip(ids, theirs, inside, strict=True))
        report.add("tools: completion ids", float(different), 0.0, where)
        masks = [np.asarray(own)[: len(row)].tolist() for own, row in zip(rollout.sampled, ids, strict=True)]
        recorded_masks = [row[keep].astype(bool).tolist() for row, keep in zip(tool_mask, inside, strict=True)]
        different = sum(own != row for own, row in zip(masks, recorded_masks, strict=True))
        report.add("tools: masks", float(different), 0.0, where)
        messages = [row["completion"] for row in recorded["rows"]]
        different = sum(own != row for own, row in zip(said.messages, messages, strict=True))
        report.add("tools: messages", float(different), 0.0, where)
        prompts, columns = responses.source.texts(responses.rows), {**self.prompts.columns(rows), **said.columns}
        rewards = self.rewards.call(prompts, said.messages, ids, columns, TrainerState())
        numbers = [np.nan_to_num(x, nan=1e6) for x in (rewards.rewards, self.trace[f"rewards_per_func_{generation}"])]
        difference = distance(*numbers)  # NaN: a reward of another environment
        report.add("tools: rewards", difference, 1e-6, where)
        pad = ((0, 0), (0, whole.response.shape[1] - rollout.response.shape[1]))
        rollout = whole.replace(
            response=jnp.pad(rollout.response, pad),
            lengths=rollout.lengths,
            ended=rollout.ended,
            sampled=jnp.pad(rollout.sampled, pad),
            response_mask=jnp.pad(rollout.response_mask, pad),
        )
        return rollout, {**said.metrics, **rewards.metrics}


class Sampler:
    """`Programs.generate` of recorded turns."""

    def __init__(self, recorded: list[list[list[int]]], eos: int, length: int):
        self.recorded, self.eos, self.length = recorded, eos, length
        self.turn = [0] * len(recorded)

    def __call__(self, prompts: PromptBatch, begun: PartialResponses) -> tuple[Rollout, None, PromptBatch]:
        response, lengths, ended = (np.array(x) for x in (begun.response, begun.lengths, begun.ended))
        for row, own in enumerate(self.recorded):
            if ended[row] or lengths[row] == self.length:
                continue
            turn = own[self.turn[row]][: self.length - lengths[row]]
            self.turn[row] += 1
            response[row, lengths[row] : lengths[row] + len(turn)] = turn
            lengths[row] += len(turn)
            ended[row] = turn[-1] == self.eos
        rollout = Rollout(
            prompt_tokens=jnp.asarray(prompts.tokens),
            prompt_lengths=jnp.asarray(prompts.lengths),
            response=jnp.asarray(response),
            lengths=jnp.asarray(lengths),
            ended=jnp.asarray(ended),
            logprobs=begun.logprobs,
            response_mask=jnp.ones(response.shape, bool),
        )
        return rollout, None
