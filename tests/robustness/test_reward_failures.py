"""Rewards that fail in a run: what it says, what it keeps, how it continues; and rows without a score."""

import functools
import os
import re
import threading

import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.rewards.interface import RewardFailure
from tests.helpers import reward_runs
from tests.helpers.reward_runs import B, Watch, bytes_of, judge, leave_one_out, ppo, rloo, table
from tests.helpers.reward_server import Server, answers, closes, hangs, takes
from tests.helpers.runs import lines

# --- servers that fail

QUICK = {"reward_server_batch_size": 4, "reward_server_retries": 1, "reward_server_timeout": 5.0}


@pytest.fixture(scope="module")
def unfailing(tmp_path_factory):
    """The run of a config's function with a server that never failed."""
    server, folder = Server(), tmp_path_factory.mktemp("unfailing")

    @functools.cache
    def run(config):
        return rlhf_jax.run(config(folder / config.__name__, reward_server=server.url, **QUICK))

    yield run
    server.close()


NOT_A_NUMBER = b'{"scores": [1.0, NaN, 2.0, 3.0]}'
FAULTS = {
    "500": (lambda _: answers(500, {"error": "no memory"}), r"status 500 .*no memory.*; tried 2 times\. Row [04]: "),
    "429": (lambda _: answers(429, {}, Retry_After="0.05"), r"status 429 .*; tried 2 times\. Row [04]: prompt"),
    "hangs": (hangs, r"no complete response within 1 s; tried 2 times\. Row [04]: prompt"),
    "closes": (lambda _: closes, r"no response \(.*; tried 2 times\. Row [04]: prompt"),
    "wrong count": (lambda _: answers(200, {"scores": [1.0]}), r"1 scores for 4 rows: .* Row [04]: prompt"),
    "NaN": (lambda _: answers(200, NOT_A_NUMBER), r"a score of nan; .* Row [15]: prompt '.*', completion '"),
    "text": (lambda _: answers(200, {"scores": ["good"] * 4}), r"a score of 'good'; .* Row [04]: prompt"),
}


def options_of(fault, server):
    return {**QUICK, "reward_server": server.url, "reward_server_timeout": 1.0 if fault == "hangs" else 5.0}


def assert_first_update_is_kept(folder, whole):
    assert bytes_of(folder).splitlines() == bytes_of(whole.run_dir).splitlines()[:1]
    assert os.listdir(folder / "checkpoints") == ["1"]
    assert sorted(os.listdir(folder / "completions")) == ["training_1.jsonl", "training_1.tokens.jsonl"]
    assert not os.path.exists(folder / "policy") and not os.path.exists(folder / "finished.json")


def assert_same_run(result, whole):
    assert bytes_of(result.run_dir) == bytes_of(whole.run_dir)
    assert bytes_of(result.paths["policy"], "model.safetensors") == bytes_of(whole.paths["policy"], "model.safetensors")


@pytest.mark.parametrize("algo", [rloo, pytest.param(ppo, marks=pytest.mark.runs)])
def test_a_run_continues_with_a_healed_server(algo, server, unfailing, tmp_path, capsys):
    whole = unfailing(algo)
    config = algo(tmp_path / "run", **options_of("500", server))
    server.script.extend([takes(0)] * 2)  # an update asks twice
    trouble, said = FAULTS["500"]
    server.forever = trouble(server)
    with pytest.raises(RewardFailure, match=f"^reward server {re.escape(server.url)}: .*{said}"):
        rlhf_jax.run(config)
    assert len(server.requests) <= 2 + 2 * 2
    assert_first_update_is_kept(tmp_path / "run", whole)
    server.forever = None
    assert_same_run(rlhf_jax.run(config), whole)
    assert "resuming after update 1 of 3" in capsys.readouterr().out


@pytest.mark.parametrize("failure", ["raise", "drop"])
def test_what_heals_within_the_retries_changes_nothing(failure, server, unfailing, tmp_path):
    config = rloo(tmp_path / "run", reward_failure=failure, **options_of("500", server))
    server.script.extend([answers(500, "busy"), takes(0), takes(0), answers(429, {}, Retry_After="0.1"), closes])
    result = rlhf_jax.run(config)
    assert len(server.requests) == 6 + 3
    if failure == "raise":
        assert_same_run(result, unfailing(rloo))
    else:
        plain = [{**line, "rewards/dropped": 0.0} for line in lines(unfailing(rloo).run_dir)]
        assert lines(result.run_dir) == plain


