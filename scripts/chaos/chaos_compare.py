"""Compares two folders of the same run: one uninterrupted, one killed and resumed.

Compared byte for byte: models, metrics.jsonl, completions/, config.json, finished.json and the names of all files. In
checkpoints/ and timings.jsonl the steps are compared (each once), in tensorboard/ what TensorBoard shows: each value of
each metric once. With --another_mesh the run was resumed on other devices: weights must agree to 1e-4 in norm, metrics
to 1e-4 * max(|value|, 0.01). Prints the differences; exit code 1 if there are any.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import struct
from collections.abc import Iterator

TOLERANCE = 1e-4
# These measure rounding, which depends on the mesh; RLOO's loss is a mean that cancels.
LOOSE = {"val/first_ratio_error": 1e-5, "policy/first_approxkl": 1e-5, "loss": 1e-5}
CLOCKS = ("checkpoints", "tensorboard", "timings.jsonl")
"""Files with clocks or random names, which are compared by content."""


def differences(
    whole: pathlib.Path, other: pathlib.Path, another_mesh: bool = False, other_checkpoints: bool = False
) -> list[str]:
    """Differences of the run in `other` from the uninterrupted one, a line each.

    Args:
      whole, other: the runs' folders.
      another_mesh: weights and metrics must agree only to a tolerance.
      other_checkpoints: only the newest checkpoint must be the same.
    """
    names = [set(files_of(folder)) for folder in (whole, other)]
    found = [f"{name} is missing" for name in sorted(names[0] - names[1])]
    found += [f"{name} is left over" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        if not another_mesh:
            found += different_bytes(name, *((folder / name).read_bytes() for folder in (whole, other)))
        elif name.endswith(".safetensors"):
            found += far_weights(name, whole / name, other / name)
        elif name == "metrics.jsonl":
            found += far_metrics(*(lines_of(folder / name) for folder in (whole, other)))
    steps = [sorted(os.listdir(folder / "checkpoints"), key=lambda x: (len(x), x)) for folder in (whole, other)]
    if steps[0][-1:] != steps[1][-1:] if other_checkpoints else steps[0] != steps[1]:
        found.append(f"checkpoints/ holds {steps[1]}, not {steps[0]}")
    steps = [[line["step"] for line in lines_of(folder / "timings.jsonl")] for folder in (whole, other)]
    if steps[0] != steps[1]:
        found.append(f"timings.jsonl has steps {steps[1]}, not {steps[0]}")
    boards = [board_of(folder / "tensorboard") for folder in (whole, other)]
    return found + different_boards(*boards, another_mesh)


def files_of(folder: pathlib.Path) -> Iterator[str]:
    """Relative paths of all files except those in CLOCKS."""
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and name.split(os.sep)[0] not in CLOCKS:
            yield name


def lines_of(path: pathlib.Path) -> list[dict]:
    """The objects of a JSON Lines file; a line that is not JSON becomes {"step": its text}."""
    objects = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            objects.append(json.loads(line))
        except ValueError:
            objects.append({"step": f"torn: {line[:60]}"})
    return objects


def different_bytes(name: str, whole: bytes, other: bytes) -> list[str]:
    """At most one line: the first difference of two files."""
    if whole == other:
        return []
    lines = itertools.zip_longest(whole.splitlines(), other.splitlines())
    line, (a, b) = next((i, pair) for i, pair in enumerate(lines, 1) if pair[0] != pair[1]) if whole else (1, ("", ""))
    if name.endswith((".jsonl", ".json", ".md")):
        at = next((i for i, (x, y) in enumerate(zip(a or b"", b or b"")) if x != y), 0)
        shown = [(text[max(0, at - 60) : at + 60].decode(errors="replace") if text else "nothing") for text in (a, b)]
        return [f"{name} differs in line {line}: {shown[1]!r}, not {shown[0]!r}"]
    at = next((i for i, (x, y) in enumerate(zip(whole, other)) if x != y), min(len(whole), len(other)))
    return [f"{name} differs at byte {at} of {len(whole)} ({len(other)})"]


def far_weights(name: str, whole: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Tensors that differ by more than the tolerance."""
    import numpy as np
    from safetensors.numpy import load_file

    a, b = load_file(whole), load_file(other)
    if set(a) != set(b):
        return [f"{name} has other tensors: {sorted(set(a) ^ set(b))}"]
    far = {key: np.linalg.norm(b[key] - x) / max(np.linalg.norm(x), 1e-3) for key, x in a.items()}
    # The key bias does not affect attention: its gradient is rounding, which Adam amplifies.
    far = {key: x for key, x in far.items() if not x <= TOLERANCE and not key.endswith("query_key_value.bias")}
    return [f"{name}: {key} is {x:.1e} away" for key, x in far.items()]


