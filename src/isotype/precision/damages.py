"""Measured damage of storage formats: how much a model's output changes if a linear layer is stored in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from isotype.core.formats import FORMATS, MEASURED
from isotype.core.names import format_bytes, grouped, plural, starred
from isotype.precision.ranges import Measurement

_NESTED = 256
_FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class LayerDamage:
    """The damage of each format to a model's output, if only one linear layer has this format.

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
        section 3) stores each constant in one byte, and adds a float32 number for every 256 blocks and another for the
        whole weight. An int8 weight has a float32 constant in each row.
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
        measured: format -> damage in nats per token if all layers have the format, on the same tokens.
    """

    subject: ClassVar = "damages"
    layout: ClassVar = ("layout", 2)

    layers: tuple[LayerDamage, ...]
    measured: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def total(self, form: str) -> float:
        """Return the damage of a format for all layers, in nats per token: measured, or else summed over the layers."""
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
