"""Finds differences between processes that train together: skipped modules, and different collectives.

With FSDP, all processes together gather a group of weights and reduce the gradients. With DDP, they reduce each
gradient together. If the batch of one process skips a module, the processes call different collectives or wait forever.
"""

import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from isotype.compat.peft import without_peft
from isotype.compat.torch import TorchDispatchMode
from isotype.compat.torch_fsdp import fake_process_group
from isotype.compat.transformers import unsplit_classes
from isotype.core.operators import COLLECTIVES
from isotype.model.loss import find_loss
from isotype.model.walk import blocks_in
from isotype.records.reach import Collective, CollectiveMismatch
from isotype.trace.reach.batch import Batch
from isotype.trace.reach.probe import gradients_of, logits_of

_PROCESSES = 2
_MOVES = {
    "_allgather_base_": "gathers",
    "allgather_into_tensor_coalesced_": "gathers",
    "_reduce_scatter_base_": "reduces",
    "reduce_scatter_tensor_coalesced_": "reduces",
    "allreduce_": "reduces",
}


def skipped_modules(model: nn.Module, batches: Sequence[Batch]) -> tuple[str, ...]:
    """Return the names of the outermost modules that have weights and run in some batches, but not in all.

    Modules inside of a repeated layer (experts) are left out: all weights of the layer are gathered together.
    """
    if len(batches) < 2:
        return ()
    ran = [_ran(model, batch) for batch in batches]
    partly = set().union(*ran).difference(set(ran[0]).intersection(*ran))
    outermost = (name for name in partly if not any(name.startswith(f"{other}.") for other in partly))
    in_layer = (name for name in partly if any(part.isdigit() for part in name.split(".")[:-1]))
    return tuple(sorted(set(outermost).difference(in_layer)))


def _ran(model: nn.Module, batch: Batch) -> set[str]:
    """Return the names of the modules with weights that a forward over `batch` calls."""
    called: set[str] = set()
    with torch.no_grad(), ExitStack() as hooks:
        for name, module in model.named_modules():
            if next(module.parameters(), None) is not None:
                hooks.enter_context(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
        model(**batch.arguments())
    return called


def without_gradient(model: nn.Module, batches: Sequence[Batch]) -> tuple[str, ...]:
    """Return the names of trainable parameters that get no gradient for some batch. DDP waits for every gradient."""
    missing: dict[str, None] = {}
    for batch in batches:
        gradients = gradients_of(model, _loss(model, batch))
        if not gradients:
            return ()
        missing.update(dict.fromkeys(name for name, gradient in gradients.items() if gradient is None))
    return tuple(missing)


def collective_mismatch(model: nn.Module, batches: Sequence[Batch]) -> CollectiveMismatch | None:
    """Return the first FSDP2 collective that differs between a batch and the first batch; None if all are equal.

    Forward and backward of each batch run in this process, in a fake process group of two.

    Args:
        model: a small copy. accelerate's sharding changes the copy in place, so the caller cannot use the copy
            afterwards.
        batches: one batch for each process.
    """
    distributed = sys.modules.get("torch.distributed")
    if len(batches) < 2 or (distributed is not None and distributed.is_initialized()):
        return None
    with fake_process_group(_PROCESSES) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP's warnings are about the small copy
        _shard(model, mesh)
        first = _collectives(model, batches[0])
        for at, batch in enumerate(batches[1:], 1):
            for step, (ours, theirs) in enumerate(zip_longest(first, _collectives(model, batch))):
                if ours is None or theirs is None or ours.signature != theirs.signature:
                    return CollectiveMismatch(at, step, ours, theirs)
    return None


def _shard(model: Any, mesh: Any) -> None:
    """Shard blocks, then other weights, as accelerate's `fsdp2_prepare_model` does (1.15, utils/fsdp_utils.py)."""
    from torch.distributed.fsdp import fully_shard

    classes = unsplit_classes(without_peft(model))
    blocks = [module for module in model.modules() if type(module).__name__ in classes]
    for block in blocks or list(blocks_in(model)):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _collectives(model: nn.Module, batch: Batch) -> list[Collective]:
    from torch.distributed.fsdp import FSDPModule

    record = _Collectives()
    with record, ExitStack() as hooks:
        for name in [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]:
            # `prepend`: the name is set before FSDP's own hook gathers.
            hook = partial(record.enter, name)
            hooks.enter_context(model.get_submodule(name).register_forward_pre_hook(hook, prepend=True))
        loss = _loss(model, batch)
        record.module = ""
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return record.calls


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor | None:
    """Return the model's loss, or the sum of its logits if the loss is outside of the model."""
    torch.manual_seed(0)
    output = model(**batch.arguments())
    loss = find_loss(output) if batch.labelled else logits_of(output, batch.ids)
    return None if loss is None else loss.sum()


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each called collective with the name of the sharded module whose forward calls it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Collective] = []
        self.module = ""

    def enter(self, name: str, *_: Any) -> None:
        self.module = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        move = _MOVES.get(func.name().rpartition("::")[2]) if func.namespace == COLLECTIVES else None
        if move is not None:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            size = sum(tensor.numel() for tensor in tensors)
            self.calls.append(Collective(move, self.module, size))
        return func(*args, **(kwargs or {}))
