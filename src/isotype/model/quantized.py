"""Reads quantization states of bitsandbytes layers, sets the dtypes of these states by a policy, and replaces layers."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from isotype.compat.bitsandbytes import dequantize_4bit, dequantize_by_blocks
from isotype.compat.torch import own_parameters
from isotype.core.dtypes import dtype_name
from isotype.core.errors import PrecisionError
from isotype.core.formats import FORMATS
from isotype.core.names import listed
from isotype.model.experts.stack import QuantizedStack, held_stack
from isotype.model.walk import derives_from, kind_of
from isotype.precision.policy import PrecisionPolicy


def quantization_state(layer: nn.Module) -> Any:
    """Return a 4-bit layer's quantization state; None if it was lost."""
    return next(iter(quantization_states(layer)), None)


def quantization_states(layer: Any) -> list[Any]:
    """Return the quantization states of a 4-bit layer's weight and of the layer itself. FSDP2 drops the state of the weight."""
    states = (getattr(holder, "quant_state", None) for holder in (getattr(layer, "weight", None), layer))
    return list({id(state): state for state in states if state is not None}.values())


def row_scales(layer: Any) -> torch.Tensor | None:
    """Return an int8 layer's float32 row scales `[out_features]`; None if they were lost."""
    scales = getattr(layer.weight, "SCB", None)
    if scales is None:  # a sharded weight has no attributes
        scales = layer.state.SCB
    return scales if isinstance(scales, torch.Tensor) else None


def codes_of(layer: Any) -> torch.Tensor:
    """Return the int8 codes of a layer, which bitsandbytes moves from the weight to the layer's state."""
    # A sharded weight is a plain tensor without the attribute CB.
    places = (layer.state.CB, getattr(layer.weight, "CB", None), layer.weight.data)
    codes: torch.Tensor = next(codes for codes in places if codes is not None)
    return codes


def dense_weight(layer: Any, dtype: torch.dtype | None = None, state: Any = None) -> torch.Tensor:
    """Return the weight of a layer, dequantized if it is quantized. `state` replaces the quantization state of a
    4-bit layer.

    By default, `dtype` is the weight's dtype, the dtype of the quantization state, or float32 for int8. A quantized weight
    has the shape `[out, in]`.
    """
    kind = kind_of(layer)
    if kind == "linear4bit":
        state = quantization_state(layer) if state is None else state
        if dtype not in (None, state.dtype):  # bitsandbytes' kernel returns the state's dtype
            state = copy.copy(state)
            state.dtype = dtype
        return dequantize_4bit(layer.weight.data, state)
    if kind != "linear8bit":
        weight: torch.Tensor = layer.weight
        return weight if dtype is None else weight.to(dtype)
    codes, scales = codes_of(layer), row_scales(layer)
    assert scales is not None, "the layer has lost its row scales"
    # code x row scale / 127 (LLM.int8, https://arxiv.org/abs/2208.07339)
    out = codes.new_empty(codes.shape, dtype=dtype or torch.float32)
    return torch.mul(codes, (scales.float().to(codes.device) / 127)[:, None], out=out)


