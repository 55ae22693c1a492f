"""What a person at a terminal sees beside the lines: what a run does at this moment, and at its end where all lies."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rlhf_jax.config import Config, Pipeline, PolicyConfig, stages_of
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.parallel import multihost
from rlhf_jax.utils.text import printable

REDRAWN = 4
"""Times a second."""


class Panel:
    """A line at the foot of the terminal while a stage trains, below all that is printed; none where output goes to a
    file or a pipe.

    A thread draws it, from numbers that are on the host already: it never makes a device wait.
    """

    def __init__(
        self, stage: Any, logger: metrics_logger.MetricLogger, now: Callable[[], tuple[int, str]], console=None
    ):
        """
        Args:
          stage: that trains.
          logger: of its metrics.
          now: gives (updates done, what is being done).
          console: rich's; None: standard output, where the first process has a terminal for it.
        """
        self._stage, self._logger, self._now = stage, logger, now
        self._doing: tuple[int, str] = (-1, "")
        self._since = time.monotonic()
        self._live = None
        if console is None:
            console = Console(highlight=False)
            if not (console.is_terminal and not console.is_dumb_terminal and multihost.is_main()):
                return
        self._live = Live(
            console=console,
            get_renderable=self.line,
            refresh_per_second=REDRAWN,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> Panel:
        if self._live is not None:
            self._live.start()
            self._live.console.show_cursor(True)  # a second signal ends the process without giving it back
        return self

    def __exit__(self, *_) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self) -> Text:
        """The line as it is now: cut at the terminal's width, what changes most first."""
        stage, now = self._stage, self._now()
        if now != self._doing:
            self._doing, self._since = now, time.monotonic()
        step, doing = now
        parts = [
            f"{stage.name} {min(step + 1, stage.total_steps)}/{stage.total_steps}",
            f"{doing} {int(time.monotonic() - self._since)}s",
            *self._logger.shown(self._logger.last),
        ]
        if (pace := self._logger.pace()) is not None:
            seconds, tokens = pace
            parts.append(f"{metrics_logger.duration(seconds * max(stage.total_steps - step, 0))} left")
            parts += [f"{tokens:,.0f} tokens/s"] if tokens else []
        size = stage.config.batch_size
        parts.append(f"{step * size:,} of {stage.total_steps * size:,} {_ROWS.get(stage.name, 'episodes')}")
        peak = metrics_logger.peak_memory()
        peak = peak.get("memory/peak_device_mib", peak.get("memory/peak_rss_mib", 0))
        parts.append(f"{peak / 1024:.1f} GiB")
        return Text(" | ".join(map(printable, parts)), no_wrap=True, overflow="ellipsis", style="bold")


_ROWS = {"sft": "rows", "reward": "pairs"}


def summary(config: Config, result: Any, seconds: float) -> list[str]:
    """Lines for the end of a command: where everything lies, and what to do with it.

    Args:
      config: that was run.
      result: `train.Result`.
      seconds: that it took.
    """
    pipeline = isinstance(config, Pipeline)
    results = result.stages if pipeline else {next(iter(stages_of(config))): result}
    lines = ["", f"done in {metrics_logger.duration(seconds)}; everything is in {result.run_dir}"]
    rows = []
    for name, found in results.items():
        begin = f"{name}/" if pipeline else ""
        rows += [(f"{begin}{part}", path) for part, path in found.paths.items()]
    last = list(results.values())[-1]
    rows.append(("metrics", os.path.join(last.run_dir, "metrics.jsonl")))
    if pipeline:
        rows.append(("comparison", os.path.join(last.run_dir, "comparison.json")))
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name:<{width}}  {path}" for name, path in rows]
    place = shlex.quote(result.run_dir)
    lines += ["next:", f"  python -m rlhf_jax.report {place}"]
    lines += [f"  python -m rlhf_jax.evaluate --run_dir {place}"]
    if any(isinstance(stage, PolicyConfig) for stage in stages_of(config).values()) or "policy" in last.paths:
        code = f'import rlhf_jax; print(rlhf_jax.load_policy({json.dumps(result.run_dir)}).generate(["..."]))'
        lines += [f"  python -c {shlex.quote(code)}"]
    return [printable(line) for line in lines]
