"""Mutation tests: changes the equations and trainers in one place at a time, and says which changes no test sees.

    python scripts/mutate.py --out mutants.jsonl --cap_minutes 60        # again with the same --out: goes on
    python scripts/mutate.py --report mutants.jsonl                      # Markdown
    python scripts/mutate.py --list --files advantages.py

Works on a copy of the checkout. One process imports what is slow to import and forks for every test file that a mutant
meets; the fork reads the mutated module from memory. Test files are tried in the order of `SUITE`, those that killed
before first, and only those that call the mutated function; inside one, the tests that call it come first. All forks
share one JAX compilation cache, so that only what a mutant changed compiles anew. It is kept in OUT.state, with what
the test files took and called without a mutation.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import pathlib
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Generator, Iterable

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from mutants import Mutant, mutants_of, sample, why_equivalent  # noqa: E402

REPLAY = "tests/parity/test_replay.py -k"
PPO = [
    "tests/algorithms/test_ppo_unscored.py",
    "tests/algorithms/test_ppo.py",
    f"{REPLAY} 'ppo_options or ppo_crafted'",
]
RLOO = ["tests/algorithms/test_rloo.py", f"{REPLAY} 'rloo_options or rloo_crafted or legacy_options'"]
SUITE = {  # file -> test files, the fastest and sharpest first; a pattern may match none
    "rlhf_jax/advantages.py": [
        *("tests/test_advantages.py", "tests/test_advantages_torch.py", "tests/test_advantages_properties*.py"),
        *(*RLOO, *PPO),
    ],
    "rlhf_jax/losses.py": [
        *("tests/test_losses.py", "tests/test_losses_torch.py", "tests/test_losses_properties*.py"),
        *(*RLOO, *PPO, "tests/test_train.py"),
    ],
    "rlhf_jax/generate.py": ["tests/test_generate.py", *PPO, *RLOO],
    "rlhf_jax/algorithms/microbatch.py": ["tests/algorithms/test_microbatch.py", *PPO, *RLOO, "tests/test_train.py"],
    "rlhf_jax/algorithms/actor_critic.py": [*PPO, *RLOO, "tests/stages/test_rloo.py"],
    "rlhf_jax/algorithms/nonfinite.py": [
        "tests/algorithms/test_nonfinite.py",
        "tests/robustness/test_nonfinite_runs.py",
    ],
    "rlhf_jax/algorithms/ppo.py": [*PPO, "tests/test_train.py"],
    "rlhf_jax/algorithms/reward_model.py": [*PPO, "tests/stages/test_rloo.py", "tests/test_train.py"],
    "rlhf_jax/algorithms/rloo.py": [*RLOO, "tests/stages/test_rloo.py"],
    "rlhf_jax/algorithms/rollout_metrics.py": [*RLOO, *PPO, "tests/stages/test_rloo.py"],
    "rlhf_jax/algorithms/sft.py": ["tests/test_train.py"],
}
PRELOADED = [
    *("jax", "jax.numpy", "chex", "flax.linen", "optax", "torch", "transformers", "hypothesis", "orbax.checkpoint"),
    *("transformers.models.gpt_neox.modeling_gpt_neox", "safetensors", "tokenizers", "scipy.stats", "tyro"),
]
# (file, function, snippet, mutated snippet, why no test can see it); the snippets are parts of the lines as listed.
MASKED = "stands where the mask replaces the result"
EQUIVALENT: list[tuple[str, str, str, str, str]] = [
    ("rlhf_jax/losses.py", "<module>", "= 1.0", "= 0.0", "the same fill stands on both sides of every difference"),
    ("rlhf_jax/losses.py", "clipped_value_loss", "_float(x), 0)", "_float(x), 1)", MASKED),
    ("rlhf_jax/losses.py", "clipped_policy_loss", "_float(advantages), 0)", "_float(advantages), 1)", MASKED),
    ("rlhf_jax/losses.py", "cross_entropy", "labels, 0)", "labels, 1)", MASKED),
    ("rlhf_jax/losses.py", "cross_entropy", "logits, 0)", "logits, 1)", MASKED),
    (
        "rlhf_jax/losses.py",
        "entropy_from_logits",
        "(shifted), 0,",
        "(shifted), 1,",
        "is multiplied by a probability of 0",
    ),
    (
        "rlhf_jax/losses.py",
        "_chosen",
        "[..., 0]",
        "[..., 1]",
        "an index beyond the one entry is clamped to it",
    ),
    (
        *("rlhf_jax/losses.py", "_below_largest"),
        *("jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))", "logits.max(axis=-1, keepdims=True)"),
        "what is subtracted cancels in value and gradient",
    ),
    (
        *("rlhf_jax/algorithms/microbatch.py", "accumulate", "(micro_batches)[0]", "(micro_batches)[1]"),
        "all leaves have as many micro-batches",
    ),
    (
        *(
            "rlhf_jax/algorithms/microbatch.py",
            "accumulate",
            "x: x[0], micro_batches), jnp",
            "x: x[1], micro_batches), jnp",
        ),
        "an index beyond the one micro-batch is clamped to it",
    ),
    (
        *("rlhf_jax/generate.py", "generate_unstacked.body", "(0, t - 1), (b, 1)", "(1, t - 1), (b, 1)"),
        "a slice of all rows is clamped to begin at the first",
    ),
    (
        *("rlhf_jax/algorithms/actor_critic.py", "response_logprobs.of", "+ 1e-7", "- 1e-7"),
        "a temperature of another 2e-7 is below float32's rounding of the result",
    ),
    ("rlhf_jax/advantages.py", "normalize", "(keep, x, 0)", "(keep, x, 1)", MASKED),
    (
        "rlhf_jax/advantages.py",
        "gae",
        "values[:, 0]",
        "values[:, 1]",
        "only the shape is taken, and an index is clamped",
    ),
]

SHOWN = ("file", "line", "function", "operator", "original", "mutated")
COLUMNS = ("mutants", "killed", "timeout", "survived", "equivalent", "not run")
BROKEN = 99  # exit status of a fork that failed by itself


# ---------------------------------------------------------------------------------------------------------- test files


class Loader(importlib.machinery.SourceFileLoader):
    """Loads one module from a text instead of its file; is its own finder."""

    def __init__(self, file: pathlib.Path, name: str, changed: str):
        super().__init__(name, str(file))
        self.changed = changed

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_code(self, fullname):
        return compile(self.changed, self.path, "exec", dont_inherit=True)


class Watch:
    """A pytest plugin: orders the tests, says what starts, fails and calls, and keeps one JAX compilation cache."""

    def __init__(self, file, first: list[str], compiled: str, traced: dict[str, str]):
        self.file, self.compiled, self.traced = file, compiled, traced
        self.rank = {node: i for i, node in reversed(list(enumerate(first)))}  # twice there: the earlier place
        self.node, self.calls, self.seconds = "", collections.defaultdict(set), collections.Counter()
        if traced:
            threading.settrace(self.trace)
            sys.settrace(self.trace)

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename in self.traced:
            self.calls[self.node].add((self.traced[frame.f_code.co_filename], frame.f_code.co_firstlineno))

    def say(self, **what):
        self.file.write(json.dumps(what) + "\n")

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.rank.get(item.nodeid, len(self.rank)))

    def pytest_runtest_logstart(self, nodeid):
        self.node = nodeid
        self.say(started=nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report):
        if report.failed:
            self.say(failed=report.nodeid)

    def pytest_sessionfinish(self):
        self.say(calls={node: sorted(places) for node, places in self.calls.items()}, tests=self.seconds)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self):
        found = yield
        config = sys.modules["jax"].config if "jax" in sys.modules else None
        if config and config.jax_compilation_cache_dir not in (None, self.compiled):
            # A fixture chose a folder of its own, which would be empty for the next mutant.
            config.update("jax_compilation_cache_dir", self.compiled)
            config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        return found


@dataclasses.dataclass
class Fork:
    """A process that runs one test file; `whole` and `each` limit it and each of its tests, in seconds."""

    folder: pathlib.Path
    whole: float
    each: float
    pid: int = 0
    began: float = dataclasses.field(default_factory=time.time)

    def said(self) -> dict:
        """The last word of each kind."""
        return {kind: what for line in json_lines(self.folder / "said") for kind, what in line.items()}

    def ended(self) -> tuple[str, str] | None:
        """(passed, killed or timeout; the test that decided it), None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            silent = time.time() - (self.folder / "said").stat().st_mtime
            if time.time() - self.began <= self.whole and silent <= self.each:
                return None
            self.kill()
            return "timeout", self.said().get("started", "collection")
        code = os.waitstatus_to_exitcode(status)
        if code == BROKEN:
            raise SystemExit(f"the runner itself failed:\n{self.log()}")
        node = self.said().get("failed") or self.said().get("started", "collection")
        return ("killed" if code else "passed"), (f"{node} (signal {-code})" if code < 0 else node)

    def kill(self) -> None:
        for kill in (os.kill, os.killpg):  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]


