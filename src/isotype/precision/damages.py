"""Measured damage of storage formats, and mixed storage, which assigns each linear layer a format by its damage.

The damage says how much the output of a model changes if a layer is stored in fewer bits.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError
from isotype.core.formats import FITTED, FORMATS, FOUR_BITS, MEASURED, QUANTIZATIONS
from isotype.core.names import format_bytes, grouped, plural, starred
from isotype.precision.decide import PrecisionRequest
from isotype.precision.policy import LayerStorage, PrecisionPolicy
from isotype.precision.ranges import Measurement

_NESTED = 256
_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class LayerDamage:
    """The damage of each format to the output of a model, if only one linear layer has this format.

    Attributes:
        rows, columns: shape of the layer's dense weight, `[out, in]`.
        damage: format -> damage in nats per token. The damage is the Kullback-Leibler divergence between the next-token
            distributions of the float32 model and of the model with the format, to first order in the loss.
        error: format -> squared norm of the weight's error.
        moments: second moments of the layer's input channels, encoded by `policy.write_moments`.
    """

    module: str
    rows: int
    columns: int
    damage: Mapping[str, float]
    error: Mapping[str, float] = field(default_factory=dict)
    moments: str = ""

    def bytes(self, form: str, *, double_quant: bool = False) -> int:
        """Return the bytes of the layer's weight in a format, with its quantization constants.

        A 4-bit weight has a float32 constant in each block. Double quantization (https://arxiv.org/abs/2305.14314,
        section 3) stores each constant in one byte. Double quantization adds a float32 number for every 256 blocks,
        and another float32 number for the whole weight. An int8 weight has a float32 constant in each row.
        """
        values = self.rows * self.columns
        if form in _FLOATS:
            return values * _FLOATS[form]
        if form == "int8":
            return values + 4 * self.rows
        blocks = math.ceil(values / FORMATS[form].block)
        constants = blocks + 4 * math.ceil(blocks / _NESTED) + 4 if double_quant else 4 * blocks
        return math.ceil(values / 2) + constants

    def damage_in(self, form: str) -> float:
        """Return the damage of a format in nats per token; 0 for float32."""
        return 0.0 if form == "float32" else self.damage[form]


@dataclass(frozen=True)
class Damages(Measurement):
    """A damage measurement of one model.

    Attributes:
        layers: all linear layers that can be quantized, in the model's order.
        measured: format -> damage in nats per token if all layers have this format. All formats are measured on the same
            tokens.
    """

    subject: ClassVar = "damages"
    layout: ClassVar = ("layout", 2)

    layers: tuple[LayerDamage, ...]
    measured: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def total(self, form: str) -> float:
        """Return the damage of a format for all layers, in nats per token. It was measured, or else is the sum over the layers."""
        if form in self.measured:
            return self.measured[form]
        return self._sum((layer, form) for layer in self.layers)

    def estimate(self, storage: Mapping[str, str], otherwise: str) -> float:
        """Estimate the damage of mixed formats in nats per token.

        A layer that is not in `storage` has the format `otherwise`. The sum of the layers' damages is scaled, so that
        the estimate equals `total(otherwise)` if all layers have the format `otherwise`.
        """
        mixed = self._sum((layer, storage.get(layer.module, otherwise)) for layer in self.layers)
        plain = self._sum((layer, otherwise) for layer in self.layers)
        return mixed * (self.total(otherwise) / plain if plain else 1.0)

    @staticmethod
    def _sum(pairs: Iterable[tuple[LayerDamage, str]]) -> float:
        return math.fsum(layer.damage_in(form) for layer, form in pairs)

    def bytes(self, form: str, *, double_quant: bool = False) -> int:
        return sum(layer.bytes(form, double_quant=double_quant) for layer in self.layers)

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {plural(len(self.layers), 'linear layer')}, {plural(self.tokens, 'token')} ({self.text}), in {self.dtype}",
            "",
            f"{'all layers in':<14}{'nats a token':>14}{'bytes':>12}",
        ]
        for form in MEASURED:
            how = "" if form in self.measured else "  (sum of layers)"
            lines.append(f"{form:<14}{self.total(form):>14.4g}{format_bytes(self.bytes(form)):>12}{how}")
        worst = sorted(self.layers, key=lambda layer: -layer.damage["nf4"])[:_SHOWN]
        width = max((len(layer.module) for layer in worst), default=0)
        lines += ["", f"{'largest in nf4':<{width}}" + "".join(f"{form:>15}" for form in MEASURED)]
        lines += [
            f"{layer.module:<{width}}" + "".join(f"{layer.damage[form]:>15.3g}" for form in MEASURED)
            for layer in worst
        ]
        kinds = grouped(self.layers, lambda layer: starred(layer.module))
        width = max((len(kind) for kind in kinds), default=0)
        lines += ["", f"{'by kind':<{width}}{'count':>8}" + "".join(f"{form:>15}" for form in MEASURED)]
        lines += [
            f"{kind:<{width}}{len(group):>8}"
            + "".join(f"{self._sum((layer, form) for layer in group):>15.3g}" for form in MEASURED)
            for kind, group in kinds.items()
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def require_whole(self) -> None:
        """Raise ValueError if the measurement of a layer lacks a format."""
        if any(set(MEASURED) - set(layer.damage) for layer in self.layers):
            raise ValueError("not a measurement: a layer lacks a format")


_SUMS = 1 << 15
"""Default of `sums`. If a size is rounded up, it grows by at most 1/32768 of `room`."""


@dataclass(frozen=True, slots=True)
class Option:
    """The size of a layer in one format, and the damage of this format to the output of the model."""

    bytes: int
    damage: float


def choose(layers: Sequence[Sequence[Option]], room: int, *, sums: int = _SUMS) -> list[int] | None:
    """Choose an option for each layer, so that the total damage is smallest within `room` bytes.

    At most `sums` (at least 1) different totals of bytes are compared. If more totals are possible, sizes are rounded
    up.

    Returns:
        The index of the option of each layer; None if even the smallest options do not fit.
    """
    least = [min(option.bytes for option in options) for options in layers]
    spare = room - sum(least)
    if spare < 0:
        return None
    extra = [[option.bytes - low for option in options] for options, low in zip(layers, least, strict=True)]
    step = math.gcd(*(size for options in extra for size in options)) or 1
    most = min(spare, sum(max(options) for options in extra))
    if most // step >= sums:
        step = math.ceil(most / (sums - 1)) if sums > 1 else most + 1
    steps = [[math.ceil(size / step) for size in options] for options in extra]
    return _table(layers, steps, min(spare // step, sum(map(max, steps))))


def _table(layers: Sequence[Sequence[Option]], steps: Sequence[Sequence[int]], room: int) -> list[int]:
    """Return the index of the best option of each layer, by dynamic programming. `room` and `steps` have the same unit."""
    best = torch.zeros(room + 1, dtype=torch.float64)
    choices = []
    for options, sizes in zip(layers, steps, strict=True):
        values = torch.full((len(options), room + 1), torch.inf, dtype=torch.float64)
        for at, (option, size) in enumerate(zip(options, sizes, strict=True)):
            if size <= room:
                values[at, size:] = best[: room + 1 - size] + option.damage
        best, chosen = values.min(dim=0)
        choices.append(chosen.to(torch.int16))
    picked = []
    for chosen, sizes in zip(reversed(choices), reversed(steps), strict=True):
        at = int(chosen[room])
        picked.append(at)
        room -= sizes[at]
    return picked[::-1]


_TENTH = 10
"""By default, the layers may take a tenth more bytes than in nf4."""


def first_request(request: PrecisionRequest) -> PrecisionRequest:
    """Return the request with all layers in nf4. Double quantization is on, unless the request decides it."""
    nested = True if request.double_quant is None else request.double_quant
    return replace(request, quantization="nf4", double_quant=nested, base_memory=None)


def as_decided(request: PrecisionRequest, policy: PrecisionPolicy) -> PrecisionRequest:
    return replace(
        request,
        quantization=policy.quantization,
        double_quant=policy.double_quant or None,
        quant_storage=policy.quant_storage if policy.storage in FOUR_BITS else None,
        layers=policy.layers,
        base_memory=None,
        quantized_parts="all" if policy.layers else request.quantized_parts,
    )


def with_constants_of(policy: PrecisionPolicy, saved: PrecisionPolicy | None) -> PrecisionPolicy:
    """Return `policy` with the constants of `saved` if both have the same layer formats, so that a resumed run keeps them."""
    if saved is None or policy.layer_formats != saved.layer_formats:
        return policy
    return replace(policy, layers=saved.layers)


def mix(
    damages: Damages, policy: PrecisionPolicy, parameters: int, request: PrecisionRequest
) -> tuple[PrecisionRequest, str]:
    """Choose the formats of all layers, so that the damage is smallest within a memory limit.

    A layer gets nf4 with fitted constants (in blocks of 64 or 32), int8, or the dtype of the model's float weights.

    Args:
        policy: the policy with all layers in nf4.
        request: `base_memory` limits the bytes of all base weights. If `base_memory` is None, the linear layers may take 10 %
            more than in nf4.

    Returns:
        (request, reason). In the returned request, `quantization` is nf4 if any layer has 4 bits, and `layers` names
        the layers in other formats. The reason counts the layers in each format and their bytes, and estimates the
        damage in nats per token.

    Raises:
        PrecisionError: the smallest formats exceed `base_memory`.
    """
    memory = request.base_memory
    plain = dtype_name(policy.plain)
    weights = sum(layer.rows * layer.columns for layer in damages.layers)
    others = (parameters - weights) * policy.plain.itemsize
    tenth = damages.bytes("nf4") + damages.bytes("nf4") // _TENTH
    room = tenth if memory is None else memory - others
    forms = (*FITTED, "int8", plain)
    options = [
        [Option(layer.bytes(form, double_quant=policy.double_quant), layer.damage_in(form)) for form in forms]
        for layer in damages.layers
    ]
    picked = choose(options, room)
    if picked is None:
        least = others + sum(min(option.bytes for option in layer) for layer in options)
        what = f"{format_bytes(memory or room)} for the weights of {damages.source}"
        expected = f"at least {format_bytes(least)}, with every layer in nf4"
        fix = "allow more memory for the base weights, or use a smaller model or more GPUs (--fsdp 2)"
        raise PrecisionError.of("no mixed storage fits", what, expected, fix)
    chosen = {layer.module: forms[at] for layer, at in zip(damages.layers, picked, strict=True)}
    size = sum(layer[at].bytes for layer, at in zip(options, picked, strict=True))
    kinds = set(chosen.values())
    storage = "nf4" if kinds & set(FITTED) else "int8" if "int8" in kinds else plain
    damage = damages.estimate(chosen, "nf4")
    counts = Counter(chosen.values())
    count = ", ".join(f"{counts[form]} in {form}" for form in forms if counts[form])
    reason = (
        f"mixed: {plural(len(chosen), 'linear layer')} ({count}) of {format_bytes(size)} in total "
        f"(limit: {format_bytes(room)}, {'a tenth more than in nf4' if memory is None else 'the memory that the other weights leave'}). "
        f"The damage, measured on {plural(damages.tokens, 'token')}, is about {damage:.2g} nats a token; "
        f"with all layers in nf4, it would be {damages.total('nf4'):.2g}"
    )
    differing = tuple(
        LayerStorage(layer.module, form, layer.moments if form in FITTED else "")
        for layer in damages.layers
        if (form := chosen[layer.module]) != storage
    )
    mixed = replace(
        request,
        quantization=storage if storage in QUANTIZATIONS else None,
        double_quant=(policy.double_quant and storage == "nf4") or None,
        quant_storage=request.quant_storage if storage == "nf4" else None,
        layers=differing,
        base_memory=None,
        quantized_parts="all",  # the damage alone decides each layer's format
    )
    return mixed, reason


def base_bytes(damages: Damages, policy: PrecisionPolicy, parameters: int) -> int:
    """Return the bytes of all base weights under a policy. `base_memory` limits them."""
    weights = sum(layer.rows * layer.columns for layer in damages.layers)
    double = policy.double_quant
    layers = sum(x.bytes(policy.storage_of(x.module), double_quant=double) for x in damages.layers)
    return layers + (parameters - weights) * policy.plain.itemsize
