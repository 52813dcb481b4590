"""Memory of one process: shards, gathered weights and communication buffers under FSDP2 or DDP.

The step runs on whole fake tensors. The ledger counts only the memory that one process holds, and FSDP2's allocations
in the order of torch 2.13 (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py):

- A group's weights are gathered into one flat buffer, and copied out of this buffer. In the forward, the buffer is
  freed after the next group's weights were copied; torch 2.15 frees it before. In the backward, the buffer is
  freed right after the copy of this group's weights. But the next group is gathered while this group still computes.
- The input of a group's reduce-scatter is freed when the next group reduces.

DDP holds all weights, and a copy of every gradient in its buckets (torch/csrc/distributed/c10d/reducer.cpp, without
`gradient_as_bucket_view`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import in_backward, storage_of
from isotype.core.operators import tensors_of
from isotype.core.optimizers import bytes_of_step, state_bytes
from isotype.model.shard import Group, groups_of
from isotype.model.walk import STANDS_FOR
from isotype.precision.devices.attention import RELEASE
from isotype.records.request import Setup
from isotype.trace.ledger import Ledger


def shard_bytes(parameter: torch.Tensor, devices: int) -> int:
    """Return the bytes of a parameter on the first of `devices` processes: its share of the padded rows."""
    rows, *rest = parameter.shape or (1,)
    return math.ceil(rows / devices) * math.prod(rest) * parameter.dtype.itemsize


_RETURNED_BY = "_isotype_returned_by"
"""Attribute of a tensor: the group whose forward has returned it."""


@dataclass(eq=False)
class _Gathering:
    """An FSDP2 group during the step. Its bytes are those of one layer, even if the group represents several layers.

    Attributes:
        repeats: how many equal groups of the model this group represents.
        whole: bytes of the group's gathered parameters.
        reduced: bytes of the buffer into which the group's gradients are reduced.
        is_gathered: True while the group's parameters are gathered in this process.
        is_prefetched: True while the group's parameters are in the flat buffer and not yet copied out of it.
        is_reduced: True after the group's backward.
        followers: groups whose forward takes a tensor that this group's forward returned.
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
    """Adjusts the memory counts in `ledger` to the share of one process while a step runs on `twin`, the fake model.

    With one device, nothing changes. `repeats` maps the `id` of a parameter to the number of equal parameters that it
    represents.
    """

    def __init__(self, twin: nn.Module, setup: Setup, ledger: Ledger, repeats: Mapping[int, int]) -> None:
        self._ledger, self._repeats = ledger, repeats
        self._trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        self._groups: list[_Gathering] = []
        self._shards: dict[int, int] = {}
        if setup.devices > 1 and setup.fsdp:
            self._shard(twin, setup)
        self._sum_in_buckets = setup.devices > 1 and not (setup.fsdp or setup.deepspeed)
        self._forwards: list[_Gathering] = []
        self._flat = 0  # bytes of the flat buffer that the last forward has not freed
        self._reducing = 0  # bytes of the input of the last reduce-scatter

    def _shard(self, twin: nn.Module, setup: Setup) -> None:
        standing = [module for module in twin.modules() if hasattr(module, STANDS_FOR)]
        reduce = setup.policy.reduce if setup.policy is not None else None
        for group in groups_of(twin, reshard=setup.reshard, more_blocks=standing):
            integers = setup.shard_integers
            parameters = [p for p in group.parameters if integers or p.requires_grad or p.is_floating_point()]
            shards = {id(p): shard_bytes(p, setup.devices) for p in parameters}
            self._shards |= shards
            trained = [p for p in parameters if p.requires_grad]
            sizes = (shards[id(p)] // p.itemsize * (reduce or p.dtype).itemsize for p in trained)
            reduced = setup.devices * sum(sizes)
            repeats = max((self._repeats[id(p)] for p in parameters), default=1)
            group = replace(group, parameters=tuple(parameters))
            self._groups.append(_Gathering(group, repeats, setup.devices * sum(shards.values()), reduced))

    def local_bytes(self, tensor: torch.Tensor) -> int | None:
        """Return how many bytes of a parameter or buffer a process holds; None if it holds the whole tensor."""
        return self._shards.get(id(tensor))

    @property
    def share(self) -> float:
        """Share (0 to 1) of the trained parameters and their optimizer states that this process holds."""
        sizes = {id(p): p.untyped_storage().nbytes() for p in self._trained}
        whole = sum(size * self._repeats[key] for key, size in sizes.items())
        local = sum(self._shards.get(key, size) * self._repeats[key] for key, size in sizes.items())
        return local / whole if whole else 1.0

    def update(
        self, kernels: str, named: Sequence[tuple[str, torch.Tensor]], twin: nn.Module, *, on_cpu: bool
    ) -> None:
        """Count the states of an optimizer with its own `kernels`, and the most memory that the update of a parameter takes."""
        share, most = self.share, 0
        for name, parameter in named:
            # transformers' Trainer registers the embeddings' states in 32 bits.
            embeds = isinstance(twin.get_submodule(name.rpartition(".")[0]), nn.Embedding)
            of = kernels, parameter.shape, parameter.itemsize
            size = state_bytes(*of, float32=embeds, pages=not on_cpu)
            self._ledger.add("optimizer", int(share * self._repeats[id(parameter)] * size))
            most = max(most, int(share * bytes_of_step(*of, float32=embeds)) if on_cpu else 0)
        self._ledger.touch("activations", most)

    def watch(self) -> Iterator[Any]:
        """Start counting. Yield the handle of each hook that is added."""
        if self._sum_in_buckets:
            sizes = (p.untyped_storage().nbytes() * self._repeats[id(p)] for p in self._trained)
            self._ledger.add("buckets", sum(sizes))
        for gathering in self._groups:
            module = gathering.group.module
            enter, leave = partial(self._enter, gathering), partial(self._leave, gathering)
            yield module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            yield module.register_forward_hook(leave)

    def gradient(self, parameter: torch.Tensor, repeats: int, module: str) -> None:
        """Count a new gradient: whole for the traced layer, and one shard for each layer that it represents."""
        assert parameter.grad is not None
        before = self._ledger.alive("gradients")
        self._ledger.count(parameter.grad, "gradients")
        size = self._ledger.alive("gradients") - before  # 0 if another gradient is a view of the same storage
        self._ledger.add("gradients", (repeats - 1) * self._shards.get(id(parameter), size), module)

    def end_backward(self) -> None:
        """Reduce the groups that no hook has reduced, because their inputs need no gradient. Then free all buffers."""
        for gathering in self._groups:
            self._reduce(gathering)
            self._ledger.add("gathered", -gathering.whole * gathering.is_prefetched)
            gathering.is_prefetched = gathering.is_reduced = False
            gathering.followers.clear()
        self._ledger.add("buckets", -self._reducing)
        self._reducing = 0
        self._free_flat()
        self._forwards.clear()

    # ------------------------------------------------------------------------------------------------- forward

    def _enter(self, gathering: _Gathering, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not gathering.is_gathered:
            self._gather(gathering)
            self._flat = gathering.whole
        # The first tensor is the hidden state. Later blocks may use the others, too, for example an encoder's output.
        hidden = next(_differentiable((args, kwargs)), None)
        if hidden is not None and torch.is_grad_enabled():
            if (source := getattr(hidden, _RETURNED_BY, None)) is not None:
                source.followers.append(gathering)
            hidden.register_hook(lambda _: self._reduce(gathering))  # type: ignore[no-untyped-call]

    def _leave(self, gathering: _Gathering, _: nn.Module, __: Any, output: Any) -> None:
        if not in_backward():
            self._forwards.append(gathering)
            gathering.is_gathered = not gathering.group.reshard
            kept = gathering.repeats if gathering.is_gathered else 0
            self._ledger.add("gathered", (kept - 1) * gathering.whole)
            if gathering is self._groups[-1]:
                self._free_flat()
        for tensor in _differentiable(output):
            setattr(tensor, _RETURNED_BY, gathering)
            tensor.register_hook(lambda _: self._prepare(gathering))  # type: ignore[no-untyped-call]

    def _gather(self, gathering: _Gathering) -> None:
        """Gather a group's weights into a flat buffer and copy them out. Free the previous group's flat buffer.

        Before torch 2.15, that buffer is freed after the copy (`prev_all_gather_state` in `wait_for_unshard` refers to it).
        """
        self._ledger.add("gathered", gathering.whole * (not gathering.is_prefetched))
        if RELEASE >= (2, 15):
            self._free_flat()
        self._ledger.add("gathered", gathering.whole)
        self._free_flat()
        gathering.is_gathered, gathering.is_prefetched = True, False

    def _free_flat(self) -> None:
        self._ledger.add("gathered", -self._flat)
        self._flat = 0

    # ------------------------------------------------------------------------------------------------ backward

    def _prepare(self, gathering: _Gathering) -> None:
        """Before a group's backward, gather its parameters, and count the flat buffer for the next group's backward."""
        if gathering.is_reduced or gathering not in self._forwards:
            return
        for follower in gathering.followers:  # hooks of one tensor run in the order of the forward
            self._reduce(follower)
        if not gathering.is_gathered:
            self._gather(gathering)
            self._ledger.add("gathered", -gathering.whole)
        if gathering.repeats > 1 and self._reducing < gathering.reduced:  # the buffer of a represented layer
            self._ledger.add("buckets", gathering.reduced - self._reducing)
            self._reducing = gathering.reduced
        at = self._forwards.index(gathering)
        if at and not ((following := self._forwards[at - 1]).is_gathered or following.is_prefetched):
            self._ledger.add("gathered", following.whole)
            following.is_prefetched = True

    def _reduce(self, gathering: _Gathering) -> None:
        """Free a group's parameters after its backward, and keep only the process's rows of the gradients."""
        if gathering.is_reduced:
            return
        gathering.is_reduced = True
        if gathering.is_gathered:
            repeats = 1 if gathering.group.reshard else gathering.repeats
            self._ledger.add("gathered", -repeats * gathering.whole)
            gathering.is_gathered = False
        gradients = [(p, p.grad) for p in gathering.group.parameters if p.grad is not None]
        reducing = gathering.reduced if gradients else 0
        self._ledger.add("buckets", reducing - self._reducing)
        self._reducing = reducing
        bytes_of = Counter[int]()  # gradients can be views of one storage
        for parameter, gradient in gradients:
            bytes_of[storage_of(gradient)] += self._shards[id(parameter)]
            self._ledger.resize(gradient, bytes_of[storage_of(gradient)])


def _differentiable(values: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_of(values) if tensor.requires_grad)
