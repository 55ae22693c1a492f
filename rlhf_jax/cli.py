"""The console command `rlhf-jax COMMAND ...`: each command is a module, imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import rlhf_jax
from rlhf_jax.utils.output import show

COMMANDS = {  # command: the module whose main runs it, and what it does
    "train": ("train", "train a model: one stage, or a pipeline of SFT, reward model and PPO, RLOO or GRPO"),
    "sweep": (
        "sweep.command",
        "train with each combination of several values of options, one run after another; a table",
    ),
    "evaluate": ("evaluate.__main__", "rewards, KL, win rates, best-of-n and ROUGE of a policy on held-out prompts"),
    "report": ("report.__main__", "one HTML page about a run, or comparing several"),
    "diff": ("rerun.diff", "where two runs part: options, data, the first update, row and tensor that differ"),
    "replay": ("rerun.replay", "what happened in one update, row by row; or with another option on the same samples"),
    "chat": ("chat", "chat with a policy in the terminal"),
    "compile": ("compile", "compile a run's programs ahead, on its devices, into a folder that the run reads"),
    "configs": ("config.shipped", "list the shipped configs, show one, copy one to edit"),
}


def usage() -> str:
    """The help."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {meaning}" for name, (_, meaning) in COMMANDS.items())
    return f"""usage: rlhf-jax COMMAND ...

RLHF in JAX: from a base model to a policy trained by PPO, RLOO or GRPO.

{rows}

  rlhf-jax train --config quickstart.py     all three stages of a small model, in minutes on a CPU, without a network
  rlhf-jax COMMAND --help                   the options of a command
  rlhf-jax --version"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the words after `rlhf-jax`; None: those of the process.

    Returns:
      The command's exit status; 2 if there is no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        show(usage())
        return 0 if words else 2
    if words[0] == "--version":
        show(f"rlhf_jax {rlhf_jax.__version__}")
        return 0
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        print(f"error: {_unknown(command)}", file=sys.stderr)
        return 2
    if command == "train":
        return _train(rest)
    return importlib.import_module(f"rlhf_jax.{COMMANDS[command][0]}").main(rest)


def _unknown(command: str) -> str:
    """A line about a command that does not exist."""
    import difflib

    if command.startswith("--"):
        return f"{command} comes before a command. Did you mean rlhf-jax train {command}?"
    close = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"unknown command {command!r}.{hint} The commands are {', '.join(COMMANDS)}."


def _train(argv: Sequence[str]) -> int:
    """`train`. Help and errors in flags are printed before its module is imported, which takes seconds."""
    from rlhf_jax.config import command_line
    from rlhf_jax.errors import UserError

    try:
        parsed = command_line.parse_recipe(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    except SystemExit as end:  # after the help
        return int(end.code or 0)
    from rlhf_jax import train

    return train.main(argv, parsed)


if __name__ == "__main__":
    sys.exit(main())
