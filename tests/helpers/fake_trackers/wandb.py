"""Stands for Weights & Biases: writes every call to $FAKE_TRACKERS, a JSON array a line."""

import json
import os


def note(*call):
    if os.environ.get("FAKE_FAILS") == call[0]:
        raise RuntimeError("no network")
    with open(os.environ["FAKE_TRACKERS"], "a") as file:
        file.write(json.dumps(["wandb", *call]) + "\n")


class Table:
    def __init__(self, columns, data, allow_mixed_types):
        assert allow_mixed_types and all(len(row) == len(columns) for row in data)
        self.rows = [dict(zip(columns, row)) for row in data]


class Run:
    def __init__(self, **options):
        note("init", options)

    def define_metric(self, name, **options):
        note("define_metric", name, options)

    def log(self, values):
        note("log", {k: v.rows if isinstance(v, Table) else v for k, v in values.items()})

    def finish(self):
        note("finish")


def init(**options):
    return Run(**options)
