"""scripts/bench/benchmark.py: arithmetic, equal options for both systems, and a small case held to its bounds."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax import models
from rlhf_jax.config import batch_sizes
from rlhf_jax.config.check import check
from rlhf_jax.errors import UserError
from rlhf_jax.models.attention import QUERY_BLOCK
from rlhf_jax.option import checked_types
from rlhf_jax.stages.work import Shape
from tests.helpers.paths import ROOT, SCRIPTS

sys.path.insert(0, str(SCRIPTS / "bench"))  # as for a script run from there

import benchmark  # noqa: E402
import benchmark_case  # noqa: E402
import benchmark_ours  # noqa: E402
import benchmark_report  # noqa: E402
import benchmark_trl  # noqa: E402

BOUNDS = ROOT / "tests" / "scripts" / "benchmark_bounds.json"
SMALL = "--shape 2x128x4 --batch 8 --epochs 2 --query_length 64 --response_length 16 --updates 6 --pairs 1 --cores 1"
SIZES = "--micro 8 --trl_micro 4 8"
CASES = {
    "ppo": benchmark_case.Case(algo="ppo", shape="2x128x4", batch=8, epochs=3, updates=5),
    "rloo": benchmark_case.Case(algo="rloo", shape="2x128x4", batch=8, epochs=3, updates=5, dtype="bfloat16"),
}


# --- the small case of CI


@pytest.mark.benchmark
def test_small_case_is_not_slower_or_larger_beside_trl_than_its_bounds(capfd, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of the tests: programs that are not optimised
    words = [*SMALL.split(), *SIZES.split(), "--device", "cpu", "--baseline", str(BOUNDS), "--check"]
    # A host that others share halves either system's speed for a while: what is slower is slower three times.
    for _ in range(3):
        code = benchmark.main(words)
        shown = capfd.readouterr()
        if code == 0:
            break
    assert code == 0, shown.out + shown.err
    assert "no ratio is below its bound" in shown.out


@pytest.mark.benchmark
def test_phases_of_rloo_are_timed_and_a_trace_is_written(tmp_path, capfd):
    words = "--algo rloo --shape 1x16x2 --batch 4 --num_generations 2 --epochs 1 --query_length 48 --response_length 4"
    words += " --updates 2 --pairs 1 --systems ours --micro 4 --device cpu --cores 1"
    places = ["--json", str(tmp_path / "out.json"), "--profile", str(tmp_path / "trace"), "--work", str(tmp_path / "w")]
    assert benchmark.main([*words.split(), *places]) == 0, capfd.readouterr().err
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["phase"] for row in found["phases"]} == set(benchmark_case.LOOP)
    assert all(row["seconds"] > 0 and row["mfu"] > 0 for row in found["phases"])
    (pair,) = found["pairs"]
    assert len(pair["ours"]["updates"]) == 2 and 0 < pair["ours"]["compile_seconds"] < pair["ours"]["updates"][0]
    assert max(found["prompt_tokens"][0]) <= 48 and len(found["prompt_tokens"][0]) == 2
    assert {"cpu", "cores", "load"} <= set(found["machine"])
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


# --- both systems do the same


@pytest.mark.parametrize("algo", ["ppo", "rloo"])
@pytest.mark.parametrize("micro", [None, 4])
def test_both_systems_are_told_the_same(algo, micro, tmp_path):
    pytest.importorskip("trl")
    from trl import RLOOConfig
    from trl.experimental.ppo import PPOConfig

    case = CASES[algo]
    ours = benchmark_ours.config_of(case, tmp_path, micro, str(tmp_path / "run"))
    check(checked_types(ours))
    options = benchmark_case.trl_options(case, str(tmp_path), micro)
    theirs = {"ppo": PPOConfig, "rloo": RLOOConfig}[algo](**options)
    for name in (*benchmark_case.SAME, *benchmark_case.OWN[algo]):
        assert getattr(ours, name) == getattr(theirs, name), name
    sums = batch_sizes.batch_arithmetic(ours)
    rows = theirs.per_device_train_batch_size
    assert rows == sums.micro_batch == (micro or 8)
    assert rows * theirs.gradient_accumulation_steps == sums.batch == 8
    assert theirs.bf16 == (ours.dtype == "bfloat16") and not theirs.gradient_checkpointing
    if algo == "ppo":
        assert theirs.num_ppo_epochs == ours.num_ppo_epochs == 3
        assert theirs.total_episodes == ours.total_episodes == sums.updates * 8 == 40
        assert theirs.response_length == ours.response_length == 53
        assert theirs.stop_token is None and ours.stop_token is None
    else:
        assert theirs.num_generations == ours.num_generations == 4
        assert theirs.max_steps == sums.optimizer_steps == 15
        assert theirs.generation_batch_size == 8 and theirs.num_iterations == 3
        assert theirs.max_completion_length == ours.response_length == 53
        assert theirs.max_grad_norm == ours.max_grad_norm == 1.0


def test_trl_on_a_gpu_that_torch_does_not_see_is_refused(monkeypatch, capsys):
    pytest.importorskip("trl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert benchmark.main(["--systems", "trl", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU" in capsys.readouterr().err


def test_models_of_the_shape_that_an_earlier_command_left_are_used(tmp_path):
    benchmark.prepare(CASES["ppo"], tmp_path, pairs=1)
    weights = tmp_path / "start/policy/model.safetensors"
    written = weights.stat().st_mtime_ns
    benchmark.prepare(CASES["rloo"], tmp_path, pairs=1)
    assert weights.stat().st_mtime_ns == written
    _, lengths = benchmark.prepare(dataclasses.replace(CASES["ppo"], shape="1x128x4"), tmp_path, pairs=1)
    assert weights.stat().st_mtime_ns > written and len(lengths[0]) == 8


def test_pairs_have_batches_of_their_own_that_fit_and_repeat_at_the_end(tmp_path):
    lines = [{"prompt": f"i met anna{'.' * n}"} for n in (1, 2, 70, 3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    case = benchmark_case.Case(shape="1x16x2", batch=2, query_length=16, prompts=str(tmp_path / "p.jsonl"))
    _, lengths = benchmark.prepare(case, tmp_path, pairs=2)
    texts = [[row["prompt"] for row in benchmark_case.rows_of(tmp_path, pair)] for pair in range(2)]
    assert texts == [["i met anna.", "i met anna.."], ["i met anna...", "i met anna."]]
    # The synthetic tokenizer gives each dot a token of its own.
    assert [row[1] - row[0] for row in lengths] == [1, -2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_trl_on_a_gpu_is_launched_by_accelerate_in_the_same_precision(device, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    case = dataclasses.replace(CASES["rloo"], device=device)
    words = benchmark.command("trl", case, tmp_path, 1, 4, "one")
    assert words[-5:] == ["1", "--name", "one", "--micro", "4"]
    launched = "accelerate.commands.launch" in words
    assert launched == (device == "cuda")
    if launched:
        assert words[words.index("--mixed_precision") + 1] == "bf16"
        assert benchmark_case.trl_options(case, "", None)["use_cpu"] is False
    assert "accelerate.commands.launch" not in benchmark.command("ours", case, tmp_path, 1, 4, "one")
    hidden = benchmark.environment(case).get("CUDA_VISIBLE_DEVICES") == ""
    assert hidden == (device == "cpu")


@pytest.mark.parametrize(
    ("system", "algo", "given", "sizes"),
    [
        ("ours", "ppo", None, [1, 2, 4, 8]),
        ("trl", "rloo", None, [1, 2, 4, 8]),
        ("ours", "rloo", None, [4, 8]),  # whole groups of 4
        ("trl", "ppo", [4, 2, 4], [2, 4]),
    ],
)
def test_sizes_to_try_divide_the_batch_and_keep_our_groups_whole(system, algo, given, sizes):
    assert benchmark.sizes_to_try(system, CASES[algo], given) == sizes


def test_sizes_are_tried_and_the_fastest_that_fits_is_chosen(tmp_path, monkeypatch):
    results = {1: result([9.0, 5.0], 100.0), 2: result([9.0, 3.0], 200.0), 4: {"out_of_memory": "no room"}}

    def child(system, case, work, pair, micro, name):
        assert (system, pair, name, case.profile) == ("trl", 0, f"micro-{micro}", "trace")
        assert benchmark_case.Case.read(work).profile is None  # trials write no trace
        return results[micro]

    monkeypatch.setattr(benchmark, "run_child", child)
    case = dataclasses.replace(CASES["ppo"], profile="trace")
    trials = benchmark.try_sizes("trl", case, tmp_path, [1, 2, 4])
    assert benchmark_case.Case.read(tmp_path) == case
    assert trials == [
        {"system": "trl", "micro": 1, "seconds": 5.0, "peak_mib": 100.0},
        {"system": "trl", "micro": 2, "seconds": 3.0, "peak_mib": 200.0},
        {"system": "trl", "micro": 4, "out_of_memory": "no room"},
    ]
    assert benchmark.choose_size("trl", trials) == 2
    table = benchmark_report.trial_table(trials).splitlines()
    assert [line.split()[4:] for line in table[1:]] == [["least", "memory"], ["fastest"], ["memory"]]
    with pytest.raises(UserError, match="trl.*memory.*4"):
        benchmark.choose_size("trl", trials[2:])


def test_running_out_of_memory_in_a_pair_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "run_child", lambda *_: {"out_of_memory": "no room"})
    with pytest.raises(UserError, match="trl.*memory.*8"):
        benchmark.measure("trl", CASES["ppo"], tmp_path, 0, 8)
    with pytest.raises(UserError, match="--micro 2.*--num_generations 4"):
        benchmark.sizes_to_try("ours", CASES["rloo"], [2])


def test_failing_child_is_told_with_the_end_of_its_log(tmp_path):
    dataclasses.replace(CASES["ppo"], algo="no such algorithm").write(tmp_path)
    with pytest.raises(UserError, match="(?s)ours.*code 1.*no such algorithm"):
        benchmark.run_child("ours", CASES["ppo"], tmp_path, 0, 4)


# --- FLOPs and bytes


def counted_by_xla(model, rows, length):
    """XLA's FLOP count of a forward pass with logits everywhere. Layers are unrolled: it counts a loop body once."""
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))

    def forward(params, tokens, mask):
        params = model.unstack(params)
        hidden, kept = model.prefill(params, tokens, mask)
        # prefill returns the last position only; logits of the others cost the same.
        logits = model.logits(params, jnp.broadcast_to(hidden[:, None], (*tokens.shape, hidden.shape[-1])))
        return logits, kept

    shapes = (jax.ShapeDtypeStruct((rows, length), kind) for kind in (jnp.int32, jnp.bool_))
    return jax.jit(forward).lower(params, *shapes).cost_analysis()["flops"]


