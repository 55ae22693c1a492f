"""Answers of policies that call tools."""

import json

import jax
import pytest

from rlhf_jax import models
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate.options import EvaluateConfig
from rlhf_jax.evaluate.run import run
from rlhf_jax.models.io import hf
from tests.helpers import tool_tokenizer as tt

ROWS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy of random weights that calls tools, and prompts with reference answers."""
    folder = tmp_path_factory.mktemp("tools")
    tt.save(folder, ROWS)
    rows = [{**row, "completion": [{"role": "assistant", "content": "x"}]} for row in tt.prompts(ROWS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = models.custom_shape("1x16x2", vocab_size=len(tt.VOCABULARY), max_positions=96)
    params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0), heads=("causal",)))
    hf.save(folder / "policy", model, jax.device_get(params), kind="causal")
    return folder


def evaluated(folder, output, **more):
    """(evaluation.json, rows of samples.jsonl, what was printed)"""
    options = {"model": str(folder / "policy"), "data": str(folder / "prompts.jsonl"), "split": "train"}
    options |= {"tokenizer_name_or_path": str(folder / "tokenizer"), "stop_token_ids": tt.SHORT_TURNS}
    options |= {"response_length": 24, "query_length": 24, "bootstrap_resamples": 100, "num_generations": 2}
    printed = []
    run(EvaluateConfig(output_dir=str(output), **{**options, **more}), printed.append)
    rows = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return json.loads((output / "evaluation.json").read_text()), rows, "\n".join(printed)


ENVIRONMENT = {"environment_factory": ("tests.helpers.tool_tokenizer:Counter",)}


def test_every_answers_environment_gives_its_reward_after_all_answers(folder, tmp_path):
    """An instance counts the calls of its own answer that succeed; it may not be reset by the next batch's."""
    found, rows, printed = evaluated(folder, tmp_path / "whole", **ENVIRONMENT)
    policy, reference = found["policies"]
    calls = policy["tools/call_frequency"] * policy["responses"]
    succeeded = calls * (1 - policy["tools/failure_frequency"])
    rewards = [answer["rewards"]["Counter"] for row in rows for answer in row["answers"]["policy"]]
    assert len(rewards) == 2 * ROWS and sum(rewards) == pytest.approx(succeeded) and succeeded > 4
    assert "calls" in printed and f"{policy['tools/call_frequency']:.2f}" in printed
    assert "score" not in reference and "reference: answers that had no environment have no rewards" in printed
    in_batches, rows_in_batches, _ = evaluated(folder, tmp_path / "batches", batch_size=4, **ENVIRONMENT)
    assert in_batches["policies"] == found["policies"] and rows_in_batches == rows


def test_answers_with_functions_have_their_results(folder, tmp_path):
    tools = tuple(f"tests.helpers.tool_tokenizer:{tool.__name__}" for tool in tt.TOOLS)
    more = {"tools": tools, "against": ()}
    found, rows, _ = evaluated(folder, tmp_path / "tools", **more, max_tool_calling_iterations=1)
    assert found["sampling"]["tools"] == list(tools) and found["policies"][0]["tools/call_frequency"] > 0
    plain, _, _ = evaluated(folder, tmp_path / "plain", against=())
    assert "tools/call_frequency" not in plain["policies"][0]
    texts = [answer["text"] for row in rows for answer in row["answers"]["policy"]]
    assert any("</tool_call><tool>" in text for text in texts)


def test_tools_need_conversations(folder, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="tools need conversations as prompts"):
        evaluated(folder, tmp_path / "out", data=str(tmp_path / "texts.jsonl"), **ENVIRONMENT)
