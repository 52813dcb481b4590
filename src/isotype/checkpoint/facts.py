"""Gathers the facts about a model that decide its precision policy. No weight is read."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.formats.config import build_on_meta, config_dtype, torch_dtype
from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.mapping.match import match, unknown_quantization
from isotype.checkpoint.mapping.schemes import EXPECTED, config_problem, method_of
from isotype.checkpoint.mapping.stored import stored_tensors
from isotype.compat.peft import without_peft
from isotype.compat.transformers import has_own_adapters, pinned, pinned_strictly
from isotype.core.errors import CheckpointError, PrecisionError
from isotype.core.formats import MXFP4
from isotype.model.boundary_choice import uncast_pins
from isotype.model.experts.stack import held_stack
from isotype.model.parts import Parts
from isotype.model.quantized import constant_bytes, is_int8
from isotype.model.read_weights import unquantizable
from isotype.model.targets import trained_heads
from isotype.model.walk import is_router, kind_of
from isotype.precision.facts import ModelFacts, QuantizationFacts

# transformers' model_type by llama.cpp's name of the architecture, if they differ in more than dashes.
_GGUF_MODEL_TYPES = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}


def facts_of(model: Any) -> ModelFacts:
    """Return the facts about a module or a transformers config. Raise PrecisionError for other objects."""
    if isinstance(model, nn.Module):
        return facts_of_module(model)
    if _is_config(model):
        return facts_of_config(type(model).__name__, model)
    expected = "an nn.Module, a transformers config, a path, embedded:NAME or a hub id"
    fix = "give one of these"
    raise PrecisionError.of("neither a model nor a config", f"a {type(model).__name__}", expected, fix)


def _is_config(value: object) -> bool:
    return hasattr(value, "model_type") and hasattr(value, "to_dict")


def facts_of_module(model: Any) -> ModelFacts:
    base = without_peft(model)
    config = getattr(base, "config", None)
    if not _is_config(config):  # a config of another library
        config = None
    named = quantization_of(config)  # may describe layers that were replaced
    quantization = _layers_quantization(base) or named
    prefixes: tuple[str, ...] = ()  # beginnings of the names of adapter parameters
    if getattr(model, "peft_config", None) or has_own_adapters(model):
        prefix = getattr(getattr(model, "base_model", None), "prefix", None)
        prefixes = (prefix or "lora_", "modules_to_save")
    stored = list(stored_parameters(base, prefixes))
    if quantization is not None:
        quantization = replace(_with_stored_experts(quantization, stored), in_memory=True)
    counts, trained = _weigh(stored, config_dtype(config))
    return ModelFacts(
        source=type(base).__name__,
        model_type=getattr(config, "model_type", None) or None,
        trained_dtype=trained,
        quantization=quantization,
        parameters=sum(counts.values()),
        parameter_bytes=sum(tensor.bytes for tensor in stored),
        **_facts_of_modules(base),
    )


def _layers_quantization(model: nn.Module) -> QuantizationFacts | None:
    """Return the most common quantization of the model's bitsandbytes layers; None without such layers."""
    counts: Counter[QuantizationFacts] = Counter()
    for module in model.modules():
        kind = kind_of(module)
        if kind == "linear4bit":
            weight: Any = module.weight
            state = getattr(weight, "quant_state", None)
            nested = state.nested if state is not None else weight.compress_statistics
            compute: Any = getattr(module, "compute_dtype", None)
            form, storage = weight.quant_type, weight.quant_storage
            counts[QuantizationFacts("bitsandbytes", form, compute, bool(nested), storage)] += 1
        elif kind == "linear8bit":
            counts[QuantizationFacts("bitsandbytes", "int8")] += 1
    return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True)
class _Stored:
    """A stored tensor: its dtype or format, its number of elements after dequantization, and its stored bytes."""

    name: str
    dtype: torch.dtype | str | None
    elements: int
    bytes: int


def stored_parameters(model: nn.Module, adapters: tuple[str, ...] = ()) -> Iterator[_Stored]:
    """Yield the stored parameters. Leave out a parameter if a part of its name begins with one of `adapters`."""
    for name, parameter in model.named_parameters():
        if any(part.startswith(adapters) for part in name.split(".")):
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        nbytes = parameter.nbytes + constant_bytes(layer, parameter)
        stack = held_stack(layer)
        if stack is not None:
            yield _Stored(name, stack.storage, stack.shape.numel(), nbytes)
            continue
        state: Any = getattr(parameter, "quant_state", None)  # None if no device has quantized the weight yet
        form: Any = "int8" if is_int8(parameter) else getattr(parameter, "quant_type", parameter.dtype)
        yield _Stored(name, form, parameter.numel() if state is None else state.shape.numel(), nbytes)


def facts_of_config(source: str, config: Any, headers: CheckpointHeaders | None = None) -> ModelFacts:
    """Return the facts about a model from its config and headers. Raise CheckpointError if they contradict each other."""
    quantization = quantization_of(config)
    if headers is None and (problem := config_problem(quantization_options(config))):
        raise CheckpointError.of("quantized weights that cannot be read", f"{source}: {problem}", *EXPECTED)
    model = build_on_meta(config, source)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if headers is not None and not unknown_quantization(quantization):
        match(model, headers).require_complete()
    if headers is None:
        trained = config_dtype(config)
        nbytes = parameters * trained.itemsize if trained is not None and quantization is None else None
    else:
        stored = list(_stored(headers))
        if quantization is not None:
            quantization = _with_stored_experts(quantization, stored)
        _, trained = _weigh(stored, config_dtype(config))
        nbytes = sum(tensor.bytes for tensor in headers.tensors)
    return ModelFacts(
        source=source,
        model_type=config.model_type,
        trained_dtype=trained,
        quantization=quantization,
        parameters=parameters,
        parameter_bytes=nbytes,
        **_facts_of_modules(model),
    )


