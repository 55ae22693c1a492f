"""Chat with a policy in a terminal.

    python scripts/chat.py --model runs/quickstart --temperature 0.7
    python scripts/chat.py --model runs/tldr/policy --multiline < post.txt
    python scripts/chat.py --model runs/quickstart_vision_grpo --image picture.png

If the tokenizer has a chat template, messages form a conversation until /new or until the context is full. Other
policies complete each text on its own, without history. A base or summarization policy expects a whole prompt,
including its "TL;DR:": --multiline reads one up to two empty lines or the end of the input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import rlhf_jax
from rlhf_jax.errors import UserError
from rlhf_jax.runtime import compile_cache
from rlhf_jax.utils.text import escape_unencodable_output, printable

HELP = "/new starts a new conversation, /seed N sets the seed, /quit (or end of input) quits"


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


def main() -> int:
    """The command. Exit code 2: wrong options."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a run's folder, a checkpoint's folder or a hub name")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--tokenizer", help="folder or hub name, if the checkpoint has no tokenizer")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute dtype")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="maximum tokens of a response")
    parser.add_argument("--temperature", type=float, default=0.7, help="sampling temperature; 0: greedy")
    parser.add_argument("--top_k", type=int, default=0, help="sample from the k most likely tokens; 0: all")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus sampling: probability mass; 1: all")
    parser.add_argument("--repetition_penalty", type=float, default=1.0, help="1: off")
    parser.add_argument("--stop", nargs="*", default=[], help="stop texts; a response ends before them")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first response; each further one adds 1")
    parser.add_argument("--system", help="system message; needs a chat template")
    parser.add_argument("--image", nargs="*", default=[], help="image files, shown with each conversation's first text")
    parser.add_argument("--multiline", action="store_true", help="an input ends with two empty lines")
    args = parser.parse_args()
    escape_unencodable_output()
    compile_cache.enable()
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
    }
    try:
        policy = rlhf_jax.load_policy(
            args.model, revision=args.revision, tokenizer=args.tokenizer, dtype=args.dtype, images=bool(args.image)
        )
        conversational = bool(policy.tokenizer.hf.chat_template)
        if args.image and not conversational:
            raise UserError(f"--image: {policy.path} has no chat template")
        if args.system and not conversational:
            raise UserError(f"--system: {policy.path} has no chat template")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages, seed = list(system), args.seed
    ends = "two empty lines end an input, " if args.multiline else ""
    mode = "conversation" if conversational else "no chat template: each text is completed on its own"
    print(f"{policy.path}: {mode}. {ends}{HELP}", file=sys.stderr)
    try:
        for text in questions(args.multiline):
            if text == "/quit":
                break
            if text == "/new":
                messages = list(system)
                continue
            if text.startswith("/seed "):
                number = text.removeprefix("/seed ").strip()
                seed = int(number) if number.isdecimal() else seed
                continue
            if not text.strip():
                continue
            content: Any = text
            if args.image and len(messages) == len(system):
                images = [{"type": "image", "image": path} for path in args.image]
                content = [*images, {"type": "text", "text": text}]
            asked = [*messages, {"role": "user", "content": content}]
            try:
                (answer,) = policy.generate([asked] if conversational else [text], stop=args.stop, seed=seed, **options)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            messages, seed = [*asked, {"role": "assistant", "content": answer}], seed + 1
            print(printable(answer), flush=True)
            if not answer.strip():
                print("(empty response)", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
