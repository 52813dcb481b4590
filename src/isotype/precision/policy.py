"""The precision policy: the dtypes of all roles in a training run, with reasons."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch

from isotype.core.dtypes import dtype_name, parse_dtype
from isotype.core.errors import CheckpointError
from isotype.core.files import write_whole
from isotype.core.formats import FORMATS, MIXED, QUANTIZATIONS
from isotype.core.json_records import FormatVersionError, decoded, encoded, require_version
from isotype.core.names import grouped, plural, starred

POLICY_FILE = "precision_policy.json"
"""File in a saved adapter's folder with the policy of the adapter's training."""
FORMAT_VERSION = 1
"""Version of the file's format. The version increases if older releases of isotype would misread a new file."""

DEFAULT_LOSS_SCALE = 65536.0


@dataclass(frozen=True)
class ModuleException:
    """A module whose measured values exceed float16's range.

    Attributes:
        how: `"scale"`, `"float32"` or `"adapters"`. `"scale"` multiplies the input of a linear layer by 2^-exponent, and its
            output (cast to float32) by 2^exponent. This is exact, except for subnormal numbers. `"float32"` runs the operators
            of the module in float32. `"adapters"` runs only the adapters of a linear layer in float32.
        exponent: exponent of `"scale"`, at least 0.
        reason: a description of the measured value.
    """

    module: str
    how: Literal["scale", "float32", "adapters"]
    exponent: int = 0
    reason: str = ""


