"""Reads the weights of a model block by block, for models that are larger than the memory.

The matrices of a block stay on the meta device until the block is read. Embeddings, head, norms and biases are filled
when the model is loaded.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.fill import Filler
from isotype.checkpoint.mapping.weight_map import Source
from isotype.checkpoint.stored_weights import StoredWeights
from isotype.checkpoint.values import DenseWeight, dequantize
from isotype.compat.glibc import give_back_memory
from isotype.core.names import grouped, unparametrized
from isotype.model.experts.stack import QuantizedStack, codes_of, place_stack, quantized_stack
from isotype.model.finite import refuse
from isotype.model.quantize import quantize_blank
from isotype.model.quantized import align_4bit, align_8bit
from isotype.model.walk import kind_of, outermost_blocks


@dataclass
class Block:
    """A block of a model.

    Attributes:
        sources: name of a deferred weight in the model -> the tensors in the files from which the weight is made.
        owners: name of a deferred weight -> the weight's module, which PEFT may wrap later.
        dense: dense weights that replace the quantized weights of the block if `DeferredBlocks.dequantize` is called.
    """

    name: str
    module: nn.Module
    sources: dict[str, Source] = field(default_factory=dict)
    owners: dict[str, nn.Module] = field(default_factory=dict)
    dense: list[DenseWeight] = field(default_factory=list)
    _blank: dict[str, tuple[nn.Parameter, QuantizedStack | None]] = field(default_factory=dict)


class DeferredBlocks:
    """The blocks of a model whose weights are read after `isotype.checkpoint.load.load`.

    Args:
        wait: True to defer the blocks' weights; False to fill all weights when the model is loaded.
        at_once: names of parameters that are never deferred.

    Attributes:
        blocks: the loaded model's blocks, in forward order.
        stored: reader of the weights as stored in the files. It is set when a model is loaded.
        other_dtypes: name -> dtype, for float tensors that the files store in another dtype than most tensors.
    """

    stored: StoredWeights
    _filler: Filler

    def __init__(self, wait: bool = True, at_once: Collection[str] = ()) -> None:
        self.blocks: tuple[Block, ...] = ()
        self.other_dtypes: dict[str, torch.dtype] = {}
        self._wait, self._at_once = wait, frozenset(at_once)
        self._used: Block | None = None

    def take(self, filler: Filler) -> dict[str, Source]:
        """Defer the matrices in the blocks of a model on the meta device. Return the sources of the weights to read now."""
        self._filler, self.stored, sources = filler, filler.stored, filler.stored.sources
        blocks = {name: Block(name, module) for name, module in outermost_blocks(self.stored.model)}
        waiting = set(self._deferrable(filler)) if self._wait else set()
        now: dict[str, Source] = {}
        names = grouped(sources, lambda name: id(sources[name]))
        for name, origin in sources.items():
            together = names[id(origin)]
            owner = _block_of(name, blocks)
            if owner is None or not all(n in waiting and _block_of(n, blocks) is owner for n in together):
                now[name] = origin
                continue
            module, _ = filler.owner(name)
            owner.sources[name], owner.owners[name] = origin, module
            if name in filler.quantized:
                quantize_blank(module, filler.dtypes[name])
                # bitsandbytes' `state_dict`, which PEFT calls, reads the value of a double-quantized weight's offset.
                state = getattr(module.weight, "quant_state", None)
                if state is not None and state.nested:
                    state.offset = torch.zeros((), dtype=torch.float32)
        self.blocks = tuple(blocks.values())
        self.other_dtypes = self.stored.in_other_dtypes(filler.quantized)
        return now

    @property
    def names(self) -> set[str]:
        return {name for block in self.blocks for name in block.sources}

    def _deferrable(self, filler: Filler) -> Iterator[str]:
        model = filler.stored.model
        named = dict(model.named_parameters(remove_duplicate=False))
        uses = Counter(map(id, named.values()))
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
        excluded = {*self._at_once, *tied, *tied.values()}
        for full_name, parameter in named.items():
            name = unparametrized(full_name)
            matrix = parameter.is_meta and parameter.ndim > 1 and uses[id(parameter)] == 1
            if matrix and name not in excluded and torch.device(filler.device(name)).type == "cpu":
                yield name

    def dequantize(self, model: Any, dtype: torch.dtype) -> None:
        """Replace quantized layers by dense layers in `dtype`. `read` fills the dense layers of a deferred block later."""
        blocks = {block.name: block for block in self.blocks if self._wait}

        def later(weight: DenseWeight) -> bool:
            block = _block_of(weight.name, blocks)
            if block is None or weight.name in self._at_once:
                return False
            block.dense.append(weight)
            return True

        dequantize(model, dtype, later)

    def read(self, block: Block) -> None:
        """Read the weights of a block. Raise CheckpointError if a file is damaged, or values are not finite."""
        # `fill` replaces the dense weights of stacked experts by codes, so their dtypes are read before.
        dtypes = [weight.dtype for weight in block.dense]
        if block.sources:
            block._blank = {name: _current(block, name) for name in block.sources}
            _, broken = self._filler.fill(block.sources, shown=False)
            refuse(self.stored.path, broken)
        for name, (blank, former) in block._blank.items():
            _convert_like(name, block.owners[name], _current(block, name)[0], blank, former)
        for weight, dtype in zip(block.dense, dtypes, strict=True):
            weight.read(dtype)
        # Free the codes of the quantized layers. Dense layers have replaced these layers.
        replaced = {weight.layer for weight in block.dense}
        self._blank_again(block, [name for name, owner in block.owners.items() if owner in replaced])

    def drop(self, block: Block) -> None:
        self._blank_again(block, list(block._blank))
        for weight in block.dense:
            weight.put(weight.module.get_parameter(weight.name.rpartition(".")[2]).data.to("meta"))
        give_back_memory()

    def _blank_again(self, block: Block, names: Collection[str]) -> None:
        for name in names:
            blank, former = block._blank.pop(name)
            owner: Any = block.owners[name]
            if former is not None:
                place_stack(owner, name.rpartition(".")[2], blank, former)
                continue
            setattr(owner, name.rpartition(".")[2], blank)
            kind = kind_of(owner)
            if kind == "linear4bit":
                owner.quant_state = blank.quant_state  # type: ignore[attr-defined]
            elif kind == "linear8bit":
                owner.state.CB, owner.state.SCB = None, owner.state.SCB.to("meta")

    def on_forward(self) -> None:
        """Install hooks that read a block before the block or one of its layers runs, and free it after its forward."""
        for block in self.blocks:
            if block.sources or block.dense:
                dense = (weight.module for weight in block.dense)
                for module in {block.module, *block.owners.values(), *dense}:
                    module.register_forward_pre_hook(lambda *_, block=block: self.use(block))
                block.module.register_forward_hook(lambda *_: self.use(None))

    def use(self, block: Block | None) -> None:
        if block is self._used:
            return
        if self._used is not None:
            self.drop(self._used)
        self._used = None
        if block is not None:
            self.read(block)
        self._used = block


def _block_of(name: str, blocks: Mapping[str, Block]) -> Block | None:
    while name:
        name = name.rpartition(".")[0]
        if name in blocks:
            return blocks[name]
    return None


def _current(block: Block, name: str) -> tuple[nn.Parameter, QuantizedStack | None]:
    owner, leaf = block.owners[name], name.rpartition(".")[2]
    stack = quantized_stack(owner, leaf)
    return (owner.get_parameter(leaf), None) if stack is None else (codes_of(owner, leaf), stack)


def _convert_like(
    name: str, owner: Any, parameter: nn.Parameter, blank: nn.Parameter, former: QuantizedStack | None
) -> None:
    """Convert a weight from a file to the dtype and quantization state of `blank`, the weight that it replaces."""
    stack, kind = quantized_stack(owner, name.rpartition(".")[2]), kind_of(owner)
    if stack is not None:
        stack.dtype = stack.dtype if former is None else former.dtype
        return
    if kind == "linear4bit" and hasattr(blank, "quant_state"):
        align_4bit(name, owner, owner.compute_dtype)
    elif kind == "linear8bit" and hasattr(blank, "SCB"):
        align_8bit(name, owner)
    elif parameter.dtype != blank.dtype:
        parameter.data = parameter.data.to(blank.dtype)
    parameter.requires_grad_(blank.requires_grad)
