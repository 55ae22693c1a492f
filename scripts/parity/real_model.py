"""Compares a checkpoint on disk with transformers on real texts, in float32 and bfloat16.

    python scripts/parity/real_model.py FOLDER
    python scripts/parity/real_model.py FOLDER --text posts.jsonl --parts perplexity bfloat16

Texts are pieces of 10 to 500 tokens cut from --text (default: the files of docs/), or the rows of a .jsonl file
(prompt, and completion after it). One line is printed for each number; a distance is ||a - b|| / ||b||, the largest
over the texts. Parts:

- logits: float32 logits beside transformers', and greedy answers of 64 tokens to 20 texts;
- perplexity: of the texts, both;
- bfloat16: logits of both, beside transformers' in float32;
- context: a prompt that ends 64 tokens before the context does;
- export: the checkpoint as we write it, opened by transformers.

Needs torch. Exit code 1: logits in float32 beyond 1e-5, a perplexity beyond 1e-4, a greedy answer or an
export that differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

import rlhf_jax  # noqa: E402
from rlhf_jax.generate import Sampling  # noqa: E402
from rlhf_jax.models.io import hf  # noqa: E402
from rlhf_jax.types import PromptBatch  # noqa: E402
from tests.helpers.arrays import distance  # noqa: E402

PROMPTS, SHORTEST, LONGEST, ANSWER = 20, 10, 500, 64


@dataclasses.dataclass
class Compared:
    """The checkpoint in both libraries, and the texts.

    Attributes:
      path: of the checkpoint.
      texts: token ids of each.
      failures: numbers beyond their bounds.
    """

    path: str
    texts: list[np.ndarray]
    failures: list[str] = dataclasses.field(default_factory=list)

    def theirs(self, dtype: torch.dtype = torch.float32, path: str | None = None) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path or self.path, dtype=dtype).eval()

    def ours(self, dtype: str = "float32") -> Any:
        return rlhf_jax.load_policy(self.path, dtype=dtype)

    def report(self, name: str, value: float, bound: float = math.inf, form: str = ".1e") -> None:
        print(f"{name:58s} {value:{form}}", flush=True)
        if not value <= bound:
            self.failures.append(name)


# --- texts


def read_texts(tokenizer: Any, path: Path | None, most: int) -> list[np.ndarray]:
    """The texts in tokens, at most `most`."""
    if path is not None and path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:most]]
        texts = [row["prompt"] + row.get("completion", "") for row in rows]
        return [np.asarray(tokenizer(text)["input_ids"][: LONGEST + 100], np.int32) for text in texts]
    files = [path] if path else sorted((ROOT / "docs").glob("*.md"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)[:200_000]
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    lengths = np.linspace(SHORTEST, LONGEST, PROMPTS).astype(int)
    if len(ids) < lengths.sum():
        raise SystemExit(f"--text has {len(ids)} tokens; {lengths.sum()} are needed.")
    return np.split(ids[: lengths.sum()], np.cumsum(lengths)[:-1])


# --- ours, one padded text at a time, so that one program serves all


def padded(rows: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(tokens [1, C] left-padded, mask [1, C], columns of padding) of each row."""
    width = max(map(len, rows))
    for row in rows:
        tokens, start = np.zeros((1, width), np.int32), width - len(row)
        tokens[0, start:] = row
        yield tokens, np.arange(width)[None] >= start, start


