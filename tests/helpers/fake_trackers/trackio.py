"""Stands for trackio: writes every call to $FAKE_TRACKERS, a JSON array a line."""

import json
import os


def note(*call):
    with open(os.environ["FAKE_TRACKERS"], "a") as file:
        file.write(json.dumps(["trackio", *call]) + "\n")


class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row)) for row in data]


def init(**options):
    note("init", options)
    return object()


def log(metrics, step):
    note("log", {k: v.rows if isinstance(v, Table) else v for k, v in metrics.items()}, step)


def finish():
    note("finish")
