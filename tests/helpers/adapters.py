"""Adapters beside PEFT's."""

from __future__ import annotations

from rlhf_jax.models.io import peft
from rlhf_jax.models.io.safetensors import open_file
from tests.helpers.arrays import distance


def assert_gradients_equal(folder, model, gradients, theirs, tolerance: float) -> None:
    """Our gradients of an adapter, written as an adapter to `folder`, are those of a PEFT model, tensor by tensor."""
    peft.save(folder, model, gradients, kind="causal", base=None)
    ours = open_file(folder / peft.WEIGHTS)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            source = ours.pop(name.replace(".default", ""))
            assert distance(source.read((slice(None),) * 2), parameter.grad) < tolerance, name
    assert not ours
