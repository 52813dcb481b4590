"""Finds the main dtype of each part of a model, to decide which operand of an operator has the wrong dtype."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from isotype.core.dtypes import FLOATS, HALVES
from isotype.core.names import with_parents
from isotype.records.request import Setup
from isotype.records.trace import Origin, Weight

_HELD = ("parameter", "buffer", "attribute")
# Origins outside of the modules. Such a tensor belongs to no part of the model.
_FROM_OUTSIDE = ("input", "data", "outside", "scratch", "conversion")

# Whole words in a weight's name. PEFT's tuner layers are found by their class. These words find adapters of users and
# other libraries (`lora_A`, `attn_lora`, `adapter`), and PEFT's prompts, which are parameters outside of tuner layers.
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
    """Counts for one part of a model: dtype -> modules that compute in it, and dtype -> elements of their weights."""

    modules: Counter[torch.dtype] = field(default_factory=Counter)
    elements: Counter[torch.dtype] = field(default_factory=Counter)

    def leaders(self) -> tuple[torch.dtype, ...]:
        """Return the dtype of most modules: several dtypes if their counts are equal, and none without modules."""
        most = max(self.modules.values(), default=0)
        return tuple(dtype for dtype, count in self.modules.items() if count == most)


Tallies = Mapping[str, Tally]


def tallies(weights: Iterable[Weight]) -> Tallies:
    """Return a tally for each module and its children, by the module's fully qualified name; "" is the whole model.

    Each module counts once, in the dtype of its largest weight. Norms, adapters, and weights that the model's author
    keeps in float32 do not count, because they differ on purpose.
    """
    parameters = [weight for weight in weights if not weight.buffer]
    voters = _largest(weight for weight in parameters if _computes(weight)) or _largest(parameters)
    parts: dict[str, Tally] = {"": Tally()}
    for weight in voters:
        dtype, count = _computed_in(weight), weight.repeats
        elements = math.prod(weight.shape) * (1 if weight.quantization is None else 2)
        for part in with_parents(weight.module):
            tally = parts.setdefault(part, Tally())
            tally.modules[dtype] += count
            tally.elements[dtype] += count * elements
    return parts


def _largest(weights: Iterable[Weight]) -> list[Weight]:
    """Return the largest weight of each module, except weights in float8, which are cast before they are multiplied."""
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
    return weight.gathered or weight.dtype


@dataclass(frozen=True)
class Sides:
    """Decides which dtype is wrong if an operator has operands of several dtypes.

    Attributes:
        compute: the compute dtype of the whole step.
        parts: the `Tally` of every module, by name; empty if a policy or autocast sets `compute` for the whole model.
        input_dtypes: float dtypes of the step's inputs.
    """

    compute: torch.dtype
    parts: Tallies = field(default_factory=dict)
    input_dtypes: Collection[torch.dtype] = ()

    def at(self, module: str, causes: Sequence[Origin]) -> torch.dtype:
        """Return the dtype of most modules in the smallest suitable part of the model around a call in `module`.

        A part is a module with its children. It contains `module` and the modules of `causes`, the origins of the operands'
        dtypes. If a cause is in a list of layers, the part contains the whole list. A part is not suitable if it has only
        one module, or equally many modules in two dtypes. If a cause is outside of the modules (an input), the part must
        contain modules in two of the causes' dtypes. If no part is suitable, `whole` decides; without `parts`, `compute`.
        """
        met = {cause.dtype for cause in causes}
        homes = [_home(cause) for cause in causes]
        modules = [home for home in homes if home is not None]
        for part in with_parents(_list_of(_common([module, *modules])))[:-1]:
            tally = self.parts.get(part, Tally())
            leaders = tally.leaders()
            both = len(met & tally.modules.keys()) > 1
            if len(leaders) == 1 and (both or (len(modules) == len(homes) and tally.modules.total() > 1)):
                return leaders[0]
        return whole(self.parts, self.input_dtypes) or self.compute


def sides_of(setup: Setup, weights: Iterable[Weight], input_dtypes: Collection[torch.dtype] = ()) -> Sides:
    """Return the `Sides` of a step with these settings and weights; `input_dtypes` are the dtypes of its float inputs."""
    decided = setup.policy is not None or setup.autocast is not None
    return Sides(setup.compute, {} if decided else tallies(weights), input_dtypes)


def whole(parts: Tallies, input_dtypes: Collection[torch.dtype] = ()) -> torch.dtype | None:
    """Return the dtype of most modules of a model; None for a model without weights.

    A 16-bit dtype of the inputs counts as one more module, because users choose this dtype. If dtypes have equally many
    modules, the inputs' dtype wins, or else the dtype of more elements.
    """
    tally = parts.get("", Tally())
    chosen = [dtype for dtype in HALVES if dtype in input_dtypes and dtype in tally.modules]
    counts = tally.modules + Counter(chosen)
    ranks = {dtype: (count, dtype in chosen, tally.elements[dtype]) for dtype, count in counts.items()}
    return max(ranks, key=lambda dtype: ranks[dtype], default=None)


def _home(cause: Origin) -> str | None:
    """Return the module that a dtype comes from; None if its origin is outside of all modules."""
    if cause.kind in _HELD:
        return cause.name.rpartition(".")[0]
    if cause.kind == "conversion" and cause.before is not None:
        return _home(cause.before)  # the converted call did not choose the dtype
    home = cause.name if cause.kind == "state" else cause.module
    return None if cause.kind in _FROM_OUTSIDE else home or None


def _list_of(module: str) -> str:
    """Return the name of the innermost list of layers that contains a module; without a list, the module's own name."""
    parts = module.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1]]) if numbers else module


def _common(modules: Sequence[str]) -> str:
    shared = set(with_parents(modules[0])).intersection(*map(with_parents, modules[1:]))
    return max(shared, key=len)