PLANS = [(None, "500", "429"), ("hangs", "closes", "wrong count"), ("NaN", "text", None)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: ", ".join(fault or "fine" for fault in plan))
def test_dropped_rows_are_counted_and_teach_nothing_and_the_run_goes_on(plan, server, tmp_path):
    options = {**options_of(plan[0], server), "reward_failure": "drop"}

    def prepare(step):
        server.forever = FAULTS[plan[step]][0](server) if plan[step] else None

    watch = Watch(prepare)
    with pytest.warns(UserWarning) as warned:
        result = rlhf_jax.run(rloo(tmp_path / "run", **options), callbacks=[watch])
    found = lines(result.run_dir)
    assert [line["rewards/dropped"] for line in found] == [B if fault else 0 for fault in plan]
    assert watch.moved == [fault is None for fault in plan]
    assert [line["episode"] for line in found] == [B, 2 * B, 3 * B]
    said = [str(warning.message) for warning in warned]
    told = [text for text in said if text.startswith(f"reward server {server.url}: ")]
    for text, fault in zip(told, filter(None, plan), strict=True):
        assert re.search(FAULTS[fault][1], text) and text.endswith("; its rows are dropped")
    nothing = [text for text in said if text.endswith("no response has a score; nothing is learned from it")]
    assert [text.partition(":")[0] for text in nothing] == [f"update {i}" for i, f in enumerate(plan, 1) if f]


# --- functions that fail


def troubled(trouble):
    """`judge`, but for update 2."""

    def judge(prompts, completions, trainer_state, **_):
        found = reward_runs.judge(prompts, completions)
        return trouble(found) if trainer_state.global_step == 1 else found

    return judge


def test_a_failing_function_is_named_and_what_was_done_is_kept(golden_rloo, tmp_path):
    free = threading.Event()
    troubles = {
        rf"raised KeyError: 'key' \({re.escape(__file__)}, line \d+\)": lambda found: {}["key"],
        r"returned nan for row 3\. .* Row 3: prompt '.*', completion '": (
            lambda found: [*found[:3], float("nan"), *found[4:]]
        ),
        r"did not return within 1 s\. Row 0: prompt '.*', completion '": lambda found: free.wait(60),
    }
    config = rloo(tmp_path / "run", reward_timeout=1.0)
    for said, trouble in troubles.items():  # the second and the third as the run is continued
        with pytest.raises(RewardFailure, match=f"^reward function judge {said}"):
            rlhf_jax.run(config, reward_funcs=troubled(trouble))
        assert_first_update_is_kept(tmp_path / "run", golden_rloo)
    free.set()
    assert_same_run(rlhf_jax.run(config, reward_funcs=judge), golden_rloo)


# --- rows without a score


def test_rows_that_no_function_scores_are_shown_and_left_out(tmp_path):
    def picky(prompts, completions, trainer_state, **_):
        found = judge(prompts, completions)
        return {0: found, 1: [None, *found[1:]], 2: [None] * B}[trainer_state.global_step]

    watch = Watch()
    with pytest.warns(UserWarning) as warned:
        result = rlhf_jax.run(rloo(tmp_path / "run"), reward_funcs=picky, callbacks=[watch])
    rows, found = table(result.run_dir, 2), lines(result.run_dir)
    said = [str(warning.message) for warning in warned if "None" in str(warning.message)]
    assert [text.partition(",")[0] for text in said] == [
        f"every reward function returned None for {count} of {B} rows" for count in (1, B)
    ]
    first = f"Row 0: prompt {rows['prompt'][0]!r}, completion {rows['completion'][0]!r}"
    assert first in said[0]
    assert np.isnan(rows["picky"]).tolist() == [True] + [False] * (B - 1)
    np.testing.assert_allclose(rows["advantage"], leave_one_out(rows["picky"]), rtol=1e-4, atol=1e-6)
    assert rows["advantage"][0] == 0 and np.abs(rows["advantage"][1:]).max() > 0
    wanted = np.nanmean(judge(rows["prompt"], rows["completion"])[1:])
    np.testing.assert_allclose([found[1]["rewards/picky/mean"], found[1]["reward"]], wanted, rtol=1e-5)
    assert np.isnan(found[2]["rewards/picky/mean"]) and watch.moved == [True, True, False]
