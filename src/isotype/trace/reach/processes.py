"""The batches of several processes that train together: modules that some do not run, collectives that differ.

FSDP gathers and reduces the weights of a group in all processes together, and DDP reduces every gradient: a process
that leaves one out waits for the others, or runs another collective than they do.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isotype.compat.fake_processes import fake_process_group
from isotype.compat.peft import without_peft
from isotype.compat.torch import TorchDispatchMode
from isotype.compat.transformers import unsplit_classes
from isotype.model.loss import find_loss
from isotype.model.walk import blocks_in
from isotype.records.reach import Collective, Parting
from isotype.trace.reach.batch import Batch
from isotype.trace.reach.place import gradients_of, logits_of

_PROCESSES = 2
_MOVES = {
    "_allgather_base_": "gathers",
    "allgather_into_tensor_coalesced_": "gathers",
    "_reduce_scatter_base_": "reduces",
    "reduce_scatter_tensor_coalesced_": "reduces",
    "allreduce_": "reduces",
}


def skipped_modules(model: nn.Module, batches: Sequence[Batch]) -> tuple[str, ...]:
    """Return the outermost modules with weights that some batches run and others do not.

    Experts and other modules inside of a repeated layer are left out: the layer's weights are gathered together.
    """
    if len(batches) < 2:
        return ()
    ran = [_ran(model, batch) for batch in batches]
    partly = set().union(*ran).difference(set(ran[0]).intersection(*ran))
    outermost = (name for name in partly if not any(name.startswith(f"{other}.") for other in partly))
    return tuple(sorted(name for name in outermost if not _inside_of_a_layer(name)))


def _ran(model: nn.Module, batch: Batch) -> set[str]:
    """Return the modules with weights that a forward over `batch` calls."""
    called: set[str] = set()

    def note(name: str) -> Any:
        return lambda module, args: called.add(name)

    hooks = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if next(module.parameters(), None) is not None
    ]
    try:
        with torch.no_grad():
            model(**batch.arguments())
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _inside_of_a_layer(name: str) -> bool:
    return any(part.isdigit() for part in name.split(".")[:-1])


def without_gradient(model: nn.Module, batches: Sequence[Batch]) -> tuple[str, ...]:
    """Return the trainable parameters to which the loss of some batch gives no gradient: DDP waits for them."""
    missing: dict[str, None] = {}
    for batch in batches:
        gradients = gradients_of(model, _loss(model, batch))
        if not gradients:
            return ()
        missing.update(dict.fromkeys(name for name, gradient in gradients.items() if gradient is None))
    return tuple(missing)


def parting(model: nn.Module, batches: Sequence[Batch]) -> Parting | None:
    """Return the first collective of FSDP2 that the processes of two batches disagree on; None if all agree.

    One process of a fake group of two runs the forward and backward of each batch. The model is sharded as accelerate
    shards it, and is of no use afterwards.

    Args:
        model: a small copy, in place.
        batches: at least one; each with gradients.
    """
    distributed = sys.modules.get("torch.distributed")
    if len(batches) < 2 or (distributed is not None and distributed.is_initialized()):
        return None
    with fake_process_group(_PROCESSES) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of FSDP about the copy
        _shard(model, mesh)
        first = _collectives(model, batches[0])
        for at, batch in enumerate(batches[1:], 1):
            other = _collectives(model, batch)
            for step in range(max(len(first), len(other))):
                one = first[step] if step < len(first) else None
                two = other[step] if step < len(other) else None
                if one is None or two is None or one.alike != two.alike:
                    return Parting(at, step, one, two)
    return None


def _shard(model: Any, mesh: Any) -> None:
    """Shard the model's blocks by themselves and the rest together, as `fsdp2_prepare_model` of accelerate does.

    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/fsdp_utils.py
    """
    from torch.distributed.fsdp import fully_shard

    base = without_peft(model)
    classes = unsplit_classes(base)
    blocks = [module for module in model.modules() if type(module).__name__ in classes]
    for block in blocks or list(blocks_in(model)):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _collectives(model: nn.Module, batch: Batch) -> list[Collective]:
    record = _Collectives()
    with record, _named(model, record):
        loss = _loss(model, batch)
        record.module = ""
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return record.calls


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor | None:
    """Return the model's loss; if the loss is computed outside of the model, the sum of its logits."""
    torch.manual_seed(0)
    output = model(**batch.arguments())
    loss = find_loss(output) if batch.labelled else logits_of(output, batch.ids)
    return None if loss is None else loss.sum()


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The collectives that are called, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []
        self.module = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        move = _MOVES.get(func.name().rpartition("::")[2]) if func.namespace == "c10d" else None
        if move is not None:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            size = sum(tensor.numel() for tensor in tensors)
            self.calls.append(Collective(move, self.module, size))
        return func(*args, **(kwargs or {}))


@contextmanager
def _named(model: nn.Module, record: _Collectives) -> Iterator[None]:
    """Name the sharded module whose forward gathers, before its own hook gathers."""

    def note(name: str) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            record.module = name

        return enter

    from torch.distributed.fsdp import FSDPModule

    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(note(name), prepend=True) for name in sharded
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
