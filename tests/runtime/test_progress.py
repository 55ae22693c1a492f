"""What a person at a terminal sees: a line that is alive while a run goes on, a summary at its end."""

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlhf_jax import train
from rlhf_jax.metrics import logger as metrics_logger
from rlhf_jax.runtime import progress
from rlhf_jax.runtime.run_folder import RunFolder
from rlhf_jax.train import Result
from tests.helpers.children import QUICK
from tests.helpers.paths import ROOT


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics_logger.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def logger(tmp_path, monkeypatch, clock):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.open("run", {"stage": "ppo"})
    names = ("objective/scores", "objective/kl")
    lines = progress.TerminalLines(stage="ppo", total_steps=48, logging_steps=0, names=names)
    with metrics_logger.MetricLogger.open(folder.path, terminal=lines) as made:
        made.lines = lines
        yield made
    folder.close()


def panel(logger, now, width=200, compiling=None):
    config = SimpleNamespace(batch_size=128)
    stage = SimpleNamespace(name="ppo", total_steps=48, config=config, compiling=compiling)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width)
    return progress.Panel(stage, logger.lines, lambda: now[0], console), stream


def test_the_panel_tells_update_phase_metrics_time_left_tokens_episodes_and_memory(logger, clock):
    now = [(0, "generate")]
    shown, _ = panel(logger, now)
    assert re.fullmatch(r"ppo 1/48 \| generate 0s \| 0 of 6,144 episodes \| [\d.]+ GiB", shown.line().plain)
    clock[0] += 7
    assert "generate 7s" in shown.line().plain
    for step, tokens in ((1, 1000), (2, 1900), (3, 2500), (4, 3300)):
        clock[0] += 3
        logger.log(step, {"num_tokens": tokens, "objective/scores": step / 4, "objective/kl": 0.5})
    now[0] = (4, "update")
    # Three updates are read, the first of which does not count; 600 tokens in the 3 s of the third.
    rest = r"2m12s left \| 200 tokens/s \| 512 of 6,144 episodes \| .* GiB"
    assert re.fullmatch(rf"ppo 5/48 \| update 0s \| scores 0.75 \| kl 0.5 \| {rest}", shown.line().plain)
    clock[0] += 2.5
    now[0] = (4, "save")
    assert "save 0s" in shown.line().plain


def test_the_panel_says_what_is_being_compiled(logger):
    compiling = SimpleNamespace(pending=["experience", "update"])
    shown, _ = panel(logger, [(0, "generate")], compiling=compiling)
    assert "ppo 1/48 | generate 0s | compiling experience, update | 0 of" in shown.line().plain
    compiling.pending = []
    assert "compiling" not in shown.line().plain


def test_the_panel_is_one_line_at_any_width_and_goes_away(logger):
    shown, stream = panel(logger, [(0, "generate")], width=30)
    with shown:
        print("a line of the run")
    text = stream.getvalue()
    assert "a line of the run\n" in text and "ppo 1/48 | generate" in text and "…" in text
    assert text.count("\x1b[?25l") <= text.count("\x1b[?25h")  # the cursor is there
    assert text.endswith("\x1b[2K") and "episodes" not in text


def test_there_is_no_panel_where_output_is_no_terminal(logger, capsys):
    with progress.Panel(SimpleNamespace(), logger.lines, lambda: (0, "")):
        print("plain")
    assert capsys.readouterr().out == "plain\n"


def test_the_summary_says_where_all_lies_and_what_is_next(tmp_path):
    place = tmp_path / "it's mine"
    result = Result(str(place), {}, {"policy": f"{place}/policy", "value": f"{place}/value"})
    lines = progress.summary(result, 250.0)
    assert lines[1] == f"done in 4m10s; everything is in {place}"
    assert lines[2:5] == [
        f"  policy   {place}/policy",
        f"  value    {place}/value",
        f"  metrics  {place}/metrics.jsonl",
    ]
    words = [shlex.split(line) for line in lines[lines.index("next:") + 1 :]]
    assert words == [
        [*shlex.split(progress.command("report")), str(place)],
        [*shlex.split(progress.command("evaluate")), "--run_dir", str(place)],
        [*shlex.split(progress.command("chat")), str(place), "--multiline"],
    ]


def test_commands_are_named_as_the_readers_shell_finds_them(tmp_path, monkeypatch):
    """By the console script of the running environment; else by its Python, relative to the working folder."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name in ("rlhf-jax", "python"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    assert progress.command("report") == "rlhf-jax report"
    monkeypatch.setenv("PATH", "/nowhere")
    assert progress.command("report") == f"{folder}/python -m rlhf_jax.report"
    monkeypatch.chdir(tmp_path)
    assert progress.command("report") == ".venv/bin/python -m rlhf_jax.report"


def test_the_summary_of_a_reward_model_offers_no_answers_and_a_pipelines_has_all_stages(tmp_path):
    model = Result("r/reward", {}, {"reward_model": "r/reward/reward_model"})
    assert not any("chat" in line for line in progress.summary(model, 1.0))
    stages = {
        "sft": Result("r/sft", {}, {"policy": "r/sft/policy"}),
        "reward": model,
        "ppo": Result("r/ppo", {}, {"policy": "r/ppo/policy", "value": "r/ppo/value"}),
    }
    lines = progress.summary(Result("r", {}, {}, stages), 1.0)
    assert [line.split() for line in lines[2:8]] == [
        ["sft/policy", "r/sft/policy"],
        ["reward/reward_model", "r/reward/reward_model"],
        ["ppo/policy", "r/ppo/policy"],
        ["ppo/value", "r/ppo/value"],
        ["metrics", "r/ppo/metrics.jsonl"],
        ["comparison", "r/ppo/comparison.json"],
    ]
    assert f"  {progress.command('report')} r" in lines


COMMAND = """--config tldr_sft.py --model_name_or_path none --scratch_model 1x16x2 --dataset_name synthetic
    --tokenizer_name_or_path synthetic --max_train_samples 32 --max_eval_samples 8 --batch_size 8 --micro_batch_size 8
    --query_length 44 --max_length 64 --length_buckets 64 --max_steps 4 --logging_steps 2 --warmup_steps 0
    --run_dir run"""


def test_the_command_in_a_terminal_has_the_panel(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    for name in ("NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "FORCE_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "rlhf_jax.train", *COMMAND.split()]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side is closed
            more = b""
        if not more:
            break
        seen += more
    os.close(ours)
    seen = seen.decode()
    assert process.wait(timeout=60) == 0, seen
    assert "\x1b[1msft 1/4 | " in seen and "of 32 rows | " in seen and " GiB" in seen
    assert "sft 4/4 | loss" in seen and "\x1b[?25h" in seen
    end = seen[seen.rindex("done in ") :]
    assert "run/policy" in end and "report run" in end and "\x1b" not in end


def test_the_command_in_a_file_has_plain_lines(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert train.main(COMMAND.split()) == 0
    said = capfd.readouterr()
    assert "\x1b" not in said.out + said.err and " GiB" not in said.out
    assert "sft 4/4 | loss" in said.out and "done in " in said.out
