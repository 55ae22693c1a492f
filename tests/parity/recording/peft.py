"""Adapters for recorded runs of TRL: asked for by the options of TRL's ModelConfig (use_peft, lora_r, ...).

Only a run that asks for them needs the package peft.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from trl import ModelConfig, get_peft_config

NAMES = {field.name for field in dataclasses.fields(ModelConfig)}


def asked_for(options: dict[str, Any]) -> tuple[Any | None, dict[str, Any]]:
    """(the adapter's LoraConfig, None without use_peft; the options that are the trainer's)."""
    own = {name: value for name, value in options.items() if name in NAMES}
    rest = {name: value for name, value in options.items() if name not in NAMES}
    return get_peft_config(ModelConfig(**own)), rest


def with_two(policy: torch.nn.Module, config: Any, name: str) -> torch.nn.Module:
    """The policy with a 'default' adapter, which is active, and another of half the rank on all linear layers."""
    from peft import get_peft_model

    model = get_peft_model(policy, config)
    other = {"r": max(config.r // 2, 1), "lora_alpha": 3, "target_modules": "all-linear", "modules_to_save": None}
    model.add_adapter(name, dataclasses.replace(config, **other))
    return model


def fill(model: torch.nn.Module, std: float = 0.2) -> None:
    """Makes B random, which begins at 0, so that adapters matter from the first step."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(std * torch.randn_like(weight))


def keep(model: torch.nn.Module, folder: Path) -> None:
    """Saves the adapters alone."""
    model.save_pretrained(folder)
    for card in folder.rglob("README.md"):
        card.unlink()
