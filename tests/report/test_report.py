"""A report is made of what the folders have, of runs that go on too, and shows any text as text; without a browser."""

import array
import base64
import hashlib
import html.parser
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from rlhf_jax import report
from rlhf_jax.config import PPOConfig, RLOOConfig
from rlhf_jax.errors import UserError
from rlhf_jax.report import __main__ as command
from rlhf_jax.report import charts, html_parts, page, read_run, samples, series, table_data
from rlhf_jax.stages import ALGORITHMS
from tests.helpers import report_runs
from tests.helpers.paths import ROOT

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Elements(html.parser.HTMLParser):
    """Checks that every element is closed by its own end; collects elements and texts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, tag, attributes):
        assert len({name for name, _ in attributes}) == len(attributes), (tag, attributes)
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts.append((self.stack[-1] if self.stack else "", data))

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def data(self):
        """What the page's script reads."""
        (text,) = [data for tag, data in self.texts if tag == "script" and data.startswith('{"tabs"')]
        return {tab["tab"]: tab for tab in json.loads(text)["tabs"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two seeds of a PPO run, the same with another kl_coef that still goes on, RLOO, a reward model, SFT."""
    top = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        run = top / f"seed{seed}" / "ppo"
        sft = str(top / f"seed{seed}" / "sft" / "policy")
        report_runs.make(run, PPOConfig(sft_model_path=sft), seed=seed, recipe="tldr_ppo.py")
    report_runs.make(top / "more_kl" / "ppo", PPOConfig(kl_coef=0.2), updates=25, total=40, seed=1, finished=False)
    report_runs.make_rloo(top / "rloo")
    report_runs.make_reward(top / "reward")
    report_runs.make_sft(top / "sft")
    return top


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    """The page of all of them, parsed."""
    path = tmp_path_factory.mktemp("page") / "all.html"
    assert report.write([str(folder)], str(path), png=False) == [str(path)]
    return Elements(path.read_text(encoding="utf-8"))


# --- what is read


def test_metrics_are_read_as_they_were_written(folder):
    run = read_run.read(str(folder / "seed1" / "ppo"), "one")
    lines = report_runs.read_lines(folder / "seed1" / "ppo" / "metrics.jsonl")
    assert (run.stage, run.updates, run.notes) == ("ppo", 40, [])
    for name in ("objective/scores", "eval/scores"):
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        assert list(zip(*run.series[name], strict=True)) == wanted and wanted
    assert "memory/peak_rss_mib" in run.series  # of timings.jsonl


def test_a_run_that_is_being_written_or_damaged_is_read_as_far_as_it_can_be(tmp_path):
    run = report_runs.make_sft(tmp_path / "sft")
    with open(run.metrics, "rb") as file:
        torn = file.read()
    found = read_run.read(run.path, "sft")
    assert found.updates == 20 and found.notes == [] and found.finished is None
    assert open(run.metrics, "rb").read() == torn  # nothing is touched
    with open(run.metrics, "a") as file:
        file.write('ss": 3}\n[1]\n\x00\n{"step": "x"}\n{"step": 22, "loss": "NaN", "odd": [1], "nan": "nan"}\n')
        file.write('{"step": 22, "eval/loss": "Infinity"}\n{"step": 3, "loss": 9}\n{"step": 23, "loss": ' + "9" * 5000)
    found = read_run.read(run.path, "sft")
    assert found.updates == 22 and math.isnan(found.series["loss"][1][-1])
    assert found.series["eval/loss"] == (array.array("d", [22]), array.array("d", [math.inf]))
    assert len(found.series["loss"][0]) == 22  # 20, the torn line that was ended, and the last
    assert "4 values or lines" in found.notes[0] and "'nan', 'odd' are no number" in found.notes[1]
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"stage": "ppo"}')
    _, groups = report.read([str(bare)])
    Elements(page.render_page(groups, "bare"))
    assert groups[0].runs[0].notes == ["metrics.jsonl has no update yet"]


def test_folders_are_found_in_those_that_are_given_and_models_are_none(folder, tmp_path):
    (folder / "rloo" / "policy").mkdir(exist_ok=True)
    (folder / "rloo" / "policy" / "config.json").write_text('{"model_type": "gpt_neox"}')
    found = read_run.find_run_folders([str(folder), str(folder / "rloo")])
    assert [os.path.relpath(path, folder) for path in found] == [
        "sft", "reward", "rloo", "more_kl/ppo", "seed1/ppo", "seed2/ppo"
    ]  # fmt: skip
    assert read_run.short_names(found)[3:] == ["more_kl/ppo", "seed1/ppo", "seed2/ppo"]
    for path, words in ((tmp_path / "none", "no such folder"), (tmp_path, "holds no run")):
        with pytest.raises(UserError, match=words):
            report.read([str(path)])


def test_a_run_is_finished_running_or_stopped(folder):
    ended, going = (read_run.read(str(folder / name / "ppo"), name) for name in ("seed1", "more_kl"))
    assert table_data.status(ended)["state"] == "finished"
    seen = table_data.status(going)["seen"]
    assert table_data.status(going, seen + 60)["state"] == "running"
    assert table_data.status(going, seen + 1e6)["state"] == "stopped or waiting"
    assert (table_data.status(going)["updates"], table_data.status(going)["total"]) == (25, 40)


# --- curves


def test_seeds_of_one_config_are_a_band_and_nothing_else_is(folder):
    _, groups = report.read([str(folder)])
    assert [group.label for group in groups] == [
        groups[0].label, groups[1].label, groups[2].label, "more_kl/ppo", "seed*/ppo, seeds 1, 2"
    ]  # fmt: skip
    rows = [report_runs.read_lines(folder / f"seed{seed}" / "ppo" / "metrics.jsonl") for seed in (1, 2)]
    curve = groups[4].curve("objective/kl")
    both = np.array([[row["objective/kl"] for row in of_seed] for of_seed in rows])
    np.testing.assert_allclose(curve.mean, both.mean(axis=0))
    np.testing.assert_array_equal([curve.low, curve.high], [both.min(axis=0), both.max(axis=0)])
    assert curve.count == 2 and groups[3].curve("objective/kl").count == 1
    again = [read_run.read(str(folder / "seed1" / "ppo"), name) for name in ("a", "b")]
    assert len(series.group_by_config(again)) == 2  # the same seed twice is no band


def test_a_band_goes_as_far_as_all_seeds_and_passes_over_what_is_not_finite():
    steps = np.arange(1.0, 6)
    first = (steps, np.array([1.0, np.nan, 3, np.inf, 5]))
    found = series.aggregate_runs([first, (steps[:4], np.array([3.0, 4, np.nan, -np.inf]))])
    np.testing.assert_array_equal(found.steps, [1, 2, 3, 4])
    np.testing.assert_array_equal(found.mean, [2, 4, 3, np.nan])
    np.testing.assert_array_equal([found.low, found.high], [[1, 4, 3, np.nan], [3, 4, 3, np.nan]])


def test_thinning_keeps_both_ends_every_peak_of_a_stretch_and_gaps():
    values = np.random.default_rng(0).normal(size=10_000)
    values[4321], values[7777], values[2000:2200] = 50, -50, np.nan
    steps = np.arange(10_000.0)
    thin = series.downsample(series.Curve(steps, values, values, values, 1), 600)
    assert len(thin.steps) <= 600 and {0, 4321, 7777, 9999} <= set(thin.steps)
    assert np.all(np.diff(thin.steps) > 0) and np.isnan(thin.mean).any()
    np.testing.assert_array_equal(thin.mean, values[thin.steps.astype(int)])
    short = series.Curve(steps[:600], values[:600], values[:600], values[:600], 1)
    assert series.downsample(short, 600) is short


def test_the_frontier_has_the_root_of_the_kl_and_lengths_as_they_are(folder):
    _, groups = report.read([str(folder / "seed1")])
    lines = report_runs.read_lines(folder / "seed1" / "ppo" / "metrics.jsonl")
    (found,) = charts.scatter(charts.Curves(groups), "objective/kl", "objective/scores", square_root=True)
    np.testing.assert_allclose(found["x"], [math.sqrt(line["objective/kl"]) for line in lines], rtol=1e-4)
    np.testing.assert_allclose(found["y"], [line["objective/scores"] for line in lines], rtol=1e-4)
    (found,) = charts.scatter(charts.Curves(groups), "eval/response_length", "eval/scores")
    assert found["step"] == list(range(4, 41, 4))


def test_every_curve_that_is_asked_for_is_on_the_page(written):
    data = written.data()
    drawn = {
        name for tab in data.values() for section in tab["sections"] for c in section["charts"] for name in c["metrics"]
    }
    wanted = (
        "objective/scores objective/kl policy/entropy_avg val/response_length eos_rate loss/policy_avg loss/value_avg "
    )
    wanted += (
        "policy/clipfrac_avg val/clipfrac_avg val/explained_variance lr time/generate time/update memory/peak_rss_mib "
    )
    assert set((wanted + "loss accuracy eval/accuracy grad_norm step_time").split()) <= drawn
    policy = data["policy"]
    assert len(policy["groups"]) == 3 and policy["groups"][2]["seeds"] == 2
    curve = policy["curves"]["objective/scores"]
    assert set(curve) == {"0", "1", "2"} and {"low", "high"} <= set(curve["2"]) and "low" not in curve["0"]
    assert policy["grids"][curve["1"]["x"]] == list(range(1, 26))
    assert policy["curves"]["eos_rate"]["0"]["y"][0] == pytest.approx(0.7, abs=0.1)
    # The first update compiles: its seconds would hide all others.
    assert policy["grids"][policy["curves"]["time/update"]["0"]["x"]][0] == 2
    clock = policy["clocks"][0]
    assert clock["episode"][-1] == 64 * 40 and 0 < clock["hours"][0] < clock["hours"][-1]
    for tab in data.values():  # nothing points to nowhere
        for section in tab["sections"]:
            for name in (name for chart in section["charts"] for name in chart["metrics"]):
                for made in tab["curves"][name].values():
                    assert len(tab["grids"][made["x"]]) == len(made["y"])


# --- words


def test_alarms_and_numbers_that_are_not_finite_are_told(folder, tmp_path):
    shutil.copytree(folder / "more_kl" / "ppo", tmp_path / "ppo")
    path = tmp_path / "ppo" / "metrics.jsonl"
    rows = report_runs.read_lines(path)
    for row in rows[2:5]:
        row["alarm/kl_above"] = 1.0
    rows[5]["alarm/kl_above"] = 0.0
    rows[24]["alarm/eos_share"] = 1.0
    rows[9] |= {"nonfinite/loss": 1.0, "nonfinite/steps_applied": 3, "grad_norm": math.inf, "loss/policy_avg": math.nan}
    report_runs.lines(path, rows)
    run = read_run.read(str(tmp_path / "ppo"), "ppo")
    assert read_run.alarm_periods(run) == [
        {"name": "alarm/kl_above", "first": 3, "last": 6},
        {"name": "alarm/eos_share", "first": 25, "last": None},
    ]
    events, bad = read_run.nonfinite_events(run)
    assert events == [{"step": 10, "causes": ["loss"], "applied": 3, "rows": []}]
    assert bad == {"grad_norm": (1, 10), "loss/policy_avg": (1, 10)}
    words = "".join(text for _, text in Elements(html_parts.alarms([run])).texts)
    for told in (
        "kl_above",
        "from update 3, until update 6",
        "from update 25, still raised",
        "update 10: loss",
        "grad_norm (1",
    ):
        assert told in words
    assert "No alarm was raised" in html_parts.alarms([read_run.read(str(folder / "seed1" / "ppo"), "one")])


def test_a_config_is_held_against_its_recipe_and_the_defaults(folder):
    _, groups = report.read([str(folder / "seed1"), str(folder / "more_kl")])
    rows = {row["name"]: row for row in table_data.options(groups)}
    kl, batch, model = rows["kl_coef"], rows["batch_size"], rows["sft_model_path"]
    assert kl["values"] == ["0.05", "0.2"] and kl["defaults"] == ["0.05"] * 2 and kl["differs"]
    assert kl["recipes"] == ["0.05", None] and kl["changed"] == [False, True]
    assert batch["changed"] == [False, True] and batch["unusual"]  # the recipe has it; the second run has no recipe
    assert not rows["gamma"]["unusual"] and "Discount" in rows["gamma"]["about"]
    assert model["values"][0] == '"{run_dir}/sft/policy"' or "seed1/sft" in model["values"][0]
    assert all(row["about"] for row in rows.values())  # every option is explained


def test_the_own_folder_of_a_pipeline_does_not_tell_seeds_apart(folder):
    run = read_run.read(str(folder / "seed1" / "ppo"), "one")
    assert series.options_of(run)["sft_model_path"] == "{run_dir}/sft/policy"


def test_calibration_is_of_pairs_and_its_absence_is_said(folder, tmp_path, written):
    data = written.data()
    assert data["policy"]["calibration"] == [] and "No data: " in "".join(t for _, t in written.texts)
    found = data["reward"]["calibration"]
    assert [point["step"] for point in found] == [10, 20, 30]
    last = found[-1]
    assert last["pairs"] == 400 and len(last["bins"]) == 10 and sum(bin[2] for bin in last["bins"]) == 400
    assert last["error"] == pytest.approx(sum(b[2] * abs(b[0] - b[1]) for b in last["bins"]) / 400, rel=0.01)
    report_runs.make_reward(tmp_path / "old", calibrated=False)
    _, groups = report.read([str(tmp_path / "old")])
    assert "No data: no evaluation on pairs" in page.render_page(groups, "old")


# --- samples


def test_samples_carry_their_tokens_kl_and_advantages(written):
    tab = written.data()["policy"]
    found, prompts = tab["samples"]["files"], tab["samples"]["prompts"]
    kinds = {(tab["runs"][file["run"]], file["kind"]) for file in found}
    assert {kind for _, kind in kinds} == {"samples", "training"} and len(kinds) == 5
    assert len(prompts) == 12  # each once, though 6 files have them
    rows, tokens = report_runs.samples(40, 12, seed=1)
    (file,) = [f for f in found if tab["runs"][f["run"]] == "seed1/ppo" and f["step"] == 40]
    for row, wanted, of_tokens in zip(file["rows"], rows, tokens, strict=True):
        assert prompts[row["p"]] == wanted["query"] and row["text"] == wanted["model response"]
        assert (row["ended"], row["length"]) == (wanted["ended"], wanted["length"])
        assert row["tokens"] == of_tokens["tokens"] and row["kl"] == pytest.approx(of_tokens["kl"], rel=5e-3)
        assert row["advantages"] == pytest.approx(of_tokens["advantages"], rel=5e-3)
    (training,) = [f for f in found if f["kind"] == "training"]
    assert "advantages" not in training["rows"][0] and training["rows"][0]["more"] == {"brevity": 1.5}


def test_more_samples_than_a_page_carries_are_left_out_evenly_and_counted(folder):
    run = read_run.read(str(folder / "seed1" / "ppo"), "one")
    whole = samples.collect_samples([run])
    assert whole["left_out"] == 0 and [file["step"] for file in whole["files"]] == [8, 16, 24, 32, 40]
    some = samples.collect_samples([run], max_characters=6000)
    steps = [file["step"] for file in some["files"]]
    assert some["left_out"] == 5 - len(steps) > 0 and steps[0] == 8 and steps[-1] == 40
    assert samples._bisection_order(9) == [8, 0, 4, 2, 6, 1, 3, 5, 7]


def test_tokens_that_do_not_fit_their_row_are_passed_over(folder, tmp_path):
    shutil.copytree(folder / "seed1" / "ppo", tmp_path / "ppo")
    path = tmp_path / "ppo" / "completions" / "40.tokens.jsonl"
    rows = report_runs.read_lines(path)
    rows[0]["kl"], rows[1]["tokens"], rows[2] = rows[0]["kl"][:-1], "text", [1]
    rows[3]["advantages"][0] = "NaN"
    report_runs.lines(path, rows[:4])
    with open(path, "a") as file:
        file.write('{"tokens"')
    found = samples.collect_samples([read_run.read(str(tmp_path / "ppo"), "ppo")])["files"][-1]["rows"]
    assert "kl" not in found[0] and "advantages" in found[0]
    assert "tokens" not in found[1] and "tokens" not in found[2] and "tokens" not in found[4]
    assert found[3]["advantages"][0] is None


# --- the page


def test_the_page_is_well_formed_and_needs_nothing_else(written):
    assert [a["lang"] for a in written.of("html")] == ["en"] and len(written.of("main")) == 1
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in written.of("meta")
    ids = [attributes["id"] for _, attributes in written.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in written.elements:
        assert not {"src", "href", "srcset", "action", "style"} & attributes.keys(), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
    (policy,) = [a["content"] for a in written.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    (style,) = [text for tag, text in written.texts if tag == "style"]
    script = [text for tag, text in written.texts if tag == "script"][-1]
    for text in (style, script):  # only these may run
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert "@import" not in style and "url(" not in style
    assert "fetch(" not in script and "XMLHttpRequest" not in script


def test_hostile_text_is_text_everywhere(tmp_path):
    bad = report_runs.HOSTILE
    name = bad.replace("/", "").replace("\ud800", "")[:120]
    run = report_runs.make(tmp_path / name, PPOConfig(sft_model_path=bad.replace("\ud800", "")), recipe=bad)
    rows = report_runs.read_lines(run.metrics)
    for row in rows:
        row |= {f"rewards/{bad}/mean": 1.0, bad: 2.0, f"alarm/{bad}": 1.0, f"nonfinite/{bad}": 1.0}
        row["odd " + bad] = [1]
    report_runs.lines(run.metrics, rows)
    table = [{"query": bad, "model response": bad, "score": 1.0, bad: bad, "length": bad, "ended": bad}]
    run.write_completions(40, table, "samples", [{"tokens": [bad, "</script>"], "kl": [0.5, -0.5]}])
    run.write_nonfinite(3, [{"prompt": bad, "response": bad, bad: bad}])
    (pathlib.Path(run.path) / "comparison.json").write_text(
        json.dumps({"rows": [{"name": bad, "score": 1.0, bad: 1}, {"name": []}]})
    )
    _, groups = report.read([run.path])
    text = page.render_page(groups, bad)
    found = Elements(text)
    assert len(found.of("script")) == 2 and found.of("img") == []
    assert "onerror=" not in "".join(name for _, attributes in found.elements for name in attributes)
    (script,) = [data for tag, data in found.texts if tag == "script" and data.startswith('{"tabs"')]
    assert "<" not in script and not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    assert text.encode("utf-8")  # no half of a surrogate pair
    row = found.data()["policy"]["samples"]["files"][-1]["rows"][0]
    assert row["text"].startswith("</script><script>") and "\\u202e" in row["text"]


def test_what_pipelines_end_with_is_one_table_and_shared_rows_stand_once(tmp_path):
    for seed in ("q0", "q1"):
        for algo, config in (("ppo", PPOConfig()), ("rloo", RLOOConfig(num_generations=4))):
            run = report_runs.make(tmp_path / seed / algo, config)
            rows = [
                {"name": "SFT", "gold_reward": 0.5, "gold_reward_se": 0.03},
                {"name": algo.upper(), "gold_reward": 1.5},
            ]
            (pathlib.Path(run.path) / "comparison.json").write_text(json.dumps({"rows": rows}))
    runs, groups = report.read([str(tmp_path)])
    assert [(one["name"], [row["name"] for row in one["rows"]]) for one in table_data.comparisons(runs)] == [
        ("q0", ["SFT", "PPO", "RLOO"]),
        ("q1", ["SFT", "PPO", "RLOO"]),
    ]
    assert html_parts.comparisons(groups).count("<table") == 1


def test_pipelines_of_several_seeds_are_one_row_for_each_policy(tmp_path):
    for seed, (sft, ppo) in enumerate([(0.5, 1.0), (0.5, 3.0)]):
        for algo, config in (("ppo", PPOConfig()), ("rloo", RLOOConfig(num_generations=4))):
            run = report_runs.make(tmp_path / f"q{seed}" / algo, config, updates=5, seed=seed)
            rows = [{"name": "SFT", "score": sft, "score_se": 0.03}, {"name": "PPO", "score": ppo}]
            (pathlib.Path(run.path) / "comparison.json").write_text(json.dumps({"rows": rows}))
    runs, groups = report.read([str(tmp_path)])
    (pipeline,) = table_data.seed_comparisons(groups, table_data.comparisons(runs))
    assert (pipeline["name"], pipeline["count"]) == ("q0, q1", 2)
    sft, ppo = pipeline["rows"]
    assert sft == {"name": "SFT", "score": 0.5, "score_se": 0.0}
    assert ppo == {"name": "PPO", "score": 2.0, "score_se": pytest.approx(12.7062)}  # t(1) / sqrt(2) * sqrt(2)
    text = html_parts.comparisons(groups)
    assert text.count("<table") == 2 and "± 13" in text and "Single pipelines" in text
    assert "single pipelines ± is" not in text
    Elements(text)


def test_groups_of_seeds_are_a_row_with_a_t_interval_and_single_runs_below(tmp_path):
    for seed, score in ((1, 1.0), (2, 2.0), (3, 3.0)):
        run = report_runs.make(tmp_path / f"seed{seed}", PPOConfig(), updates=5, seed=seed)
        rows = report_runs.read_lines(run.metrics)
        report_runs.lines(run.metrics, [*rows, {"step": 6, "eval/scores": score}])
    _, groups = report.read([str(tmp_path)])
    item = table_data.headlines(groups[0], "policy")[0]
    assert (item["metric"], item["value"], item["spread"]) == ("eval/scores", 2, 2.5)  # 4.302653 / sqrt(3)
    text = html_parts.runs(groups, "policy")
    whole, single = text.split("<summary>Single runs</summary>")
    assert whole.count('<tr><th scope="row">') == 1 and single.count('<tr><th scope="row">') == 3
    assert text.count('button class="run"') == 1 and "2 <small>± 2.5</small>" in whole and "95 % interval" in text
    Elements(text)
    alone = html_parts.runs([series.Group("one", groups[0].runs[:1])], "policy")
    assert "Single runs" not in alone and "95 %" not in alone


def test_a_page_of_a_thousand_updates_is_small(tmp_path):
    for seed in (1, 2, 3):
        report_runs.make(tmp_path / f"{seed}", PPOConfig(), updates=1000, seed=seed, sample_rows=64)
    path = tmp_path / "page.html"
    report.write([str(tmp_path)], str(path), png=False)
    assert path.stat().st_size < 3_000_000
    assert len(Elements(path.read_text(encoding="utf-8")).data()["policy"]["groups"]) == 1


# --- the command


def test_the_command_writes_the_page_and_pictures_and_starts_no_device(folder, tmp_path):
    code = (
        "import sys; from rlhf_jax.report.__main__ import main; status = main(sys.argv[1:]); "
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized(); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / "seed1" / "ppo"), str(folder / "reward"), "--out", "a.html"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    names = ["a.html", "a-policy.png", "a-reward.png"]
    assert done.stdout.splitlines() == [f"written: {tmp_path / name}" for name in names]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    for name in names[1:]:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 10_000


def test_without_matplotlib_the_page_is_written_and_what_to_install_is_said(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command.main([str(folder / "sft"), "--out", str(tmp_path / "a.html")]) == 0
    assert os.listdir(tmp_path) == ["a.html"] and "'.[report]'" in capsys.readouterr().err
    with pytest.raises(UserError, match="matplotlib is not installed"):
        report.write([str(folder / "sft")], str(tmp_path / "b.html"))


def test_one_runs_page_lies_in_its_folder_and_wrong_paths_are_told(folder, tmp_path, capsys):
    shutil.copytree(folder / "sft", tmp_path / "sft")
    assert command.main([str(tmp_path / "sft"), "--no_png"]) == 0
    assert (tmp_path / "sft" / "report.html").is_file()
    assert command.main([str(tmp_path / "gone")]) == 2 and "no such folder" in capsys.readouterr().err
    assert command.main([str(tmp_path / "sft"), "--out", str(tmp_path / "no" / "a.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_every_algorithm_has_a_tab():
    tabs = {name: charts.tab_of(name) for name in [*ALGORITHMS, "of_a_config_file"]}
    assert tabs.pop("sft") == "sft" and tabs.pop("reward") == "reward"
    assert {"ppo", "rloo", "grpo"} < set(tabs) and set(tabs.values()) == {"policy"}


def test_a_report_shows_versions_and_devices_and_marks_those_that_differ(folder, tmp_path):
    for name, jaxes in (("one", ["0.10.2", "0.11.0"]), ("two", ["0.10.2"])):
        shutil.copytree(folder / "rloo", tmp_path / name / "rloo")
        environments = [{"jax": jax, "devices": "1 x <cpu>", "XLA_FLAGS": ""} for jax in jaxes]
        (tmp_path / name / "rloo" / "inputs.json").write_text(json.dumps({"environments": environments}))
    one, two = (read_run.read(str(tmp_path / name / "rloo"), name) for name in ("one", "two"))
    text = html_parts.environments([series.Group("one", [one]), series.Group("two", [two])])
    assert text.startswith("<details open>") and "XLA_FLAGS" not in text
    assert "<b>jax</b></th><td><b>0.10.2, then 0.11.0</b></td><td><b>0.10.2</b>" in text
    assert ">devices</th><td>1 x &lt;cpu&gt;</td>" in text
    assert html_parts.environments([series.Group("two", [two])]).startswith("<details><summary>")
    for broken in ("[1]", '{"environments": 3}', '{"environments": [1]}', "{"):
        (tmp_path / "two" / "rloo" / "inputs.json").write_text(broken)
        assert read_run.read(str(tmp_path / "two" / "rloo"), "two").environments == []