@dataclass(frozen=True)
class LayerStorage:
    """A linear layer whose format differs from the `storage` of the policy.

    Attributes:
        storage: `"nf4"`, `"nf4-32"` (blocks of 32 weights, not 64), `"nf4-fitted"` and `"nf4-32-fitted"` (constants
            fitted to the layer's inputs), `"fp4"`, `"int8"`, or the float dtype of unquantized weights.
        moments: second moments of the layer's input channels for fitted constants, encoded by `write_moments`.
    """

    module: str
    storage: str
    moments: str = ""


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of one training run; immutable.

    Attributes:
        compute: dtype of matmul operands.
        storage: how frozen base weights are stored: the name of a float dtype, `"nf4"`, `"fp4"` or `"int8"`.
        master: dtype of trainable parameters, which the optimizer updates.
        reduce: dtype in which ranks sum their gradients. It is equal to `master`.
        loss_scaling: True if a GradScaler is needed. This is the case only for float16 compute with float32 masters.
        trainable: `"lora"` (adapters on a frozen base) or `"full"` (every weight).
        device: name of the device profile for which the policy was decided.
        pinned: patterns of parameter names. A parameter stays float32 if a pattern matches a part of its name.
        double_quant: True if the quantization constants are also quantized (only nf4 and fp4).
        quant_storage: dtype of the packed 4-bit bytes. With FSDP, it has to be the compute dtype.
        wide_residual: True if the residual stream is float32 while matmuls run in 16 bits.
        layers: linear layers whose format is not `storage` (a mixed base).
        dense: names of modules for images and audio. These modules stay unquantized, unless the request quantizes them.
        never_quantized: names of modules that always stay unquantized, because the model itself uses their weights, or adapters
            train them as a whole.
        exceptions: modules whose values exceed the compute dtype's range.
        loss_scale: the initial loss scale of a GradScaler.
        keep_frozen: True if frozen float weights keep their dtype, whatever `storage` is. It is True for a policy that
            `PrecisionCallback` derives from a model.
        experts: `"mxfp4"` if stacked experts stay in this format; else "".
        routers: True if routers compute scores and choose experts in float32.
        reasons: role -> reason.
        warnings: disadvantages of the user's explicit requests.
    """

    compute: torch.dtype
    storage: str
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    loss_scaling: bool = False
    trainable: str = "lora"
    device: str = "cpu"
    pinned: tuple[str, ...] = ()
    double_quant: bool = False
    quant_storage: torch.dtype = torch.uint8
    wide_residual: bool = False
    layers: tuple[LayerStorage, ...] = ()
    dense: tuple[str, ...] = ()
    never_quantized: tuple[str, ...] = ()
    exceptions: tuple[ModuleException, ...] = ()
    loss_scale: float = DEFAULT_LOSS_SCALE
    keep_frozen: bool = False
    experts: str = ""
    routers: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def quantized(self) -> bool:
        """True if the base's linear layers are stored in a quantization format."""
        return self.storage in QUANTIZATIONS

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Names of unquantized modules for `llm_int8_skip_modules` of transformers; empty for the default of transformers."""
        return tuple(dict.fromkeys((*self.dense, *self.never_quantized)))

    @property
    def quantization(self) -> str | None:
        """The value of `PrecisionRequest.quantization` for this storage; None for float storage."""
        return self.storage if self.quantized else self.experts or None

    @property
    def form(self) -> str:
        """The storage in one word: `mixed` if the layers have several formats, else the quantization or the float dtype."""
        return MIXED if self.layers else self.quantization or self.storage

    @cached_property
    def _layers_by_name(self) -> Mapping[str, LayerStorage]:
        return {layer.module: layer for layer in self.layers}

    def storage_of(self, module: str) -> str:
        """Return the storage of the quantized linear layer with this name in the base model."""
        layer = self._layers_by_name.get(module)
        return self.storage if layer is None else layer.storage

    def code_book_of(self, module: str) -> str:
        """Return bitsandbytes' name of the code book of a layer. For float storage, return the name of the dtype."""
        storage = self.storage_of(module)
        return FORMATS[storage].code if storage in FORMATS else storage

    @property
    def layer_formats(self) -> dict[str, str]:
        """Module name -> format, for each layer in another format than `storage`."""
        return {layer.module: layer.storage for layer in self.layers}

    def moments_of(self, module: str) -> torch.Tensor | None:
        """Return the second moments `[in]` of the inputs of a linear layer; None if the constants of the layer are not fitted."""
        layer = self._layers_by_name.get(module)
        return read_moments(layer.moments) if layer is not None and layer.moments else None

    @property
    def plain(self) -> torch.dtype:
        """Dtype of frozen weights that are neither quantized nor pinned: embeddings, norms, lm_head."""
        return self.compute if self.quantized else parse_dtype(self.storage)

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype for `torch.autocast`; None for float32 compute."""
        return None if self.compute == torch.float32 else self.compute

    @property
    def residual(self) -> torch.dtype:
        """Dtype of hidden states between blocks: float32 if `wide_residual`, else the float weights' dtype."""
        return torch.float32 if self.wide_residual else self.plain

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Return (role, dtype, reason) for every role, in the order of the printed table."""
        count, low = len(self.exceptions), self.compute != torch.float32
        compute = dtype_name(self.compute) + (f" ({plural(count, 'exception')})" if count else "")
        scaling = f"on, from {self.loss_scale:g}" if self.loss_scaling else "off"
        roles = (
            ("storage", "frozen base weights", self.storage_words()),
            ("compute", "matmuls", compute),
            ("residual", "residual stream", dtype_name(self.residual)),
            ("master", "trainable parameters", dtype_name(self.master)),
            ("optimizer", "optimizer state", dtype_name(self.master)),
            ("reduce", "gradient reduction", dtype_name(self.reduce)),
            ("pinned", "pinned parameters", "float32" if self.pinned else "none"),
            ("norms", "norms", "float32 inside" if low else "float32"),
            ("routers", "routers of experts", "float32" if self.routers else ""),
            ("buffers", "rotary and other buffers", "float32"),
            ("loss", "softmax and loss", "float32"),
            ("loss_scaling", "loss scaling", scaling),
        )
        return tuple((title, dtype, self.reasons.get(role, "")) for role, title, dtype in roles if dtype)

    def storage_words(self) -> str:
        """Describe the storage: `nf4 (double quantization), mixed, experts mxfp4`."""
        nested = " (double quantization)" if self.double_quant else ""
        experts = f", experts {self.experts}" if self.experts else ""
        return f"{self.storage}{nested}{', mixed' if self.layers else ''}{experts}"

    def layer_lines(self) -> tuple[str, ...]:
        """Return a line for each format and kind of module in `layers`, with the indices of the layers."""
        kinds: dict[tuple[str, str], list[str]] = {}
        for layer in self.layers:
            number = next((part for part in layer.module.split(".") if part.isdigit()), "")
            kinds.setdefault((layer.storage, starred(layer.module)), []).append(number)
        return tuple(
            f"{kind} in {form}" + (f": {', '.join(numbers)}" if all(numbers) else "")
            for (form, kind), numbers in sorted(kinds.items())
        )

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        indent = " " * (sum(widths) + 4)
        lines = []
        for role, dtype, reason in rows:
            wrapped = textwrap.wrap(reason, 110 - len(indent)) or [""]
            lines.append(f"{role:<{widths[0]}}  {dtype:<{widths[1]}}  {wrapped[0]}".rstrip())
            lines += [indent + part for part in wrapped[1:]]
        remarks = [f"stored otherwise: {line}" for line in self.layer_lines()]
        remarks += [f"exception: {line}" for line in self.exception_lines()]
        remarks += [f"warning: {warning}" for warning in self.warnings]
        lines += [part for line in remarks for part in textwrap.wrap(line, 110, subsequent_indent="  ")]
        return "\n".join(lines)

    def exception_lines(self) -> tuple[str, ...]:
        """Return a line for each kind of module in `exceptions`, with the reason of the first module."""
        groups = grouped(self.exceptions, lambda exception: (starred(exception.module), exception.how))
        return tuple(_exception_line(name, group) for (name, _), group in groups.items())

    def summary(self) -> dict[str, Any]:
        """Return the fields as JSON values for display. The moments are omitted, because they have a character for each input channel."""
        return {**encoded(replace(self, layers=()), {}), "layers": self.layer_formats}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON values of all fields. `from_dict` is the inverse function."""
        moments = {layer.module: layer.moments for layer in self.layers if layer.moments}
        return {"format_version": FORMAT_VERSION, **self.summary(), "moments": moments}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the policy from the values of `to_dict`.

        Raises:
            FormatVersionError: the values have another format version. Files of isotype 0.1.0 count as version 1.
        """
        require_version(values.get("format_version", 1), FORMAT_VERSION)
        moments, layers = values.get("moments", {}), values.get("layers", {}).items()
        content = {name: value for name, value in values.items() if name not in ("moments", "format_version")}
        content["layers"] = [{"module": m, "storage": s, "moments": moments.get(m, "")} for m, s in layers]
        policy: Self = decoded(content, cls)
        return policy

    def save(self, directory: str | Path) -> Path:
        """Write the policy as JSON to a temporary file in `directory`, and rename the file."""
        return write_whole(Path(directory) / POLICY_FILE, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def read(cls, directory: str | Path) -> Self | None:
        """Return the policy saved in `directory`; None if there is none.

        Raises:
            CheckpointError: the file is no policy, or has another format version.
        """
        path = Path(directory) / POLICY_FILE
        if not path.is_file():
            return None
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FormatVersionError) as error:
            headline, expected = "unreadable precision policy", "the JSON that isotype wrote"
            fix = "delete the file to decide the policy again"
            if isinstance(error, FormatVersionError):
                headline, expected = "precision policy of another format version", "a supported version"
                fix = f"install the version of isotype that wrote the file, or {fix}"
            raise CheckpointError.of(headline, f"{path}: {error}", expected, fix) from error


def _exception_line(name: str, group: list[ModuleException]) -> str:
    first = group[0]
    how = "in float32" if first.how == "float32" else "with its adapters in float32"
    if first.how == "scale":
        exponents = sorted({exception.exponent for exception in group})
        to = f" to {exponents[-1]}" if len(exponents) > 1 else ""
        how = f"scaled by powers of two ({exponents[0]}{to})"
    times = f" ({len(group)} modules)" if len(group) > 1 else ""
    return f"{name}{times} {how}: {first.reason}"


def is_pinned(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches a part of the parameter's name, as in transformers. `*` matches any text."""
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


_LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_OCTAVE = 2
"""Number of encoded values per factor of 2 between moments. A single value would be accurate enough (benchmarks/quality.py)."""
_PRIOR = 8
"""The mean over all channels is added to each channel with the weight of this many tokens, because an expert may get few tokens."""


def write_moments(squares: torch.Tensor, tokens: int) -> str:
    """Return second moments of input channels as text, with one character for each channel. The character `_` is for
    the largest moment.

    `squares` `[in]` contains the sum of squares over `tokens` for each channel. A common factor of all channels has
    no effect.
    """
    squares = squares.cpu().double()  # some devices lack float64
    moments = squares + _PRIOR * squares.mean() / max(1, tokens)
    levels = (moments / moments.max()).log2().mul(_OCTAVE).round() + len(_LEVELS) - 1
    return "".join(_LEVELS[level] for level in levels.nan_to_num(0).clamp(0, len(_LEVELS) - 1).int().tolist())


def read_moments(text: str) -> torch.Tensor:
    """Return float32 moments `[in]`, divided by the largest moment. Raise ValueError for an invalid character."""
    levels = torch.tensor([_LEVELS.index(character) for character in text], dtype=torch.float32)
    return torch.exp2((levels - (len(_LEVELS) - 1)) / _OCTAVE)
