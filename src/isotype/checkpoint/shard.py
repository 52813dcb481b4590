"""Loads a checkpoint on several processes. Each process reads and keeps only its rows of every tensor."""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from isotype.checkpoint.checkpoint import Checkpoint, open_checkpoint
from isotype.checkpoint.mapping.match import match
from isotype.checkpoint.stored_weights import StoredWeights, fill_buffers
from isotype.checkpoint.weightless import forget_quantization, skeleton, store
from isotype.compat.peft import dora_without_weights
from isotype.compat.torch import own_parameters
from isotype.compat.transformers import draw, rename
from isotype.core.errors import PrecisionError
from isotype.core.formats import MXFP4
from isotype.core.names import base_name, grouped, with_parents
from isotype.core.random_states import random_states_kept
from isotype.model.experts.quantize import quantize_parts, with_constants
from isotype.model.experts.stack import QuantizedStack, held_stack
from isotype.model.finite import require_finite
from isotype.model.modes import KeepsValues
from isotype.model.quantize import quantize_4bit, quantize_int8, state_4bit
from isotype.model.quantized import dense_weight, quantization_state, replaces_conv1d
from isotype.model.shard import device_of, is_gathered, mesh_over_all, shard_model
from isotype.model.targets import remember_drawn
from isotype.model.walk import Place, kind_of, places
from isotype.precision.policy import PrecisionPolicy


def load_sharded(
    path: str | Path | Checkpoint,
    policy: PrecisionPolicy,
    adapt: Callable[[Any], Any] | None = None,
    *,
    mesh: Any = None,
    reshard: bool = True,
    revision: str | None = None,
    **settings: Any,
) -> Any:
    """Load the model at `path` under `policy`. FSDP2 shards it over the processes of `mesh`.

    The model is built without weights. Then it gets its adapters, is sharded, and is filled. Each process reads, quantizes
    and keeps only its rows of every tensor. Quantized weights are bitwise equal to the weights of `isotype.load`. All
    processes must call this function.

    Args:
        path: checkpoint directory, GGUF file, hub id or `embedded:smollm2`; or an open checkpoint.
        adapt: function that adds adapters to a model on the meta device: `lambda model: isotype.add_lora(model, policy, r=16)`.
            The values of the adapters for a seed do not depend on the number of processes.
        mesh: a `DeviceMesh` of one dimension. The default contains all processes.
        reshard: True to free a block's gathered weights after its forward, and to gather them again for its backward.
        revision: branch, tag or commit of a hub id.
        **settings: `model_class` and `attn_implementation` as in `isotype.load`, and fields of the config to set, such as
            `num_labels`.

    Returns:
        The model, or the result of `adapt`, as an FSDP2 module with two attributes: `precision_policy` is the policy,
        and `bytes_read` is the number of bytes that this process has read.

    Raises:
        CheckpointError: `path` is no checkpoint, the checkpoint lacks needed tensors, or values are not finite.
        PrecisionError: the checkpoint is saved in the format of bitsandbytes, whose codes cannot be divided into rows; or
            `adapt` adds DoRA to int8 layers.
        UsageError: there is no process group.
    """
    checkpoint = open_checkpoint(path, revision)
    device = device_of(policy)
    mesh = mesh_over_all(device) if mesh is None else mesh
    with PartialState().local_main_process_first():  # the first process of a machine downloads
        checkpoint = checkpoint.downloaded()
    config = copy.deepcopy(checkpoint.model_config)
    if saved := checkpoint.facts.saved_format:
        what = f"{checkpoint.source}, saved in {saved}, over {mesh.size()} processes"
        expected = "float weights, because each process reads only its rows"
        fix = "use the original checkpoint in a float dtype; each process quantizes its rows while it reads them"
        raise PrecisionError.of("a quantized checkpoint cannot be sharded", what, expected, fix)
    forget_quantization(config)  # the weights are dequantized while they are read
    with random_states_kept():  # some towers draw random buffers and embeddings when they are built
        model = skeleton(config, policy, buffers=True, **settings)
    headers = checkpoint.require_headers()
    matched = match(model, headers)
    matched.require_complete()
    stored = StoredWeights(model, headers, matched.weights)
    # Parameters that may be missing, such as a new head: every process draws the same values from the same random state.
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in matched.initialised):
        module = model.get_submodule(owner)
        for name, parameter in module.named_parameters(recurse=False):
            own_parameters(module)[name] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
        draw(model, module)
    remember_drawn(model, matched.initialised)
    model.name_or_path = checkpoint.name
    rename(model.config, checkpoint.name)
    fill_buffers(model, stored)
    model = store(model, policy)
    if adapt is not None:
        with KeepsValues(), dora_without_weights():
            model = adapt(model)
    magnitudes = new_magnitudes(model)
    shard_model(model, policy, mesh, reshard=reshard)
    _fill(model, _Rows(stored, policy, mesh, device, checkpoint.name))
    _fill_magnitudes(model, magnitudes)
    model.bytes_read = stored.bytes_read
    return model


