"""Records with adapters are read wherever their parts lie; what contradicts or cannot be done over is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.optional import optional
from tests.parity import adapters, options, replay, report, weights

torch = optional("torch")
CASES = Path(__file__).parent / "cases"


def copied(tmp_path, name):
    """A copy of a case."""
    return Path(shutil.copytree(CASES / name, tmp_path / "case"))


def told(folder):
    """The options of a record."""
    return json.loads((folder / "case.json").read_text())["options"]


def changed(folder, **changes):
    """Changes an adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def into(folder, place):
    """Moves an adapter's files into another folder of the record."""
    place.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("adapter_*"):
        file.rename(place / file.name)


def renamed(folder, rename):
    """Renames the tensors of an adapter."""
    file = folder / "adapter_model.safetensors"
    save_file({rename(name): x for name, x in load_file(file).items()}, file)


def without(name, *gone):
    """The options of a case but for some."""
    return {key: value for key, value in told(CASES / name).items() if key not in gone}


# ----------------------------------------------------------------------------------------------- where things may lie


def as_default(folder):
    """PEFT's layout of an adapter in a folder of its name."""
    for part in ("adapter", "final_policy"):
        into(folder / part, folder / part / "default")


def as_another_name(folder):
    """The adapter that is trained has a name of its own."""
    for part in ("adapter", "final_policy"):
        into(folder / part, folder / part / "trained")
    return {**told(folder), "model_adapter_name": "trained"}


def as_default_reference(folder):
    """The reference is PEFT's default adapter, and what is trained has a name."""
    for part in ("adapter", "final_policy"):
        into(folder / part, folder / part / "trained")
        into(folder / part / "first", folder / part)
    return {**told(folder), "model_adapter_name": "trained", "ref_adapter_name": "default"}


def ref_adapter(folder):
    """The reference adapter beside adapter/."""
    into(folder / "adapter/first", folder / "ref_adapter")
    shutil.rmtree(folder / "final_policy/first")


def ref_folder(folder):
    """The reference adapter in ref/, and no option that names it."""
    into(folder / "adapter/first", folder / "ref")
    return without("lora_named_ref", "ref_adapter_name")


def ref_saved_by_peft(folder):
    """PEFT's folder of the adapter's name within ref/."""
    into(folder / "adapter/first", folder / "ref/first")
    return without("lora_named_ref", "ref_adapter_name")


def unlisted(folder):
    """No option about adapters at all."""
    return without("lora_named_ref", *options.ADAPTERS)


def nested(folder):
    """The options in a dict of their own, some by PEFT's names and patterns."""
    own = {"r": 4, "alpha": 32, "target_modules": r".*\.(query_key_value|dense_4h_to_h)", "bias": "none"}
    return {**without("lora_named_ref", *options.ADAPTERS), "peft_config": own, "use_peft": True}


def old_file(folder):
    """torch's files."""
    for file in folder.rglob("adapter_model.safetensors"):
        tensors = {name: torch.from_numpy(x) for name, x in load_file(file).items()}
        torch.save(tensors, file.with_suffix(".bin"))
        file.unlink()


def names_within(folder):
    """Tensors under the names that they have in a PeftModel's own state."""
    for part in ("adapter", "final_policy"):
        renamed(folder / part, lambda name: name.replace(".weight", ".default.weight"))


def elsewhere(folder):
    """Paths of the machine that recorded."""
    for part in folder.rglob("adapter_config.json"):
        changed(part.parent, base_model_name_or_path="/nowhere/model", revision="main")


@pytest.mark.parametrize(
    "rearranged",
    [as_default, as_another_name, as_default_reference, ref_adapter, ref_folder, ref_saved_by_peft, unlisted, nested]
    + [old_file, names_within, elsewhere],
)
def test_a_record_reads_the_same_wherever_its_adapters_lie(tmp_path, rearranged):
    plain = adapters.start_of(CASES / "lora_named_ref", told(CASES / "lora_named_ref"))
    assert (plain.policy.lora.r, plain.ref.lora.r, plain.ref.lora.alpha) == (4, 2, 3)
    folder = copied(tmp_path, "lora_named_ref")
    start = adapters.start_of(folder, rearranged(folder) or told(folder))
    assert (start.policy, start.ref) == (plain.policy, plain.ref)
    assert start.notes and "reference is the adapter" in start.notes[0]
    for ours, theirs in ((start, plain), (adapters.ended(start, {}), adapters.ended(plain, {}))):
        trees = [(x.base, x.params, x.ref_params) if isinstance(x, adapters.Start) else x for x in (ours, theirs)]
        jax.tree.map(np.testing.assert_array_equal, *trees)


