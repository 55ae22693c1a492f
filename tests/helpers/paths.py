"""Folders of the checkout."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_jax"
SCRIPTS = ROOT / "scripts"
