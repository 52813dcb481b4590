"""Damaged checkpoints: files truncated at every boundary, files with changed bytes, and indexes with false entries.

Reading raises a CheckpointError that names the file, and no other error. Time and memory stay bounded.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from isotype.checkpoint.formats.config import gguf_config
from isotype.checkpoint.formats.headers import read_headers
from isotype.checkpoint.inspect import inspect_checkpoint
from isotype.core.errors import CheckpointError
from tests.checkpoint.test_gguf import write_gguf

FORMATS = ("safetensors", "torch", "gguf", "index")
FEW, MANY = 120, 3000  # files of each format, in every run and in `make test-all`
_SECONDS = 2.0  # seconds of computing for one file of a few KiB
_MIB = 300  # MiB that reading all files may add to the process


def weights() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.arange(32, dtype=torch.bfloat16).view(8, 4),
        "model.layers.0.mlp.up_proj.weight": torch.ones(4, 4),
        "model.layers.0.mlp.up_proj.bias": torch.zeros(4, dtype=torch.int64),
        "model.norm.weight": torch.ones(3, dtype=torch.float16),
    }


def whole(form: str, directory: Path) -> Path:
    """Save a small checkpoint; return the file to damage."""
    held = weights()
    if form == "safetensors":
        save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
        return directory / "model.safetensors"
    if form == "torch":
        torch.save(held, directory / "pytorch_model.bin")
        return directory / "pytorch_model.bin"
    if form == "gguf":
        return write_gguf(directory / "model.gguf")
    shards = {"1.safetensors": dict(list(held.items())[:2]), "2.safetensors": dict(list(held.items())[2:])}
    for name, part in shards.items():
        save_file(part, directory / name)
    index = directory / "model.safetensors.index.json"
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map}))
    return index


def head(form: str, content: bytes) -> int:
    """Return the number of bytes before the weights; for a torch archive all bytes, since its directory is at its end."""
    if form == "safetensors":
        return 8 + int.from_bytes(content[:8], "little")
    return min(len(content), 4096) if form == "gguf" else len(content)


def flips(form: str, content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield copies with one to eight changed bytes, most of them in the header."""
    chance = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 8))):
            end = head(form, content) if chance.random() < 0.9 else len(content)
            changed[chance.randrange(end)] = chance.choice((0, 0xFF, 0x80, chance.randrange(256), ord("9")))
        yield bytes(changed)


