"""Options of tools."""

from __future__ import annotations

import dataclasses

from rlhf_jax.option import Options, PositiveFloat, PositiveInt, option


@dataclasses.dataclass(frozen=True)
class ToolOptions(Options):
    """What a policy may call while it responds."""

    # --- tools
    tools: tuple[str, ...] = option((), path=True)
    """Functions that the policy may call in its responses to conversations: 'module:function', 'file.py:function' or
    'package.module.function', with type hints and a Google docstring (docs/tools.md)."""
    environment_factory: tuple[str, ...] = option((), path=True)
    """Class whose instances are reset for each response and whose methods the policy may call: 'file.py:Class' or
    'textarena:GAME', or several as 'NAME=file.py:Class' with a column 'environment' in the data (docs/tools.md)."""
    max_tool_calling_iterations: PositiveInt | None = option(None, rare=True)
    """Maximum number of times that a response continues after tool calls; None: limited by response_length alone."""
    tool_timeout: PositiveFloat = option(60.0, rare=True)
    """Timeout of one call of a tool, in seconds; its result is then an error that the policy reads. The timeout of a
    reset too, which ends the run."""
    tools_replay: str | None = option(None, path=True, rare=True, resume="free")
    """Folder of a run of these options that called tools: its recorded results are taken in place of calls of
    functions; environments are reset, and their calls repeated and compared."""
