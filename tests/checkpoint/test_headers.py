"""Headers of safetensors files, sharded checkpoints and directories. GGUF: test_gguf.py."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from isotype.checkpoint.formats.headers import read_headers, read_sharded_headers
from isotype.checkpoint.formats.safetensors import read_safetensors
from isotype.core.errors import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
in_tmp_path = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a safetensors file with this header, JSON or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def message(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    return str(caught.value)


def damaged(path: Path, given: str, expected: str) -> str:
    return (
        f"cannot read {path}\n  - {given}\n    expected  {expected}\n"
        "    fix       the file is damaged: download, copy or save it again"
    )


tensors = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


@in_tmp_path
@given(tensors=tensors, metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_what_safetensors_writes_is_read(
    tmp_path: Path, tensors: dict[str, tuple[torch.dtype, list[int]]], metadata: dict[str, str]
) -> None:
    path = tmp_path / "model.safetensors"
    # Without tensors and metadata, safetensors 0.8 writes a header that it cannot read itself.
    assume(tensors or metadata)
    save_file(
        {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}, path, metadata
    )
    headers = read_headers(path)
    assert {t.name: (t.dtype, list(t.shape)) for t in headers.tensors} == tensors
    assert [t.name for t in headers.tensors] == sorted(tensors)
    assert sum(t.bytes for t in headers.tensors) == sum(
        torch.zeros(shape, dtype=dtype).nbytes for dtype, shape in tensors.values()
    )
    assert headers.metadata == metadata
    assert (headers.format, headers.kind, headers.path) == ("safetensors", "model", path)


@in_tmp_path
@given(content=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        read_headers(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
likely = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "F8_E4M3", "BOOL", "Q4", "", 3, None]),
        "shape": st.lists(st.integers(-1, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | json_values,
    },
)


@in_tmp_path
@given(
    header=json_values | st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), likely | json_values),
    data=st.binary(max_size=16),
)
def test_any_json_header_is_read_or_refused(tmp_path: Path, header: Any, data: bytes) -> None:
    """isotype accepts no header that the safetensors library refuses."""
    path = write(tmp_path / "x.safetensors", header, data)
    try:
        found = read_headers(path)
    except CheckpointError:
        return
    try:
        with safe_open(path, "pt") as file:
            assert sorted(file.keys()) == [tensor.name for tensor in found.tensors]
    except SafetensorError as error:
        pytest.fail(f"safetensors refuses it: {error}")


@in_tmp_path
@given(st.data())
def test_every_truncation_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}, whole)
    content = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError):
        read_headers(cut)


def test_a_truncated_file_says_what_is_missing(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.safetensors", {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 8, 16)}, bytes(9)
    )
    problem = "9 bytes of data, too few for 1 of the tensors, such as 'b'"
    assert message(path) == damaged(path, problem, "16 bytes")


@pytest.mark.parametrize(
    ("header", "data", "given", "expected"),
    [
        ([], b"", "a header that is a JSON list", "a JSON object"),
        ({"a": 1}, b"", "tensor 'a': 1", "an object with dtype, shape and data_offsets"),
        ({"a": entry("Q9", [1], 0, 4)}, bytes(4), "tensor 'a': dtype 'Q9'", "a dtype such as 'BF16'"),
        ({"a": entry("F32", [True], 0, 4)}, bytes(4), "tensor 'a': shape [True]", "a list of sizes"),
        ({"a": entry("F32", [1], 4, 0)}, bytes(4), "tensor 'a': data_offsets [4, 0]", "[begin, end]"),
        ({"a": entry("F32", [3], 0, 8)}, bytes(8), "tensor 'a': 8 bytes for F32 [3]", "12 bytes"),
        (
            {"a": entry("F32", [1], 4, 8)},
            bytes(8),
            "tensor 'a' at byte 4 leaves a hole after the header",
            "byte 0",
        ),
        (
            {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)},
            bytes(8),
            "tensor 'b' at byte 4 overlaps 'a'",
            "byte 8",
        ),
        ({"a": entry("F32", [1], 0, 4)}, bytes(6), "2 bytes after the last tensor", "none"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ {'a': 1}", "an object of text"),
        (b'{"a":1,"a":2}', b"", "tensor 'a' twice", "each name once"),
    ],
)
def test_damage(tmp_path: Path, header: Any, data: bytes, given: str, expected: str) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    assert message(path) == damaged(path, given, expected)


def test_a_header_that_is_not_json(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"{nope}")
    assert "a header that is not JSON (Expecting property name" in message(path)


def test_all_problems_at_once_but_not_thousands(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {f"t{n:03}": entry("F32", [2], 0, 4) for n in range(100)})
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    assert len(caught.value.problems) == 10
    assert caught.value.hint == "90 more problems not shown"


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "it is a Git LFS pointer: run git lfs pull",
        ),
        (b"GGUF" + bytes(40), "it is a GGUF file: rename it to a name that ends in .gguf"),
        (
            b"<!DOCTYPE html><html></html>",
            "it is an HTML or XML page, not the file itself: download it again",
        ),
        (b"PK\x03\x04" + b"abcdefgh", "it is a PyTorch file: rename it to a name that ends in .bin"),
        (b"\xff" * 16, "it is not a safetensors file, or damaged: download or save it again"),
    ],
)
def test_files_of_another_kind(tmp_path: Path, content: bytes, fix: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    assert caught.value.problems[0].fix == fix


def shard(directory: Path, held: dict[str, list[str]], index: dict[str, str]) -> Path:
    """Write shards with these tensors, and an index with the content `index`."""
    for name, names in held.items():
        save_file({each: torch.zeros(2, dtype=torch.bfloat16) for each in names}, directory / name)
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": index}))
    return path


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    shard(
        tmp_path,
        {"1.safetensors": ["b"], "2.safetensors": ["a"]},
        {"b": "1.safetensors", "a": "2.safetensors"},
    )
    headers = read_headers(tmp_path)
    assert [(t.name, t.dtype, t.file.name) for t in headers.tensors] == [
        ("a", torch.bfloat16, "2.safetensors"),
        ("b", torch.bfloat16, "1.safetensors"),
    ]
    assert headers.metadata == {"total_size": 8}
    assert headers.kind == "model"


def test_everything_wrong_with_shards_at_once(tmp_path: Path) -> None:
    held = {"1.safetensors": ["a", "x"], "2.safetensors": ["c"]}
    index = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors", "d": "3.safetensors"}
    path = shard(tmp_path, held, index)
    cut = tmp_path / "2.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    assert message(tmp_path) == (
        f"cannot read {path}\n"
        "  - 1.safetensors lacks b\n"
        "    expected  the tensors that model.safetensors.index.json lists for 1.safetensors\n"
        "    fix       take the index and the shards from the same save of the model\n"
        "  - 1.safetensors also has x\n"
        "    expected  the tensors that model.safetensors.index.json lists for 1.safetensors\n"
        "    fix       take the index and the shards from the same save of the model\n"
        "  - 2.safetensors: 3 bytes of data, too few for 1 of the tensors, such as 'c'\n"
        "    expected  4 bytes\n"
        "    fix       the file is damaged: download, copy or save it again\n"
        "  - 3.safetensors is missing; model.safetensors.index.json expects d in it\n"
        f"    expected  the file {tmp_path}/3.safetensors\n"
        "    fix       download the shard, or copy it into the directory"
    )


@pytest.mark.parametrize("name", ["../1.safetensors", "/etc/passwd", "", 3])
def test_an_index_cannot_reach_outside_its_directory(tmp_path: Path, name: object) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    assert message(tmp_path) == damaged(
        path, f"shard {name!r} of tensor 'a'", "the name of a file in the same directory"
    )


@in_tmp_path
@given(content=json_values | st.fixed_dictionaries({"weight_map": json_values}))
def test_any_json_index_is_read_or_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        read_sharded_headers(path)


def test_an_adapter_directory(tmp_path: Path) -> None:
    save_file({"lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    assert read_headers(tmp_path).kind == "adapter"


def test_safetensors_win_over_pickles(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert [t.name for t in read_headers(tmp_path).tensors] == ["a"]


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    for n in range(8):
        (tmp_path / f"{n}.txt").touch()
    assert message(tmp_path) == (
        "not a checkpoint\n"
        f"  - the directory {tmp_path} holds 0.txt, 1.txt, 2.txt, 3.txt, 4.txt, 5.txt and 2 more\n"
        "    expected  one of model.safetensors, model.safetensors.index.json, pytorch_model.bin, "
        "pytorch_model.bin.index.json, adapter_model.safetensors or a .gguf file\n"
        "    fix       pass the directory that contains the weights"
    )


def test_shards_without_an_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    assert message(tmp_path) == (
        "it is unknown which safetensors files belong to the model\n"
        f"  - the directory {tmp_path} holds model-00001-of-00002.safetensors\n"
        "    expected  model.safetensors, or shards listed in model.safetensors.index.json\n"
        "    fix       copy the index together with the shards, or rename a single file to model.safetensors"
    )


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert message(tmp_path / "a.txt") == (
        "not a checkpoint\n"
        f"  - the file {tmp_path}/a.txt\n"
        "    expected  a directory, or a file ending in .safetensors, .gguf, .bin, .pt, .safetensors.index.json or "
        ".bin.index.json\n"
        "    fix       pass the directory or file that contains the weights"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert message(tmp_path / "a.safetensors") == (
        f"no such file\n  - {tmp_path}/a.safetensors\n    expected  an existing file\n"
        "    fix       check the path, or download the file"
    )


def test_no_weight_is_read(tmp_path: Path) -> None:
    """A sparse file whose data would take 8 TB is read like any other file."""
    path = tmp_path / "model.safetensors"
    size = 2**43
    text = json.dumps({"a": entry("U8", [size], 0, size)}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    assert read_safetensors(path)[0][0].elements == size
