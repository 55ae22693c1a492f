"""The tools and environments of a run, and how they change its config, its data and its responses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_jax.config import PolicyConfig
from rlhf_jax.data import PromptData, Tokenizer
from rlhf_jax.data.tool_calls import ToolCalls
from rlhf_jax.errors import UserError
from rlhf_jax.stages.turns import Turns
from rlhf_jax.tools.environments import Environments, open_environments
from rlhf_jax.tools.records import replayed
from rlhf_jax.tools.toolbox import Toolbox, open_toolbox


@dataclasses.dataclass
class Tools:
    """The tools of a run; falsy without any.

    Attributes:
      toolbox: of functions.
      environments: None: there are none.
      config: of the stage; with environments each response has a prompt of its own.
    """

    toolbox: Toolbox
    environments: Environments | None
    config: PolicyConfig

    def __bool__(self) -> bool:
        return bool(self.toolbox.schemas) or self.environments is not None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of all tools, each name once."""
        environments = {} if self.environments is None else self.environments.schemas
        schemas = [*self.toolbox.schemas, *(schema for schema_list in environments.values() for schema in schema_list)]
        return list({schema["function"]["name"]: schema for schema in schemas}.values())

    @property
    def reward_functions(self) -> list[Callable]:
        """Of the environments."""
        return [] if self.environments is None else self.environments.reward_functions

    @property
    def reward_columns(self) -> tuple[str, ...]:
        """What reward functions get beside the columns of the data (`Conversations.columns`)."""
        return () if self.environments is None else ("environments",)

    @property
    def messages(self) -> list[str]:
        """What is said of them at the start of a run."""
        if not self:
            return []
        names = ", ".join(schema["function"]["name"] for schema in self.schemas)
        return [f"tools {names} run in this process, with your rights"]

    @property
    def prompt_config(self) -> PolicyConfig:
        """The config whose chat template shows the tools to the policy."""
        if not self:
            return self.config

        def shown(kwargs: dict[str, Any] | None) -> dict[str, Any]:
            if "tools" in (kwargs or {}):
                raise UserError("chat_template_kwargs has 'tools', which cannot be called: give the option tools")
            return {**(kwargs or {}), "tools": self.schemas}

        entries, key = self.config.datasets, "chat_template_kwargs"
        if entries is not None:
            entries = tuple({**entry, key: shown(entry[key])} if key in entry else entry for entry in entries)
        factory = self.config.environment_factory
        if self.environments is not None:
            factory = factory or ("an argument of rlhf_jax.run",)
        kwargs = shown(self.config.chat_template_kwargs)
        changes: dict[str, Any] = {key: kwargs, "datasets": entries, "environment_factory": factory}
        return dataclasses.replace(self.config, **changes)

    def turns(self, sources: Sequence[PromptData], tokenizer: Tokenizer, *, positions: int, mesh: Any) -> Turns | None:
        """The turns of a policy; None without tools.

        Args:
          tokenizer: the policy's.

        Raises:
          UserError: prompts are texts, have images, tools of their own or no environment; or as `ToolCalls`.
        """
        if not self:
            return None
        for source in sources:
            name = source.report.name
            if not source.conversational:
                raise UserError(f"tools need conversations as prompts, lists of messages; those of {name} are texts")
            if source.images is not None:
                raise UserError(f"tools with images are not supported; {name} has images")
            if "tools" in source.column_names:
                raise UserError(f"{name} has a column 'tools' beside the option tools: remove one of them")
            if self.environments is not None and self.environments.several:
                for row, values in enumerate(source.raw):
                    self.environments.check_row(values, f"{name}, row {row}")
        calls = ToolCalls(tokenizer, self.schemas, self.config.chat_template_kwargs)
        return Turns(self.config, self.toolbox, self.environments, calls, positions, mesh)


def open_tools(config: PolicyConfig, functions: Sequence[Callable], environment_factory: Any) -> Tools:
    """The tools of a run.

    Args:
      functions: tools beside those of the config.
      environment_factory: in place of that of the config: a callable, or a dict of them; None: the config's.

    Raises:
      UserError: a tool is not a function with a schema, or an option does not work with tools.
    """
    environments = open_environments(config.environment_factory, environment_factory, config.tool_timeout)
    tools = Tools(open_toolbox(config.tools, functions, config.tool_timeout), environments, config)
    if config.tools_replay is not None:
        if not tools:
            raise UserError("tools_replay needs tools or environment_factory")
        replayed(config.tools_replay)
    if not tools:
        return tools
    for name in ("structured_outputs_regex", "structured_outputs_regex_column"):
        if getattr(config, name) is not None:
            raise UserError(f"{name} with tools is not supported: remove one of them")
    if config.stop_token is None and config.stop_token_ids is None:
        raise UserError("tools need a token that ends the policy's messages: set stop_token eos or stop_token_ids")
    if environments is None:
        return tools
    names = {schema["function"]["name"] for schema in tools.toolbox.schemas}
    for schema in (schema for schema_list in environments.schemas.values() for schema in schema_list):
        if schema["function"]["name"] in names:
            raise UserError(f"tool {schema['function']['name']!r} has the name of an environment's method: rename one")
    # A reset may return another text for each response.
    changes: dict[str, Any] = {"decode_longest_first": False}
    if config.shared_prompts:
        changes["shared_prompts"] = False
    return dataclasses.replace(tools, config=dataclasses.replace(config, **changes))
