"""A tokenizer with whole calls of tools as single tokens, so that random weights call tools; and the tools."""

import json
import os

from rlhf_jax.data.fast_tokenizer import EOS, PAD, UNK, word_level_tokenizer

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMES = ("add", "tell", "fail", "absent")
CALLS = [{"name": "add", "arguments": {"a": n, "b": 1}} for n in range(4)]
CALLS += [{"name": "tell", "arguments": {"word": word}} for word in ("x", "y", "z", "x y z", "x x x x x x x x")]
CALLS += [{"name": "fail", "arguments": {}}, {"name": "absent", "arguments": {}}, {"name": "add", "arguments": [1]}]
WORDS = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in CALLS]
WORDS += ["<tool_call>[1, 2]</tool_call>"]
"""Calls, and one that is malformed."""
LETTERS = ("x", "y", "z", " ", *map(str, range(10)))
VOCABULARY = [EOS, PAD, UNK, "<system>", "<user>", "<assistant>", "<tool>", "<tools>", *WORDS, *LETTERS]

SHORT_TURNS = tuple(map(VOCABULARY.index, (EOS, *"3456789")))
"""Stop ids with which turns are short."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tell(word: str) -> str:
    """Says a word.

    Args:
        word: The word.
    """
    return word


def fail() -> str:
    """Always fails."""
    raise ValueError("x y")


TOOLS = [add, tell, fail]


class Counter:
    """Counts up to a number that the row has."""

    def __init__(self):
        self.resets = 0

    def reset(self, prompt, answer, **_):
        self.resets, self.count, self.answer = self.resets + 1, 0, answer
        return f" {int(answer) % 10}" if int(answer) % 3 else None

    def add(self, a: int, b: int) -> int:
        """Counts.

        Args:
            a: How much.
            b: Ignored.
        """
        self.count += 1 if isinstance(a, int) else 0
        return self.count

    def get_reward(self):
        return float(self.count)


def save_tokenizer(folder):
    """Writes the tokenizer. Returns its path."""
    pieces = r'<tool_call>\{"name".*?</tool_call>|<tool_call>\[1, 2\]</tool_call>|<\w+>|\w+| |[^\w ]+'
    tokenizer = word_level_tokenizer(VOCABULARY, pieces)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def prompts(count):
    """Rows of conversations that differ in their lengths."""
    words = ["x", "x y", "z z z", "1 2", "y"]
    texts = [" ".join([words[i % 5]] * (1 + i % 2)) for i in range(count)]
    return [{"prompt": [{"role": "user", "content": text}], "answer": str(i)} for i, text in enumerate(texts)]


def save(folder, rows):
    """Writes the tokenizer and prompts.jsonl with `rows` rows."""
    os.makedirs(folder, exist_ok=True)
    save_tokenizer(f"{folder}/tokenizer")
    with open(f"{folder}/prompts.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in prompts(rows))
