"""Builds the model that `isotype.load` returns, with every tensor on the meta device.

transformers chooses the model's classes and the layers to quantize. The operators of bitsandbytes compute the shapes
of packed weights and quantization states. Therefore names, shapes and dtypes are the same as with the installed
versions.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from isotype.checkpoint.facts import quantization_of, quantization_options
from isotype.checkpoint.formats.config import building
from isotype.checkpoint.formats.config import concrete_class as concrete_class
from isotype.compat.torch import own_parameters
from isotype.compat.transformers import class_for_load, own_class_again, pinned, set_attention
from isotype.core.threads import undisturbed
from isotype.model.enforce import enforce_model
from isotype.model.experts.quantize import formats_of_stacks, store_blank
from isotype.model.quantize import quantize_blank
from isotype.model.quantized import store_layers
from isotype.model.read_weights import unquantizable
from isotype.precision.policy import PrecisionPolicy, is_pinned


@undisturbed
def skeleton(
    config: Any,
    policy: PrecisionPolicy | torch.dtype,
    *,
    model_class: Any = None,
    attn_implementation: str | None = None,
    buffers: bool = False,
    **settings: Any,
) -> Any:
    """Return the dense model on the meta device, with float tensors in the dtype `policy.plain`.

    Raises CheckpointError if transformers has no class for the config, or the class cannot be built from the config.

    Args:
        model_class: a transformers model class or auto class. The default is the class that the config names.
        buffers: True to compute the buffers on the CPU, because most checkpoints do not contain them.
        **settings: fields to set in a copy of the config, such as `num_labels`.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(config)
    cls = concrete_class(config, model_class)
    for name, value in settings.items():
        setattr(config, name, value)
    if attn_implementation is not None:
        set_attention(config, attn_implementation)
    quantized = not isinstance(policy, torch.dtype) and policy.quantized
    dtype = policy if isinstance(policy, torch.dtype) else policy.plain
    config.dtype = dtype
    loading = class_for_load(cls)
    with building(cls), ExitStack() as stack:
        for context in loading.get_init_context(dtype, quantized, False, None):
            if not (buffers and isinstance(context, torch.device)):
                stack.enter_context(context)
        if buffers:
            stack.enter_context(init_empty_weights(include_buffers=False))
            stack.enter_context(no_init_weights())
        model = loading(config)
    model.tie_weights()
    return model


def store(model: Any, policy: PrecisionPolicy) -> Any:
    """Convert a model from `skeleton` to the storage of the policy, in place, and enforce the policy.

    4-bit weights become `[packed bytes, 1]` with a quantization state. int8 weights become `[out, in]` with row scales.
    Stacked experts become codes (see `isotype.model.experts.stack`).
    """
    quantization = quantization_of(model.config)
    if quantization is not None and quantization.dequantized:
        forget_quantization(model.config)
    if policy.quantized:
        _quantize(model, policy, getattr(model.config, "quantization_config", None))
    else:
        store_blank(model, formats_of_stacks(model, policy), policy)
    own_class_again(model)
    if policy.trainable == "lora":
        model.requires_grad_(False)
    model.eval()
    note_quantization(model, policy)
    enforce_model(model, policy)
    return model


def skipped_modules(config: Any) -> tuple[str, ...]:
    return tuple(quantization_options(config).get("llm_int8_skip_modules") or ())


def _quantize(model: Any, policy: PrecisionPolicy, saved: Any) -> None:
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils.quantization_config import BitsAndBytesConfig

    wanted = saved or wanted_quantization(policy, None)
    if isinstance(wanted, dict):
        wanted = BitsAndBytesConfig.from_dict(wanted)
    quantizer = AutoHfQuantizer.from_config(wanted, pre_quantized=saved is not None)
    quantizer.preprocess_model(model=model, dtype=policy.plain, device_map={"": "cpu"}, use_kernels=False)
    other = store_layers(model, policy)
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        held = isinstance(own_parameters(module).get("weight"), nn.Parameter)
        if held and (weight in other or quantizer.param_needs_quantization(model, weight)):
            quantize_blank(module, model.config.dtype)
    store_blank(model, formats_of_stacks(model, policy, quantizer.modules_to_not_convert or ()), policy)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def quantized_weights(model: Any, policy: PrecisionPolicy | None = None) -> frozenset[str]:
    """Return the names of the weights that transformers quantizes with bitsandbytes when it loads a dense model.

    For a module that is not from transformers, these are the weights of all linear layers. Weights that `policy`
    stores dense are not in the result.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    always = unquantizable(model) if policy is None else ()
    skipped = [*left_dense(model, () if policy is None else policy.unquantized), *always]
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and should_convert_module(name, skipped)
        and (policy is None or not is_pinned(f"{name}.weight", policy.pinned))
    )


def left_dense(model: Any, dense: Sequence[str]) -> Sequence[str]:
    """Return the modules that transformers leaves dense: `dense` or, if it is empty, the defaults of the model's class."""
    from transformers.quantizers.base import HfQuantizer

    if not hasattr(model, "all_tied_weights_keys"):
        return dense
    skipped: Sequence[str] = HfQuantizer.get_modules_to_not_convert(model, list(dense) or None, pinned(model))
    return skipped


def forget_quantization(config: Any) -> None:
    for holder in (config, config.get_text_config()):
        vars(holder).pop("quantization_config", None)


def wanted_quantization(policy: PrecisionPolicy, saved: str | None) -> Any:
    """Return the `BitsAndBytesConfig` for `policy`; None if the policy is dense or the files have the quantization `saved`."""
    if saved is not None or not policy.quantized:
        return None
    from transformers import BitsAndBytesConfig

    dense = list(policy.unquantized) or None
    if policy.storage == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=dense)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        llm_int8_skip_modules=dense,
        bnb_4bit_quant_type=policy.storage,
        bnb_4bit_compute_dtype=policy.compute,
        bnb_4bit_use_double_quant=policy.double_quant,
        bnb_4bit_quant_storage=policy.quant_storage,
    )


def note_quantization(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Set the policy's compute dtype in the model's quantization config."""
    config = getattr(model.config, "quantization_config", None)
    if config is not None and hasattr(config, "bnb_4bit_compute_dtype"):
        config.bnb_4bit_compute_dtype = policy.compute
