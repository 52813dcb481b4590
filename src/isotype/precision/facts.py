"""What the precision policy is decided from: facts about a model, gathered elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from isotype.core.errors import Problem
from isotype.core.formats import QUANTIZATIONS

_DEQUANTIZED = frozenset({"mxfp4", "fp8", "compressed-tensors", "modelopt"})


@dataclass(frozen=True)
class QuantizationFacts:
    """How the weights are quantized already.

    Attributes:
        method: the library or scheme: `"bitsandbytes"`, `"mxfp4"`, `"gptq"`, `"awq"`, `"fp8"`, …
        format: `"nf4"`, `"fp4"`, `"int8"`, `"mxfp4"`; for other methods their name and bits, `"gptq-4bit"`.
        compute_dtype: dtype that the weights are dequantized to; None if nothing says it.
        double_quant: whether the quantization constants are quantized too; None if that has no meaning.
        quant_storage: dtype of the packed bytes; None if nothing says it.
        skip_modules: modules that are left unquantized.
        experts: the format of stacked experts, if they can stay in it and it is not that of linear layers: `"mxfp4"`; else empty.
        in_memory: whether a model in memory is quantized so, not a checkpoint.
    """

    method: str
    format: str
    compute_dtype: torch.dtype | None = None
    double_quant: bool | None = None
    quant_storage: torch.dtype | None = None
    skip_modules: tuple[str, ...] = ()
    experts: str = ""
    in_memory: bool = field(default=False, compare=False)

    @property
    def dequantized(self) -> bool:
        """True if loading makes dense weights of these."""
        return self.method in _DEQUANTIZED and (self.method == "mxfp4" or not self.in_memory)


@dataclass(frozen=True)
class ModelFacts:
    """What a model is, as far as dtypes go. Of a PEFT model, the base model's.

    Attributes:
        source: what was given, in words: a path, a hub id or a class name.
        model_type: as in config.json (`"llama"`), or None without a config.
        architecture: name of the model class.
        trained_dtype: what the weights were trained in: the dtype of most elements that are not quantized, else
            the config's; None if nothing says it.
        quantization: how the weights are quantized already, or None.
        pinned: patterns of parameters kept in float32 when float16 is asked for (`_keep_in_fp32_modules`).
        pinned_strict: patterns of parameters kept in float32 always (`_keep_in_fp32_modules_strict`).
        parameters: number of parameters, each counted once and as if dense.
        parameter_bytes: bytes they take as stored, with their quantization constants.
        dense: modules that no quantization takes unless it is asked for: towers of pictures and sound with their projectors, and what
            transformers leaves out beside them; empty of a model of text alone.
        routers: whether routers choose experts by themselves, as those of transformers' classes do.
        notes: what could not be found out, and why.
    """

    source: str
    model_type: str | None = None
    architecture: str | None = None
    trained_dtype: torch.dtype | None = None
    quantization: QuantizationFacts | None = None
    pinned: tuple[str, ...] = ()
    pinned_strict: tuple[str, ...] = ()
    parameters: int | None = None
    parameter_bytes: int | None = None
    routers: bool = False
    dense: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def saved_format(self) -> str | None:
        """The quantization that the weights are stored in and keep when they are loaded."""
        quantization = self.quantization
        return None if quantization is None or quantization.dequantized else quantization.format


def unreadable(facts: ModelFacts) -> Problem | None:
    """Why a model that is saved quantized is not read; None if it is."""
    if facts.saved_format is None or facts.saved_format in QUANTIZATIONS:
        return None
    return Problem(
        f"{facts.source} is quantized with {facts.saved_format}",
        "float weights, mxfp4, fp8, compressed-tensors, modelopt, or bitsandbytes nf4, fp4 or int8",
        f"give the unquantized original and a quantization of {', '.join(QUANTIZATIONS)}",
    )
