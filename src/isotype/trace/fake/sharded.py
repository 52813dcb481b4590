"""Memory of one process: shards, gathered weights and communication buffers under FSDP2 or DDP.

The step runs on whole fakes; the ledger counts a process's share. FSDP2's timing is from torch 2.13
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py): weights are gathered into
one flat buffer and copied out of it; a forward frees that buffer after the next group's copy, a backward
after its own copy, and gathers the next group ahead; the input of a group's reduce-scatter lives until the
next group's. DDP holds all weights, and a copy of every gradient in its buckets
(torch/csrc/distributed/c10d/reducer.cpp, without `gradient_as_bucket_view`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import in_backward
from isotype.model.fold import STANDS_FOR
from isotype.model.shard import Group, groups_of
from isotype.records.trace import Setup
from isotype.trace.ledger import Ledger


def shard_bytes(parameter: torch.Tensor, devices: int) -> int:
    """Return the bytes held by the first of `devices` processes: rows are padded to a multiple of their number."""
    rows, *rest = parameter.shape or (1,)
    return math.ceil(rows / devices) * math.prod(rest) * parameter.dtype.itemsize


_RETURNED_BY = "_isotype_returned_by"


@dataclass(eq=False)
class _Gathering:
    """A group of FSDP2 during the step; bytes are of one of the equal layers it represents.

    Attributes:
        group: its module and parameters.
        repeats: number of groups of the whole model it represents.
        whole: bytes of its gathered parameters.
        reduced: bytes of the buffer in which its gradients are reduced.
        is_gathered: whether its parameters are gathered.
        is_prefetched: whether they are in the flat buffer already.
        is_reduced: whether its backward has ended.
        followers: groups whose forward took the tensor that this one's returned.
    """

    group: Group
    repeats: int
    whole: int
    reduced: int
    is_gathered: bool = False
    is_prefetched: bool = False
    is_reduced: bool = False
    followers: list[_Gathering] = field(default_factory=list)


class ProcessMemory:
    """Counts a process's memory in `ledger` while the step of `setup` runs on `twin`; nothing changes for one
    device.

    `repeats`: `id` of a parameter -> number it represents.
    """

    def __init__(self, twin: nn.Module, setup: Setup, ledger: Ledger, repeats: Mapping[int, int]) -> None:
        self._ledger, self._devices, self._repeats = ledger, setup.devices, repeats
        self._trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        self._groups: list[_Gathering] = []
        self._shards: dict[int, int] = {}
        if setup.devices > 1 and setup.fsdp:
            self._shard(twin, setup)
        self._sum_in_buckets = setup.devices > 1 and not setup.fsdp
        self._forwards: list[_Gathering] = []
        self._flat = 0  # bytes of the gathered buffer that a forward leaves to the next group
        self._reducing = 0  # bytes of the last reduce-scatter's input

    def _shard(self, twin: nn.Module, setup: Setup) -> None:
        standing = [module for module in twin.modules() if hasattr(module, STANDS_FOR)]
        reduce = setup.policy.reduce if setup.policy is not None else None
        for group in groups_of(twin, reshard=setup.reshard, more_blocks=standing):
            parameters = tuple(
                p
                for p in group.parameters
                if setup.shard_integers or p.requires_grad or p.is_floating_point()
            )
            held = {id(p): shard_bytes(p, setup.devices) for p in parameters}
            self._shards |= held
            reduced = sum(
                held[id(p)] // p.dtype.itemsize * (reduce or p.dtype).itemsize
                for p in parameters
                if p.requires_grad
            )
            repeats = max((self._repeats[id(p)] for p in parameters), default=1)
            whole, reduced = (setup.devices * size for size in (sum(held.values()), reduced))
            self._groups.append(
                _Gathering(Group(group.module, parameters, group.reshard), repeats, whole, reduced)
            )

    def held(self, tensor: torch.Tensor) -> int | None:
        """Return the bytes of a parameter or buffer that a process holds; None for all."""
        return self._shards.get(id(tensor))

    @property
    def share(self) -> float:
        """Share of the trained parameters and their optimizer states that a process holds."""
        whole = sum(p.untyped_storage().nbytes() * self._repeats[id(p)] for p in self._trained)
        held = sum(
            self._shards.get(id(p), p.untyped_storage().nbytes()) * self._repeats[id(p)]
            for p in self._trained
        )
        return held / whole if whole else 1.0

    def watch(self) -> Iterator[Any]:
        """Start counting, and yield the handles of its hooks."""
        if self._sum_in_buckets:
            sizes = (p.untyped_storage().nbytes() * self._repeats[id(p)] for p in self._trained)
            self._ledger.add("buckets", sum(sizes))
        for each in self._groups:
            module = each.group.module
            yield module.register_forward_pre_hook(self._entering(each), prepend=True, with_kwargs=True)
            yield module.register_forward_hook(self._leaving(each))

    def gradient(self, parameter: torch.Tensor, repeats: int, module: str) -> None:
        """Count a new gradient of `parameter`: whole until its group is reduced, shards for represented layers."""
        assert parameter.grad is not None
        size = parameter.grad.untyped_storage().nbytes()
        self._ledger.seen(parameter.grad, "gradients")
        self._ledger.add("gradients", (repeats - 1) * self._shards.get(id(parameter), size), module)

    def end_backward(self) -> None:
        """Reduce groups without an input that requires a gradient, and free all buffers."""
        for each in self._groups:
            self._reduce(each)
            self._ledger.add("gathered", -each.whole * each.is_prefetched)
            each.is_prefetched = each.is_reduced = False
            each.followers.clear()
        self._ledger.add("buckets", -self._reducing)
        self._reducing = 0
        self._free_flat()
        self._forwards.clear()

    # ------------------------------------------------------------------------------------------------- forward

    def _entering(self, each: _Gathering) -> Callable[..., None]:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not each.is_gathered:
                self._gather(each)
                self._flat = each.whole
            # That of the hidden states: others, such as an encoder's, are used by later blocks.
            entering = next((tensor for tensor in _differentiable((args, kwargs))), None)
            if entering is not None and torch.is_grad_enabled():
                if (source := getattr(entering, _RETURNED_BY, None)) is not None:
                    source.followers.append(each)
                entering.register_hook(lambda _: self._reduce(each))  # type: ignore[no-untyped-call]

        return enter

    def _leaving(self, each: _Gathering) -> Callable[..., None]:
        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if not in_backward():
                self._forwards.append(each)
                if each.group.reshard:
                    self._ledger.add("gathered", -each.whole)
                    each.is_gathered = False
                else:
                    self._ledger.add("gathered", (each.repeats - 1) * each.whole)
                if each is self._groups[-1]:
                    self._free_flat()
            for tensor in _differentiable(output):
                setattr(tensor, _RETURNED_BY, each)
                tensor.register_hook(lambda _: self._prepare(each))  # type: ignore[no-untyped-call]

        return leave

    def _gather(self, each: _Gathering) -> None:
        """Gather weights into one buffer, which stays, and copy them; then free the buffer left by a forward.

        torch 2.13 intends to free it before, but a variable of `wait_for_unshard` (`prev_all_gather_state`)
        still references it.
        """
        self._ledger.add("gathered", each.whole * (1 if each.is_prefetched else 2))
        self._free_flat()
        each.is_gathered, each.is_prefetched = True, False

    def _free_flat(self) -> None:
        self._ledger.add("gathered", -self._flat)
        self._flat = 0

    # ------------------------------------------------------------------------------------------------ backward

    def _prepare(self, each: _Gathering) -> None:
        """Gather a group's parameters, and the next group's buffer, before its backward."""
        if each.is_reduced or each not in self._forwards:
            return
        for follower in each.followers:  # hooks of one tensor run in the order of the forward
            self._reduce(follower)
        if not each.is_gathered:
            self._gather(each)
            self._ledger.add("gathered", -each.whole)
        if each.repeats > 1 and self._reducing < each.reduced:  # as left by the layer after it
            self._ledger.add("buckets", each.reduced - self._reducing)
            self._reducing = each.reduced
        at = self._forwards.index(each)
        following = self._forwards[at - 1] if at else None
        if following is not None and not (following.is_gathered or following.is_prefetched):
            self._ledger.add("gathered", following.whole)
            following.is_prefetched = True

    def _reduce(self, each: _Gathering) -> None:
        """Free a group's parameters after its backward, and keep the process's rows of the gradients."""
        if each.is_reduced:
            return
        each.is_reduced = True
        if each.is_gathered:
            kept = 1 if each.group.reshard else each.repeats
            self._ledger.add("gathered", -kept * each.whole)
            each.is_gathered = False
        gradients = [(p, p.grad) for p in each.group.parameters if p.grad is not None]
        self._ledger.add("buckets", -self._reducing)
        self._reducing = each.reduced if gradients else 0
        self._ledger.add("buckets", self._reducing)
        for parameter, gradient in gradients:
            self._ledger.resize(gradient, self._shards[id(parameter)])


def _differentiable(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that require a gradient in a module's arguments or output."""
    if isinstance(values, torch.Tensor):
        if values.requires_grad:
            yield values
    elif isinstance(values, (list, tuple, Mapping)):
        for each in values.values() if isinstance(values, Mapping) else values:
            yield from _differentiable(each)