def cuts(form: str, content: bytes, count: int) -> Iterator[bytes]:
    """Yield the file cut at the boundaries of its header; for a long header, at `count` places."""
    ends = list(range(min(head(form, content) + 2, len(content))))
    for end in ends[:: max(1, len(ends) // count)]:
        yield content[:end]


def assert_read_or_refused(path: Path, read: Callable[[Path], object] = inspect_checkpoint) -> bool:
    """Return True if reading a damaged file raises an error that names the file."""
    begin = time.process_time()
    refused: CheckpointError | None = None
    try:
        read(path)
    except CheckpointError as error:
        refused = error
    assert time.process_time() - begin < _SECONDS
    if refused is None:
        return False
    assert path.name in str(refused)
    assert refused.problems
    assert all(problem.given and problem.expected and problem.fix for problem in refused.problems)
    str(refused).encode()  # the message can be printed
    return True


def grown(before: int) -> float:
    """Return the largest growth of the process in MiB."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("form", FORMATS)
def test_random_bytes_are_read_or_refused(tmp_path, form, count):
    path = whole(form, tmp_path)
    content = path.read_bytes()
    assert not assert_read_or_refused(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for changed in flips(form, content, count, seed=count):
        path.write_bytes(changed)
        refused += assert_read_or_refused(path)
    # A changed byte in a tensor's values, or in a text that is not used, may remain unnoticed.
    assert refused > count // 4
    assert grown(before) < _MIB


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, form, count):
    path = whole(form, tmp_path)
    content = path.read_bytes()
    for cut in cuts(form, content, count):
        path.write_bytes(cut)
        assert assert_read_or_refused(path)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_a_config_is_read_from_damaged_gguf_metadata_or_refused(tmp_path, count):
    path = whole("gguf", tmp_path)
    content = path.read_bytes()
    assert gguf_config(read_headers(path)).model_type == "llama"
    for changed in flips("gguf", content, count, seed=count):
        path.write_bytes(changed)
        assert_read_or_refused(path, lambda path: gguf_config(read_headers(path)))


def said(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_headers(path)
    return str(caught.value)


def rewritten(path: Path, change: Callable[[dict], object]) -> Path:
    """Write a safetensors file with another header and the same data."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return path


def test_a_huge_header_is_not_read(tmp_path):
    path = whole("safetensors", tmp_path)
    for length in (2**63, 2**64 - 1, 40_000_001):
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
        assert f"a header of {length} bytes" in said(path)


def test_an_entry_of_a_header_is_shown_in_part(tmp_path):
    path = rewritten(whole("safetensors", tmp_path), lambda header: header.update(a=[0] * 10_000))
    assert len(said(path)) < 400


@pytest.mark.parametrize("count", [2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("at", [8, 16])
def test_huge_counts_in_a_gguf_file(tmp_path, at, count):
    path = whole("gguf", tmp_path)
    content = bytearray(path.read_bytes())
    content[at : at + 8] = struct.pack("<Q", count)
    path.write_bytes(content)
    assert str(path) in said(path)


def test_tensors_that_overlap(tmp_path):
    path = whole("safetensors", tmp_path)

    def change(header: dict) -> None:
        norm, embed = header["model.norm.weight"], header["model.embed_tokens.weight"]
        norm["data_offsets"] = [embed["data_offsets"][0], embed["data_offsets"][0] + 6]

    text = said(rewritten(path, change))
    assert "tensor 'model." in text
    assert "overlaps" in text


def test_gguf_tensors_that_overlap(tmp_path):
    path = whole("gguf", tmp_path)
    headers = sorted(read_headers(path).tensors, key=lambda tensor: tensor.begin)
    content = path.read_bytes()
    name = headers[1].name.encode()
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (dimensions,) = struct.unpack_from("<I", content, at)
    at += 4 + 8 * dimensions + 4
    path.write_bytes(content[:at] + struct.pack("<Q", 0) + content[at + 8 :])
    assert headers[1].name in said(path)
    assert f"overlaps {headers[1].name!r}" in said(path) or f"overlaps {headers[0].name!r}" in said(path)


def test_a_name_twice_in_a_header(tmp_path):
    path = whole("safetensors", tmp_path)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + size].replace(b"model.norm.weight", b"model.layers.0.mlp.up_proj.bias")
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    assert "tensor 'model.layers.0.mlp.up_proj.bias' twice" in said(path)


def test_a_name_twice_in_an_index(tmp_path):
    index = whole("index", tmp_path)
    index.write_text(
        index.read_text().replace('{"model.embed', '{"model.norm.weight": "1.safetensors", "model.embed')
    )
    assert "'model.norm.weight' twice" in said(tmp_path)


def test_a_key_twice_in_gguf_metadata(tmp_path):
    path = whole("gguf", tmp_path)
    path.write_bytes(
        path.read_bytes().replace(b"llama.embedding_length", b"llama.feed_forward_len"[:22].ljust(22, b"x"))
    )
    before = path.read_bytes()
    twice = before.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id")
    path.write_bytes(twice)
    assert "metadata 'tokenizer.ggml.eos_token_id' twice" in said(path)


def test_half_a_character_is_no_name(tmp_path):
    path = rewritten(
        whole("safetensors", tmp_path),
        lambda header: header.update({"\ud800": header.pop("model.norm.weight")}),
    )
    assert "tensor '\\ud800'" in said(path)
    index = whole("index", tmp_path)
    index.write_text(index.read_text().replace("2.safetensors", "\\ud800.safetensors"))
    assert "\\ud800.safetensors' of tensor" in said(index)


@pytest.mark.parametrize(
    "shard",
    [
        "../1.safetensors",
        "/etc/passwd",
        "a/../1.safetensors",
        "..",
        ".",
        "1\0.safetensors",
        "x" * 300,
        None,
        [],
    ],
)
def test_an_index_names_files_of_its_own_directory(tmp_path, shard):
    (tmp_path / "model").mkdir()
    index = whole("index", tmp_path / "model")
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(content))
    assert (
        f"- shard {shard!r} of tensor 'model.norm.weight'\n    expected  the name of a file in the same directory"
        in said(index)
    )


def test_links_are_followed_and_dangling_ones_are_missing(tmp_path):
    """Files in the hub's cache are links. The owner may let a link lead out of the directory; an index may not."""
    index = whole("index", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    target = (tmp_path / "2.safetensors").rename(tmp_path / "elsewhere" / "blob")
    (tmp_path / "2.safetensors").symlink_to(target)
    assert len(read_headers(index).tensors) == 4
    target.unlink()
    assert "2.safetensors is missing; model.safetensors.index.json expects 2 tensors (" in said(index)
    (tmp_path / "2.safetensors").unlink()
    (tmp_path / "2.safetensors").symlink_to("2.safetensors")
    assert "2.safetensors is missing" in said(index)


def test_an_index_and_its_shards_disagree(tmp_path):
    index = whole("index", tmp_path)
    content = json.loads(index.read_text())
    content["weight_map"]["ghost.weight"] = "1.safetensors"
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    text = said(tmp_path)
    assert "1.safetensors lacks ghost.weight\n" in text
    assert "2.safetensors also has model.norm.weight\n" in text
    assert text.count("take the index and the shards from the same save of the model") == 2


def test_an_index_without_metadata_says_what_to_add(tmp_path):
    index = whole("index", tmp_path)
    content = json.loads(index.read_text())
    del content["metadata"]
    index.write_text(json.dumps(content))
    assert 'fix       add "metadata": {} to the index' in said(index)
