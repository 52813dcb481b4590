"""`isotype.fuse` replaces layers of a PEFT model by fused functions; `isotype.unfuse` restores them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import psutil
import torch
from torch import nn

from isotype.compat.torch_device import device_type
from isotype.core.names import format_bytes, grouped, plural, starred
from isotype.lora.adapted import why_not
from isotype.lora.attention.registered import AttentionReport, use_fast_attention
from isotype.lora.gates import GatedParts, gated_parts
from isotype.lora.kernels import DEVICES, Kernel, Operation, chosen, foreseen
from isotype.lora.loops import elementwise
from isotype.lora.modules import FusedLora, FusedMlp, FusedNorm, FusedRotary, Siblings, put_in, take_out
from isotype.lora.norms import NormParts, is_norm, norm_parts
from isotype.lora.rotary import rotates
from isotype.lora.weights import DenseWeights, shape_of
from isotype.model.boundary import boundary_of
from isotype.model.enforce import policy_of
from isotype.model.experts import layer as experts
from isotype.model.modes import in_evaluation
from isotype.model.quantized import keep_training_layout
from isotype.model.shard import free_gathered, is_gathered
from isotype.model.walk import LINEAR_KINDS, is_tuner_layer, kind_of
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.precision.devices.simulated import working_dtype

_TOKENS = 4


def same_input(
    model: Any, layers: Mapping[str, nn.Module], inputs: Mapping[str, Any] | None
) -> tuple[list[tuple[str, ...]], str]:
    """Return (groups of names of layers with the same input, reason why the model could not be run or "").

    The layers of a group are children of the same module. This module calls them one after another with the same
    tensor. Each other layer forms a group alone. The model runs once, in evaluation mode and without gradients, on
    `inputs` or, if `inputs` is None, on a few tokens.
    """
    calls: list[tuple[str, Any]] = []
    try:
        with ExitStack() as stack:
            for name, layer in layers.items():
                stack.callback(layer.register_forward_pre_hook(partial(_add_call, calls, name)).remove)
            for module in model.modules():
                blank = is_tuner_layer(module) or kind_of(module) == "linear8bit"
                if not blank or isinstance(module, experts.FusedExperts):
                    continue
                if any(parameter.is_meta for parameter in module.parameters()):
                    stack.enter_context(_blank(module))
            stack.enter_context(in_evaluation(model))
            model(**(_tokens(model) if inputs is None else inputs))
        unseen = ""
    except Exception as error:  # noqa: BLE001 - a model may raise anything for missing inputs
        calls, unseen = [], f"{type(model).__name__} could not be run: {str(error).partition(chr(10))[0]}"
    return _groups(list(layers), calls), unseen


def _add_call(calls: list[tuple[str, Any]], name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    calls.append((name, args[0] if len(args) == 1 else object()))


@contextmanager
def _blank(layer: Any) -> Iterator[None]:
    """In the `with` block, a linear layer returns an empty tensor, because some kernels do not support the meta device."""
    base = layer.get_base_layer() if is_tuner_layer(layer) else layer
    if kind_of(base) in LINEAR_KINDS and base.weight.dim() == 2:  # not a convolution
        rows, _ = shape_of(base)
        layer.__dict__["forward"] = lambda x, *_, **__: x.new_empty(*x.shape[:-1], rows)
    else:  # PEFT's forward would use autocast on the meta device
        layer.__dict__["forward"] = base.forward
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _tokens(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 1 + _TOKENS, device=next(model.parameters()).device)[None]
    two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return {"input_ids": ids, "decoder_input_ids": ids} if two else {"input_ids": ids}


def _groups(names: list[str], calls: list[tuple[str, Any]]) -> list[tuple[str, ...]]:
    by_call = groupby(calls, key=lambda call: (call[0].rpartition(".")[0], id(call[1])))
    runs = [[name for name, _ in run] for _, run in by_call]
    groups: list[tuple[str, ...]] = []
    placed: set[str] = set()
    for run in runs:
        # A layer that is called twice with one tensor, or with different neighbours, is a group of its own.
        others = [other for other in runs if other is not run and set(other) & set(run)]
        alone = len(set(run)) < len(run) or any(other != run for other in others)
        for group in [(name,) for name in run] if alone else [tuple(run)]:
            if not placed & set(group):
                groups.append(group)
                placed |= set(group)
    return groups + [(name,) for name in names if name not in placed]


_ATTENTION = "lora_attention"


@dataclass(frozen=True)
class FusionReport:
    """The modules that `fuse` has fused, and the reasons why other modules are not fused.

    Attributes:
        fused: names of the LoRA layers that are computed together with their adapters by one function.
        together: groups of fused layers that get the same input. One function computes all outputs of a group.
        gated: name of a gated MLP -> its activation. The backward recomputes the product act(gate) * up.
        norms: names of the RMSNorms that are computed by one function each.
        left: names of the LoRA layers that keep PEFT's forward, each with the reason.
        unseen: the reason why the model could not be run to find layers with the same input; "" if it could.
        copies, copied_bytes: number and bytes of dense copies of base weights in the compute dtype.
        rotary: names of the attention layers that rotate queries and keys by one fused function. For partial rotations and for
            inputs of several dtypes, the layer still calls the model's function.
        kernels: names of the operations between matrix products, each with its GPU kernel; empty on a CPU.
        experts: names of the modules in which one function computes all experts and their adapters.
    """

    fused: tuple[str, ...]
    together: tuple[tuple[str, ...], ...]
    gated: Mapping[str, str]
    norms: tuple[str, ...]
    attention: AttentionReport
    left: Mapping[str, str]
    unseen: str = ""
    copies: int = 0
    copied_bytes: int = 0
    rotary: tuple[str, ...] = ()
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    experts: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        parts = [f"{len(self.fused)} of {plural(len(self.fused) + len(self.left), 'LoRA layer')}"]
        if self.together:
            parts.append(f"{plural(len(self.together), 'group')} on the same input")
        if self.experts:
            parts.append(f"the experts of {plural(len(self.experts), 'layer')}")
        if self.gated:
            parts.append(plural(len(self.gated), "gated MLP"))
        if self.norms:
            parts.append(plural(len(self.norms), "norm"))
        if self.attention.repeated:
            parts.append("keys and values repeated for a fused attention")
        elif self.attention.in_use and not self.attention.by_lengths:
            parts.append("attention by one function")
        if self.attention.sides:
            parts.append("no padding")
        if self.copies:
            parts.append(f"{format_bytes(self.copied_bytes)} of dense copies")
        return f"fused: {', '.join(parts)}"

    @property
    def kernel_lines(self) -> list[str]:
        """A line for each GPU kernel: the operations that it computes."""
        used = sorted({kernel.name for kernel in self.kernels.values() if kernel.functions})
        of_kernel = grouped(self.kernels, lambda name: self.kernels[name].name)
        return [f"{', '.join(of_kernel[name])} by {_KERNELS[name]}" for name in used]

    @property
    def left_lines(self) -> list[str]:
        """A line for each reason why layers keep PEFT's forward."""
        reasons = Counter((starred(name), reason) for name, reason in self.left.items())
        return [
            f"left to PEFT: {name} ({plural(count, 'layer')}): {reason}"
            for (name, reason), count in reasons.items()
        ]

    @property
    def fallbacks(self) -> list[str]:
        """Lines about operations without a GPU kernel, slow attention, remaining padding, and a model that could not be run."""
        lines = []
        for name, kernel in self.kernels.items():
            if kernel.functions is None:
                what = f"unfused: {name} runs as several operators"
                if name == _GRADIENTS:
                    what = "rounded: matrix products round the adapters' gradients to the compute dtype"
                lines.append(f"{what}: {'; '.join(kernel.reasons)}")
        if self.attention.slow:
            lines.append(f"attention: {self.attention.slow}")
        if self.attention.padded:
            lines.append(f"padding: stays in batches: {self.attention.padded}")
        if self.unseen:
            lines.append(f"layers are fused one by one: {self.unseen}; pass `inputs` for the model's forward")
        return lines

    def __str__(self) -> str:
        lines = [f"fused: {plural(len(self.fused), 'LoRA layer')}"]
        kinds = Counter(" ".join(name.rpartition(".")[2] for name in names) for names in self.together)
        lines += [f"together: {names} ({count} times)" for names, count in kinds.items()]
        for gate, count in Counter(self.gated.values()).items():
            mlps = f"{plural(count, 'MLP')} ({gate})"
            lines.append(f"gated: {mlps}; the backward recomputes their products")
        if self.experts:
            layers = plural(len(self.experts), "layer")
            lines.append(f"experts: in each of {layers}, one function computes experts and adapters")
        if self.norms:
            lines.append(f"norms: {plural(len(self.norms), 'RMSNorm')}, each computed by one function")
        if self.rotary:
            layers = plural(len(self.rotary), "attention layer")
            lines.append(f"rotary: one function rotates queries and keys in each of {layers}")
        if self.copies:
            size = format_bytes(self.copied_bytes)
            lines.append(f"stored: dense copies of {plural(self.copies, 'base weight')}, {size}")
        lines += self.fallbacks
        lines += [f"kernels: {line}" for line in self.kernel_lines]
        lines.append(str(self.attention))
        if self.attention.sides:
            sides = " or ".join(sorted(self.attention.sides))
            lines.append(f"padding: removed from batches of TRL's trainers if it is on the {sides} of a row")
        return "\n".join((*lines, *self.left_lines))


