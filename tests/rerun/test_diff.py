"""Two runs: where they part is named, by option, data, update, row and tensor."""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import pytest

from rlhf_jax import train
from rlhf_jax.errors import UserError
from rlhf_jax.rerun import diff
from tests.helpers import rerun_cases as cases


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return cases.run(tmp_path_factory.mktemp("first"))


def lines(a, b, **options):
    """(whether two runs are equal, what is said)"""
    said = []
    equal = diff.diff(str(a), str(b), log=said.append, **options)
    return equal, "\n".join(said)


def copy(run, folder):
    shutil.copytree(run, folder / "run")
    return folder / "run"


def test_equal_runs_are_said_to_be_equal_with_what_was_compared(first, tmp_path):
    equal, said = lines(first, cases.run(tmp_path))
    assert (
        equal
        and "option" not in said
        and said.endswith(
            "equal bit by bit: metrics of 7 updates; rows, tokens and rewards of 7 updates; checkpoints 6, 7"
        )
    )


def test_another_seed_is_another_first_row(first, tmp_path):
    equal, said = lines(first, cases.run(tmp_path, seed=5), recompute=False)
    assert not equal and "option: seed: 42 -> 5" in said
    assert "updates: 1 differs" in said and "update 1: rows of the data of" in said


def test_another_order_of_batches_is_other_rows_and_no_other_option(first, tmp_path):
    equal, said = lines(first, cases.run(tmp_path, shuffle_dataset=False), recompute=False)
    assert not equal and "option: shuffle_dataset: true -> false" in said
    assert "update 1: rows of the data of" in said and "option: seed" not in said


def test_a_changed_row_of_data_is_found_in_the_update_that_reads_it_first(first, tmp_path):
    run = cases.run(tmp_path, changed_row=11)
    rows = [json.loads(line)["rows"] for line in (pathlib.Path(run) / "rows.jsonl").read_text().splitlines()]
    update = 1 + next(number for number, some in enumerate(rows) if 11 in some)
    place = rows[update - 1].index(11)
    equal, said = lines(first, run)
    assert not equal and "data and models: training data" in said
    assert f"row {place} of the batch (row 11 of the data)" in said
    assert f"first difference: prompt tokens, row {place}" in said, said
    assert f"update {update} differs" in said or f"updates: {update} differs" in said


def test_a_changed_reward_is_found_in_the_rewards_of_the_first_update(first, tmp_path):
    equal, said = lines(first, cases.run(tmp_path, reward=" + 1.0"))
    assert not equal and "tokens of" not in said.partition("recomputing")[0]
    assert "update 1: rewards wordiness of 8 of 8 rows differ, first of row 0 of the batch" in said
    assert "first difference: rewards, row 0" in said


def test_a_learning_rate_that_a_resume_changed_is_found_in_its_update(first, tmp_path):
    folder = tmp_path / "other"
    run = copy(first, folder)
    cases.prepare(folder)
    for step in ("7",):
        shutil.rmtree(run / "checkpoints" / step)
    (run / "finished.json").unlink()
    config = dataclasses.replace(cases.config(folder), learning_rate=1e-2, override_resume=True)
    train.run(config)
    equal, said = lines(first, run)
    assert not equal and "option: learning_rate: 0.001 -> 0.01" in said
    assert "updates: equal up to 6, update 7 differs" in said
    assert "recomputing update 7 of the second run from checkpoint 6" in said
    assert "first difference: params after the update" in said


def test_another_micro_batch_size_is_told_as_rounding(first, tmp_path):
    equal, said = lines(first, cases.run(tmp_path, micro_batch_size=2))
    assert not equal and "option: micro_batch_size" in said
    assert "first difference" in said and "the runs part by rounding" in said


def test_a_flipped_bit_of_a_checkpoint_is_found(first, tmp_path):
    run = copy(first, tmp_path)
    data = max((run / "checkpoints" / "6").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    equal, said = lines(first, run)
    assert not equal and f"checkpoint {run}/checkpoints/6 is damaged" in said


def test_another_version_of_jax_is_named(first, tmp_path):
    run = copy(first, tmp_path)
    inputs = json.loads((run / "inputs.json").read_text())
    inputs["environments"][-1]["jax"] = "0.9.0"
    (run / "inputs.json").write_text(json.dumps(inputs))
    equal, said = lines(first, run, recompute=False)
    assert equal and 'environment: environment.jax: "' in said and '-> "0.9.0"' in said


def test_folders_without_a_run_and_one_folder_alone_are_refused(first, tmp_path, capsys):
    with pytest.raises(UserError, match="holds no run"):
        diff.diff(str(tmp_path), str(first))
    assert diff.main([str(first)]) == 2 and "needs the folders of two runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "a, b, said",
    [
        (np.float32([1, 2]), np.float32([1, 2]), None),
        (np.float32([1, np.nan]), np.float32([1, np.nan]), None),
        (np.float32([1, 2]), np.float32([1, 3]), "x, [1]: 2 | 3; 1 of 2 differ"),
        (np.float32([1, 2]), np.float32([1]), "x: shapes [2] and [1]"),
        (None, np.float32([1]), "x: in the second run only"),
    ],
)
def test_two_arrays_are_told_apart(a, b, said):
    assert diff.describe("x", a, b) == said
