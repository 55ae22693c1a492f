"""The models a recorded run started from, with its adapters where it has some: which lie where, and what they say.

A LoRA record holds `adapter/` in PEFT's form, on top of `policy/`, whatever its base_model_name_or_path says. PEFT puts
the adapter 'default' into the folder itself and others into folders of their names; both are looked for, here and in
`final_policy/`. The adapter's own adapter_config.json decides; an option of case.json that contradicts it is refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlhf_jax.models import Model, lora
from rlhf_jax.models.io import hf
from rlhf_jax.models.io import peft as peft_files
from rlhf_jax.models.io.safetensors import read_json
from rlhf_jax.models.lora import Lora
from tests.parity import vision
from tests.parity.options import NESTED, Refused

# TRL's names of PEFT's options, and short forms in a dict of their own.
PEFT_NAMES = {
    "lora_r": "r",
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "targets": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "rslora": "use_rslora",
}
OWN = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_rslora")
# Another function of the weights, where they are given and not empty.
REFUSED = ("use_dora", "load_in_8bit", "load_in_4bit", "lora_target_parameters")
HEADS = {"lm_head": "embed_out"}  # transformers 5's name of the head


@dataclasses.dataclass(frozen=True)
class Start:
    """What the policy and its reference start from; without adapters `base` is None and params are whole.

    Attributes:
      policy, ref: models.
      base: see `response_logprobs.Models`.
      params, ref_params: of the policy that is trained, and of the reference; {}: the base alone.
      where: the folder of the adapter that is trained; None without adapters.
      final: that of what it became.
      notes: what the record did not say by itself.
    """

    policy: Model
    ref: Model
    base: dict[str, Any] | None
    params: Any
    ref_params: Any
    where: Path | None
    final: Path
    notes: tuple[str, ...] = ()


def start_of(folder: Path, options: dict[str, Any], trains_on: bool = False) -> Start:
    """Reads policy/, ref/ and the adapters of a record.

    Args:
      folder: of the record.
      options: of its case.json.
      trains_on: the trainer makes a frozen copy of an adapter that was there before, called 'ref', its reference.

    Raises:
      Refused: names the option or folder in the way.
      UserError: names the tensor or file.
    """
    images = vision.has_images(folder)
    policy, params = hf.load(folder / "policy", kind="causal", images=images)
    parallel = getattr(policy.config, "use_parallel_residual", None)  # an option of GPT-NeoX alone
    if parallel is not None and options.get("parallel", True) != parallel:
        raise Refused(f"{folder.name}: option parallel disagrees with policy/config.json's use_parallel_residual")
    given = _given(options)
    unused = ("use_peft", "use_peft", False) in given
    full_ref = (folder / "ref" / hf.CONFIG).is_file()
    if not (folder / "adapter").exists():
        asked = next((name for peft, name, value in given if peft in ("use_peft", *OWN) and value), None)
        if asked and not unused:
            raise Refused(f"{folder.name}: option {asked} asks for LoRA, but adapter/ is missing")
        ref = (policy, params)
        if (folder / "ref").exists():
            ref = hf.load(folder / "ref", kind="causal", images=images)
        return Start(policy, ref[0], None, params, ref[1], None, folder / "final_policy")

    if unused:
        raise Refused(f"{folder.name}: option use_peft is False, but there is an adapter/")
    for _, name, value in given:
        if name in REFUSED and value:
            raise Refused(f"{folder.name}: option {name}={value!r} is not replayed")
    name, beside = options.get("model_adapter_name"), options.get("ref_adapter_name")
    where = _named(folder / "adapter", name, beside)
    if where is None:
        raise Refused(f"{folder.name}: adapter/ has no {peft_files.CONFIG}, nor has a folder in it")
    form, trained = _read(where, policy)
    _agree(folder, where, given, form, policy)
    adapted = dataclasses.replace(policy, lora=form)
    final = _named(folder / "final_policy", name, beside) or folder / "final_policy"
    start = Start(adapted, adapted, {"policy": params}, trained, {}, where, final)
    if full_ref:
        ref, ref_params = hf.load(folder / "ref", kind="causal", images=images)
        return dataclasses.replace(start, ref=ref, ref_params=ref_params)
    other = _reference(folder, options, where, trains_on)
    if other is None:
        return start
    ref_form, ref_params = _read(other, policy)
    note = f"the reference is the adapter {other.relative_to(folder)}"
    return dataclasses.replace(
        start, ref=dataclasses.replace(policy, lora=ref_form), ref_params=ref_params, notes=(note,)
    )


def ended(start: Start, params: Any) -> tuple[Any, Any]:
    """What the policy became: (of the replay's trained `params` what compares with the record, the recorded).

    Without an adapter in final_policy/, but with a model, that is the base with the adapter merged.
    """
    if start.base is None:
        return params, hf.load(start.final, kind="causal", images=start.policy.reads_images)[1]
    if not _holds(start.final):
        whole = lora.merge_lora(start.policy.with_lora(start.base["policy"], params))
        return whole, hf.load(start.final, kind="causal", images=start.policy.reads_images)[1]
    form, theirs = _read(start.final, start.policy)
    for field in ("target_modules", "modules_to_save", "scale"):
        first, last = getattr(start.policy.lora, field), getattr(form, field)
        if first != last:
            raise Refused(f"{start.final}: its adapter has {field} {last}, and that of {start.where} {first}")
    return params, theirs


def _holds(folder: Path) -> bool:
    """Whether an adapter lies in the folder itself."""
    return (folder / peft_files.CONFIG).is_file()


def _inside(folder: Path) -> list[Path]:
    """The adapters in folders of their names."""
    return sorted(path.parent for path in folder.glob(f"*/{peft_files.CONFIG}"))


def _named(folder: Path, name: str | None, beside: str | None) -> Path | None:
    """The adapter `name` (default: 'default') of a folder, not that called `beside`; None where there is none."""
    places = [folder / name, folder] if name not in (None, "default") else [folder, folder / "default"]
    if found := next((place for place in places if _holds(place)), None):
        return found
    others = [path for path in _inside(folder) if path.name not in (beside, "ref")]
    if len(others) > 1:
        names = ", ".join(path.name for path in others)
        raise Refused(f"{folder.parent.name}: {folder.name}/ has the adapters {names}; option model_adapter_name is to "
                      "say which is trained")  # fmt: skip
    return others[0] if others else None


def _reference(folder: Path, options: dict[str, Any], trained: Path, trains_on: bool) -> Path | None:
    """The folder of the reference adapter; None: the reference is the policy without an adapter."""
    name = options.get("ref_adapter_name")
    if name:
        if name == (options.get("model_adapter_name") or "default"):
            raise Refused(f"{folder.name}: option ref_adapter_name={name!r} is the adapter that is trained")
        places = [folder / parent / name for parent in ("adapter", "ref_adapter", "ref", "final_policy")]
        places += [folder / "ref_adapter", folder / "ref", *([folder / "adapter"] if name == "default" else [])]
    else:
        places = [folder / "ref_adapter", *_inside(folder / "ref_adapter"), folder / "ref", *_inside(folder / "ref")]
        places += [folder / "adapter/ref", folder / "final_policy/ref"] if trains_on else []
    if found := next((place for place in places if _holds(place)), None):
        return found
    if name:
        raise Refused(
            f"{folder.name}: option ref_adapter_name={name!r}: no {peft_files.CONFIG} in adapter/{name}, ref_adapter/ "
            "or ref/"
        )
    # Where the option is not listed, an adapter that was recorded beside the trained one can be nothing else.
    others = [path for path in _inside(folder / "adapter") if path != trained]
    if "ref_adapter_name" in options or not others:
        return None
    if len(others) > 1:
        names = ", ".join(path.name for path in others)
        raise Refused(
            f"{folder.name}: adapter/ also has {names}; option ref_adapter_name is to say which is the reference"
        )
    return others[0]


def _read(folder: Path, model: Model) -> tuple[Lora, Any]:
    """An adapter: (its form, its params)."""
    return peft_files.read(peft_files.read_config(folder), model)


def _given(options: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Options of adapters, those of nested dicts too: (PEFT's name, name as given, value); None left out."""
    found: list[tuple[str, Any]] = []
    for name, value in options.items():
        if name in NESTED and isinstance(value, dict):
            found += value.items()
        elif name in NESTED:
            found.append(("use_peft", bool(value)))
        elif name in ("use_peft", *REFUSED, *OWN, *PEFT_NAMES):
            found.append((name, value))
    return [(PEFT_NAMES.get(name, name), name, value) for name, value in found if value is not None]


def _agree(folder: Path, where: Path, given: Iterable[tuple[str, str, Any]], form: Lora, model: Model) -> None:
    """Refused for an option that contradicts the adapter."""
    config = read_json(where / peft_files.CONFIG)
    own = {
        "r": form.r,
        "lora_alpha": form.alpha,
        "lora_dropout": form.dropout,
        "target_modules": set(form.target_modules),
        "modules_to_save": set(form.modules_to_save),
        "use_rslora": form.use_rslora,
    }
    for peft, name, value in given:
        if peft not in own:
            continue
        said = value
        if peft == "target_modules":
            said = set(_matched(value, model))
        elif peft == "modules_to_save":
            said = {HEADS.get(last, last) for last in (item.split(".")[-1] for item in _listed(value))}
        if said != own[peft]:
            raise Refused(
                f"{folder.name}: option {name} is {value!r}, but {where.relative_to(folder)}/{peft_files.CONFIG} says "
                f"{peft} {config.get(peft)!r}"
            )


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _matched(targets: Any, model: Model) -> Iterator[str]:
    """The linears that PEFT finds for `target_modules`: a pattern, or a list of the ends of names."""
    if model.reads_images:
        yield from lora.resolve_targets(model, tuple(_listed(targets)), "target_modules")
        return
    for name, (layers, *rest) in model.family.linears.items():
        key = f"{model.family.prefix}{layers}.0.{'.'.join(rest)}"
        if targets == lora.ALL_LINEAR or lora.ALL_LINEAR in _listed(targets):
            yield name
        elif isinstance(targets, str) and re.fullmatch(targets, key):
            yield name
        elif any(key == one or key.endswith(f".{one}") for one in _listed(targets)):
            yield name
