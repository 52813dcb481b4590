"""Measured value ranges of a model. These ranges decide a float16 policy."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from isotype.core.errors import CheckpointError
from isotype.core.files import write_whole
from isotype.core.json_records import decoded


@dataclass(frozen=True)
class Measurement:
    """A measurement of one model, which can be stored as JSON.

    Attributes:
        subject: the measured quantity, as a word.
        layout: key and version of the file layout. A file with another version is not read.
        source: a description of the model.
        key: fingerprint of the checkpoint's headers and file sizes; "" for a model in memory.
        when: date and time of the measurement, ISO 8601 in UTC.
        dtype: dtype of the computation: `"float32"`, or `"bfloat16"` if float32 did not fit.
        text: a description of the inputs, such as "the batch given" or "4 texts of 64 tokens that come with isotype".
        tokens: number of tokens of all batches.
    """

    subject: ClassVar[str]
    layout: ClassVar[tuple[str, int]]

    source: str
    key: str
    when: str
    dtype: str
    text: str
    tokens: int

    def to_json(self) -> str:
        return json.dumps(dict([self.layout]) | asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the measurement from the text of `to_json`. Raise ValueError for other text or another layout."""
        key, number = cls.layout
        try:
            values: dict[str, Any] = json.loads(text)
            if values.pop(key) != number:
                raise ValueError(f"its {key} is not {number}")
            measurement: Self = decoded(values, cls)
            measurement.require_whole()
            return measurement
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a measurement: {error}") from error

    def require_whole(self) -> None:
        """Raise ValueError if the loaded measurement is incomplete."""

    def save(self, path: str | Path) -> Path:
        """Write the measurement to a temporary file, and rename the file to `path`."""
        return write_whole(Path(path), self.to_json() + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Return the measurement in the file `path`. Raise CheckpointError if the file does not contain a measurement."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            headline, written = f"unreadable measurement of {cls.subject}", f"what {cls.__name__}.save wrote"
            raise CheckpointError.of(headline, f"{path}: {error}", written, "measure again") from error


FLOAT16_LARGEST = 65504.0
FLOAT16_FLUSHED = 2.0**-25
"""float16's smallest number is 2^-24. float16 rounds values up to half of this number to zero."""
_FILL = 1e37
"""Finite magnitudes above this number are fill values of masks (such as the lowest number of bfloat16), and not activations."""
_LOSS_SCALES = (2.0**0, 2.0**24)

MATMULS = (
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "_grouped_mm",
    "_scaled_dot_product",
)  # fmt: skip
"""Prefixes of operators that autocast runs in 16 bits. Their operands and results are rounded."""
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn", "_varlen_attn")
"""Prefixes of attention kernels. Only the first result of these operators contains activations."""


def is_attention(op: str) -> bool:
    """Return True if an operator (`aten._scaled_dot_product_flash_attention.default`) is an attention kernel."""
    return op.removeprefix("aten.").removeprefix("torch_attn.").startswith(ATTENTION)


def has_statistics(op: str) -> bool:
    """Return True if all results except the first are logarithms of sums. In these, minus infinity is log(0)."""
    return is_attention(op) or op.startswith("aten._ctc_loss")


def is_fill(value: float) -> bool:
    """Return True if a measured magnitude is the fill value of a mask."""
    return _FILL < value < math.inf


def first_loss_scale(gradient: float) -> float:
    """Return the largest power of two that scales `gradient` to at most 65504 / 16. The result is from 1 to 2^24."""
    low, high = _LOSS_SCALES
    if not gradient:
        return high
    return min(max(2.0 ** math.floor(math.log2(FLOAT16_LARGEST / 16 / gradient)), low), high)


@dataclass(frozen=True, slots=True)
class OperatorRange:
    """The largest magnitudes of one operator call in a step, over all batches.

    Attributes:
        module: the innermost module that calls the operator, by its name in the base model ("" is the model itself). A backward
            operator has the module of its forward operator.
        index: number of this call among the calls of the operator in the module and phase, counted from 0.
        phase: forward or backward. Gradients belong to the mean loss, before loss scaling.
        inputs: largest magnitude of each float operand, in the order of the arguments.
        output: largest magnitude of the results.
        flushed: share of the nonzero elements in the results that float16 rounds to zero (magnitudes up to 2^-25). The largest
            share over the batches counts. For a large result, evenly spaced elements are counted.
        source: `file:line` of the call; "" if there is none.
        flushed_scaled: like `flushed`, after multiplication by 65536, which is the initial loss scale of a GradScaler.
    """

    module: str
    op: str
    index: int
    phase: Literal["forward", "backward"]
    inputs: tuple[float, ...]
    output: float
    flushed: float = 0.0
    source: str = ""
    flushed_scaled: float = 0.0

    @property
    def matmul(self) -> bool:
        """True if autocast runs the operator in 16 bits."""
        return self.op.removeprefix("aten.").startswith(MATMULS)


@dataclass(frozen=True, slots=True)
class ModuleRange:
    """Largest magnitudes of a module's inputs and outputs, over all batches.

    Attributes:
        name: fully qualified name in the base model.
        kind: `"linear"`, `"embedding"`, `"norm"` or `"other"`, see `isotype.model.walk.Place.kind`.
        gradient: largest gradient of the outputs, for the mean loss before loss scaling; 0 if there is none.
        weight: largest magnitude in the float parameters of the module itself; 0 if there is none.
        median_weight: median magnitude of the nonzero values in the largest parameter of the module; 0 if there is none. For a
            large parameter, evenly spaced values are used.
        weight_gradient: largest gradient of the trainable parameters of the module itself; 0 if there is none.
    """

    name: str
    kind: str
    input: float
    output: float
    gradient: float = 0.0
    weight: float = 0.0
    median_weight: float = 0.0
    weight_gradient: float = 0.0


@dataclass(frozen=True)
class Ranges(Measurement):
    """A range measurement of one model. Gradients belong to the mean loss over the tokens of one forward.

    Attributes:
        batches: number of batches. If there is a single batch, number of its texts.
        spread: largest factor between the maximum outputs of one module in two batches (or texts).
        modules: the modules that were called, in the order of their first call.
        operators: calls of operators with floating-point results, in the order in which they were first called.
        stream: names of the modules whose outputs are the residual stream: the embedding and the blocks, in order.
        notes: parts that could not be measured, with the reason.
    """

    subject: ClassVar = "ranges"
    layout: ClassVar = ("format", 2)

    batches: int
    spread: float
    modules: tuple[ModuleRange, ...]
    operators: tuple[OperatorRange, ...]
    stream: tuple[str, ...]
    loss: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @cached_property
    def by_module(self) -> Mapping[str, ModuleRange]:
        return {module.name: module for module in self.modules}

    @property
    def stream_modules(self) -> tuple[ModuleRange, ...]:
        """The modules whose outputs are the residual stream, in order."""
        return tuple(self.by_module[name] for name in self.stream if name in self.by_module)

    @property
    def measured(self) -> str:
        """A description with date, dtype and data of the measurement."""
        return f"measured {self.when[:10]} in {self.dtype} on {self.text}"

    @property
    def undefined(self) -> OperatorRange | None:
        """The first operator with finite operands and a non-finite result; None if loss and gradients are finite."""
        values = (*self.loss, *(module.gradient for module in self.modules))
        if all(map(math.isfinite, values)):
            return None
        finite = (operator for operator in self.operators if all(map(math.isfinite, operator.inputs)))
        return next((operator for operator in finite if not math.isfinite(operator.output)), None)

    @property
    def residual(self) -> ModuleRange | None:
        """The module with the largest output in the residual stream; None if `stream` is empty."""
        return max(self.stream_modules, key=lambda module: module.output, default=None)
