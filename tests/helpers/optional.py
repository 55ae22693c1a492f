"""Packages that tests compare ours with, and that the others of their file do without."""

import importlib.util

import pytest


class Absent:
    """In place of a package that is not installed: a test that uses it is skipped."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):  # pytest and inspect look at what is in a module
            raise AttributeError(attribute)
        pytest.skip(f"needs {self._name}")


class WithoutTorch:
    """transformers without torch: a test that uses a class that needs it is skipped."""

    def __init__(self, package):
        self._package = package

    def __getattr__(self, attribute: str):
        value = getattr(self._package, attribute)
        if type(value).__name__ == "DummyObject":  # transformers' own stand-in
            pytest.skip(f"transformers.{attribute} needs torch")
        return value


def optional(name: str):
    """The package `name`, or an `Absent`."""
    try:
        package = importlib.import_module(name)
        without_torch = name == "transformers" and importlib.util.find_spec("torch") is None
        return WithoutTorch(package) if without_torch else package
    except ModuleNotFoundError as error:
        if name != error.name and not name.startswith(f"{error.name}."):
            raise
        return Absent(name)
