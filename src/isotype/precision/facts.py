"""The facts about a model that decide its precision policy."""

from dataclasses import dataclass, field

import torch

from isotype.core.errors import Problem
from isotype.core.formats import DEQUANTIZED, METHODS, QUANTIZATIONS
from isotype.core.names import alternatives


@dataclass(frozen=True)
class QuantizationFacts:
    """The format of weights that are already quantized.

    Attributes:
        method: the library or method: `"bitsandbytes"`, `"mxfp4"`, `"gptq"`, `"awq"`, `"fp8"`, …
        format: `"nf4"`, `"fp4"`, `"int8"`, `"mxfp4"`; for another method, its name and bits: `"gptq-4bit"`.
        compute_dtype: dtype to which weights are dequantized; None if unknown.
        double_quant: True if the quantization constants are also quantized; None if the method has no such option.
        quant_storage: dtype of the packed bytes; None if unknown.
        experts: `"mxfp4"` if stacked experts can keep this format while linear layers are dequantized; else "".
        in_memory: True if the weights are in memory, and not in a checkpoint.
    """

    method: str
    format: str
    compute_dtype: torch.dtype | None = None
    double_quant: bool | None = None
    quant_storage: torch.dtype | None = None
    experts: str = ""
    in_memory: bool = field(default=False, compare=False)

    @property
    def dequantized(self) -> bool:
        method = METHODS.get(self.method)
        return method is not None and method.dequantized and (method.in_memory or not self.in_memory)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model's dtypes; for a PEFT model, about its base model.

    Attributes:
        source: a description of the model: a path, a hub id or a class name.
        model_type: model type in config.json (`"llama"`); None without a config.
        trained_dtype: dtype in which the model was trained: the dtype of most unquantized elements, or else the config's dtype;
            None if unknown.
        pinned: patterns of parameters that stay float32 in float16 (`_keep_in_fp32_modules`).
        pinned_strict: patterns of parameters that always stay float32 (`_keep_in_fp32_modules_strict`).
        uncast: those of these patterns whose modules keep the dtype of their outputs.
        parameters: number of parameters of the dequantized model. A shared parameter counts once.
        parameter_bytes: stored bytes, including quantization constants.
        dense: names of modules that are quantized only on request: vision and audio towers, their projectors, and modules that
            transformers leaves unquantized. Empty for a text model.
        never_quantized: names of layers that cannot be quantized, because the code of the model uses their weights, or adapters
            train them as a whole.
        kept: modules that transformers leaves unquantized by default. It is set only together with `dense` and
            `never_quantized`.
        routers: True if the model has routers, the modules that choose experts.
    """

    source: str
    model_type: str | None = None
    trained_dtype: torch.dtype | None = None
    quantization: QuantizationFacts | None = None
    pinned: tuple[str, ...] = ()
    pinned_strict: tuple[str, ...] = ()
    uncast: tuple[str, ...] = ()
    parameters: int | None = None
    parameter_bytes: int | None = None
    routers: bool = False
    dense: tuple[str, ...] = ()
    never_quantized: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def saved_format(self) -> str | None:
        """The quantization format of the weights after loading; None for float weights."""
        quantization = self.quantization
        return None if quantization is None or quantization.dequantized else quantization.format


def unreadable(facts: ModelFacts) -> Problem | None:
    """Return the problem if isotype cannot read the quantization format of a model; else None."""
    if facts.saved_format is None or facts.saved_format in QUANTIZATIONS:
        return None
    expected = f"float weights, GGUF, {', '.join(DEQUANTIZED)}, or bitsandbytes {alternatives(QUANTIZATIONS)}"
    fix = f"use the unquantized original, and choose a quantization: {', '.join(QUANTIZATIONS)}"
    return Problem(f"{facts.source} is quantized with {facts.saved_format}", expected, fix)
