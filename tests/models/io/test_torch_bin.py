"""pytorch_model.bin is read without torch, and admits tensors and nothing else."""

from __future__ import annotations

import collections
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.errors import UserError
from rlhf_jax.models.io import hf, torch_bin
from tests.helpers.models_common import assert_trees_equal, reference
from tests.helpers.optional import optional

torch = optional("torch")
DTYPES = "float16 bfloat16 float32 float64 uint8 int8 int16 int32 int64 bool".split()


def as_numpy(tensor):
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def test_every_dtype_and_layout_is_read_back_equal(tmp_path):
    state = collections.OrderedDict()
    for dtype in DTYPES:
        base = (torch.arange(24).reshape(2, 3, 4) % 7).to(getattr(torch, dtype))
        state[f"{dtype}.whole"] = base
        state[f"{dtype}.transposed"] = base.transpose(0, 2)
        state[f"{dtype}.slice"] = base[1, ::2, 1:3]
        state[f"{dtype}.expanded"] = base[0, :, :1].expand(3, 5)
        state[f"{dtype}.scalar"] = base[1, 1, 1]
        state[f"{dtype}.empty"] = base[:0]
    torch.save(state, tmp_path / "a.bin")
    tensors = torch_bin.read(tmp_path / "a.bin")
    assert list(tensors) == list(state)
    for name, tensor in tensors.items():
        array = tensor.read()
        assert str(array.dtype) == name.split(".")[0] and array.shape == tensor.shape == tuple(state[name].shape)
        np.testing.assert_array_equal(array.astype(np.float64), as_numpy(state[name]).astype(np.float64))


@given(data=st.data())
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_view_of_a_storage_is_read_back_equal(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    base = torch.randn(*shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    view = base.permute(*data.draw(st.permutations(range(len(shape)))))
    for axis in range(view.ndim):
        start = data.draw(st.integers(0, view.shape[axis] - 1))
        view = view.narrow(axis, start, data.draw(st.integers(1, view.shape[axis] - start)))
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"view": view, "base": base}, f"{folder}/a.bin")
        tensors = torch_bin.read(f"{folder}/a.bin")
        np.testing.assert_array_equal(tensors["view"].read(), view.numpy())
        np.testing.assert_array_equal(tensors["base"].read(), base.numpy())


def write_bin(folder, model, shards=1):
    folder.mkdir()
    (folder / "config.json").write_text(model.config.to_json_string())
    state = {name.replace("lm_head", "embed_out"): tensor for name, tensor in model.state_dict().items()}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    names, weight_map = list(state), {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = names[number::shards]
        torch.save({name: state[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_bin_checkpoint_equals_the_safetensors_one(tmp_path, shards):
    theirs = reference("causal")
    theirs.save_pretrained(tmp_path / "safe")
    write_bin(tmp_path / "bin", theirs, shards)
    model, params = hf.load(tmp_path / "bin")
    expected_model, expected = hf.load(tmp_path / "safe")
    assert model == expected_model
    assert_trees_equal(params, expected)


def test_checkpoints_are_read_without_torch(tmp_path):
    write_bin(tmp_path / "bin", reference("causal"))
    code = f"""
import sys
sys.modules["torch"] = None
from rlhf_jax.models.io import hf
model, params = hf.load({str(tmp_path / "bin")!r})
hf.save({str(tmp_path / "out")!r}, model, params, kind="causal")
hf.load({str(tmp_path / "out")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Evil:
    """Pickles as a call of os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_hostile_bin_is_refused_by_name_and_not_run(tmp_path):
    folder, witness = tmp_path / "evil", tmp_path / "witness"
    write_bin(folder, reference("causal"))
    state = {"gpt_neox.embed_in.weight": torch.zeros(2), "x": Evil(f"touch {witness}")}
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: .*asks for (posix|nt)\.system.*nothing was run"):
        hf.load(folder)
    assert not witness.exists()


def rewrite(path, target, data=None, change=lambda content: content):
    """A copy of a torch file with data.pkl replaced, or each storage changed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl"):
                content = content if data is None else data
            elif "/data/" in name:
                content = change(content)
            new.writestr(name, content)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "asks for builtins.eval"),
        (b"ctorch._utils\n_rebuild_parameter\n.", "asks for torch._utils._rebuild_parameter"),
        (b"ctorch\nUntypedStorage\n.", "asks for torch.UntypedStorage"),
        (b"ccollections\nOrderedDict.fromkeys\n.", "asks for collections.OrderedDict.fromkeys"),
        (pickle.dumps([1, 2]), "holds a list, not a state dict"),
        (pickle.dumps({"step": 3}), "entry 'step' is of type int, not a tensor"),
        (pickle.dumps({"model": {}}), "entry 'model' is of type dict, not a tensor"),
        (b"\x80\x02}q", "damaged or not a state dict"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "storage 'a' is not a typed tensor storage"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_name(tmp_path, data, message):
    torch.save({"a": torch.ones(3)}, tmp_path / "good.bin")
    rewrite(tmp_path / "good.bin", tmp_path / "bad.bin", data)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        torch_bin.read(tmp_path / "bad.bin")
    assert "bad.bin" in str(error.value)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"a": torch.ones(300)}, tmp_path / "good.bin")
    rewrite(tmp_path / "good.bin", tmp_path / "cut.bin", change=lambda content: content[:-4])
    with pytest.raises(UserError, match=r"cut\.bin: .*data/0 has 1196 bytes, not 300 of float32"):
        torch_bin.read(tmp_path / "cut.bin")
    with zipfile.ZipFile(tmp_path / "good.bin") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        data = archive.read(name)
    # 300 is the storage's count, the size, in this order, each a two-byte BININT2; lengthen the size alone.
    count = b"M" + (300).to_bytes(2, "little")
    assert data.count(count) == 2
    head, middle, tail = data.split(count)
    rewrite(tmp_path / "good.bin", tmp_path / "long.bin", head + count + middle + b"M\x2d\x01" + tail)
    with pytest.raises(UserError, match=r"long\.bin.*storage"):
        torch_bin.read(tmp_path / "long.bin")


def test_the_legacy_format_is_refused_by_name(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"old\.bin.*legacy.*1\.6"):
        torch_bin.read(tmp_path / "old.bin")
    (tmp_path / "raw.bin").write_bytes(pickle.dumps(Evil("true")))
    with pytest.raises(UserError, match=r"raw\.bin.*torch\.save"):
        torch_bin.read(tmp_path / "raw.bin")
    with zipfile.ZipFile(tmp_path / "zip.bin", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UserError, match=r"zip\.bin.*zip archive.*torch\.save"):
        torch_bin.read(tmp_path / "zip.bin")
