"""Compares a checkpoint on disk with transformers: logits, greedy answers, and the error of bfloat16.

    python scripts/parity/real_model.py FOLDER

20 prompts of 10 to 500 tokens are cut from --text (default: the files of docs/) and given to both, one at a time.
Printed are ||ours - theirs|| / ||theirs|| of the logits in float32, the largest over the prompts; the number of prompts
whose greedy answers of 64 tokens are equal; and the same distance from transformers' float32 logits for both in
bfloat16. Needs torch. Exit code 1: a distance in float32 above 1e-5, or an answer that differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import rlhf_jax  # noqa: E402
from rlhf_jax.generate import Sampling  # noqa: E402
from rlhf_jax.types import PromptBatch  # noqa: E402

PROMPTS, SHORTEST, LONGEST, ANSWER = 20, 10, 500, 64


def prompts(tokenizer, text: str) -> list[np.ndarray]:
    """Pieces of the text, of evenly spaced lengths in tokens."""
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    lengths = np.linspace(SHORTEST, LONGEST, PROMPTS).astype(int)
    if len(ids) < lengths.sum():
        raise SystemExit(f"--text has {len(ids)} tokens; {lengths.sum()} are needed.")
    return np.split(ids[: lengths.sum()], np.cumsum(lengths)[:-1])


def their_logits(path: str, rows: list[np.ndarray], dtype: torch.dtype) -> tuple[list[np.ndarray], list[list[int]]]:
    """transformers' logits of each row and, in float32, its greedy answers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    logits, answers = [], []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor(row)[None].long()
            logits.append(model(tokens).logits[0].float().numpy())
            if dtype == torch.float32:
                options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": ANSWER}
                answers.append(model.generate(tokens, **options)[0, len(row) :].tolist())
    return logits, answers


def our_logits(path: str, rows: list[np.ndarray], dtype: str) -> tuple[list[np.ndarray], list[list[int]]]:
    """Ours; rows are padded to one width, so that one program serves all."""
    policy = rlhf_jax.load_policy(path, dtype=dtype)
    width = max(map(len, rows))

    @jax.jit
    def compute(params, tokens, mask):
        hidden = policy.model.hidden(params, tokens, mask, dtype=policy.dtype)
        return policy.model.logits(params, hidden).astype(jnp.float32)

    logits, answers = [], []
    for row in rows:
        tokens = np.zeros((1, width), np.int32)
        tokens[0, width - len(row) :] = row
        mask = np.arange(width)[None] >= width - len(row)
        logits.append(np.asarray(compute(policy.params, tokens, mask))[0, width - len(row) :])
        if dtype == "float32":
            batch = PromptBatch(tokens=tokens, lengths=np.asarray([len(row)], np.int32), rows=np.zeros(1, np.int32))
            stop = (policy.tokenizer.eos_id,)
            sampling = Sampling(max_new_tokens=ANSWER, temperature=0.0, stop_ids=stop)
            rollout = policy.sample(batch, 0, sampling)
            answers.append(np.asarray(rollout.response)[0, : int(rollout.lengths[0])].tolist())
    return logits, answers


def distance(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest ||a - b|| / ||b|| of the rows."""
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(ours, theirs, strict=True))


def main() -> int:
    """Prints the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--text", type=Path, help="a text file to cut the prompts from")
    arguments = parser.parse_args()
    files = [arguments.text] if arguments.text else sorted((ROOT / "docs").glob("*.md"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.folder)
    rows = prompts(tokenizer, "\n".join(file.read_text(encoding="utf-8") for file in files)[:200_000])
    print(f"prompts of {len(rows[0])} to {len(rows[-1])} tokens   {len(rows)}", flush=True)
    theirs, their_answers = their_logits(arguments.folder, rows, torch.float32)
    ours, our_answers = our_logits(arguments.folder, rows, "float32")
    exact = distance(ours, theirs)
    print(f"float32: distance of the logits      {exact:.1e}", flush=True)
    equal = sum(a == b for a, b in zip(our_answers, their_answers, strict=True))
    print(f"float32: equal greedy answers        {equal} of {len(rows)}", flush=True)
    rounded = our_logits(arguments.folder, rows, "bfloat16")[0]
    print(f"bfloat16: distance of ours           {distance(rounded, theirs):.1e}", flush=True)
    rounded = their_logits(arguments.folder, rows, torch.bfloat16)[0]
    print(f"bfloat16: distance of transformers'  {distance(rounded, theirs):.1e}")
    return 0 if exact <= 1e-5 and equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