def test_modules_that_are_trained_in_full_are_read_under_their_names_in_a_peft_model(tmp_path):
    folder = copied(tmp_path, "lora_rslora")
    plain = adapters.start_of(folder, told(folder))
    assert plain.policy.lora.modules_to_save == ("final_layer_norm", "embed_out") and plain.policy.lora.use_rslora
    assert plain.ref_params == {}  # the policy without its adapter
    inner = ("lm_head.weight", "lm_head.modules_to_save.default.weight")
    renamed(folder / "adapter", lambda name: name.replace(*inner).replace("norm.", "norm.modules_to_save.default."))
    assert any("modules_to_save" in name for name in load_file(folder / "adapter/adapter_model.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, adapters.start_of(folder, told(folder)).params, plain.params)


def test_a_full_reference_model_stands_beside_an_adapter(tmp_path):
    """TRL takes it, if it is given, over all adapters."""
    folder = copied(tmp_path, "lora_named_ref")
    shutil.copytree(CASES / "ppo_small/ref", folder / "ref")
    start = adapters.start_of(folder, told(folder))
    assert start.ref.lora is None and start.policy.lora is not None and not start.notes
    assert "embed_in" in start.ref_params["backbone"]


def test_the_copy_that_trls_rloo_makes_of_an_adapter_is_its_reference(tmp_path):
    folder = copied(tmp_path, "rloo_lora")
    assert adapters.start_of(folder, told(folder), trains_on=True).ref_params == {}
    shutil.copytree(folder / "adapter", folder / "final_policy/ref")
    start = adapters.start_of(folder, told(folder), trains_on=True)
    jax.tree.map(np.testing.assert_array_equal, start.ref_params, start.params)


def test_a_merged_policy_is_compared_with_the_base_and_its_adapter(tmp_path):
    folder = copied(tmp_path, "lora_small")
    start = adapters.start_of(folder, told(folder))
    shutil.rmtree(folder / "final_policy")
    shutil.copytree(folder / "policy", folder / "final_policy")
    whole, theirs = adapters.ended(start, start.params)
    assert jax.tree.structure(whole) == jax.tree.structure(theirs)
    kernels = [x["backbone"]["layers"]["attention"]["query_key_value"]["kernel"] for x in (whole, theirs)]
    assert report.distance(*kernels) > 0.1
    np.testing.assert_array_equal(*(x["embed_out"]["kernel"] for x in (whole, theirs)))


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("lora_small", {"lora_r": 8}, "option lora_r is 8, but adapter/adapter_config.json says r 4"),
        ("lora_small", {"lora_alpha": 16}, "option lora_alpha is 16"),
        ("lora_small", {"use_rslora": True}, "option use_rslora is True, but .* says use_rslora False"),
        ("lora_small", {"lora_dropout": 0.1}, "option lora_dropout is 0.1, but .* says lora_dropout 0.05"),
        ("lora_small", {"lora_target_modules": ["all-linear"]}, "option lora_target_modules is"),
        ("lora_small", {"lora_modules_to_save": ["lm_head"]}, "option lora_modules_to_save is"),
        ("lora_small", {"lora": {"alpha": 16}}, "option alpha is 16"),
        ("lora_small", {"use_peft": False}, "option use_peft is False, but there is an adapter"),
        ("lora_small", {"use_dora": True}, "option use_dora=True is not replayed"),
        (
            "lora_small",
            {"ref_adapter_name": "first"},
            "ref_adapter_name='first': no adapter_config.json in adapter/first",
        ),
        ("lora_named_ref", {"ref_adapter_name": "default"}, "'default' is the adapter that is trained"),
        ("ppo_small", {"lora_r": 8}, "option lora_r asks for LoRA, but adapter/ is missing"),
        ("ppo_small", {"peft": True}, "option use_peft asks for LoRA, but adapter/ is missing"),
    ],
)
def test_options_that_contradict_the_adapter_are_refused_by_name(case, change, message):
    with pytest.raises(options.Refused, match=message):
        adapters.start_of(CASES / case, {**told(CASES / case), **change})