def fuse(
    model: nn.Module,
    inputs: Any = None,
    *,
    budget: int | None = None,
    device: str | DeviceProfile | None = None,
) -> FusionReport:
    """Fuse each LoRA layer of a PEFT model into one function. Layers with the same input share one function.

    PEFT's parameters keep their names, and adapters can be saved, loaded, merged and switched as before. PEFT's forward
    still computes a layer if its active adapter cannot be fused (see `FusionReport.left`). PEFT's forward also computes
    a layer that is compiled, has merged or disabled adapters, or has hooks on its inner modules. Gated MLPs recompute
    their product in the backward instead of saving it. On a CPU, each RMSNorm and each rotary embedding is computed by
    one function, and attention is computed by compiled loops (`isotype.lora.attention`). To find layers with the same
    input, the model runs once, without gradients. If the model is sharded, call `fuse` after sharding and in every
    process.

    Args:
        model: a PEFT model; changed in place. If the model is fused already, it is fused again.
        inputs: keyword arguments for the forward that finds layers with the same input. The default inputs are a few tokens.
            They run the language model, but no vision tower.
        budget: maximum bytes for dense copies of base weights that are quantized or need a cast. On a GPU, the default is 0. On
            a CPU, the default is a quarter of the free memory. On a CPU, dequantizing a weight takes more than half as long as
            multiplying by the weight. A sharded (FSDP2) model gets no copies.
        device: kind (`"cpu"`, `"cuda"`), name (`"t4"`) or profile of the device for which a model on the meta device is fused.
            None means the device of the parameters.

    Returns:
        The names of the fused modules, and of the unfused modules with the reasons.
    """
    unfuse(model)
    if isinstance(device, str) and device not in ("cpu", *DEVICES):
        device = device_profile(device)
    fused_experts, of_experts = _fuse_experts(model)
    tuners = ((name, module) for name, module in model.named_modules() if is_tuner_layer(module))
    layers = {n: m for n, m in tuners if hasattr(m, "lora_A") and not isinstance(m, experts.FusedExperts)}
    reasons = {name: of_experts.get(id(layer)) or why_not(layer) for name, layer in layers.items()}
    fused = {name: layer for name, layer in layers.items() if reasons[name] is None}
    for layer in fused.values():
        if kind_of(layer.get_base_layer()) == "linear4bit":
            keep_training_layout(layer.get_base_layer())
    if any(map(is_gathered, model.modules())):
        budget = 0
    groups, unseen = same_input(model, fused, inputs)
    devices = {parameter.device.type for parameter in model.parameters()}
    kind = device.kind if isinstance(device, DeviceProfile) else device
    on_cpu = devices == {"cpu"} or (devices == {"meta"} and kind == "cpu")
    if budget is None:
        budget = int(psutil.virtual_memory().available) // 4 if on_cpu else 0
    weights = DenseWeights(budget)
    for names in groups:
        siblings = Siblings(weights, [fused[name] for name in names])
        for layer in siblings.layers:
            put_in(layer, FusedLora, weights, siblings)
    _keep_copies(model, weights, fused)
    gated = {name: parts.gate.name for name, parts in _put_in_all(model, FusedMlp, _gated).items()}
    kernels = {} if on_cpu else _kernels(model, gated.values(), device_type(kind) if kind else "")
    rotates = elementwise.compiled() if on_cpu else _has(kernels, "rotary positions")
    norms = on_cpu or _has(kernels, "RMSNorm")
    rotary = tuple(_put_in_all(model, FusedRotary, _rotates)) if rotates else ()
    gpu = device_profile("cuda") if "cuda" in devices else None  # the first NVIDIA or AMD GPU
    # The trials of attention run only the backbone, with the weights that FSDP2 gathered for the whole model.
    attention = use_fast_attention(model, kind, device if isinstance(device, DeviceProfile) else gpu)
    model.__dict__[_ATTENTION] = attention  # for `unfuse`
    free_gathered(model)
    return FusionReport(
        tuple(fused),
        tuple(names for names in groups if len(names) > 1),
        gated,
        tuple(_put_in_all(model, FusedNorm, _norm)) if norms else (),
        attention,
        {name: reason for name, reason in reasons.items() if reason is not None},
        unseen,
        weights.copies,
        weights.bytes,
        rotary,
        kernels,
        fused_experts,
    )