def _facts_of_modules(model: Any) -> dict[str, Any]:
    dense, read = tuple(Parts(model).outside_of_language()), (*unquantizable(model), *trained_heads(model))
    kept: tuple[str, ...] = ()
    if (dense or read) and hasattr(model, "all_tied_weights_keys"):
        from transformers.quantizers.base import HfQuantizer

        kept = tuple(sorted(HfQuantizer.get_modules_to_not_convert(model)))
        read = tuple(name for name in read if name not in kept)

    def gather(patterns: Callable[[Any], Any]) -> tuple[str, ...]:
        return tuple(sorted({name for module in model.modules() for name in patterns(module) or ()}))

    pins, strict = gather(pinned), gather(pinned_strictly)
    return {
        "pinned": pins,
        "pinned_strict": strict,
        "uncast": uncast_pins(model, (*pins, *strict)),
        "dense": dense and (*dense, *kept),
        "never_quantized": read,
        "kept": kept,
        "routers": any(map(is_router, model.modules())),
    }


def quantization_options(config: Any) -> Mapping[str, Any]:
    """Return the quantization_config of a transformers config or of its text config, or an empty mapping."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None and hasattr(config, "get_text_config"):
        quantization = getattr(config.get_text_config(), "quantization_config", None)
    if not quantization:
        return {}
    return quantization if isinstance(quantization, Mapping) else quantization.to_dict()


def quantization_of(config: Any) -> QuantizationFacts | None:
    options = quantization_options(config)
    if not options:
        return None
    method = method_of(options)
    bits = options.get("bits") or options.get("w_bit")
    if method != "bitsandbytes":
        # The name includes the method, because "int8" alone is bitsandbytes' format.
        form = f"{method}-{bits}bit" if bits else method
        return QuantizationFacts(method, form, experts=MXFP4 if method == MXFP4 else "")
    if options.get("load_in_8bit"):
        return QuantizationFacts(method, "int8")
    return QuantizationFacts(
        method,
        str(options.get("bnb_4bit_quant_type", "fp4")),  # bitsandbytes' own default
        torch_dtype(options.get("bnb_4bit_compute_dtype"), "bnb_4bit_compute_dtype"),
        bool(options.get("bnb_4bit_use_double_quant", False)),
        torch_dtype(options.get("bnb_4bit_quant_storage"), "bnb_4bit_quant_storage"),
    )


def _stored(headers: CheckpointHeaders) -> Iterator[_Stored]:
    for tensor in stored_tensors(headers.tensors, headers.quantization):
        # torch has no dtype for GGUF block types: their name is the format.
        dtype = tensor.weight.dtype if tensor.weight.dtype is not None else tensor.weight.dtype_name
        form = dtype if tensor.plain or not tensor.constants else tensor.form
        yield _Stored(tensor.name, form, tensor.values, tensor.bytes)


def _with_stored_experts(quantization: QuantizationFacts, stored: Iterable[_Stored]) -> QuantizationFacts:
    return replace(quantization, experts=MXFP4 if any(tensor.dtype == MXFP4 for tensor in stored) else "")


def _weigh(
    stored: Iterable[_Stored], named_dtype: torch.dtype | None
) -> tuple[Mapping[torch.dtype | str, int], torch.dtype | None]:
    """Return the number of elements by dtype or format, and the dtype in which the weights were trained."""
    counts: Counter[torch.dtype | str] = Counter()
    for tensor in stored:
        if isinstance(tensor.dtype, str) or (tensor.dtype is not None and tensor.dtype.is_floating_point):
            counts[tensor.dtype] += tensor.elements
    # No model is trained in 8 bits throughout: float8 weights were quantized from a wider dtype.
    wide = {dtype: n for dtype, n in counts.items() if isinstance(dtype, torch.dtype) and dtype.itemsize > 1}
    trained = max(wide, key=lambda dtype: (wide[dtype], dtype == named_dtype)) if wide else named_dtype
    return dict(counts), trained


def facts_of_gguf(headers: CheckpointHeaders) -> ModelFacts:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    counts, trained = _weigh(_stored(headers), None)
    if any(isinstance(form, str) for form in counts):
        trained = None  # a file of quantized blocks does not contain the dtype of the training
    architecture = headers.architecture
    model_type = _GGUF_MODEL_TYPES.get(architecture, architecture.replace("-", "_"))
    cls: Any = None
    if model_type in CONFIG_MAPPING:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[model_type], None)
    return ModelFacts(
        source=str(headers.path),
        model_type=architecture if cls is None else model_type,
        trained_dtype=trained,
        pinned=tuple(sorted(pinned(cls) or ())),
        pinned_strict=tuple(sorted(pinned_strictly(cls) or ())),
        parameters=sum(tensor.elements for tensor in headers.tensors),
        parameter_bytes=sum(tensor.bytes for tensor in headers.tensors),
        routers=any(".ffn_gate_inp." in tensor.name for tensor in headers.tensors),
    )
