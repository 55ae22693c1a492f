"""Chat with a policy in a terminal: `rlhf-jax chat RUN`, or `python -m rlhf_jax.chat`.

    rlhf-jax chat runs/quickstart --temperature 0.7
    rlhf-jax chat runs/tldr_ppo_1b --multiline < post.txt
    rlhf-jax chat runs/quickstart_vision_grpo --image picture.png

If the tokenizer has a chat template, messages form a conversation until /new or until the context is full. Other
policies complete each text on its own, without history. A base or summarization policy expects a whole prompt,
including its "TL;DR:": --multiline reads one up to two empty lines or the end of the input.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax import inference, storage
from rlhf_jax.config import command_line
from rlhf_jax.errors import UserError
from rlhf_jax.generate.options import SamplingOptions
from rlhf_jax.models.options import ComputeOptions, Dtype
from rlhf_jax.option import (
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    TopP,
    option,
    out_of_range,
)
from rlhf_jax.utils.output import guarded_output
from rlhf_jax.utils.text import printable

PROG = "rlhf-jax chat"
HELP = "/new starts a new conversation, /seed N sets the seed, /quit (or end of input) quits"


@dataclasses.dataclass(frozen=True)
class ChatOptions(Options):
    """Chat with a policy: a conversation where its tokenizer has a chat template, else one completion for each text."""

    model: str | None = None
    """A run's folder, a checkpoint's folder or a hub name; may be given without the flag."""
    revision: str | None = None
    """Hub revision."""
    tokenizer: str | None = None
    """Folder or hub name, if the checkpoint has no tokenizer."""
    dtype: Dtype = option("float32", like=ComputeOptions)
    max_new_tokens: PositiveInt = 128
    """Maximum tokens of a response."""
    temperature: NonNegativeFloat = 0.7
    """Sampling temperature; 0: greedy."""
    top_k: NonNegativeInt = option(0, like=SamplingOptions)
    top_p: TopP = option(1.0, like=SamplingOptions)
    repetition_penalty: PositiveFloat = option(1.0, like=SamplingOptions)
    stop: tuple[str, ...] = ()
    """Texts that end a response, which is cut before them."""
    regex: str | None = None
    """Regular expression that each response matches, as structured_outputs_regex of training."""
    seed: NonNegativeInt = 0
    """Seed of the first response; each further one adds 1."""
    system: str | None = None
    """System message; needs a chat template."""
    image: tuple[str, ...] = ()
    """Image files, shown with the first text of each conversation."""
    multiline: bool = False
    """An input ends with two empty lines."""


def questions(multiline: bool) -> Iterator[str]:
    """User inputs: one line each, or with `multiline` all lines up to two empty ones."""
    prompt = "> " if sys.stdin.isatty() else ""
    lines: list[str] = []
    while True:
        try:
            line = input(prompt if not lines else "")
        except EOFError:
            break
        if not multiline or (not lines and line.startswith("/")):
            yield line
        elif line == "" and lines and lines[-1] == "":
            yield "\n".join(lines[:-1])
            lines = []
        else:
            lines.append(line)
    if any(lines):
        yield "\n".join(lines)


@guarded_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, or 2 after a user error (one line on stderr)."""
    try:
        options = command_line.parse_options(
            sys.argv[1:] if argv is None else argv, ChatOptions, PROG, positional="model"
        )
        if problems := [*out_of_range(options)]:
            raise UserError("\n".join(problems))
        if options.model is None:
            raise UserError(f"{PROG} needs a model: {PROG} runs/quickstart")
        if missing := next((path for path in options.image if not storage.is_file(path)), None):
            raise UserError(f"--image {missing}: no such file")
        policy = inference.load_policy(
            options.model,
            revision=options.revision,
            tokenizer=options.tokenizer,
            dtype=options.dtype,
            images=bool(options.image),
        )
        for name in ("system", "image"):
            if getattr(options, name) and not policy.tokenizer.hf.chat_template:
                raise UserError(f"--{name}: {policy.path} has no chat template")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    try:
        converse(policy, options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


def converse(policy: inference.Policy, options: ChatOptions) -> None:
    """Answers the inputs until they end: answers on stdout, the rest on stderr."""
    conversational = bool(policy.tokenizer.hf.chat_template)
    system = [{"role": "system", "content": options.system}] if options.system else []
    messages, seed = list(system), options.seed
    ends = "two empty lines end an input, " if options.multiline else ""
    mode = "conversation" if conversational else "no chat template: each text is completed on its own"
    print(f"{policy.path}: {mode}. {ends}{HELP}", file=sys.stderr)
    sampling: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "stop", "regex")
    }
    for text in questions(options.multiline):
        if text == "/quit":
            break
        if text == "/new":
            messages = list(system)
        elif text.startswith("/seed "):
            number = text.removeprefix("/seed ").strip()
            seed = int(number) if number.isdecimal() else seed
        elif text.strip():
            content: Any = text
            if options.image and len(messages) == len(system):
                images = [{"type": "image", "image": path} for path in options.image]
                content = [*images, {"type": "text", "text": text}]
            asked = [*messages, {"role": "user", "content": content}]
            try:
                (answer,) = policy.generate([asked] if conversational else [text], seed=seed, **sampling)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            messages, seed = [*asked, {"role": "assistant", "content": answer}], seed + 1
            print(printable(answer), flush=True)
            if not answer.strip():
                print("(empty response)", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