_GRADIENTS = "gradients of adapters in float32"
_KERNELS = {
    "aten": "torch's fused operator",
    "triton": "isotype's Triton kernels",
    "addmm": "torch's matrix product with a float32 result",
    "mm": "torch's matrix product with a float32 result",
}


def _kernels(model: nn.Module, gates: Iterable[str], kind: str) -> dict[str, Kernel]:
    """Return the GPU kernel of each operation between matrix products, chosen by trials on this machine.

    A model on the meta device gets the kernels that a trace assumes for `kind`, a type of device.
    """
    policy = policy_of(model)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None or (kind if parameter.is_meta else parameter.device.type) not in DEVICES:
        return {}
    dtype = parameter.dtype if policy is None else policy.compute
    operations: dict[str, tuple[Operation, str]] = {
        "RMSNorm": ("rms_norm", ""),
        "RMSNorm with a weight in another dtype": ("rms_norm_promoted", ""),
        "rotary positions": ("rotary", ""),
        **{f"gated product ({gate})": ("gated", gate) for gate in sorted(set(gates))},
    }
    if dtype.itemsize == 2:
        operations[_GRADIENTS] = "float32_product", ""
    device = parameter.device
    if parameter.is_meta:
        return {name: foreseen(operation) for name, (operation, _) in operations.items()}
    return {name: chosen(operation, device, dtype, gate) for name, (operation, gate) in operations.items()}