def constant_bytes(layer: Any, weight: torch.Tensor) -> int:
    """Return the bytes of the constants of a quantized weight: absmax for 4 bits, scales for int8."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        nested = int(state.state2.absmax.nbytes) if state.nested else 0
        return int(state.absmax.nbytes) + nested
    stack = held_stack(layer)
    if stack is not None:
        return sum(int(constants.nbytes) for constants in stack.buffers())
    scales = row_scales(layer) if is_int8(weight) else None
    return 0 if scales is None else int(scales.nbytes)


def is_int8(weight: torch.Tensor) -> bool:
    """Return True if a parameter's class has the name of bitsandbytes' int8 weight. bitsandbytes is not imported."""
    return type(weight).__name__ == "Int8Params"


def replaces_conv1d(layer: Any) -> bool:
    """Return True if a bitsandbytes layer has replaced a Conv1D. Files have the weights of Conv1D as `[in, out]`."""
    return derives_from(getattr(layer, "source_cls", object), "Conv1D")


def align_4bit(name: str, layer: Any, compute: torch.dtype) -> list[str]:
    """Set the dtypes of a `Linear4bit`, its quantization state and its constants. Return the changes in words.

    A load sets the dtype of dequantized weights to the saved dtype, even if the policy has another dtype
    (https://github.com/unslothai/unsloth/issues/4005). Raise PrecisionError if the state was lost or the packed codes were
    cast.
    """
    changes = []
    dequantize_by_blocks()
    if quantization_state(layer) is None:
        raise _lost(name, layer, "packed 4-bit weight", "absmax constants")
    # A sharded weight has no attributes.
    storage = getattr(layer.weight, "quant_storage", layer.quant_storage)
    if layer.weight.dtype != storage:
        what = f"{name}: codes packed as {dtype_name(storage)} are now {dtype_name(layer.weight.dtype)}"
        expected = "the bytes as they were packed, because casting them changes the codes"
        fix = "load the model again, and do not cast it with .to(dtype), .half() or .bfloat16()"
        raise PrecisionError.of("packed 4-bit codes were cast", what, expected, fix)
    if layer.compute_dtype != compute or not layer.compute_type_is_set:
        changes.append(f"compute dtype {_name(layer.compute_dtype)} -> {dtype_name(compute)}")
        layer.compute_dtype = compute
        layer.compute_type_is_set = True
    for state in quantization_states(layer):
        changes += _align_state(state, compute)
    keep_training_layout(layer)
    return changes


def _align_state(state: Any, compute: torch.dtype) -> list[str]:
    changes = []
    if state.dtype != compute:
        changes.append(f"quantization state {_name(state.dtype)} -> {dtype_name(compute)}")
        state.dtype = compute
    for holder in (state, state.state2 if state.nested else None):
        if holder is not None and holder.absmax.is_floating_point() and holder.absmax.dtype != torch.float32:
            changes.append(f"absmax {_name(holder.absmax.dtype)} -> float32")
            holder.absmax = holder.absmax.float()
    return changes


def align_stack(stack: QuantizedStack, compute: torch.dtype) -> list[str]:
    """Set the dtype of dequantized stacked expert weights. Return the change in words, or an empty list."""
    if stack.dtype == compute:
        return []
    before, stack.dtype = stack.dtype, compute
    return [f"dense values {_name(before)} -> {dtype_name(compute)}"]


def align_8bit(name: str, layer: Any) -> list[str]:
    """Store an int8 layer's row scales on the layer, in float32. Raise PrecisionError if the scales are lost."""
    scales = row_scales(layer)
    if scales is None:
        raise _lost(name, layer, "int8 weight", "row scales")
    if getattr(layer.weight, "CB", None) is not None:
        # `Module.to` copies a weight without its scales. Scales on the layer stay.
        layer.init_8bit_state()
        layer.state.SCB = scales.to(layer.weight.device)
    if scales.dtype == torch.float32:
        return []
    layer.state.SCB = layer.state.SCB.float()
    return [f"row scales {_name(scales.dtype)} -> float32"]


def _lost(name: str, layer: Any, what: str, constants: str) -> PrecisionError:
    headline = "a quantized layer lost its quantization state"
    lost = f"{name}: {what} of shape {tuple(layer.weight.shape)} without a state"
    fix = "load the model again, because other code has replaced or cast the quantized parameter"
    return PrecisionError.of(headline, lost, f"a weight with codes and {constants}", fix)


def _name(dtype: torch.dtype | None) -> str:
    return "unset" if dtype is None else dtype_name(dtype)


# ------------------------------------------------------------------------ layout of 4-bit weights on CPUs
# On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights in place in the first evaluation forward. The new layout
# has no backward and rounds absmax to bfloat16. A model that generates and then trains would silently learn from wrong
# gradients, and for some shapes, repacking raises an error. The layer's own switch keeps the layout that trains. See
# Linear4bit.forward in bitsandbytes/nn/modules.py and _convert_weight_packed_for_cpu in bitsandbytes/functional.py
# (0.50.2); a test in tests/model/test_quantized.py fails when this code can be removed.

_SWITCH = "support_avx512bf16_for_cpu"
_KEPT = "_isotype_keeps_layout"
_BLOCK_ROWS = 32


def keep_training_layout(layer: Any) -> tuple[tuple[str, Any], ...]:
    """Keep bitsandbytes from repacking a 4-bit layer. Return the former attributes, for `restore_layout`."""
    before = tuple((name, getattr(layer, name)) for name in (_SWITCH, _KEPT) if hasattr(layer, name))
    if hasattr(layer, _SWITCH):
        setattr(layer, _SWITCH, False)
        setattr(layer, _KEPT, True)
    return before


def restore_layout(layer: Any, before: tuple[tuple[str, Any], ...]) -> None:
    layer.__dict__.pop(_KEPT, None)
    for name, value in before:
        setattr(layer, name, value)


def is_repacked(state: Any) -> bool:
    """Return True if bitsandbytes has repacked a weight for this CPU, according to its quantization state."""
    return bool(getattr(state, "packing_format_for_cpu", False))


def repacking(layer: Any) -> str | None:
    """Return the reason why the first evaluation forward of a 4-bit layer cannot repack its weight on a CPU with
    AVX512-BF16.

    Return "" if repacking works. Return None if nothing is repacked: the layer keeps its training layout, is repacked
    already, or belongs to a version of bitsandbytes that does not repack.
    """
    state = quantization_state(layer)
    if state is None or getattr(layer, _KEPT, False) or not hasattr(layer, _SWITCH):
        return None
    if is_repacked(state) or state.shape is None:
        return None
    from bitsandbytes.nn import modules

    if modules.has_avx512bf16() and not getattr(layer, _SWITCH):
        return None  # disabled by the user
    rows, *more = (int(size) for size in state.shape)
    if len(more) != 1:
        return f"the weight has {1 + len(more)} dimensions, but repacking needs two"
    if rows % _BLOCK_ROWS:
        return f"{rows} rows are not a multiple of {_BLOCK_ROWS}"
    if more[0] % state.blocksize:
        return f"{more[0]} columns are not a multiple of the block size {state.blocksize}"
    return ""


# ----------------------------------------------------------------------------------------------- mixed storage
# transformers' `BitsAndBytesConfig` has one format (4 or 8 bits) and a list of skipped layers.

_OUTLIERS = 6.0
"""int8 layers multiply inputs above this magnitude in 16 bits: `llm_int8_threshold`, https://arxiv.org/abs/2208.07339."""
_BITS = {"linear4bit": 4, "linear8bit": 8}


def store_layers(model: nn.Module, policy: PrecisionPolicy) -> frozenset[str]:
    """Change layers in place to the formats in `policy.layers`. Return the names of the weights that become int8.

    The model has bitsandbytes layers on the meta device that are not quantized yet. Raise PrecisionError if the model lacks
    a layer of the policy.
    """
    modules = dict(model.named_modules())
    names = [choice.module for choice in policy.layers]
    unknown = [name for name in names if kind_of(modules.get(name, model)) not in _BITS]
    if unknown:
        what = f"{listed(unknown)}, for which the policy has formats"
        expected = "quantized linear layers of this model"
        fix = "resolve the policy for this model: isotype.resolve_precision(model, quantization='mixed')"
        raise PrecisionError.of("the policy is for other layers", what, expected, fix)
    for choice in policy.layers:
        layer: Any = modules[choice.module]
        form = FORMATS.get(choice.storage)
        if form is None:
            model.set_submodule(choice.module, dense_layer(layer, policy.plain))
        elif form.bits != _BITS[kind_of(layer)]:
            model.set_submodule(choice.module, _int8(layer))
        elif form.block:
            layer.weight.quant_type, layer.weight.blocksize = form.code, form.block
    return frozenset(f"{choice.module}.weight" for choice in policy.layers if choice.storage == "int8")


def leave_dense(model: nn.Module, weights: Iterable[str], dtype: torch.dtype) -> None:
    """Replace layers by dense layers to initialize and train, because the checkpoint lacks their quantized `weights`."""
    modules = dict(model.named_modules())
    for name in {weight.rpartition(".")[0] for weight in weights}:
        if name in modules and kind_of(modules[name]) in _BITS:
            model.set_submodule(name, dense_layer(modules[name], dtype))


def _int8(layer: Any) -> nn.Module:
    from bitsandbytes.nn import Linear8bitLt

    with torch.device("meta"):
        sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
        linear = Linear8bitLt(*sizes, bias, has_fp16_weights=False, threshold=_OUTLIERS)
    linear.source_cls = getattr(layer, "source_cls", nn.Linear)
    return _with_bias(linear.requires_grad_(False), layer)


def dense_layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    """Return an `nn.Linear` or Conv1D that replaces a quantized layer. It has the bias of the layer, and a weight on the meta device."""
    with torch.device("meta"):
        if replaces_conv1d(layer):
            linear = layer.source_cls(layer.out_features, layer.in_features)
        else:
            linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    return _with_bias(linear.to(dtype).requires_grad_(False), layer)


def _with_bias(linear: nn.Module, layer: Any) -> nn.Module:
    if layer.bias is not None:
        own_parameters(linear)["bias"] = layer.bias
    return linear.train(layer.training)