Steps = Generator[Fork | None, tuple[str, str], None]  # None: nothing to wait for but a moment


@dataclasses.dataclass
class Project:
    """What is tested by what."""

    root: pathlib.Path
    suite: dict[str, list[str]]
    preloaded: list[str]
    equivalent: list[tuple[str, str, str, str, str]]
    least_seconds: float = 30.0  # no limit is shorter

    def mutants(self, files: list[str] | None = None) -> list[Mutant]:
        for file in files or []:
            if not any(name.endswith(file) for name in self.suite):
                raise SystemExit(f"--files: {file} is none of {', '.join(self.suite)}")
        chosen = [name for name in self.suite if files is None or name.endswith(tuple(files))]
        return [mutant for name in chosen for mutant in mutants_of(name, (self.root / name).read_text())]

    def tests_of(self, file: str) -> list[str]:
        """The entries of the suite, patterns replaced by what they match."""
        found = []
        for entry in self.suite[file]:
            found += sorted(str(p.relative_to(self.root)) for p in self.root.glob(entry)) if "*" in entry else [entry]
        return found


class Runner:
    """Runs mutants of a copy of a project and appends what became of them to `out`, until the deadline."""

    def __init__(self, project: Project, work: pathlib.Path, out: pathlib.Path, jobs: int, deadline: float):
        junk = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "dist", out.name + "*")
        root = shutil.copytree(project.root, work / "copy", ignore=junk)
        self.project, self.work, self.out = dataclasses.replace(project, root=root), work, out
        self.jobs, self.deadline, self.count = jobs, deadline, itertools.count()
        self.state = out.with_name(out.name + ".state")  # kept from run to run: compiled programs, the baseline
        (self.state / "compiled").mkdir(parents=True, exist_ok=True)
        self.records = {record["key"]: record for record in json_lines(out)}
        self.killers = collections.defaultdict(collections.Counter)
        for record in self.records.values():
            self.killers[record["file"], record["function"]][record["killed_by"]] += 1
        texts = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
        self.base_file = self.state / f"baseline-{hashlib.sha256(texts).hexdigest()[:16]}.json"
        self.base = json.loads(self.base_file.read_text()) if self.base_file.exists() else {}
        self.measuring: set[str] = set()
        if out.exists() and not out.read_bytes().endswith(b"\n"):  # cut short when a run was killed
            out.write_bytes(out.read_bytes() + b"\n")

    def start(self, tests: str, whole=math.inf, each=math.inf, mutant: Mutant | None = None, first=()) -> Fork:
        fork = Fork(self.work / str(next(self.count)), whole, each)
        fork.folder.mkdir()
        (fork.folder / "said").touch()
        sys.stdout.flush()
        fork.pid = os.fork()
        if fork.pid == 0:
            self.child(fork.folder, tests, mutant, first)
        return fork

    def child(self, folder: pathlib.Path, tests: str, mutant: Mutant | None, first) -> None:
        """Never returns."""
        status, root = BROKEN, self.project.root
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for number in (1, 2):
                os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            os.chdir(root)
            sys.path.insert(0, str(root))
            sys.dont_write_bytecode = True
            path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
            os.environ.update(PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
            if mutant is not None:
                name = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                sys.meta_path.insert(0, Loader(root / mutant.file, name, mutant.source))
            file = open(folder / "said", "a", buffering=1)
            traced = {str(root / name): name for name in self.project.suite} if mutant is None else {}
            watch = Watch(file, first, str(self.state / "compiled"), traced)
            options = f"-x -q -p no:cacheprovider -p no:xdist -o addopts= --rootdir {root} --basetemp {folder}/tmp"
            status = int(pytest.main([*shlex.split(tests), *options.split()], plugins=[watch]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def drive(self, work: Iterable[Steps]) -> None:
        """Sends generators the ends of the forks that they yield, some at a time, until the deadline."""
        work, running = iter(work), {}
        try:
            while time.time() < self.deadline:
                while len(running) < self.jobs and (job := next(work, None)):
                    running[job] = next(job, None)
                if not running:
                    return
                for job, fork in list(running.items()):
                    if end := fork.ended() if fork else ("passed", ""):
                        del running[job]
                        with contextlib.suppress(StopIteration):
                            running[job] = job.send(end)
                        if fork:
                            shutil.rmtree(fork.folder, ignore_errors=True)
                time.sleep(0.02)
        finally:
            for fork in filter(None, running.values()):
                fork.kill()

    def measure(self, tests: str) -> Steps:
        """The baseline of a test file, once: its time, and which test calls which function."""
        while tests in self.measuring and tests not in self.base:
            yield None
        if tests in self.base:
            return
        self.measuring.add(tests)
        fork = self.start(tests)
        verdict, node = yield fork
        if verdict != "passed":
            raise SystemExit(f"{tests} does not pass without a mutation ({node}):\n{fork.log()}")
        found, seconds = fork.said(), time.time() - fork.began
        longest = max(
            seconds - sum(found["tests"].values()), *found["tests"].values()
        )  # or what comes before the tests
        self.base[tests] = {**found, "seconds": seconds, "longest": longest}
        self.base_file.write_text(json.dumps(self.base))
        print(f"baseline {seconds:6.1f} s  {tests}", flush=True)

    def attempt(self, mutant: Mutant) -> Steps:
        """The tests of a mutant, file by file, until one fails; then its record."""
        verdict, node, spent, least = "passed", "", 0.0, self.project.least_seconds
        killers = [killer for killer, _ in self.killers[mutant.file, mutant.function].most_common()]

        def turn(tests: str) -> int:
            known = self.base[tests]["tests"] if tests in self.base else ()
            return min([i for i, killer in enumerate(killers) if killer in known], default=len(killers))

        for tests in sorted(self.project.tests_of(mutant.file), key=turn):
            yield from self.measure(tests)
            base = self.base[tests]
            calling = [node for node, places in base["calls"].items() if any(map(mutant.within, places))]
            if calling:
                limits = (max(least, 4 * base[name]) for name in ("seconds", "longest"))
                fork = self.start(tests, *limits, mutant, killers + calling)
                verdict, node = yield fork
                spent += time.time() - fork.began
            if verdict != "passed":
                break
        if verdict == "passed":
            verdict, node = "survived", ""
        self.killers[mutant.file, mutant.function][node] += 1
        record = {"id": mutant.id, "key": mutant.key, "status": verdict, "seconds": round(spent, 2), "killed_by": node}
        self.records[mutant.key] = record | {name: getattr(mutant, name) for name in SHOWN}
        with open(self.out, "a") as file:
            file.write(json.dumps(self.records[mutant.key]) + "\n")
        print(f"{verdict:8} {spent:6.1f} s  {mutant.id}  {node}", flush=True)

    def run(self, chosen: list[Mutant], again: bool) -> int:
        """Returns how many are left."""

        def left() -> list[Mutant]:
            return [mutant for mutant in chosen if mutant.key not in self.records]

        if again:
            self.records = {key: record for key, record in self.records.items() if record["status"] == "killed"}
        try:
            self.drive(self.attempt(mutant) for mutant in left())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        return len(left())


def preload(names: list[str]) -> None:
    """Imports what every fork needs; one thread, and no JAX backend, which would not survive a fork."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "hypothesis" in sys.modules:
        hypothesis = sys.modules["hypothesis"]
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # that it fails is enough: no shrinking
        hypothesis.settings.register_profile("mutate", derandomize=True, database=None, deadline=None, phases=phases)
        hypothesis.settings.load_profile("mutate")
    gc.freeze()


# -------------------------------------------------------------------------------------------------------------- report


def json_lines(path: pathlib.Path) -> Generator[dict, None, None]:
    """The objects of a file's lines; a line cut short is none, a file that is not there has none."""
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def report(mutants: list[Mutant], lines: Iterable[dict], table) -> str:
    """Markdown: a row a file, and what survived. A record of a function that has changed since does not count.

    The share is of what was run: killed and timed out over these and survivors; equivalents are in neither.
    """
    records = {record["key"]: record for record in lines}
    counts, survivors, equivalents = collections.defaultdict(collections.Counter), [], []
    for mutant in mutants:
        record, why = records.get(mutant.key), why_equivalent(mutant, table)
        status = record["status"] if record else "not run"
        if why and status in ("survived", "not run"):
            status = "equivalent"
            equivalents.append((mutant, why))
        elif status == "survived":
            survivors.append((mutant, "" if record["seconds"] else "no test calls it"))
        for name in (mutant.file, "all"):
            counts[name].update([status, "mutants"])
    lines = [f"| file | {' | '.join(COLUMNS)} | share |", "|---" + "|---:" * (len(COLUMNS) + 1) + "|"]
    for name, count in counts.items():
        killed = count["killed"] + count["timeout"]
        share = f"{100 * killed / (killed + count['survived']):.1f} %" if killed + count["survived"] else "-"
        lines.append(f"| {name} | {' | '.join(str(count[column]) for column in COLUMNS)} | {share} |")
    for title, found in (("Survivors", survivors), ("Equivalent", equivalents)):
        lines += ["", f"## {title}: {len(found)}", ""]
        for mutant, why in found:
            lines.append(f"- {mutant.file}:{mutant.line} `{mutant.function}`, {mutant.operator}{why and f': {why}'}")
            lines += [f"  - `{mutant.original}`", f"  - `{mutant.mutated}`"]
    for entry in table:
        of_entry = [m for m in mutants if why_equivalent(m, [entry])]
        if not of_entry and entry[0] in counts:
            lines.append(f"\nThe table of equivalents has an entry that is no mutant: {entry[:4]}")
        if any(records.get(m.key, {}).get("status") == "killed" for m in of_entry):
            lines.append(f"\nThe table of equivalents has an entry that was killed: {entry[:4]}")
    return "\n".join(lines)


def main(argv: list[str] | None = None, project: Project | None = None) -> int:
    project = project or Project(pathlib.Path(__file__).resolve().parents[1], SUITE, PRELOADED, EQUIVALENT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", help="ends of paths; default: all of SUITE")
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of the sample")
    parser.add_argument("--sample", type=int, help="at most so many of each file")
    parser.add_argument("--cap_minutes", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) // 2, 1), help="processes at once")
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines, appended to; what it has is not run again")
    parser.add_argument("--again", action="store_true", help="run what survived or timed out again")
    parser.add_argument("--list", action="store_true", help="only list the mutants")
    parser.add_argument("--report", type=pathlib.Path, help="only print the report of these JSON lines")
    args = parser.parse_args(argv)
    if args.report:
        print(report(project.mutants(args.files), json_lines(args.report), project.equivalent))
    elif args.list:
        for mutant in sample(project.mutants(args.files), args.seed, args.sample):
            print(f"{mutant.id}  {mutant.function}\n    {mutant.original}\n    {mutant.mutated}")
    elif not args.out:
        parser.error("--out, --list or --report is needed")
    else:
        deadline = time.time() + 60 * args.cap_minutes
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        preload(project.preloaded)
        with tempfile.TemporaryDirectory(prefix="mutate-") as work:
            runner = Runner(project, pathlib.Path(work), args.out.resolve(), args.jobs, deadline)
            chosen = sample(runner.project.mutants(args.files), args.seed, args.sample)
            chosen = [mutant for mutant in chosen if not why_equivalent(mutant, project.equivalent)]
            left = runner.run(chosen, args.again)
            print(f"{len(chosen) - left} of {len(chosen)} mutants done, {left} left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