def test_options_of_adapters_that_were_not_used_are_no_contradiction():
    start = adapters.start_of(CASES / "ppo_small", {"use_peft": False, "lora_r": 16, "use_rslora": False})
    assert start.base is None and start.policy.lora is None and start.where is None
    agreeing = {"lora_target_modules": ["query_key_value"], "lora_task_type": "CAUSAL_LM", "use_dora": False}
    again = adapters.start_of(CASES / "lora_small", {**told(CASES / "lora_small"), **agreeing})
    assert again.policy.lora.target_modules == ("query_key_value",)


def test_of_several_adapters_the_options_say_which_is_which(tmp_path):
    folder = copied(tmp_path, "lora_named_ref")
    shutil.copytree(folder / "adapter/first", folder / "adapter/second")
    with pytest.raises(options.Refused, match="adapter/.*first, second.*ref_adapter_name"):
        adapters.start_of(folder, without("lora_named_ref", "ref_adapter_name"))
    assert adapters.start_of(folder, {**told(folder), "ref_adapter_name": None}).ref_params == {}
    into(folder / "adapter", folder / "adapter/third")
    with pytest.raises(options.Refused, match="second, third.*model_adapter_name"):
        adapters.start_of(folder, told(folder))


def test_what_dropped_out_is_not_recorded_and_refused(tmp_path, capsys):
    folder = copied(tmp_path, "rloo_lora")
    changed(folder / "adapter", lora_dropout=0.1)
    case = json.loads((folder / "case.json").read_text())
    del case["options"]["lora_dropout"]
    (folder / "case.json").write_text(json.dumps(case))
    assert replay.main([str(folder)]) == 2
    assert "lora_dropout is 0.1" in capsys.readouterr().err
    case["options"]["disable_dropout"] = True
    (folder / "case.json").write_text(json.dumps(case))
    assert replay.open_case(folder).start.policy.lora.dropout == 0.1


def test_an_adapter_that_ended_in_another_form_is_refused(tmp_path):
    folder = copied(tmp_path, "lora_small")
    start = adapters.start_of(folder, told(folder))
    changed(folder / "final_policy", use_rslora=True)
    with pytest.raises(options.Refused, match=r"scale 4\.0.*2\.0"):
        adapters.ended(start, start.params)


# ------------------------------------------------------------------------------------------------ what is off is seen


@pytest.mark.parametrize("wrong", ["scale", "reference"])
def test_a_wrong_scale_and_a_wrong_reference_are_seen(tmp_path, wrong):
    folder = copied(tmp_path, "rloo_lora")
    if wrong == "scale":  # alpha / sqrt(r) in place of alpha / r
        for part in ("adapter", "final_policy"):
            changed(folder / part, use_rslora=True)
    if wrong == "reference":  # the policy with its adapter
        shutil.copytree(folder / "adapter", folder / "ref_adapter")
    one = replay.open_case(folder)
    one.begin()
    _, found = one.generate(0)
    assert one.report.rows["old log-probabilities"].passed == (wrong != "scale")
    assert report.metric_distance(found["kl"], one.logs[0]["kl"]) > report.METRICS


def test_every_tensor_of_an_adapter_is_compared_at_its_end():
    start = adapters.start_of(CASES / "lora_rslora", told(CASES / "lora_rslora"))
    ours, theirs = adapters.ended(start, start.params)
    found = report.Report()
    seen = []
    found.add = lambda quantity, gap, tolerance, where: seen.append((quantity, gap, where))
    weights.compare_weights(found, "policy", ours, theirs, start.policy, 1e-5, 1.0)
    # Two tensors of four layers' linears in two layers, a layer norm and a head: none is where it began.
    assert len(seen) == 2 * 4 * 2 + 3 and {quantity for quantity, _, _ in seen} == {"final policy, tensors"}
    assert all(gap > weights.WEIGHTS for _, gap, _ in seen)
    assert {"layer 1 mlp/dense_4h_to_h/lora_b", "embed_out/kernel"} <= {where for _, _, where in seen}
