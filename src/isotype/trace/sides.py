"""The dtype of a part of a model: if one operator gets two dtypes, the dtype of fewer modules is out of place."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from isotype.records.trace import FLOATS, HALVES, Origin, Setup, Weight

_HELD = ("parameter", "buffer", "attribute")
# Origins outside of the modules: such a tensor belongs to no part of the model.
_FROM_OUTSIDE = ("input", "data", "outside", "scratch")

# Whole words of a weight's name. PEFT's tuner layers are recognized by their class. These words find adapters
# written by hand or by other libraries (`lora_A`, `attn_lora`, `adapter`), and the prompts of PEFT, which are
# parameters outside of tuner layers.
_ADAPTER_NAMES = re.compile(
    r"(?<![^._])(?:lora|dora|lokr|loha|ia3|vera|adapters?)(?![^._])"
    r"|(?<![^.])(?:magnitude|modules_to_save|soft_prompt|adaption_(?:prompt|gate))(?![^.])"
    r"|^prompt_encoder\.[^.]+\.(?:embedding|mlp_head|lstm_head|transform)\.",
    re.IGNORECASE,
)


def is_adapter(name: str, weight: Weight | None) -> bool:
    """Return whether a weight belongs to an adapter, by its name or the class of its module."""
    return bool(_ADAPTER_NAMES.search(name)) or (weight is not None and weight.adapter)


@dataclass
class Tally:
    """Counts by dtype in one part of a model: of the modules that compute, and of the elements of their weights."""

    modules: Counter[torch.dtype] = field(default_factory=Counter)
    elements: Counter[torch.dtype] = field(default_factory=Counter)

    def leaders(self) -> tuple[torch.dtype, ...]:
        """Return the dtype of most modules in a tuple, which has several dtypes in a tie, and none if no module computes."""
        most = max(self.modules.values(), default=0)
        return tuple(dtype for dtype, count in self.modules.items() if count == most)


Tallies = Mapping[str, Tally]


def tallies(weights: Iterable[Weight]) -> Tallies:
    """Return the tally of every module, children included, by fully qualified name; "" is the whole model.

    Every module counts once, in the dtype of its largest weight. Norms, adapters and pinned weights do not count:
    their dtype differs from their neighbours' on purpose.
    """
    held = [weight for weight in weights if not weight.buffer]
    voters = _largest(weight for weight in held if _computes(weight)) or _largest(held)
    parts: dict[str, Tally] = {"": Tally()}
    for weight in voters:
        dtype, count = _computed_in(weight), weight.repeats
        elements = math.prod(weight.shape) * (1 if weight.quantization is None else 2)
        for part in _around(weight.module):
            tally = parts.setdefault(part, Tally())
            tally.modules[dtype] += count
            tally.elements[dtype] += count * elements
    return parts


def _largest(weights: Iterable[Weight]) -> list[Weight]:
    """Return the largest weight of each module among the weights with a compute dtype (float8 is for storage)."""
    largest: dict[str, Weight] = {}
    for weight in weights:
        known = largest.get(weight.module)
        larger = known is None or math.prod(weight.shape) > math.prod(known.shape)
        if larger and _computed_in(weight) in FLOATS and _computed_in(weight).itemsize > 1:
            largest[weight.module] = weight
    return list(largest.values())


def _computes(weight: Weight) -> bool:
    if weight.kind == "norm" or weight.pinned or is_adapter(weight.name, weight):
        return False
    matrix = sum(size > 1 for size in weight.shape) > 1
    return matrix or weight.kind in ("linear", "linear4bit", "embedding")


def _computed_in(weight: Weight) -> torch.dtype:
    if weight.kind == "linear4bit" and weight.quantization is not None:
        return weight.quantization.compute or torch.float32
    return weight.dtype


def _around(module: str) -> tuple[str, ...]:
    """Return the names of a module and its parents, innermost first; the outermost is ""."""
    parts = module.split(".") if module else []
    return tuple(".".join(parts[:end]) for end in range(len(parts), -1, -1))


@dataclass(frozen=True)
class Sides:
    """Decides which dtype is out of place if the operands of an operator have several.

    Attributes:
        compute: the compute dtype of the whole step.
        decided: True if a policy or autocast sets `compute` for all parts of the model.
        parts: the `Tally` of every module, by name.
        input_dtypes: float dtypes of the step's inputs.
    """

    compute: torch.dtype
    decided: bool
    parts: Tallies
    input_dtypes: Collection[torch.dtype] = ()

    def at(self, module: str, causes: Sequence[Origin]) -> torch.dtype:
        """Return the dtype of the smallest part of the model that decides for a call in `module`.

        A part contains all `causes` (the origins of the operands' dtypes), and all layers of the lists that contain a cause. If
        an origin is outside of the modules (an input), the part must contain modules of both dtypes. A single module decides
        nothing, and in a tie the enclosing part decides. `whole` decides for the whole model, and `compute` is returned for a
        model without weights.
        """
        if self.decided:
            return self.compute
        met = {cause.dtype for cause in causes}
        homes = [_home(cause) for cause in causes]
        held = [home for home in homes if home is not None]
        for part in _around(_list_of(_common([module, *held])))[:-1]:
            tally = self.parts.get(part, Tally())
            leaders = tally.leaders()
            both = len(met & tally.modules.keys()) > 1
            if len(leaders) == 1 and (both or (len(held) == len(homes) and tally.modules.total() > 1)):
                return leaders[0]
        return whole(self.parts, self.input_dtypes) or self.compute


def sides_of(setup: Setup, weights: Iterable[Weight], input_dtypes: Collection[torch.dtype] = ()) -> Sides:
    """Return the sides of a step with these settings, weights and dtypes of float inputs."""
    decided = setup.policy is not None or setup.autocast is not None
    return Sides(setup.compute, decided, tallies(weights), input_dtypes)


def whole(parts: Tallies, input_dtypes: Collection[torch.dtype] = ()) -> torch.dtype | None:
    """Return the dtype of most modules of a model; None for a model without weights.

    A 16-bit input counts as one more module and decides a tie, because the user chose its dtype. The number of elements
    decides every other tie.
    """
    tally = parts.get("", Tally())
    chosen = [dtype for dtype in HALVES if dtype in input_dtypes and dtype in tally.modules]
    counts = tally.modules + Counter(chosen)
    ranks = {dtype: (count, dtype in chosen, tally.elements[dtype]) for dtype, count in counts.items()}
    return max(ranks, key=lambda dtype: ranks[dtype], default=None)


def _home(cause: Origin) -> str | None:
    """Return the name of the module that a dtype comes from; None if it comes from outside of the modules."""
    if cause.kind in _HELD:
        return cause.name.rpartition(".")[0]
    if cause.kind == "state":
        return cause.name
    return None if cause.kind in _FROM_OUTSIDE else cause.module or None


def _list_of(module: str) -> str:
    """Return the innermost list of layers that contains a module; the module itself if there is no list."""
    parts = module.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1]]) if numbers else module


def _common(modules: Sequence[str]) -> str:
    """Return the innermost module that contains all of `modules`."""
    shared = set(_around(modules[0])).intersection(*(_around(module) for module in modules[1:]))
    return max(shared, key=len)
