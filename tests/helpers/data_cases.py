"""Data sets of every kind and form, and what the package makes of each: recorded once, compared ever after.

`python -m tests.helpers.data_cases` writes tests/data/recorded_batches.json anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile

import datasets
import numpy as np
import pyarrow as pa

from rlhf_jax import data
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from tests.helpers import made_data
from tests.helpers.chat_tokenizer import MARKED, assistant, bytes_tokenizer, user

RECORDED = pathlib.Path(__file__).parents[1] / "data" / "recorded_batches.json"
BAD_LINES = (
    b'{"prompt": 3, "completion": " x"}',
    b'{"prompt": "broken',
    b"[1, 2]",
    b'{"prompt": "caf\xe9", "completion": " x"}',
    b'{"completion": " x"}',
    b'{"prompt": null, "completion": " x"}',
    b'{"prompt": "\\ud800 met anna", "completion": " x"}',
    b'{"prompt": "  ", "completion": " x"}',
    b'{"prompt": "i met anna.", "completion": ""}',
)
EQUAL_PAIR = {"prompt": "a", "chosen": " b", "rejected": " b", "by": 1}


def posts(count: int, **more) -> list[dict]:
    """Demonstrations of the built-in task with other columns, some of them absent from some rows."""
    rows = []
    for i, row in enumerate(synthetic.demonstrations(count, seed=5)):
        extra = {"number": i, "note": None if i % 3 else {"deep": [i, "x"], "a": 1.5}, **more}
        if i % 4 == 1:
            extra["sometimes"] = f"\u00e9 {i}"
        rows.append({**row, **extra})
    return rows


def conversations(count: int) -> list[dict]:
    """Prompts and completions as messages, and whole conversations."""
    rows = []
    for i in range(count):
        asked = [user(f"question {i} " + "x" * (i % 7))]
        if i % 3 == 0:
            asked = [user("before"), assistant("yes"), *asked]
        said = [assistant(f"answer {i} " + "y" * (i % 5))]
        rows.append({"prompt": asked, "completion": said, "messages": [*asked, *said], "label": i})
    return rows


def pairs(count: int) -> list[dict]:
    """Pairs of the built-in task with a margin."""
    return [{**row, "by": i / 4} for i, row in enumerate(synthetic.preference_pairs(count, seed=3))]


def chat_pairs(count: int) -> list[dict]:
    """Pairs of conversations."""
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": [assistant(f"no {i}" + "z" * (i % 9))]}
        for i, row in enumerate(conversations(count))
    ]


def write_lines(path: pathlib.Path, rows: list, bad: tuple[bytes, ...] = (), end: bytes = b"\n") -> str:
    """JSON lines with bad and blank ones in between."""
    lines = [json.dumps(row, ensure_ascii=bool(i % 2)).encode() for i, row in enumerate(rows)]
    for i, line in enumerate(bad):
        lines[3 * i + 2 : 3 * i + 2] = [b"", line, b"  \t"]
    path.write_bytes(end.join(lines))
    return str(path)


def _summary(made, columns: bool = False) -> dict:
    """Everything that training reads of a data set, as texts and hashes."""
    digest = hashlib.sha256()

    def add(batch) -> None:
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            if value is not None:
                digest.update(
                    f"{field.name} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes()
                )

    size = min(8, len(made))
    for step in range(3 * (len(made) // size)):
        add(made.batch(42, step, size))
    for start in range(0, len(made), size):
        add(made.in_order(start, size))
    add(made.batch(42, 1, size, np.arange(size)[1:3]))
    if columns:
        rows = list(range(len(made)))
        texts = [made.display_texts(rows), made.texts(rows), made.columns(rows), made.conversational]
        digest.update(json.dumps([*texts, list(made.columns(rows))], default=str).encode())
    return {"batches": digest.hexdigest()[:32], "fingerprint": made.fingerprint, "report": str(made.report)}


def _sources(folder: pathlib.Path) -> dict[str, object]:
    """Every form of a data set, all with demonstrations of texts."""
    rows = posts(40)
    plain = [{key: row[key] for key in ("prompt", "completion", "number")} for row in rows]
    table = datasets.Dataset.from_list(plain)
    (folder / "document.json").write_text(json.dumps({"rows": rows, "version": 1}))
    (folder / "list.json").write_text(json.dumps([*rows[:20], 3, *rows[20:]]))
    (folder / "lines.json").write_text("\n".join(json.dumps(row) for row in rows))
    table.to_parquet(str(folder / "a.parquet"))
    table.to_csv(str(folder / "a.csv"))
    table.save_to_disk(str(folder / "saved"))
    (folder / "parts").mkdir(exist_ok=True)
    table.select(range(25)).to_parquet(str(folder / "parts" / "train-0.parquet"))
    write_lines(folder / "parts" / "train-1.jsonl", rows[25:], BAD_LINES[:2])
    feather = pa.table({"prompt": [row["prompt"] for row in rows], "completion": [row["completion"] for row in rows]})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, feather.schema) as writer:
        writer.write_table(feather)
    return {
        "lines": write_lines(folder / "a.jsonl", rows),
        "lines with bad ones": write_lines(folder / "bad.jsonl", rows, BAD_LINES),
        "lines of Windows": write_lines(folder / "windows.jsonl", rows, BAD_LINES, b"\r\n"),
        "lines of a Macintosh": write_lines(folder / "macintosh.jsonl", rows, BAD_LINES, b"\r"),
        "lines with a mark": _marked(folder / "marked.jsonl", rows),
        **{name: str(folder / name) for name in ("document.json", "list.json", "lines.json", "a.parquet", "a.csv")},
        **{name: str(folder / name) for name in ("a.arrow", "saved", "parts")},
        "object": table,
        "selected object": table.select([3, 1, 7, 30, 12, 5, 8, 9, 2, 1]),
        "list": [*rows[:9], "no row", *rows[9:]],
        "synthetic": "synthetic",
        "arithmetic": "arithmetic",
    }


def _marked(path: pathlib.Path, rows: list) -> str:
    write_lines(path, rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    return str(path)


def _made(make) -> dict:
    try:
        return make()
    except UserError as error:
        return {"error": str(error)}


def results(folder: pathlib.Path, chosen=lambda name: True) -> dict[str, dict]:
    """What is made of every case: {case: batches, fingerprint and report, or error}.

    Args:
      folder: for files; its path is FOLDER in the result.
      chosen: whether a case is tried.
    """
    found: dict[str, dict] = {}
    load = data.load_rows
    texts, chat = data.load_tokenizer("synthetic"), bytes_tokenizer(MARKED)
    words = {"synthetic": texts, "arithmetic": data.load_tokenizer("arithmetic")}
    for name, source in _sources(folder).items():
        tokenizer = words.get(name, texts)
        for bad in ("raise", "skip"):
            for limit in (None, 12):
                limit = 60 if limit is None and name in words else limit
                rows = lambda: load(source, max_samples=limit, kind="demonstrations")  # noqa: B023, E731
                for kind in ("prompts", "demonstrations"):
                    case, make = f"{kind} of {name}, {bad}, {limit}", getattr(made_data, f"make_{kind}")
                    if chosen(case):
                        made = lambda: make(rows(), tokenizer, on_bad_row=bad)  # noqa: B023, E731
                        found[case] = _made(lambda: _summary(made(), kind == "prompts"))  # noqa: B023
    files = {
        "posts": write_lines(folder / "posts.jsonl", posts(60), BAD_LINES),
        "chats": write_lines(folder / "chats.jsonl", [*conversations(40), {"prompt": "text"}, {"prompt": []}]),
        "pairs": write_lines(folder / "pairs.jsonl", [*pairs(40), EQUAL_PAIR]),
        "chat pairs": write_lines(folder / "chat_pairs.jsonl", [*chat_pairs(40), {"chosen": "a"}]),
        "parts": write_lines(
            folder / "parts.jsonl",
            [
                {"subreddit": "advice", "title": "help", "post": "i met anna. " * (i % 9), "summary": "met anna"}
                for i in range(1, 30)
            ],
        ),
    }
    whole = [{"messages": row["messages"]} for row in conversations(30)]
    files["messages"] = write_lines(folder / "messages.jsonl", whole)
    full = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in pairs(20)]
    files["full pairs"] = write_lines(folder / "full_pairs.jsonl", full)
    for name, kind, tokenizer, options in _options(texts, chat):
        make, case = getattr(made_data, f"make_{kind}"), f"{kind} of {name} with {options}"
        if not chosen(case):
            continue
        made = lambda: make(load(files[name]), tokenizer, on_bad_row="skip", **options)  # noqa: B023, E731
        found[case] = _made(lambda: _summary(made(), kind == "prompts"))  # noqa: B023
        if kind == "demonstrations" and "error" not in found[case]:
            data_set = made()
            found[f"packed {case}"] = _summary(data.pack(data_set, data_set.report.longest + 20, False))
    return json.loads(json.dumps(found).replace(json.dumps(str(folder))[1:-1], "FOLDER"))


def _options(texts, chat):
    """(file, kind, tokenizer, options)"""
    for overflow in ("truncate", "drop"):
        for length in (30, 42, 512):
            limits = {"query_length": length, "query_overflow": overflow}
            yield "posts", "prompts", texts, limits
            yield "parts", "prompts", texts, limits
            yield "chats", "prompts", chat, {**limits, "query_length": 2 * length}
            for longest in (44, 562):
                yield "posts", "demonstrations", texts, {**limits, "max_length": longest}
                yield "parts", "demonstrations", texts, {**limits, "max_length": longest}
                yield "pairs", "pairs", texts, {**limits, "max_length": longest, "margin_column": "by"}
                yield "full pairs", "pairs", texts, {**limits, "max_length": longest}
                for more in ({}, {"assistant_only_loss": True}, {"completion_only_loss": True}):
                    yield "chats", "demonstrations", chat, {**limits, "max_length": 3 * longest, **more}
                    yield "messages", "demonstrations", chat, {**limits, "max_length": 3 * longest, **more}
                yield "chat pairs", "pairs", chat, {**limits, "query_length": 2 * length, "max_length": 3 * longest}
    yield "posts", "prompts", texts, {"length_buckets": (64, 96)}
    yield "posts", "prompts", texts, {"length_buckets": (8,)}
    yield "posts", "prompts", texts, {"shuffle_dataset": False}
    yield "posts", "prompts", texts, {"prompt_column": "nothing"}


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as made_in:
        RECORDED.write_text(json.dumps(results(pathlib.Path(made_in)), indent=0, sort_keys=True) + "\n")
