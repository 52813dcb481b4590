"""Reading ahead into two buffers by a thread: the bits of mapped files, bounded memory, and no thread left over."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import isotype
from isotype.checkpoint import fill as filling
from isotype.checkpoint.formats import mapped as staging
from isotype.checkpoint.formats.headers import read_file_headers
from isotype.checkpoint.formats.mapped import staged
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.core.errors import CheckpointError
from tests.models import tiny_model


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a file with tensors of all sizes and many dtypes."""
    tensors = {
        "small": torch.arange(7, dtype=torch.int16),
        "weight": torch.randn(33, 5),
        "half": torch.randn(3, 40).bfloat16(),
        "large": torch.randn(50, 40),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "last": torch.randn(11, 13).half(),
    }
    save_file(tensors, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", tensors


def work_of(path: Path) -> list[tuple[str, list[TensorHeader]]]:
    return [(header.name, [header]) for header in read_file_headers(path)]


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("isotype-reader")]


@pytest.mark.parametrize("size", [1024, 4096, 1 << 20])
def test_every_tensor_comes_in_its_order_and_what_fits_comes_in_a_buffer(
    saved: tuple[Path, dict[str, torch.Tensor]], size: int
) -> None:
    path, tensors = saved
    work = work_of(path)
    order = []
    for name, there in staged(work, size):
        order.append(name)
        (header,) = dict(work)[name]
        assert (there is None) == (header.bytes > size)
        if there is not None:
            read = there.tensor(header)
            assert read.dtype == tensors[name].dtype
            assert torch.equal(read, tensors[name])
    assert order == [name for name, _ in work]
    assert not readers()


def test_two_buffers_are_all_the_memory_there_is(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def buffer(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(staging, "_buffer", buffer)
    places = {there.buffer.data_ptr() for _, there in staged(work_of(saved[0]), 1024) if there}
    assert sizes == [1024, 1024]
    assert len(places) == 2


def test_the_thread_reads_ahead(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = threading.Event()
    fills = itertools.count(1)
    fill = staging._fill

    def watched(*args: Any, **kwargs: Any) -> Any:
        if next(fills) == 2:
            ahead.set()  # the second group is read while the first is used
        return fill(*args, **kwargs)

    monkeypatch.setattr(staging, "_fill", watched)
    small = [(name, headers) for name, headers in work_of(saved[0]) if headers[0].bytes]
    reading = staged(small * 3, 1024)
    _, first = next(reading)
    assert ahead.wait(20)
    kept = None if first is None else first.buffer.clone()
    if first is not None and kept is not None:
        assert torch.equal(first.buffer, kept)
    reading.close()
    assert not readers()


def test_a_file_that_ends_too_early_is_named_where_its_tensors_are_waited_for(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    path, _ = saved
    work = work_of(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"weights\.safetensors") as raised:
        list(staged(work, 4096))
    assert "contains only" in str(raised.value)
    assert not readers()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(staged(work, 4096))
    assert not readers()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, MemoryError])
def test_what_ends_the_caller_ends_the_thread(
    saved: tuple[Path, dict[str, torch.Tensor]], interrupt: type[BaseException]
) -> None:
    def use() -> None:
        reading = staged(work_of(saved[0]) * 4, 1024)
        try:
            next(reading)
            raise interrupt
        finally:
            reading.close()

    with pytest.raises(interrupt):
        use()
    assert not readers()


def test_where_no_memory_can_be_pinned_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refusing(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no more pages can be locked\nand more")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    assert staging._buffer(64).numel() == 65
    assert caplog.messages == [
        "weights are copied to the GPU more slowly, without pinned memory: no more pages can be locked"
    ]


# ------------------------------------------------------------------------------------------------ a whole model


@pytest.mark.parametrize("quantization", [None, "nf4", "int8", "saved nf4"])
def test_a_model_has_the_same_bits_as_from_mapped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    path, form = tmp_path / "model", quantization and quantization.removeprefix("saved ")
    tiny_model("llama", torch.bfloat16).save_pretrained(path)
    policy = isotype.resolve_precision(path, "bfloat16", form, device="cpu")
    if quantization == "saved nf4":
        isotype.load(path, policy).save_pretrained(tmp_path / "saved")
        path = tmp_path / "saved"
    mapped = isotype.load(path, policy).state_dict()
    buffers: list[torch.Tensor] = []

    def buffer(size: int) -> torch.Tensor:
        buffers.append(torch.empty(size + 1, dtype=torch.uint8))
        return buffers[-1]

    monkeypatch.setattr(staging, "_buffer", buffer)
    monkeypatch.setattr(filling, "staged", partial(staged, size=1 << 14))
    # A device map may leave the quantized weights on the CPU.
    on_gpu = lambda _, source: source.target == "model.embed_tokens.weight"  # noqa: E731
    monkeypatch.setattr(filling.Filler, "_on_gpu", on_gpu)
    read = isotype.load(path, policy)
    assert [buffer.nbytes for buffer in buffers] == [(1 << 14) + 1] * 2
    assert read.state_dict().keys() == mapped.keys()
    for name, value in read.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == mapped[name].dtype
            assert torch.equal(value, mapped[name]), name
    # No tensor is in a buffer, which the next tensors will overwrite.
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in read.parameters())
    assert not readers()


def test_buffers_are_used_where_weights_go_to_a_gpu() -> None:
    class To:
        def __init__(self, device: Any) -> None:
            self.device = lambda _: device

    class Source:
        target = "weight"

    for device, gpu in (("cpu", False), (torch.device("cuda", 1), True), ("xpu:0", True)):
        assert filling.Filler._on_gpu(To(device), Source()) == gpu  # type: ignore[arg-type]
