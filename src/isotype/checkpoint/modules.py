"""Load a checkpoint into any `nn.Module`, by its own names or through an adapter of its author."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from isotype.checkpoint.fill import Placement, fill, place, placement_dtypes
from isotype.checkpoint.formats.headers import CheckpointHeaders, read_headers
from isotype.checkpoint.formats.mapped import MappedFiles
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.load_plan import quantized_weights
from isotype.checkpoint.mapping.match import match
from isotype.checkpoint.mapping.stored import dense_dtype, dense_shape, stored_tensors
from isotype.checkpoint.values import dense
from isotype.checkpoint.weightless import wanted_quantization
from isotype.core.dtypes import to_safetensors_name
from isotype.core.errors import CheckpointError
from isotype.core.names import listed
from isotype.model.enforce import enforce_model
from isotype.model.experts.quantize import formats_of_stacks, store_blank
from isotype.model.finite import not_finite, refuse
from isotype.model.mixed import store_layers
from isotype.model.walk import places
from isotype.precision.policy import PrecisionPolicy, is_pinned


class StateDictAdapter(Protocol):
    """Conversion of a checkpoint's tensors into those of a module, and back.

    `to_hf(from_hf(state))` must equal `state`. Renaming, splitting, joining, stacking and transposing are allowed.
    """

    def from_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the module's tensors by name from the checkpoint's mapped ones; also called with meta tensors."""

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the checkpoint's tensors by name from those of the module."""


def load_module(
    model: nn.Module,
    path: Path,
    policy: PrecisionPolicy,
    *,
    adapter: StateDictAdapter | None = None,
    device: Any = "cpu",
) -> None:
    """Fill `model` from the checkpoint at `path` in place, and bring it under the policy.

    Its linear layers become bitsandbytes' if the policy is quantized. The tensors' previous values are dropped, so
    parameters may be on the meta device; buffers that no file has may not.

    Args:
        model: any module.
        path: checkpoint directory or .safetensors file.
        policy: from `isotype.resolve_precision`.
        adapter: for names and shapes that differ from the checkpoint's.
        device: of the tensors.

    Raises:
        CheckpointError: a tensor is missing, of another shape than the module's, duplicate, or not finite; a buffer
            without values is in no file.
    """
    headers = read_headers(path)
    matched = match(model, _adapted(headers, adapter) if adapter is not None else headers)
    matched.require_complete()
    blank = [name for name in matched.buffers if model.get_buffer(name).is_meta]
    if blank:
        what = f"{type(model).__name__} with {listed(blank, 6)} on the meta device"
        fix = "build the module with accelerate.init_empty_weights(include_buffers=False), or on the CPU"
        raise CheckpointError.of("buffers without values", what, "values: no file has these buffers", fix)
    if policy.quantized:
        _quantize(model, policy)
    moments = policy.moments_by_weight()
    kinds = ("linear4bit", "linear8bit")
    quantized = frozenset(f"{place.name}.weight" for place in places(model) if place.kind in kinds)
    stacks = formats_of_stacks(model, policy)
    dtypes = placement_dtypes(model, policy, policy.pinned)
    dtypes |= dict.fromkeys(quantized, policy.plain)
    store_blank(model, stacks, policy)
    placement = Placement(
        dtypes,
        quantized,
        lambda name: device,
        stacks=stacks,
        double_quant=policy.double_quant,
        moments=moments,
    )
    if adapter is None:
        _, broken = fill(model, matched.weights, placement)
    else:
        files = MappedFiles()
        state = {
            tensor.name: dense(tensor, files.tensor, policy.plain)
            for tensor in stored_tensors(headers.tensors, headers.quantization)
        }
        tensors = [
            (name, place(model, name, value, placement)) for name, value in adapter.from_hf(state).items()
        ]
        broken = not_finite((name, value) for name, value in tensors if isinstance(value, nn.Parameter))
    refuse(path, broken)
    for name, source in matched.tied.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))
    model.requires_grad_(policy.trainable != "lora")
    model.eval()
    enforce_model(model, policy)


def _adapted(headers: CheckpointHeaders, adapter: StateDictAdapter) -> CheckpointHeaders:
    """Return the headers of the adapter's results for the checkpoint's tensors, found on the meta device."""
    blank = {
        tensor.name: torch.empty(dense_shape(tensor) or (), dtype=dense_dtype(tensor), device="meta")
        for tensor in stored_tensors(headers.tensors, headers.quantization)
    }
    adapted = adapter.from_hf(blank)
    tensors = tuple(
        TensorHeader(name, to_safetensors_name(value.dtype), tuple(value.shape), value.nbytes, headers.path)
        for name, value in adapted.items()
    )
    return CheckpointHeaders(headers.path, headers.format, headers.kind, tensors, headers.metadata)


def _quantize(model: nn.Module, policy: PrecisionPolicy) -> None:
    from transformers.integrations import replace_with_bnb_linear

    chosen = {name.removesuffix(".weight") for name in quantized_weights(model)}
    chosen -= {name for name in chosen if is_pinned(f"{name}.weight", policy.pinned)}
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    left, wanted = [name for name in linear if name not in chosen], wanted_quantization(policy, None)
    replace_with_bnb_linear(model, modules_to_not_convert=left, quantization_config=wanted)
    store_layers(model, policy)
