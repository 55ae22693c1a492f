"""What a run prints: a line an update, a live line at the foot of a terminal, and a summary at the end."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rlhf_jax import storage
from rlhf_jax.errors import UserError
from rlhf_jax.metrics.logger import peak_memory
from rlhf_jax.metrics.sinks import Entry
from rlhf_jax.parallel import multihost
from rlhf_jax.utils.forks import undone_in_children
from rlhf_jax.utils.text import duration, printable, short_number

REFRESHES_PER_SECOND = 4


class TerminalLines:
    """A sink that prints every so many updates their number, the metrics that matter, MFU, seconds an update, time
    left."""

    def __init__(
        self,
        *,
        stage: str = "",
        total_steps: int = 0,
        logging_steps: int = 1,
        names: Sequence[str] = (),
        stream: TextIO | None = None,
    ):
        """
        Args:
          stage: what each line begins with.
          total_steps: updates of the whole run, for the time left.
          logging_steps: a line every so many updates; 0: none, messages only.
          names: metrics to print, in this order; those that an update lacks are left out.
          stream: default: standard output.
        """
        self._stage, self._total, self._every = stage, total_steps, logging_steps
        self._names, self._stream = tuple(names), stream
        self._last: dict[str, Any] = {}
        self._updates = 0
        self._mfu: float | None = None  # of the newest update
        self._paces: deque[tuple[float, int]] = deque(maxlen=20)  # (seconds, tokens of the run so far) of updates

    def write(self, entry: Entry) -> None:
        """Prints the entry's line where one is due, and its messages."""
        step, self._last = entry.step, entry.metrics
        if self._updates == 1:
            self._paces.clear()  # the first update compiles: its time says nothing about the others
        if step:
            self._updates += 1
            self._paces.append((entry.timings["time/step"], entry.metrics.get("num_tokens", 0)))
            self._mfu = entry.timings.get("mfu") if self._updates > 1 else None
        due = self._every and (step % self._every == 0 or step == self._total)
        for line in ([self.line(step, entry.metrics)] if due else []) + list(entry.messages):
            print(line, file=self._stream, flush=True)

    def line(self, step: int, metrics: dict[str, Any]) -> str:
        """The line of an update."""
        count = f"{step:>{len(str(self._total))}}/{self._total}" if self._total else str(step)
        count = f"{self._stage} {count}".strip()
        if not step:  # an evaluation before the first update
            return " | ".join([count, *(f"{n} {short_number(x)}" for n, x in metrics.items() if n.startswith("eval/"))])
        seconds, _ = self.pace() or (0.0, 0.0)
        left = [f"{duration(seconds * (self._total - step))} left"] if step < self._total else []
        return " | ".join([count, *self._format(metrics), *self._share(), f"{duration(seconds)}/update", *left])

    def last_metrics(self) -> list[str]:
        """The metrics that matter of the newest entry, formatted."""
        return [*self._format(self._last), *self._share()]

    def _share(self) -> list[str]:
        """The share of the devices' peak, where it is known."""
        return [] if self._mfu is None else [f"mfu {short_number(self._mfu)}"]

    def _format(self, metrics: dict[str, Any]) -> list[str]:
        return [f"{_label(n)} {short_number(metrics[n])}" for n in self._names if n in metrics]

    def pace(self) -> tuple[float, float] | None:
        """(seconds an update, tokens a second) over the last updates; tokens are 0 where they are not counted; None
        before the first update."""
        paces = list(self._paces)
        if not paces:
            return None
        seconds = [each for each, _ in paces]
        tokens = max(paces[-1][1] - paces[0][1], 0)
        return sum(seconds) / len(seconds), tokens / sum(seconds[1:]) if tokens else 0.0

    def close(self) -> None:
        """Nothing to close."""


def _label(name: str) -> str:
    """'objective/kl' -> 'kl'; 'eval/loss' keeps its prefix, since 'loss' is another metric."""
    return name if name.startswith("eval/") else name.split("/")[-1]