@pytest.mark.parametrize("spec", ["1x128x4", "2x64x2", "3x256x8", "llama:2x128x4x2"])
@pytest.mark.parametrize("length", [64, 128, 200])
def test_flop_formula_is_within_5_percent_of_what_xla_counts(spec, length):
    model, tokens = models.custom_shape(spec, 512), 4 * length
    block = max(QUERY_BLOCK, -(-length // 8))  # whole blocks are multiplied, also beyond the diagonal
    pairs = 4 * sum(
        (min(start + block, length) - start) * min(start + block, length) for start in range(0, length, block)
    )
    formula = Shape.of(model).forward(tokens, pairs, tokens, (tokens, pairs))
    assert formula == pytest.approx(counted_by_xla(model, 4, length), rel=0.05)


def test_best_rate_is_of_the_fastest_run_and_stops_at_slow_ones():
    seconds = iter([9.0, 2.0, 1.0, 4.0, 9.0, 8.0, 6.0, 7.0])
    slow = (100.0, lambda: pytest.fail("a larger one after a slow one"))
    attempts = [(10.0, lambda: next(seconds)), (66.0, lambda: next(seconds)), slow]
    assert benchmark_case.best_rate(attempts, patience=5.0) == 11.0


# --- the arithmetic of the report


def result(updates, mib, **more):
    loop = [dict.fromkeys(benchmark_case.LOOP, seconds / 4) for seconds in updates]
    return {"updates": updates, "loop": loop, "peak_rss_mib": mib, "micro": 8, "matmul_flops": 1e9, **more}


def test_ratios_are_of_medians_after_the_first_update_pair_by_pair():
    pairs = [
        {"ours": result([9.0, 2.0, 1.0, 3.0], 500.0), "trl": result([5.0, 8.0], 2000.0)},
        {"ours": result([9.0, 1.0], 500.0), "trl": result([3.0, 6.0], 1000.0, peak_device_mib=250.0)},
    ]
    found = benchmark_report.ratios(pairs)
    assert [row["speed"] for row in found] == [4.0, 6.0]
    assert [row["memory"] for row in found] == [4.0, 0.5]
    assert benchmark_report.spread([row["speed"] for row in found]) == {"median": 5.0, "low": 4.0, "high": 6.0}
    shown = benchmark_report.report(CASES["ppo"], pairs, [])
    assert "episodes/s, ours / TRL: 5.00 (4.00 to 6.00; pairs: 4.00, 6.00)" in shown
    assert "4.000 episodes/s, first 9.00 s, peak 500 MiB" in shown


def test_phases_are_medians_without_first_updates_against_the_faster_library():
    shape = Shape(2, 8, 32, 100)
    case = dataclasses.replace(CASES["ppo"], response_length=4, epochs=1, batch=2)
    pairs = [{"ours": result([9.0, 4.0], 1.0), "trl": {**result([9.0, 8.0], 1.0), "matmul_flops": 2e9}}]
    rows = {(r["phase"], r["system"]): r for r in benchmark_report.phase_table(case, shape, pairs, [[3, 5]])}
    work = benchmark_report.case_work(case, shape, [3, 5])
    assert rows["update", "ours"]["seconds"] == 1.0 and rows["update", "trl"]["seconds"] == 2.0
    assert rows["update", "ours"]["mfu"] == pytest.approx(work["update"].flops / 2e9)
    assert rows["generate", "trl"]["tokens_per_second"] == 4.0  # 2 rows of 4 in 2 s


def test_clock_of_trl_books_wrapped_calls_and_leaves_the_rest_to_the_update():
    clock = benchmark_trl.Clock(lambda: None)
    wrapped = clock.wrap(lambda x: x + 1, lambda x: {0: "reference", 1: "value"}.get(x))
    clock.start()
    assert [wrapped(x) for x in (0, 0, 1, 5)] == [1, 1, 2, 6]
    clock.end()
    clock.end()
    first, second = clock.loop
    assert first["experience"] == first["reference"] + first["value"] > 0
    assert sum(first[phase] for phase in benchmark_case.LOOP) == pytest.approx(clock.updates[0])
    assert second["experience"] == 0 and "reference" not in second


# --- the baseline


def test_stored_bounds_lie_below_what_was_measured_and_hold_later_ratios(tmp_path):
    path, case = tmp_path / "bounds.json", CASES["ppo"]
    found = {"speed": benchmark_report.spread([5.0]), "memory": benchmark_report.spread([2.0])}
    benchmark_report.store_bounds(path, case, found, {"date": "today"})
    benchmark_report.store_bounds(path, CASES["rloo"], found, {})
    bounds = benchmark_report.bounds_of(path, case)
    assert bounds == {"speed": 3.0, "memory": 1.2}
    assert benchmark_report.below_bounds(bounds, found) == []
    slower = {**found, "speed": benchmark_report.spread([2.9])}
    assert benchmark_report.below_bounds(bounds, slower) == ["speed ratio 2.90 is below its bound 3.00"]
    with pytest.raises(UserError, match="'ppo 2x128x4, batch 8, 4 epochs.*--check"):
        benchmark_report.bounds_of(path, dataclasses.replace(case, epochs=4))


def test_check_fails_the_command_below_a_bound(tmp_path, monkeypatch, capsys):
    pytest.importorskip("trl")
    pairs = {"ours": result([9.0, 2.0], 100.0, device="cpu"), "trl": result([9.0, 3.0], 100.0, device="cpu")}
    monkeypatch.setattr(benchmark, "measure", lambda system, *_: pairs[system])
    words = "--shape 1x16x2 --query_length 48 --pairs 1 --batch 2 --micro 2 --trl_micro 2".split()
    words += ["--device", "cpu", "--cores", "1", "--baseline"]
    words.append(str(tmp_path / "b.json"))
    assert benchmark.main(words) == 0
    assert benchmark.main([*words, "--check"]) == 0
    pairs["ours"] = result([9.0, 4.0], 100.0, device="cpu")
    assert benchmark.main([*words, "--check"]) == 1
    assert "speed ratio 0.75 is below its bound 0.90" in capsys.readouterr().out
    pairs["trl"]["device"] = "cuda"
    assert benchmark.main(words) == 2
    assert "ran on cpu and cuda" in capsys.readouterr().err


# --- what the user gives


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--updates 1", "--updates 1: give 2 or more; the first update is not counted"),
        ("--systems ours,theirs", "--systems ours,theirs: give ours, trl, or ours,trl"),
        ("--algo rloo --batch 10", "--batch 10 must be a multiple of --num_generations 4"),
        ("--micro 5", "--micro 5 must divide --batch 16"),
        ("--prompts posts.jsonl", "--prompts FILE needs --tokenizer"),
        ("--check", "--check needs --baseline FILE and both systems"),
        ("--query_length 8", "has 0 prompts of at most 8 tokens; an update needs 16"),
    ],
)
def test_wrong_options_are_told(words, said, capsys):
    assert (
        benchmark.main([*words.split(), "--device", "cpu", *([] if "--systems" in words else ["--systems", "ours"])])
        == 2
    )
    assert said in capsys.readouterr().err
