"""Runs that `chaos.py` kills: shortened quickstart stages, one start of a run (a leg), and timings of its phases."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

from rlhf_jax.config import files as config_files
from rlhf_jax.config import resolve, stages_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "scripts" / "launch"))

from launch_local import end_with_parent, free_port  # noqa: E402

from tests.helpers.children import QUICK  # noqa: E402

UPDATES, SAVE_STEPS = 6, 2
PATIENCE = {"leg": 900.0, "others": 360.0}  # seconds until a leg, or its remaining processes, counts as hung
BARE = {"model_name_or_path": None, "sft_model_path": None, "scratch_model": "2x32x4"}

# GRPO starts from random weights; its reference and the coefficient of its entropy bonus change from update to update.
MOVING = {
    "sft_model_path": None,
    "scratch_model": "qwen2:2x64x4x2",
    "beta": 0.05,
    "sync_ref_model": True,
    "ref_model_sync_steps": 3,
    "use_adaptive_entropy": True,
    "entropy_target": 20.0,
}
ADAPTED = {"use_peft": True, "lora_r": 4, "lora_target_modules": ("all-linear",), "lora_value": "own"}

# 80 rows are 2.5 updates, so epochs of the data end within the run, as do evaluations and samples.
EVERY = {"save_steps": SAVE_STEPS, "logging_steps": 1, "eval_steps": 3, "max_train_samples": 80, "max_eval_samples": 16}
SUPERVISED = {"batch_size": 32, "max_steps": UPDATES, "warmup_steps": 2}
ROLLING = {"batch_size": 32, "total_episodes": 32 * UPDATES, "log_completions": True, "num_sample_generations": 3}


def configs(folder: pathlib.Path, short: bool, adapters: bool = False) -> dict[str, str]:
    """{stage: JSON} of the quickstart's stages with few updates, each starting from the models of earlier stages.

    Args:
      folder: of the campaign; models come from its uninterrupted runs.
      short: smaller models from scratch and a reward function instead of the reward model, so stages are independent.
      adapters: train LoRA adapters.
    """
    found = {}
    for pipeline in ("quickstart", "quickstart_rloo", "quickstart_math"):
        for name, stage in stages_of(resolve(config_files.load_config(pipeline))).items():
            if name in found:
                continue
            options = {**EVERY, **(SUPERVISED if name in ("sft", "reward") else ROLLING), "run_dir": "run"}
            if name == "grpo":
                options |= MOVING | ({"sync_ref_model": False} if adapters else {})
            elif short:
                options |= {key: value for key, value in BARE.items() if hasattr(stage, key)}
                options["reward_model_path"], options["reward_funcs"] = None, ("rlhf_jax.data.synthetic:gold_reward",)
            elif name != "sft":
                options["model_name_or_path"] = options["sft_model_path"] = str(folder / "whole/sft/run/policy")
                options["reward_model_path"] = str(folder / "whole/reward/run/reward_model")
            if adapters:
                options |= ADAPTED
            options = {key: value for key, value in options.items() if hasattr(stage, key)}
            found[name] = config_files.to_json(dataclasses.replace(stage, **options))
    return found


@dataclasses.dataclass(frozen=True)
class Plan:
    """One kill.

    Attributes:
      phase: compile, rollout, update, save, export; 'any': at any moment of the plain command.
      number: of the update, step or compilation.
      wait: seconds after the start of the phase; for 'any', of the process.
      file: kill right before this file change of the phase instead, counted from 1; 0: by time.
    """

    phase: str
    number: int = 0
    wait: float = 0.0
    file: int = 0


@dataclasses.dataclass(frozen=True)
class Event:
    """A line reported by chaos_child.py."""

    at: float
    kind: str
    phase: str
    number: int
    rest: tuple[str, ...] = ()

    @classmethod
    def of(cls, line: str) -> Event:
        at, kind, phase, number, *rest = line.split()
        return cls(float(at), kind, phase, int(number), tuple(rest))

    @property
    def commits(self) -> bool:
        """Whether it renames a checkpoint folder, which commits it."""
        return self.kind == "file" and self.rest[1] == "rename" and self.rest[2].count(os.sep) == 1


class Leg:
    """The processes of one start of a run; one of them may be instrumented and killed."""

    def __init__(
        self,
        folder: pathlib.Path,
        config: pathlib.Path,
        cache: pathlib.Path,
        *,
        plan: Plan | None = None,
        watched: bool = False,
        how: str = "KILL",
        processes: int = 1,
        devices: int = 1,
        victim: int = 0,
        short: bool = False,
    ):
        """Starts them in `folder`, with run folder `run` in it. Without a plan the run is not killed."""
        self.plan, self.victim, self.how, self.events = plan, victim, how, []
        self.changed = threading.Condition()
        train = ["--config", str(config), "--run_dir", "run"]
        # NPROC sets the size of XLA's thread pool; a collective occupies one thread per device.
        env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "NPROC": "8"}
        env |= {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "JAX_NUM_CPU_DEVICES": str(devices)}
        env.pop("JAX_COMPILATION_CACHE_DIR", None)
        if short:
            env["XLA_FLAGS"] = QUICK
        address = f"127.0.0.1:{free_port()}"
        self.began, self.processes, self.reader = time.monotonic(), [], None
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(processes):
            join = ("--distributed", address, "--num_processes", str(processes), "--process_id", str(index))
            command, pipes = [sys.executable, "-m", "rlhf_jax.train"], ()
            if index == victim and (watched or plan is not None and plan.phase != "any"):
                source, sink = os.pipe()
                pipes = (sink,)
                command = [sys.executable, str(ROOT / "scripts/chaos/chaos_child.py"), "--report", str(sink)]
                if plan is not None and plan.file:
                    command += ["--before", f"{plan.phase}:{plan.number}:{plan.file}", "--signal", how]
                command.append("--")
            command += [*train, *(join if processes > 1 else ())]
            with open(folder / f"process-{index}.log", "a") as log:
                options = {"stdout": log, "stderr": subprocess.STDOUT, "preexec_fn": end_with_parent}
                self.processes.append(subprocess.Popen(command, cwd=folder, env=env, pass_fds=pipes, **options))
            if pipes:
                os.close(sink)
                self.reader = threading.Thread(target=self._read, args=(source,), daemon=True)
                self.reader.start()

    def _read(self, source: int) -> None:
        with os.fdopen(source, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with self.changed:
                    if line.endswith("\n"):
                        self.events.append(Event.of(line))
                    self.changed.notify_all()

    def ends(self) -> str | None:
        """Kills as planned and waits for all processes; returns an error message or None."""
        target, plan = self.processes[self.victim], self.plan
        if plan is not None and not plan.file and self._comes(plan):
            since = self.began if plan.phase == "any" else time.monotonic()
            _sleep(target, since + plan.wait)
            if target.poll() is None:
                target.send_signal(getattr(signal, f"SIG{self.how}"))
                self.hit = time.monotonic()
        wrong, deadline = None, self.began + PATIENCE["leg"]
        for process in (target, *self.processes):
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                wrong = f"process {self.processes.index(process)} hangs"
                process.kill()
                process.wait()
            if plan is not None and process is target:
                deadline = min(deadline, time.monotonic() + PATIENCE["others"])
        if self.reader is not None:
            self.reader.join(10)
        self.seconds = time.monotonic() - self.began
        return wrong

    hit: float | None = None
    """Time at which the signal was sent."""

    def _comes(self, plan: Plan) -> bool:
        """Waits until the phase of a plan has begun; False: the process ended first."""
        if plan.phase == "any":
            return True
        wanted, seen = ("begin", plan.phase, plan.number), 0
        with self.changed:
            while True:
                fresh, seen = self.events[seen:], len(self.events)
                if any((event.kind, event.phase, event.number) == wanted for event in fresh):
                    return True
                if self.processes[self.victim].poll() is not None:
                    return False
                if time.monotonic() > self.began + PATIENCE["leg"]:
                    return False
                self.changed.wait(0.2)

    @property
    def codes(self) -> list[int]:
        """Exit codes; -9: killed by SIGKILL."""
        return [process.returncode for process in self.processes]

    @property
    def was_hit(self) -> bool:
        """Whether the planned signal reached the run."""
        killed_itself = any(event.kind == "kill" for event in self.events)
        if self.how == "KILL":
            return self.codes[self.victim] == -signal.SIGKILL and (self.hit is not None or killed_itself)
        return self.hit is not None or killed_itself

    def died_in(self, measured: Measured) -> tuple[str, dict]:
        """(phase, details) at the time of the signal: the planned phase if the process was in it, else the actual one.

        A process without instrumentation is in 'any'.
        """
        if self.reader is None:
            return "any", {"seconds": round(self.hit - self.began, 3)}
        for event in self.events:
            if event.kind == "kill":
                where = {"before": " ".join(event.rest[1:]), "change": int(event.rest[0]), "number": event.number}
                return event.phase, where
        at, open_ones = self.hit, {}
        for event in self.events:
            # After SIGTERM the process continues. After SIGKILL it reports nothing more; the clocks are the same.
            if event.at > at and self.how == "TERM":
                break
            if event.kind == "begin":
                open_ones[event.phase] = event
            elif event.kind == "end":
                open_ones.pop(event.phase, None)
        save = open_ones.pop("save", None)
        if save is not None and measured.saving(self.events, save, at, self.victim == 0):
            open_ones["save"] = save
        phases = [self.plan.phase, *("save", "export", "compile", "rollout", "update")]
        for phase in phases:
            if phase in open_ones:
                began = open_ones[phase]
                return phase, {"number": began.number, "seconds": round(at - began.at, 4)}
        return "between", {"seconds": round(at - self.began, 3)}


def _sleep(process: subprocess.Popen, until: float) -> None:
    """Sleeps until a time or the end of a process."""
    while (left := until - time.monotonic()) > 0 and process.poll() is None:
        time.sleep(min(left, 0.05))


@dataclasses.dataclass
class Measured:
    """Timings of an uninterrupted, instrumented run of a stage.

    Attributes:
      wall: seconds of the plain command with a warm compilation cache.
      seconds: {phase: {number: seconds}}.
      files: {phase: {number: file changes}}.
      renames: of checkpoint folders, per save.
    """

    wall: float
    seconds: dict[str, dict[int, float]]
    files: dict[str, dict[int, int]]
    renames: int

    @classmethod
    def of(cls, events: list[Event], wall: float) -> Measured:
        seconds: dict[str, dict[int, float]] = {"save": {}}
        files: dict[str, dict[int, int]] = {}
        began: dict[tuple[str, int], float] = {}
        renames: dict[int, int] = {}
        for event in events:
            if event.kind == "begin":
                began[event.phase, event.number] = event.at
            elif event.kind == "end":
                took = event.at - began[event.phase, event.number]
                seconds.setdefault(event.phase, {})[event.number] = took
            elif event.kind == "file":
                files.setdefault(event.phase, {})[event.number] = int(event.rest[0])
                if event.commits and event.phase == "save":
                    renames[event.number] = renames.get(event.number, 0) + 1
                    seconds["save"][event.number] = event.at - began["save", event.number]
        files["any"] = {0: sum(event.kind == "file" for event in events)}
        return cls(wall, seconds, files, max(renames.values(), default=0))

    def saving(self, events: list[Event], save: Event, at: float, renaming: bool) -> bool:
        """Whether a save was still running at `at`: its last rename is missing, or was made less than 50 ms before.

        For a process that renames nothing, the usual duration decides.
        """
        if not renaming:
            return at - save.at < max(self.seconds["save"].values(), default=0.0)
        renames = [
            event.at for event in events if event.commits and event.number == save.number and event.at >= save.at
        ]
        longest = 3 * max(self.seconds["save"].values(), default=1.0) + 0.5
        return at - save.at < longest and (len(renames) < self.renames or at - renames[-1] < 0.05)


def remove(folder: pathlib.Path) -> None:
    """Removes a folder if it exists."""
    shutil.rmtree(folder, ignore_errors=True)