def _fuse_experts(model: nn.Module) -> tuple[tuple[str, ...], dict[int, str]]:
    """Fuse experts with adapters. Return (names of the fused modules, {id of an unfused PEFT wrapper: reason})."""
    fused: list[str] = []
    left: dict[int, str] = {}
    for name, outer in experts.outermost(model):
        wrappers = experts.wrappers_of(outer)
        if wrappers and (reason := experts.why_not(outer)) is not None:
            left |= {id(wrapper): reason for wrapper in wrappers}
        elif wrappers:
            experts.put_in(outer)
            fused.append(name)
    return tuple(fused), left


def _has(kernels: Mapping[str, Kernel], operation: str) -> bool:
    return operation in kernels and kernels[operation].functions is not None


def _put_in_all(model: nn.Module, kind: Any, parts_of: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Fuse each module for which `parts_of` returns a result. Return name -> result of `parts_of`."""
    modules = dict(model.named_modules())
    all_parts = {name: parts for name, module in modules.items() if (parts := parts_of(module))}
    for name, parts in all_parts.items():
        put_in(modules[name], kind, *([parts] if kind.lora_state else []))
    return all_parts


def _gated(module: nn.Module) -> GatedParts | None:
    parts = gated_parts(module) if boundary_of(module) is None else None
    return parts if parts and isinstance(module._modules[parts.down], FusedLora) else None


def _norm(module: nn.Module) -> NormParts | None:
    return norm_parts(module) if is_norm(module) else None


def _rotates(module: nn.Module) -> bool:
    return boundary_of(module) is None and rotates(type(module).forward)


def _keep_copies(model: nn.Module, weights: DenseWeights, fused: Mapping[str, Any]) -> None:
    policy = policy_of(model)
    if policy is None or any(parameter.is_meta for parameter in model.parameters()):
        return
    for layer in fused.values():
        base = layer.get_base_layer()
        weights.kept(base, working_dtype(policy.compute, base.weight))


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: restore the modules' classes and the model's attention, and drop the copies of weights."""
    attention: AttentionReport | None = model.__dict__.pop(_ATTENTION, None)
    if attention is not None:
        attention.undo()
    experts.take_out(model)
    for module in model.modules():
        take_out(module)
