"""Files written by torch.save: only tensors are read, loaded values are equal, and other objects are refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.formats.mapped import MappedFiles
from isotype.checkpoint.formats.torch_file import torch_tensors
from isotype.checkpoint.load import load
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.stored_weights import StoredWeights
from isotype.cli.main import main
from isotype.core.errors import CheckpointError
from tests.models import quiet, save_tiny

SPARSE = "'a': a torch.sparse_coo tensor" if torch.__version__ < "2.14" else "a sparse tensor"
# Older versions may not return a tensor's offset in its file: torch.load reads the tensor then.
OLDER = torch.__version__ < "2.13"


def as_torch(directory: Path, shards: int = 1) -> Path:
    """Save a safetensors checkpoint again as pytorch_model.bin, or as shards with an index."""
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, directory / "pytorch_model.bin")
        return directory
    weight_map = {}
    for at in range(shards):
        part = dict(list(weights.items())[at::shards])
        file = f"pytorch_model-{at + 1:05d}-of-{shards:05d}.bin"
        torch.save(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return directory


@pytest.mark.parametrize("shards", [1, 3])
def test_headers_are_those_of_safetensors(saved, tmp_path, shards):
    safe = {(t.name, t.dtype, t.shape, t.bytes) for t in read_headers(saved("llama", torch.bfloat16)).tensors}
    path = as_torch(save_tiny("llama", tmp_path, torch.bfloat16), shards)
    headers = read_headers(path)
    assert (headers.format, headers.kind) == ("torch", "model")
    assert {(t.name, t.dtype, t.shape, t.bytes) for t in headers.tensors} == safe
    values = load_file(saved("llama", torch.bfloat16) / "model.safetensors")
    mapped = MappedFiles()
    for tensor in headers.tensors:
        assert torch.equal(mapped.tensor(tensor), values[tensor.name])
        if not tensor.begin:
            assert OLDER
            continue
        stored = tensor.file.read_bytes()[tensor.begin : tensor.begin + tensor.bytes]
        assert stored == values[tensor.name].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("shards", "quantization"), [(1, None), (3, "nf4")])
def test_it_is_streamed_with_the_same_values(saved, tmp_path, monkeypatch, shards, quantization):
    monkeypatch.delattr(transformers.modeling_utils, "load_state_dict")  # transformers would call it
    other = saved("llama", torch.bfloat16)
    path = as_torch(save_tiny("llama", tmp_path, torch.bfloat16), shards)
    with quiet():
        model, same = (
            load(each, resolve_precision(each, "bfloat16", quantization, "cpu")) for each in (path, other)
        )
    expected = same.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_tensors_of_one_storage_and_of_other_strides(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    parts = {
        "whole": whole,
        "rows": whole[1:],
        "turned": whole.T,
        "scalar": torch.tensor(3),
        "none": whole[:0],
    }
    torch.save(parts, tmp_path / "pytorch_model.bin")
    headers = {tensor.name: tensor for tensor in read_headers(tmp_path).tensors}
    assert OLDER or headers["rows"].begin == headers["whole"].begin + 16
    mapped = MappedFiles()
    assert all(torch.equal(mapped.tensor(headers[name]), value) for name, value in parts.items())


def test_weights_under_a_key(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "weights.pt")
    assert [tensor.name for tensor in read_headers(tmp_path / "weights.pt").tensors] == ["a"]


def test_stored_weights_are_read_from_it(saved, tmp_path):
    path = as_torch(save_tiny("qwen3-moe", tmp_path, torch.bfloat16))
    with quiet():
        model = load(saved("qwen3-moe", torch.bfloat16), resolve_precision(path, "bfloat16", device="cpu"))
    stored = StoredWeights(model, read_headers(path))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(stored.read(name), model.state_dict()[name])


def test_inspect_and_check_read_it(tmp_path, capsys):
    path = as_torch(save_tiny("llama", tmp_path, torch.bfloat16))
    assert main(["inspect", str(path)]) == 0
    assert "(torch, model)" in capsys.readouterr().out
    assert main(["check", str(path), "--device", "a100"]) == 0


class Evil:
    """An object that runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    return str(caught.value)


def test_a_pickle_in_disguise_is_not_run(tmp_path):
    mark = tmp_path / "mark"
    for name, write in {
        "pytorch_model.bin": lambda path: torch.save({"a": torch.ones(2), "b": Evil(mark)}, path),
        "old.bin": lambda path: torch.save({"b": Evil(mark)}, path, _use_new_zipfile_serialization=False),
        "bare.pt": lambda path: path.write_bytes(pickle.dumps(Evil(mark))),
        "model.safetensors": lambda path: path.write_bytes(pickle.dumps(Evil(mark)) + bytes(200)),
    }.items():
        write(tmp_path / name)
        text = refused(tmp_path / name)
        assert text.startswith(f"cannot read {tmp_path / name}\n")
        assert "use the checkpoint in safetensors" in text
    assert not mark.exists()
    assert (
        "a pickle of other objects than tensors: posix.mkdir\n"
        "    expected  only tensors, because unpickling anything else may run code\n"
    ) in refused(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("content", "given"),
    [
        ({}, "a dict"),
        ([torch.ones(2)], "a list"),
        ({"a": torch.ones(2), "step": 3}, "'step': a int"),
        ({"a": torch.ones(2, 2).to_sparse()}, SPARSE),
        ({3: torch.ones(2)}, "the name 3"),
    ],
)
def test_other_things_than_weights(tmp_path, content, given):
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert f"- {given}\n" in refused(tmp_path / "pytorch_model.bin")


def test_a_file_that_torch_did_not_write(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"no weights at all")
    assert "- 17 bytes that begin with b'no'\n" in refused(tmp_path / "model.pt")


def test_torch_files_without_their_index(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    assert refused(tmp_path) == (
        "it is unknown which files belong to the model\n"
        f"  - pytorch_model-00001-of-00002.bin in {tmp_path}\n"
        "    expected  model.safetensors or pytorch_model.bin, in one file or as shards with an index\n"
        "    fix       copy the index together with the shards, or pass the path of a single file"
    )


def test_values_are_mapped(tmp_path):
    torch.save({"a": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    assert torch.equal(torch_tensors(tmp_path / "pytorch_model.bin")["a"], torch.ones(4))