@dataclass(frozen=True)
class _Rows:
    """Reads this process's rows of the `stored` weights."""

    stored: StoredWeights
    policy: PrecisionPolicy
    mesh: Any
    device: torch.device
    source: str

    def plain(self, name: str, parameter: Any) -> torch.Tensor:
        return self._read(name, *self._own_rows(parameter.shape[0]), parameter.dtype)

    def codes_8bit(self, name: str, parameter: Any, layer: Any) -> torch.Tensor:
        """Return the int8 codes of the rows of this process, and store the scales of all rows in the layer."""
        rows = parameter.shape[0]
        start, stop = self._own_rows(rows)
        scales = torch.zeros(rows, dtype=torch.float32, device=self.device)
        codes, scales[start:stop] = quantize_int8(self._read(name, start, stop, None, replaces_conv1d(layer)))
        layer.state.SCB = self._sum_over_processes(scales)
        return codes

    def codes_4bit(self, name: str, parameter: Any, layer: Any) -> torch.Tensor:
        """Return the codes `[count, 1]` of this process in the storage dtype, and store the constants of all processes in the layer."""
        state = quantization_state(layer)
        width, size = state.shape[1], state.blocksize
        packed = 2 * parameter.dtype.itemsize  # weights in one element of the storage dtype
        start, stop = (min(row * packed, state.shape.numel()) for row in self._own_rows(parameter.shape[0]))
        absmax = torch.zeros(math.ceil(state.shape.numel() / size), dtype=torch.float32, device=self.device)
        codes = torch.empty(0, 1, dtype=torch.uint8, device=self.device)
        if stop > start:
            # Quantize whole blocks around this process's weights, from the rows that hold these blocks.
            first, last = start // size * size, min(math.ceil(stop / size) * size, state.shape.numel())
            top, bottom = first // width, math.ceil(last / width)
            dense = self._read(name, top, bottom, state.dtype, replaces_conv1d(layer)).flatten()
            block = dense[first - top * width : last - top * width]
            moments = self.policy.moments_of(name.removesuffix(".weight"))
            fit = {"moments": moments, "first": first - top * width}
            codes, quantized = quantize_4bit(block, state.quant_type, blocksize=size, **fit)
            codes = codes[(start - first) // 2 : (stop - first + 1) // 2]
            # If a block reaches into the next process's rows, the process in which the block begins sets its constant.
            skipped = math.ceil(start / size) - first // size
            absmax[first // size + skipped : math.ceil(stop / size)] = quantized.absmax[skipped:]
        constants = {name: getattr(state, name) for name in ("shape", "dtype", "blocksize", "quant_type")}
        absmax = self._sum_over_processes(absmax)
        layer.quant_state = state_4bit(absmax, double_quant=state.nested, **constants)
        return codes.contiguous().view(-1).view(parameter.dtype).view(-1, 1)

    def stack(self, name: str, holder: Any, blank: QuantizedStack) -> torch.Tensor:
        """Return the codes of the experts of this process, and store the constants of all experts in `holder`."""
        experts, device, storage = blank.shape[0], self.device, blank.storage
        dtype = blank.dtype
        start, stop = self._own_rows(experts)
        if storage == MXFP4:
            codes, part = (values.to(device) for values in self.stored.read_packed(name, start, stop))
        else:
            parts = (self._read(name, expert, expert + 1, dtype) for expert in range(start, stop))
            shape, transposed = torch.Size((stop - start, *blank.shape[1:])), blank.transposed
            codes, stack = quantize_parts(parts, shape, storage, dtype, transposed=transposed, device=device)
            (part,) = stack.factors()
        constants = torch.zeros(experts, *part.shape[1:], dtype=part.dtype, device=device)
        constants[start:stop] = part
        holder[0] = with_constants(blank, self._sum_over_processes(constants))
        return codes

    def _own_rows(self, rows: int) -> tuple[int, int]:
        """Return the first row of this process, and the row after its last. FSDP2 splits rows like `torch.chunk`."""
        size = math.ceil(rows / self.mesh.size())
        start = min(size * self.mesh.get_local_rank(), rows)
        return start, min(start + size, rows)

    def _read(
        self, name: str, start: int, stop: int, dtype: torch.dtype | None, transposed: bool = False
    ) -> torch.Tensor:
        rows = self.stored.read_rows(name, start, stop, dim=1 if transposed else 0)
        require_finite(self.source, [(name, rows)])
        return (rows.T if transposed else rows).to(device=self.device, dtype=dtype).contiguous()

    def _sum_over_processes(self, part: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(part, group=self.mesh.get_group())
        return part


def _fill(model: nn.Module, rows: _Rows) -> None:
    from torch.distributed.tensor import DTensor, Shard

    owners: dict[Any, list[tuple[str, Place, str]]] = {}  # (name in the model, place, name in the module)
    for place in places(model):
        for name, parameter in place.module.named_parameters(recurse=False):
            if parameter.is_meta:
                full = base_name(place.full_name(name))
                owners.setdefault(parameter, []).append((full, place, name))
    shapes = rows.stored.shapes
    sources = {p: next(owner for owner in sharing if owner[0] in shapes) for p, sharing in owners.items()}
    copies = Counter(name for name, _, _ in sources.values())
    read: dict[str, torch.Tensor] = {}  # rows of parameters that have a trained copy with the same values
    for parameter, (name, place, leaf) in sources.items():
        layer: Any = place.module
        stack = held_stack(layer)
        if stack is not None:
            values = rows.stack(name, layer, stack)
        elif place.kind == "linear4bit" and leaf == "weight":
            values = rows.codes_4bit(name, parameter, layer)
        elif place.kind == "linear8bit" and leaf == "weight":
            values = rows.codes_8bit(name, parameter, layer)
        elif name in read:
            values = read[name].to(parameter.dtype, copy=True)
        else:
            values = rows.plain(name, parameter)
            if copies[name] > 1:
                read[name] = values
        sharded = DTensor.from_local(
            values, rows.mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        replacement = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        for _, holder, other in owners[parameter]:
            own_parameters(holder.module)[other] = replacement
    model.load_state_dict({}, strict=False)  # FSDP2 registers new parameters after a load


def new_magnitudes(model: nn.Module) -> dict[str, list[str]]:
    """Return layer -> adapters whose DoRA magnitudes are NaN, because the adapters are new (see `dora_without_weights`).

    Raise PrecisionError for DoRA on int8 layers, because FSDP2 turns `Int8Params` into plain tensors, which PEFT does
    not dequantize.
    """
    new: dict[str, list[str]] = {}
    for place in places(model):
        layer: Any = place.module
        for adapter, magnitude in getattr(layer, "lora_magnitude_vector", {}).items():
            if kind_of(layer.get_base_layer()) == "linear8bit":
                what = f"DoRA on {base_name(place.name)}, which is stored in int8"
                expected = "DoRA on layers in 4 or 16 bits, because PEFT does not dequantize sharded int8 weights for DoRA"
                fix = "store these layers in nf4, or train LoRA without DoRA"
                raise PrecisionError.of("DoRA on sharded int8 weights", what, expected, fix)
            if magnitude.weight.isnan().any():
                new.setdefault(place.name, []).append(adapter)
    return new


@torch.no_grad()
def _fill_magnitudes(model: nn.Module, new: Mapping[str, Sequence[str]]) -> None:
    """Set the magnitudes of DoRA to the norms of W + s B A (https://arxiv.org/abs/2402.09353), with one gathered block at a time."""
    from torch.distributed.tensor import distribute_tensor

    units = {name for name, module in model.named_modules() if is_gathered(module)}
    for unit, names in grouped(new, lambda name: next(n for n in with_parents(name) if n in units)).items():
        block: Any = model.get_submodule(unit)
        block.unshard()
        norms = []
        for name in names:
            layer: Any = model.get_submodule(name)
            weight = dense_weight(layer.get_base_layer())
            for adapter in new[name]:
                magnitude = layer.lora_magnitude_vector[adapter]
                change = layer.lora_B[adapter].weight @ layer.lora_A[adapter].weight
                norms.append((magnitude, magnitude.get_weight_norm(weight, change, layer.scaling[adapter])))
        block.reshard()
        for magnitude, norm in norms:
            sharded = magnitude.weight
            part = distribute_tensor(norm, sharded.device_mesh, sharded.placements, src_data_rank=None)
            sharded.to_local().copy_(part.to_local())
