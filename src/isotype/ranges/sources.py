"""What is measured: a model in memory, or one whose weights stay on disk until a module asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.adapter import tokenizer_of
from isotype.checkpoint.facts import facts_of
from isotype.checkpoint.formats.headers import find_weights
from isotype.checkpoint.formats.hub import downloaded, local_snapshot
from isotype.checkpoint.load import load, saved_format, tokenizer_source
from isotype.checkpoint.locate import resolve_source
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.stored_weights import blank_model, fill_buffers, stored_weights
from isotype.checkpoint.weightless import model_config
from isotype.core.errors import CheckpointError, Problem, UsageError
from isotype.model.walk import blocks_in, kind_of
from isotype.precision.facts import ModelFacts
from isotype.ranges.twin import Read, unwrapped
from isotype.ranges.weights import Weight

_ROOM = 1.5
"""Memory of a measurement over that of the largest block's weights."""


@dataclass(frozen=True)
class Measured:
    """What is measured.

    Attributes:
        model: the module; on the meta device where its weights stay on disk.
        source: what it is, in words.
        device: where it is.
        files: the directory or GGUF file in which its tokenizer may be; None where nobody knows.
        read: how a parameter's values are had; None where they are the parameter's own.
        notes: what there is to say about it.
    """

    model: nn.Module
    source: str
    device: torch.device
    files: Path | None = None
    read: Read | None = None
    notes: tuple[str, ...] = ()

    def tokenizer(self) -> Any | None:
        """The tokenizer that lies beside the weights, or None."""
        return None if self.files is None else tokenizer_of(tokenizer_source(self.files))

    def fitting_dtype(self, device: torch.device) -> torch.dtype:
        """float32, or bfloat16 where the largest block does not fit into the free memory of `device` in float32."""
        free = free_memory(device)
        needed = _ROOM * 4 * max(_parts(self.model), default=0)
        return torch.bfloat16 if free is not None and needed > free else torch.float32


def largest_part(source: str | Path) -> int:
    """Weights of the largest part of a checkpoint that has to be in memory at one time, see `_parts`."""
    return max(_parts(blank_model(model_config(source))), default=0)


def _parts(model: nn.Module) -> list[int]:
    """Numbers of weights that are there at the same time: of a block, or of a module outside of blocks."""
    blocks = blocks_in(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    parts = [sum(each.numel() for each in block.parameters()) for block in blocks]
    outside = [module for module in model.modules() if id(module) not in inside]
    return parts + [
        sum(each.numel() for each in module.parameters(recurse=False))
        for module in outside
        if kind_of(module) != "embedding"  # of which only the rows that are looked up are made
    ]


def free_memory(device: torch.device) -> int | None:
    """Free bytes of a device; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def of_module(model: nn.Module) -> Measured:
    """A model in memory.

    Raises:
        UsageError: its weights have no values here.
    """
    model = unwrapped(model)
    wrapped: Any = model
    base = wrapped.get_base_model() if hasattr(model, "peft_config") else model
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "full_tensor"):
            where = "on the meta device" if parameter.is_meta else "sharded over processes"
            problem = Problem(
                f"{name} {where}", "weights with values", "give the checkpoint, by its path or hub id"
            )
            raise UsageError("this model cannot be measured in memory", [problem])
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    named = str(getattr(base, "name_or_path", "") or "")
    files: Path | None = None
    if named:
        try:
            files = _files(named, None, local_snapshot)
        except CheckpointError:
            files = None  # it has been moved since, or lies on a hub that nobody can reach
    return Measured(model, type(base).__name__, device, files)


def of_checkpoint(source: str | Path, revision: str | None) -> Measured:
    """A checkpoint, its weights left on disk where transformers' own conversions allow to read them one by one."""
    files = _files(source, revision, downloaded)
    assert files is not None
    facts = facts_of(files)
    if facts.quantization is not None and not facts.quantization.dequantized:
        return _loaded(source, files, facts, f"its weights are stored in {facts.quantization.format}")
    model = blank_model(model_config(files))
    stored = stored_weights(model, files)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    held = {
        each: next((name for name in tied if name in stored.shapes), None) for each, tied in names.items()
    }
    missing = [names[each][0] for each, name in held.items() if name is None]
    if missing:
        return _loaded(source, files, facts, f"it has no {missing[0]}, which transformers draws")
    fill_buffers(model, stored)

    def read(_: nn.Module, __: str, parameter: torch.Tensor) -> Weight:
        name = held[id(parameter)]
        assert name is not None
        return Weight(id(parameter), parameter.shape, lambda: stored.read(name))

    return Measured(model, str(source), torch.device("cpu"), files, read)


def _loaded(source: str | Path, files: Path, facts: ModelFacts, why: str) -> Measured:
    policy = resolve_precision(files, quantization=saved_format(facts), device="cpu")
    model = load(files, policy, device_map=None)
    note = f"loaded whole, not block by block: {why}"
    return Measured(model.requires_grad_(False), str(source), torch.device("cpu"), files, None, (note,))


def _files(
    source: str | Path, revision: str | None, of_hub: Callable[[str, str | None], Path | None]
) -> Path | None:
    """The directory with a checkpoint's safetensors, or its GGUF file."""
    found = resolve_source(source)
    if isinstance(found, str):
        return of_hub(found, revision)
    weights = find_weights(found) if found.is_dir() else None
    return weights[0] if weights is not None and weights[0].suffix == ".gguf" else found
