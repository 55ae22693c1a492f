"""Talks to a policy in a terminal.

    python scripts/chat.py --model runs/quickstart --temperature 0.7
    python scripts/chat.py --model runs/tldr/policy --multiline < post.txt

Where the tokenizer has a chat template, a conversation goes on until /new or the context is full. Other policies go on
from each text as it is, and remember nothing: what a base or summarisation policy was trained on is a whole prompt,
its "TL;DR:" included, which --multiline takes, up to two empty lines or the end of the input.
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

HELP = "/new forgets what was said, /seed N draws otherwise, /quit ends (so does the end of the input)"


def questions(multiline: bool) -> Iterator[str]:
    """What is typed: a line each, or with `multiline` all lines up to an empty one that follows another empty one."""
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
    """Exit status 2 for what the user got wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a run's folder, a checkpoint's folder or a hub name")
    parser.add_argument("--revision", help="hub revision")
    parser.add_argument("--tokenizer", help="folder or hub name, where the checkpoint has none of its own")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="compute dtype")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="most tokens of a response")
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampling; 0: the likeliest token")
    parser.add_argument("--top_k", type=int, default=0, help="among the k likeliest tokens only; 0: all")
    parser.add_argument("--top_p", type=float, default=1.0, help="among the tokens of this probability; 1: all")
    parser.add_argument("--repetition_penalty", type=float, default=1.0, help="of tokens already there; 1: off")
    parser.add_argument("--stop", nargs="*", default=[], help="texts before which a response ends")
    parser.add_argument("--seed", type=int, default=0, help="of the first response; each further one adds 1")
    parser.add_argument("--system", help="system message, with a chat template")
    parser.add_argument("--multiline", action="store_true", help="a question ends with two empty lines")
    args = parser.parse_args()
    escape_unencodable_output()
    compile_cache.enable()
    options: dict[str, Any] = {
        name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty")
    }
    try:
        policy = rlhf_jax.load_policy(args.model, revision=args.revision, tokenizer=args.tokenizer, dtype=args.dtype)
        talks = bool(policy.tokenizer.hf.chat_template)
        if args.system and not talks:
            raise UserError(f"--system: {policy.path} has no chat template, so there is no place for it")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    system = [{"role": "system", "content": args.system}] if args.system else []
    said, seed = list(system), args.seed
    ends = "two empty lines end a text, " if args.multiline else ""
    print(f"{policy.path}: {'a conversation' if talks else 'each text by itself'}. {ends}{HELP}", file=sys.stderr)
    try:
        for text in questions(args.multiline):
            if text == "/quit":
                break
            if text == "/new":
                said = list(system)
                continue
            if text.startswith("/seed "):
                number = text.removeprefix("/seed ").strip()
                seed = int(number) if number.isdecimal() else seed
                continue
            if not text.strip():
                continue
            asked = [*said, {"role": "user", "content": text}]
            try:
                (answer,) = policy.generate([asked] if talks else [text], stop=args.stop, seed=seed, **options)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            said, seed = [*asked, {"role": "assistant", "content": answer}], seed + 1
            print(printable(answer), flush=True)
            if not answer.strip():
                print("(it ended at once: an empty answer)", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
