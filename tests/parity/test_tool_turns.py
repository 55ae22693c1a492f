"""Turns beside TRL's own loop: the same scripted samples, in both."""

import asyncio
import json
import threading
import types

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_jax import data
from rlhf_jax.config import GRPOConfig
from rlhf_jax.data.files import from_list
from rlhf_jax.parallel.sharding import make_mesh
from rlhf_jax.rewards.interface import completion_ids
from rlhf_jax.stages.open_tools import open_tools
from tests.helpers.chat_tokenizer import bytes_tokenizer
from tests.helpers.made_data import make_prompts
from tests.helpers.optional import optional
from tests.helpers.tool_tokenizer import add, fail, tell
from tests.parity.tool_turns import Sampler

trl_templates, trl_grpo = optional("trl.chat_template_utils"), optional("trl.trainer.grpo_trainer")
TEMPLATES = {"qwen3": ("qwen3_chat_template", "<|im_end|>"), "llama3": ("llama3_1_chat_template", "<|eot_id|>")}


async def later(word: str) -> str:
    """Says a word, later.

    Args:
        word: The word.
    """
    await asyncio.sleep(0)
    return word.upper()


TOOLS = [add, tell, fail, later]
CALLS = [
    ("add", {"a": 1, "b": 2}),
    ("add", {"a": 1}),
    ("add", [1, 2]),
    ("tell", {"word": "x"}),
    ("tell", {"word": "long " * 12}),
    ("later", {"word": "y"}),
    ("later", {}),
    ("fail", {}),
    ("absent", {"a": 1}),
]


def text_of(family, kinds):
    """A turn: calls by their numbers, or text."""
    if family == "llama3":
        name, arguments = CALLS[kinds[0]] if kinds else ("", {})
        return json.dumps({"name": name, "parameters": arguments}) if kinds else "It is 3."
    calls = [json.dumps({"name": CALLS[k][0], "arguments": CALLS[k][1]}) for k in kinds]
    return "Well. " + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


class Case:
    """A family's tokenizer, tools and prompts."""

    def __init__(self, family):
        name, end = TEMPLATES[family]
        hf = bytes_tokenizer(getattr(trl_templates, name)).hf
        hf.add_special_tokens({"eos_token": end})
        self.family, self.hf, eos = family, hf, hf.convert_tokens_to_ids(end)
        self.tokenizer = data.Tokenizer(hf=hf, name=family, pad_id=2, eos_id=eos, vocab_size=len(hf))
        self.mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])

    def ours(self, plans, length, most, positions):
        config = GRPOConfig(run_dir="unused", response_length=length, max_tool_calling_iterations=most)
        tools = open_tools(config, TOOLS, None)
        rows = [{"prompt": [{"role": "user", "content": f"question {i}"}]} for i in range(len(plans))]
        kwargs = tools.prompt_config.chat_template_kwargs
        prompts = make_prompts(
            from_list(rows, "rows"), self.tokenizer, query_length=100_000, chat_template_kwargs=kwargs
        )
        turns = tools.turns([prompts], self.tokenizer, positions=positions, mesh=self.mesh)
        rows = np.arange(len(plans))
        sampler = Sampler(plans, self.tokenizer.eos_id, length)
        batch = prompts.batch_from_rows(rows, slice(None))
        responses = turns.respond(
            sampler, lambda batch: batch, prompts, batch, rows, real=len(plans), tick=lambda: None, at=""
        )
        turns.close()
        rollout, said = responses.rollout, responses.conversations
        ids = completion_ids(np.asarray(rollout.response), np.asarray(rollout.lengths))
        masks = [np.asarray(x)[: len(own)].astype(int).tolist() for x, own in zip(rollout.sampled, ids, strict=True)]
        calls = round(said.metrics["tools/call_frequency"] * len(plans))
        failures = round(said.metrics["tools/failure_frequency"] * calls)
        return [tokens.tolist() for tokens in prompts.tokens], ids, masks, said.messages, calls, failures

    def trl(self, prompt_ids, plans, length, most, positions):
        """TRL's `_tool_call_loop` on a trainer that samples by the plans."""
        hf = trl_templates.add_response_schema(self.hf)
        preserving = trl_templates.is_chat_template_prefix_preserving(hf)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        turn = [1] * len(plans)

        def sample(ids, *_, **__):
            sampled = []
            for own in ids:
                row = next(i for i, prompt in enumerate(prompt_ids) if own[: len(prompt)] == prompt)
                sampled.append(plans[row][turn[row]][:length])
                turn[row] += 1
            return sampled, None

        async_tools = {tool.__name__: tool for tool in TOOLS if asyncio.iscoroutinefunction(tool)}
        trainer = types.SimpleNamespace(
            max_tool_calling_iterations=10**6 if most is None else most,
            _sync_tool_dicts=[{tool.__name__: tool for tool in TOOLS if tool.__name__ not in async_tools}] * len(plans),
            _async_tool_dicts=[async_tools] * len(plans),
            async_loop=loop,
            max_completion_length=length,
            use_vllm=False,
            model=types.SimpleNamespace(config=types.SimpleNamespace(max_position_embeddings=positions)),
            tools=TOOLS,
            processing_class=hf,
            _tokenizer=hf,
            _is_vlm=False,
            chat_template=None if preserving else trl_templates.get_training_chat_template(hf),
            chat_template_kwargs={},
            _generate_single_turn=sample,
        )
        trainer._get_tool_suffix_ids = lambda messages: trl_grpo.GRPOTrainer._get_tool_suffix_ids(trainer, messages)
        first = [plan[0][:length] for plan in plans]
        completions = [
            [trl_templates.parse_response(hf, ids, prefix=prompt)]
            for ids, prompt in zip(first, prompt_ids, strict=True)
        ]
        prompts = [[{"role": "user", "content": f"question {i}"}] for i in range(len(plans))]
        found = trl_grpo.GRPOTrainer._tool_call_loop(trainer, prompts, prompt_ids, first, completions, None, None, {})
        loop.call_soon_threadsafe(loop.stop)
        masks, completions, ids, _, calls, failures, _ = found
        return ids, masks, completions, calls, failures


@pytest.fixture(scope="module")
def cases():
    return {family: Case(family) for family in TEMPLATES}


@pytest.mark.parametrize("family", TEMPLATES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.lists(st.lists(st.integers(0, len(CALLS) - 1), max_size=3), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    length=st.integers(40, 700),
    most=st.none() | st.integers(1, 3),
    room=st.none() | st.integers(100, 400),
)
def test_turns_are_those_of_trl(cases, family, kinds, length, most, room):
    case = cases[family]
    eos = [case.tokenizer.eos_id]
    # The last turn calls nothing, so that no plan ends before its response.
    plans = [[[*case.tokenizer.encode(text_of(family, turn)), *eos] for turn in [*row, []]] for row in kinds]
    positions = 10**6
    prompt_ids, *_ = case.ours([[eos]] * len(plans), length, most, positions)
    if room is not None:
        positions = max(map(len, prompt_ids)) + room
    prompt_ids, *ours = case.ours(plans, length, most, positions)
    theirs = case.trl(prompt_ids, plans, length, most, positions)
    for name, own, wanted in zip(("ids", "masks", "messages", "calls", "failures"), ours, theirs, strict=True):
        assert own == wanted, name
