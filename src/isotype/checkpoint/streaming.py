"""Weights streamed into a model that transformers' `from_pretrained` has built and goes on with.

transformers does what it is best at: finding and downloading files, building the class, its quantizer's choice of layers,
tied weights, buffers that are computed, generation settings. In between, `isotype.checkpoint.fill` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from isotype.checkpoint.deferred import DeferredBlocks
from isotype.checkpoint.fill import Placement, fill
from isotype.checkpoint.formats.headers import CheckpointHeaders, Format, read_file_headers
from isotype.checkpoint.mapping.match import Match, match
from isotype.checkpoint.values.gguf_values import turning
from isotype.checkpoint.values.unpack import Packing
from isotype.compat.transformers import mark_as_loaded
from isotype.core.formats import QUANTIZATIONS
from isotype.model.enforce import dtypes_to_load
from isotype.model.mixed import moments_by_weight, store_layers
from isotype.model.quantized import holds_turned
from isotype.model.walk import places
from isotype.precision.policy import PrecisionPolicy, is_pinned


def can_stream(state_dict: object, files: Sequence[str] | None, settings: Any) -> bool:
    """Whether what `from_pretrained` is about to load is streamed; else it loads on its own.

    Args:
        state_dict: weights that were given in memory.
        files: the files of weights.
        settings: transformers' `LoadStateDictConfig`.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled

    elsewhere = "disk" in (settings.device_map or {}).values() or settings.device_mesh is not None
    foreign = settings.hf_quantizer is not None and not _is_bnb(settings.hf_quantizer)
    return (
        state_dict is None
        and bool(files)
        and all(str(file).endswith((".safetensors", ".bin")) for file in files or ())
        and not (elsewhere or foreign or settings.ignore_mismatched_sizes or settings.disable_mmap)
        and not (is_deepspeed_zero3_enabled() or is_fsdp_enabled())
    )


def headers_of(source: object, files: Sequence[str]) -> CheckpointHeaders:
    """The headers of the files that `from_pretrained` has found for `source`."""
    tensors = tuple(tensor for file in files for tensor in read_file_headers(Path(file)))
    form: Format = "torch" if str(files[0]).endswith(".bin") else "safetensors"
    return CheckpointHeaders(Path(str(source)), form, "model", tensors, {})


def stream(
    model: Any,
    headers: CheckpointHeaders,
    settings: Any,
    policy: PrecisionPolicy,
    packing: Packing,
    deferred: DeferredBlocks | None = None,
) -> tuple[Any, dict[str, str]]:
    """Fill `model` from a checkpoint's files.

    Args:
        model: of transformers, on the meta device, with bitsandbytes' layers where it is quantized.
        headers: of the checkpoint.
        settings: transformers' `LoadStateDictConfig`.
        policy: decides the dtypes.
        packing: what the checkpoint's config says of its own quantization.
        deferred: takes what is to be read block by block.

    Returns:
        transformers' `LoadStateDictInfo`, and the names of parameters that are not finite with what is wrong.

    Raises:
        CheckpointError: tensors are missing, of another shape than the model's or there twice, or a file is damaged.
    """
    store_layers(model, policy)
    matched = match(model, headers)
    matched = replace(matched, wrong=tuple(wrong for wrong in matched.wrong if not _is_turned(model, wrong)))
    matched.require_complete()
    expected = set(model.state_dict())  # quantized layers have more of them afterwards
    placement = replace(_placement(model, settings, policy), packing=packing, turn=turning(model, headers))
    weights = matched.weights
    if deferred is not None:
        weights = deferred.take(model, weights, placement, headers.path)
    filled, broken = fill(model, weights, placement)
    filled |= set() if deferred is None else deferred.names
    for name in filled:
        # transformers draws values for what has not this mark.
        mark_as_loaded(model.get_parameter_or_buffer(name))
    return _info(expected - filled, matched), broken


def _placement(model: Any, settings: Any, policy: PrecisionPolicy) -> Placement:
    from transformers.integrations.accelerate import get_device

    quantizer, plan = settings.hf_quantizer, tuple(settings.dtype_plan)
    wanted = dtypes_to_load(model, tuple(places(model)), policy)
    dtypes = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            pinned = torch.float32 if is_pinned(name, plan) else value.dtype
            dtypes[name] = pinned if policy.keep_frozen else wanted.get(value, pinned)  # type: ignore[call-overload]
    other = {f"{each.module}.weight" for each in policy.layers if each.storage in QUANTIZATIONS}
    quantized = {
        name
        for name in model.state_dict()
        if quantizer is not None and (quantizer.param_needs_quantization(model, name) or name in other)
    }
    device_map = settings.device_map or {"": "cpu"}
    return Placement(
        dtypes | dict.fromkeys(quantized, policy.plain),
        frozenset(quantized),
        lambda name: get_device(device_map, name, valid_torch_device=True),
        moments=moments_by_weight(policy),
    )


def _is_bnb(quantizer: Any) -> bool:
    return str(getattr(quantizer.quantization_config.quant_method, "value", "")) == "bitsandbytes"


def _is_turned(model: Any, wrong: Any) -> bool:
    """Whether a tensor fits once it is turned: those of GPT-2's layers, where bitsandbytes' take their place."""
    layer = model.get_submodule(wrong.name.rpartition(".")[0])
    return holds_turned(layer) and wrong.found == wrong.wanted[::-1]


def _info(missing: set[str], matched: Match) -> Any:
    from transformers.modeling_utils import LoadStateDictInfo

    empty = {"error_msgs": list, "conversion_errors": dict}
    info = {each.name: empty.get(each.name, set)() for each in fields(LoadStateDictInfo)}
    info["missing_keys"] = missing
    info["unexpected_keys"] = {tensor.weight.name for tensor in matched.surplus}
    return LoadStateDictInfo(**info)