def our_outputs(policy: Any, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of each row."""
    model = policy.model

    @jax.jit
    def compute(params, tokens, mask):
        return model.logits(params, model.hidden(params, tokens, mask, dtype=policy.dtype)).astype(jnp.float32)

    return [np.asarray(compute(policy.params, tokens, mask))[0, start:] for tokens, mask, start in padded(rows)]


def our_answer(policy: Any, row: np.ndarray, width: int) -> list[int]:
    """A greedy answer."""
    tokens = np.zeros((1, width), np.int32)
    tokens[0, width - len(row) :] = row
    batch = PromptBatch(tokens=tokens, lengths=np.asarray([len(row)], np.int32), rows=np.zeros(1, np.int32))
    sampling = Sampling(max_new_tokens=ANSWER, temperature=0.0, stop_ids=(policy.tokenizer.eos_id,))
    rollout = policy.sample(batch, 0, sampling)
    return np.asarray(rollout.response)[0, : int(rollout.lengths[0])].tolist()


def their_answer(model: Any, row: np.ndarray) -> list[int]:
    tokens = torch.tensor(row)[None].long()
    options = {"do_sample": False, "max_new_tokens": ANSWER}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(row) :].tolist()


def their_logits(model: Any, rows: list[np.ndarray]) -> list[np.ndarray]:
    return [model(torch.tensor(row)[None].long()).logits[0].float().numpy() for row in rows]


def perplexity(logits: list[np.ndarray], rows: list[np.ndarray]) -> float:
    """Of all tokens of the rows but their first."""
    losses = [
        F.cross_entropy(torch.tensor(scores[:-1]).double(), torch.tensor(row[1:]).long(), reduction="none")
        for scores, row in zip(logits, rows, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


# --- parts


def logits(both: Compared) -> None:
    rows = both.texts[:PROMPTS]
    theirs, ours = both.theirs(), both.ours()
    pairs = zip(our_outputs(ours, rows), their_logits(theirs, rows), strict=True)
    both.report("logits, float32: distance", max(distance(a, b) for a, b in pairs), 1e-5)
    width = max(map(len, rows))
    differ = sum(our_answer(ours, row, width) != their_answer(theirs, row) for row in rows)
    both.report(f"greedy answers of {ANSWER} tokens that differ, of {len(rows)}", differ, 0, "d")


def perplexities(both: Compared) -> None:
    theirs = perplexity(their_logits(both.theirs(), both.texts), both.texts)
    ours = perplexity(our_outputs(both.ours(), both.texts), both.texts)
    both.report(f"perplexity of {len(both.texts)} texts, transformers", theirs, form=".4f")
    both.report("perplexity, ours: relative difference", abs(ours - theirs) / theirs, 1e-4)


def bfloat16(both: Compared) -> None:
    rows = both.texts[:PROMPTS]
    exact = their_logits(both.theirs(), rows)
    both.report("logits, bfloat16, ours: distance", max(map(distance, our_outputs(both.ours("bfloat16"), rows), exact)))
    theirs = their_logits(both.theirs(torch.bfloat16), rows)
    both.report("logits, bfloat16, transformers: distance", max(map(distance, theirs, exact)))


def context(both: Compared) -> None:
    ours, theirs = both.ours(), both.theirs()
    length = ours.model.config.max_position_embeddings - ANSWER
    row = np.resize(np.concatenate(both.texts), length)
    [wanted] = [own[-256:] for own in their_logits(theirs, [row])]
    [found] = [own[-256:] for own in our_outputs(ours, [row])]
    both.report(f"last 256 logits of {length} tokens, float32: distance", distance(found, wanted), 1e-5)
    both.report("  greedy answers that differ", int(our_answer(ours, row, length) != their_answer(theirs, row)), 0, "d")


def export(both: Compared) -> None:
    ours, rows = both.ours(), both.texts[:2]
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, ours.model, ours.params, kind="causal")
        pairs = zip(their_logits(both.theirs(path=folder), rows), their_logits(both.theirs(), rows), strict=True)
        differ = sum(not np.array_equal(a, b) for a, b in pairs)
    both.report("export: texts with another logit in transformers", differ, 0, "d")


PARTS = {
    "logits": logits,
    "perplexity": perplexities,
    "bfloat16": bfloat16,
    "context": context,
    "export": export,
}


def main() -> int:
    """Prints the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--text", type=Path, help="a text to cut pieces from, or a .jsonl file of prompts")
    parser.add_argument("--rows", type=int, default=64, help="of a .jsonl file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.folder)
    both = Compared(arguments.folder, read_texts(tokenizer, arguments.text, arguments.rows))
    lengths = [len(row) for row in both.texts]
    print(f"{len(lengths)} texts of {min(lengths)} to {max(lengths)} tokens", flush=True)
    with torch.no_grad():
        for name in arguments.parts:
            PARTS[name](both)
    for failure in both.failures:
        print(f"beyond its bound: {failure}")
    return 1 if both.failures else 0


if __name__ == "__main__":
    sys.exit(main())