class Panel:
    """A live line at the foot of the terminal while a stage trains; none where output goes to a file or a pipe.

    A thread draws it from numbers that are already on the host: it never makes a device wait.
    """

    def __init__(self, stage: Any, lines: TerminalLines, now: Callable[[], tuple[int, str]], console=None):
        """
        Args:
          stage: that trains.
          lines: gets the stage's metrics.
          now: gives (updates done, current phase).
          console: rich's; None: standard output, if it is a terminal and this is the main process.
        """
        self._stage, self._lines, self._now = stage, lines, now
        self._phase: tuple[int, str] = (-1, "")
        self._since = time.monotonic()
        self._live = None
        self._forks = contextlib.ExitStack()
        if console is None:
            console = Console(highlight=False)
            if not (console.is_terminal and not console.is_dumb_terminal and multihost.is_main()):
                return
        self._live = Live(
            console=console,
            get_renderable=self.line,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> Panel:
        if self._live is not None:
            streams = sys.stdout, sys.stderr  # what the line takes the place of

            def undo() -> None:
                sys.stdout, sys.stderr = streams

            self._forks.enter_context(undone_in_children(undo))
            self._live.start()
            self._live.console.show_cursor(True)  # a second signal ends the process with the cursor hidden
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._live.stop()
            self._forks.close()

    def line(self) -> Text:
        """The line as it is now, cut at the terminal's width, so what changes most comes first."""
        stage, now = self._stage, self._now()
        if now != self._phase:
            self._phase, self._since = now, time.monotonic()
        step, phase = now
        parts = [
            f"{stage.name} {min(step + 1, stage.total_steps)}/{stage.total_steps}",
            f"{phase} {int(time.monotonic() - self._since)}s",
            *([f"compiling {', '.join(pending)}"] if (pending := stage.compiling and stage.compiling.pending) else []),
            *self._lines.last_metrics(),
        ]
        if (pace := self._lines.pace()) is not None:
            seconds, tokens = pace
            parts.append(f"{duration(seconds * max(stage.total_steps - step, 0))} left")
            parts += [f"{tokens:,.0f} tokens/s"] if tokens else []
        size = stage.config.batch_size
        parts.append(f"{step * size:,} of {stage.total_steps * size:,} {_ROWS.get(stage.name, 'episodes')}")
        peak = peak_memory()
        peak = peak.get("memory/peak_device_mib", peak.get("memory/peak_rss_mib", 0))
        parts.append(f"{peak / 1024:.1f} GiB")
        return Text(" | ".join(map(printable, parts)), no_wrap=True, overflow="ellipsis", style="bold")


_ROWS = {"sft": "rows", "reward": "pairs"}


def command(name: str) -> str:
    """How the reader's shell calls a command of this package: `rlhf-jax NAME` where it is found, else by Python."""
    script, python = shutil.which("rlhf-jax"), sys.executable
    if script and os.path.dirname(os.path.abspath(script)) == os.path.dirname(python):
        return f"rlhf-jax {name}"
    with contextlib.suppress(UserError):  # a reward function may have removed it
        python = python.removeprefix(os.path.join(storage.working_folder(), ""))
    return f"{shlex.quote(python)} -m rlhf_jax.{name}"


def summary(result: Any, seconds: float) -> list[str]:
    """Lines for the end of a command: where its outputs are, and what to run next.

    Args:
      result: `train.Result`.
      seconds: how long it took.
    """
    pipeline = bool(result.stages)
    results = result.stages or {"": result}
    lines = ["", f"done in {duration(seconds)}; everything is in {result.run_dir}"]
    rows = []
    for name, stage_result in results.items():
        prefix = f"{name}/" if pipeline else ""
        rows += [(f"{prefix}{part}", path) for part, path in stage_result.paths.items()]
    last = list(results.values())[-1]
    rows.append(("metrics", os.path.join(last.run_dir, "metrics.jsonl")))
    if pipeline:
        rows.append(("comparison", os.path.join(last.run_dir, "comparison.json")))
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {path}" for name, path in rows]
    place = shlex.quote(result.run_dir)
    lines += ["next:", f"  {command('report')} {place}", f"  {command('evaluate')} --run_dir {place}"]
    if "policy" in last.paths:
        lines += [f"  {command('chat')} {place} --multiline"]
    return [printable(line) for line in lines]
