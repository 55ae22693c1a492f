"""Packages that tests compare ours with, and that the others of their file do without."""

import importlib

import pytest


class Absent:
    """In place of a package that is not installed: a test that uses it is skipped."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):  # pytest and inspect look at what is in a module
            raise AttributeError(attribute)
        pytest.skip(f"needs {self._name}")


def optional(name: str):
    """The package `name`, or an `Absent`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return Absent(name)