def far_metrics(whole: list[dict], other: list[dict]) -> list[str]:
    """Metrics that differ by more than the tolerance."""
    if [line["step"] for line in whole] != [line["step"] for line in other]:
        return [f"metrics.jsonl has steps {[line['step'] for line in other]}"]
    found = []
    for a, b in zip(whole, other):
        if set(a) != set(b):
            found.append(f"metrics.jsonl, update {a['step']}: other names: {sorted(set(a) ^ set(b))}")
        for name in a.keys() & b.keys():
            x, y = a[name], b[name]
            near = LOOSE.get(name, 0.0)
            if x != y and not (isinstance(x, float) and abs(x - y) <= max(near, TOLERANCE * max(abs(x), 0.01))):
                found.append(f"metrics.jsonl, update {a['step']}: {name} is {y}, not {x}")
    return found


# --- TensorBoard


def records(path: pathlib.Path) -> Iterator[bytes]:
    """The records of an event file; stops at a torn last record, as TensorBoard does."""
    data, at = path.read_bytes(), 0
    while at + 12 <= len(data):
        size = struct.unpack_from("<Q", data, at)[0]
        if at + 16 + size > len(data):
            return
        yield data[at + 12 : at + 12 + size]
        at += 16 + size


def board_of(folder: pathlib.Path) -> dict[str, list[tuple[int, object]]]:
    """What TensorBoard shows: {tag: [(step, value)]}, from files in order of name, with their purges applied."""
    from tensorboardX.proto import event_pb2

    shown: dict[str, list[tuple[int, object]]] = {}
    for path in sorted(folder.glob("*tfevents*")):
        for record in records(path):
            event = event_pb2.Event.FromString(record)
            if event.HasField("session_log") and event.session_log.status == event_pb2.SessionLog.START:
                for tag, values in shown.items():
                    shown[tag] = [value for value in values if value[0] < event.step]
            for value in event.summary.value:
                content = b"".join(value.tensor.string_val) if value.HasField("tensor") else value.simple_value
                shown.setdefault(value.tag, []).append((event.step, content))
    return {tag: values for tag, values in shown.items() if values}


def different_boards(whole: dict, other: dict, another_mesh: bool = False) -> list[str]:
    """Tags whose steps or values differ; for clocks only the steps count."""
    found = []
    for tag in sorted(whole.keys() | other.keys()):
        a, b = ([*values] for values in (whole.get(tag, []), other.get(tag, [])))
        if [step for step, _ in a] != [step for step, _ in b]:
            found.append(f"tensorboard/: {tag} has steps {[s for s, _ in b]}, not {[s for s, _ in a]}")
        elif repr(a) != repr(b) and not another_mesh and not is_clock(tag):
            found.append(f"tensorboard/: {tag} has other values")
    return found


def is_clock(tag: str) -> bool:
    """Whether a TensorBoard tag belongs to timings.jsonl."""
    prefixes = ("time/", "memory/", "mfu", "tokens_per_second/", "bandwidth/", "peak/")
    return tag.startswith(prefixes) or tag in ("step_time", "eps")
