"""The plan of a load, by groups of tensors that are treated alike in all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isotype.checkpoint.inspect import folded_name, hub_headers
from isotype.checkpoint.load_plan import LoadPlan, PlannedTensor, load_plan
from isotype.checkpoint.opened import config_of, facts_of, open_checkpoint
from isotype.checkpoint.resolve import resolve_precision
from isotype.checkpoint.weightless import skeleton, store
from isotype.core.grouping import grouped
from isotype.precision.policy import PrecisionPolicy


@dataclass(frozen=True)
class PlanGroup:
    """Tensors of one name in all layers that are stored and converted alike.

    Attributes:
        name: the tensors' name in the model, layer and expert numbers written as `*`.
        count: how many tensors.
        stored: how the files hold them: a dtype's name or a quantization format.
        storage: how the loaded model holds them.
        how: what is done to them on the way, in words.
        pinned: whether the model's author keeps them in float32.
        shapes: every shape in the model, most frequent first.
        sources: how many tensors of the files they are made of.
        bytes: what is read from the files.
    """

    name: str
    count: int
    stored: str
    storage: str
    how: str
    pinned: bool
    shapes: tuple[tuple[int, ...], ...]
    sources: int
    bytes: int


@dataclass(frozen=True)
class PlanInspection:
    """What loading a checkpoint would do.

    Attributes:
        path: what was read.
        model: the class that would be loaded.
        policy: the policy it would be loaded under.
        plan: every tensor.
        groups: the plan's tensors in the model's order, those treated alike together.
        loaded_bytes: what the loaded parameters take.
    """

    path: str
    model: str
    policy: PrecisionPolicy
    plan: LoadPlan
    groups: tuple[PlanGroup, ...]
    loaded_bytes: int

    @property
    def file_bytes(self) -> int:
        """What is read from the files; a tensor that two of the model's share is read once."""
        return sum({(s.file, s.name): s.bytes for t in self.plan.tensors for s in t.sources}.values())


def inspect_plan(
    path: str | Path,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    device: str = "auto",
    trainable: str = "lora",
    revision: str | None = None,
    base_memory: int | None = None,
) -> PlanInspection:
    """Plan the load of a checkpoint from its headers and config alone.

    Args:
        path: a directory, a .gguf file, `embedded:NAME` or a hub id.
        dtype, quantization, device, trainable, revision, base_memory: as of `isotype.resolve_precision`.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is not complete; names every problem.
        PrecisionError: a policy that cannot be.
    """
    checkpoint = open_checkpoint(path, revision)
    policy = resolve_precision(
        path, dtype, quantization, device, trainable, revision=revision, base_memory=base_memory
    )
    headers = checkpoint.headers or hub_headers(checkpoint.name, revision)
    model = skeleton(config_of(checkpoint), policy)
    plan = load_plan(model, headers, policy)
    plan.match.require_complete()
    loaded = facts_of(store(model, policy)).parameter_bytes
    assert loaded is not None  # of a module it is known
    return PlanInspection(str(path), plan.match.model, policy, plan, _groups(plan.tensors), loaded)


def _groups(tensors: Sequence[PlannedTensor]) -> tuple[PlanGroup, ...]:
    together = grouped(tensors, lambda t: (folded_name(t.name), t.stored, t.storage, t.how, t.pinned))
    return tuple(
        PlanGroup(
            name,
            len(some),
            stored,
            storage,
            how,
            pinned,
            tuple(shape for shape, _ in Counter(tensor.shape for tensor in some).most_common()),
            sum(len(tensor.sources) for tensor in some),
            sum(tensor.bytes for tensor in some),
        )
        for (name, stored, storage, how, pinned), some in together.items()
    )
