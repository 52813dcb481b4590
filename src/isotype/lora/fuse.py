"""Put fused LoRA paths into a PEFT model, and take them out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn

from isotype.core.names import format_bytes, plural, starred
from isotype.lora.adapted import why_not
from isotype.lora.attention.registered import AttentionReport, use_fast_attention
from isotype.lora.fused import Siblings
from isotype.lora.gated import gated_parts
from isotype.lora.kernels import DEVICES, Kernel, Operation, chosen
from isotype.lora.loops import elementwise
from isotype.lora.modules import FusedLora, FusedMlp, FusedNorm, FusedRotary, put_in, take_out
from isotype.lora.norms import is_norm, norm_parts
from isotype.lora.rotary import rotates
from isotype.lora.weights import DenseWeights, shape_of
from isotype.model.boundary import boundary_of
from isotype.model.enforce import policy_of
from isotype.model.experts.layer import FusedExperts, outermost, wrappers_of
from isotype.model.experts.layer import put_in as put_experts_in
from isotype.model.experts.layer import take_out as take_experts_out
from isotype.model.experts.layer import why_not as why_not_experts
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
    """Group the names of `layers`: children of one module that are called in a row with the very same tensor.

    Gradient checkpointing recomputes whole modules: what runs together must be found in one.

    Args:
        model: the model; run once in evaluation, without gradients. Its random states and modes stay as they are.
        layers: the layers by name.
        inputs: arguments of its forward; None for a few tokens.

    Returns:
        The groups, in which every layer occurs once, and why nothing was seen; empty where the model could be run.
    """
    calls: list[tuple[str, Any]] = []
    try:
        with ExitStack() as stack:
            for name, layer in layers.items():
                stack.callback(layer.register_forward_pre_hook(_noting(calls, name)).remove)
            for module in model.modules():
                blank = is_tuner_layer(module) or kind_of(module) == "linear8bit"
                if blank and not isinstance(module, FusedExperts) and _is_blank(module):
                    stack.enter_context(_blank(module))
            stack.enter_context(in_evaluation(model))
            model(**(_tokens(model) if inputs is None else inputs))
        unseen = ""
    except Exception as error:  # noqa: BLE001 - whatever a model raises that was given too little
        calls, unseen = [], f"{type(model).__name__} could not be run: {str(error).partition(chr(10))[0]}"
    return _groups(list(layers), calls), unseen


def _noting(calls: list[tuple[str, Any]], name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.append((name, args[0] if len(args) == 1 else object()))

    return hook


def _is_blank(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def _blank(layer: Any) -> Iterator[None]:
    """Let a linear layer without weights return a tensor of the right shape: not every kernel knows the meta device.

    What else PEFT wraps computes without its adapter: it asks for autocast on the device of what it adapts.
    """
    base = layer.get_base_layer() if is_tuner_layer(layer) else layer
    if kind_of(base) in LINEAR_KINDS and base.weight.dim() == 2:  # no convolution
        rows, _ = shape_of(base)
        layer.__dict__["forward"] = lambda x, *_, **__: x.new_empty(*x.shape[:-1], rows)
    else:
        layer.__dict__["forward"] = base.forward
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _tokens(model: Any) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    ids = torch.arange(1, 1 + _TOKENS, device=device)[None]
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {"input_ids": ids}
    return {"input_ids": ids, "decoder_input_ids": ids}


def _groups(names: list[str], calls: list[tuple[str, Any]]) -> list[tuple[str, ...]]:
    runs: list[list[str]] = []
    last: tuple[str, Any] = ("", None)
    for name, x in calls:
        parent = name.rpartition(".")[0]
        if parent == last[0] and x is last[1]:
            runs[-1].append(name)
        else:
            runs.append([name])
        last = (parent, x)
    groups: list[tuple[str, ...]] = []
    placed: set[str] = set()
    for run in runs:
        # A layer that is called twice with one tensor, or in other company another time, stays by itself.
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
    """What `fuse` did, module by module.

    Attributes:
        fused: names of the LoRA layers that compute in one function.
        together: those of them that read the same input and run as one.
        gated: name of each gated MLP that does not keep its product -> the activation.
        norms: names of the RMSNorms that compute in one function (on a CPU, or a GPU that has a kernel for it).
        attention: which attention the model has now.
        left: name of each LoRA layer that is left on PEFT's own path -> why.
        unseen: why it is not known which layers read the same input; empty where it is.
        copies: how many base weights have a dense copy in the compute dtype.
        copied_bytes: the bytes of those copies.
        rotary: names of the attention layers that rotate queries and keys in one function (on a CPU with a compiler, or a GPU that has a
            kernel for it), but for calls that rotate parts of heads or in several dtypes.
        kernels: on a GPU, each operation between the products -> the kernel that computes it, and why not another.
        experts: names of the experts modules, adapters included, that compute in one function each.
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
        """One line."""
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
        elif self.attention.taken and not self.attention.by_lengths:
            parts.append("attention by the faster kernel")
        if self.attention.sides:
            parts.append("no padding")
        if self.copies:
            parts.append(f"{format_bytes(self.copied_bytes)} of dense copies")
        return f"fused: {', '.join(parts)}"

    @property
    def fallbacks(self) -> list[str]:
        """A line for each operation that has no kernel of its own on this GPU, and for a look at the inputs that failed."""
        slow = {name: kernel for name, kernel in self.kernels.items() if kernel.functions is None}
        lines = [_fallback(name, kernel) for name, kernel in slow.items()]
        if self.attention.slow:
            lines.append(f"attention: {self.attention.slow}")
        if self.attention.padded:
            lines.append(f"padding: computed with the rest: {self.attention.padded}")
        if self.unseen:
            lines.append(f"one by one: {self.unseen}; give `inputs`, with which the model can be run")
        return lines

    def __str__(self) -> str:
        lines = [f"fused: {plural(len(self.fused), 'LoRA layer')}"]
        kinds = Counter(" ".join(name.rpartition(".")[2] for name in names) for names in self.together)
        lines += [f"together: {names} ({count} times)" for names, count in kinds.items()]
        for gate, count in Counter(self.gated.values()).items():
            lines.append(
                f"gated: {plural(count, 'MLP')} ({gate}), whose product is formed again in the backward"
            )
        if self.experts:
            layers = plural(len(self.experts), "layer")
            lines.append(f"experts: those of {layers} in one function a layer, adapters on activations")
        if self.norms:
            lines.append(f"norms: {plural(len(self.norms), 'RMSNorm')} in one function each")
        if self.rotary:
            layers = plural(len(self.rotary), "attention layer")
            lines.append(f"rotary: queries and keys of {layers} are rotated in one function each")
        if self.copies:
            size = format_bytes(self.copied_bytes)
            lines.append(f"kept: dense copies of {plural(self.copies, 'base weight')}, {size}")
        lines += self.fallbacks
        names = {kernel.name for kernel in self.kernels.values() if kernel.functions is not None}
        lines += [f"kernels: {_listed(self.kernels, name)} by {_KERNELS[name]}" for name in sorted(names)]
        lines.append(str(self.attention))
        if self.attention.sides:
            sides = " or ".join(sorted(self.attention.sides))
            lines.append(
                f"padding: left out of the batches of TRL's trainers where it lies {sides} of the tokens"
            )
        reasons = Counter((starred(name), reason) for name, reason in self.left.items())
        for (name, reason), count in reasons.items():
            lines.append(f"left to PEFT: {name} ({plural(count, 'layer')}): {reason}")
        return "\n".join(lines)


def fuse(
    model: nn.Module,
    inputs: Any = None,
    *,
    budget: int | None = None,
    device: str | DeviceProfile | None = None,
) -> FusionReport:
    """Let the LoRA layers of a PEFT model compute in one function each, and those that read the same input together.

    Parameters, names, files, merging and switching of adapters stay PEFT's own. A layer whose active adapter cannot be
    fused (see `FusionReport.left`) runs as PEFT has it; so does every layer while it is merged or disabled, is compiled,
    or has hooks inside. Gated MLPs form their product again in the backward instead of keeping it, and RMSNorms and rotary
    positions compute in one function on a CPU. There attention takes the kernel that is measured to be faster, once on a
    machine and for every class of shapes (`isotype.lora.attention`).
    The model is run once, without gradients, to see which layers read the same input. 4-bit weights keep the layout that trains
    (`isotype.model.quantized.keep_training_layout`): bitsandbytes would repack them in that run on some CPUs. A sharded model is fused after
    it was sharded, by all processes together: layers read what FSDP2 has gathered when they are called.

    Args:
        model: a PEFT model; changed in place. A model that is fused already is fused afresh.
        inputs: what the model is run with once: the arguments of its forward by name. By default a few tokens, which
            reach the language model and no vision tower.
        budget: bytes that dense copies of quantized base weights may take, or of those that another compute dtype needs
            cast. By default a quarter of the free memory on a CPU, where dequantizing a weight costs more than half of
            the product it feeds, and none on other devices. With a policy (`isotype.enforce`, `isotype.add_lora`) the
            copies are made here, else by the first step. A model that is sharded (FSDP2) keeps none: each process would hold whole what
            all hold together.
        device: kind (`"cpu"`, `"cuda"`) or profile of the device that a model without weights, on the meta device, stands for; None:
            the one that its parameters are on.

    Returns:
        What was fused and what was not, and why.
    """
    unfuse(model)
    experts, of_experts = _fuse_experts(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if is_tuner_layer(module) and hasattr(module, "lora_A") and not isinstance(module, FusedExperts)
    }
    reasons = {name: of_experts.get(id(layer)) or why_not(layer) for name, layer in layers.items()}
    fused = {name: layer for name, layer in layers.items() if reasons[name] is None}
    for layer in fused.values():
        if kind_of(layer.get_base_layer()) == "linear4bit":
            keep_training_layout(layer.get_base_layer())
    sharded = any(map(is_gathered, model.modules()))
    if sharded:
        budget = 0
    groups, unseen = same_input(model, fused, inputs)
    devices = {parameter.device.type for parameter in model.parameters()}
    kind = device.kind if isinstance(device, DeviceProfile) else device
    on_cpu = devices == {"cpu"} or (devices == {"meta"} and kind == "cpu")
    weights = DenseWeights(_default_budget(on_cpu) if budget is None else budget)
    for names in groups:
        siblings = Siblings(weights, [fused[name] for name in names])
        for layer in siblings.layers:
            put_in(layer, FusedLora, weights, siblings)
    _keep_copies(model, weights, fused)
    gated = _fuse_gated(model)
    kernels = {} if on_cpu else _kernels(model, gated.values())
    rotates = elementwise.compiled() if on_cpu else _has(kernels, "rotary positions")
    norms = on_cpu or _has(kernels, "RMSNorm")
    rotary = _fuse_rotary(model) if rotates else ()
    # It runs the backbone by itself: what FSDP2 has gathered for the whole model's run is there still.
    attention = _attention(model, kind, device if isinstance(device, DeviceProfile) else _profile(devices))
    free_gathered(model)
    return FusionReport(
        tuple(fused),
        tuple(names for names in groups if len(names) > 1),
        gated,
        _fuse_norms(model) if norms else (),
        attention,
        {name: reason for name, reason in reasons.items() if reason is not None},
        unseen,
        weights.copies,
        weights.bytes,
        rotary,
        kernels,
        experts,
    )


_GRADIENTS = "gradients of adapters in float32"


def _fallback(name: str, kernel: Kernel) -> str:
    reasons = "; ".join(kernel.reasons)
    if name == _GRADIENTS:
        return f"rounded: products round gradients of adapters to the compute dtype: {reasons}"
    return f"unfused: {name} runs by single operators: {reasons}"


_KERNELS = {
    "aten": "torch's fused operator",
    "triton": "isotype's Triton kernels",
    "addmm": "torch's products with float32 results",
    "mm": "torch's products with float32 results",
}


def _listed(kernels: Mapping[str, Kernel], name: str) -> str:
    return ", ".join(operation for operation, kernel in kernels.items() if kernel.name == name)


def _kernels(model: nn.Module, gates: Iterable[str]) -> dict[str, Kernel]:
    """What computes between the products of a model on a GPU, tried now: nothing is left to fail in a step."""
    policy = policy_of(model)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is None or parameter.device.type not in DEVICES:
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
    return {
        name: chosen(operation, parameter.device, dtype, detail)
        for name, (operation, detail) in operations.items()
    }


def _fuse_experts(model: nn.Module) -> tuple[tuple[str, ...], dict[int, str]]:
    """(names of the adapted experts that now compute in one function, the wrapper of others -> why they do not)"""
    fused: list[str] = []
    left: dict[int, str] = {}
    for name, outer in outermost(model):
        wrappers = wrappers_of(outer)
        if wrappers and (reason := why_not_experts(outer)) is not None:
            left |= {id(wrapper): reason for wrapper in wrappers}
        elif wrappers:
            put_experts_in(outer)
            fused.append(name)
    return tuple(fused), left


def _has(kernels: Mapping[str, Kernel], operation: str) -> bool:
    return operation in kernels and kernels[operation].functions is not None


def _fuse_gated(model: nn.Module) -> dict[str, str]:
    layers = {name: (module, gated_parts(module)) for name, module in model.named_modules()}
    gated = {}
    for name, (module, parts) in layers.items():
        free = boundary_of(module) is None
        if free and parts is not None and isinstance(module._modules[parts.down], FusedLora):
            put_in(module, FusedMlp, parts)
            gated[name] = parts.gate.name
    return gated


def _profile(devices: set[str]) -> DeviceProfile | None:
    """Of the one NVIDIA or AMD GPU that a model is on; a model over several goes by the first."""
    return device_profile("cuda") if "cuda" in devices else None


def _attention(model: nn.Module, kind: str | None, profile: DeviceProfile | None) -> AttentionReport:
    report = use_fast_attention(model, kind, profile)
    model.__dict__[_ATTENTION] = report  # for `unfuse`
    return report


def _fuse_norms(model: nn.Module) -> tuple[str, ...]:
    named = {name: module for name, module in model.named_modules() if is_norm(module)}
    norms = {
        name: (module, parts) for name, module in named.items() if (parts := norm_parts(module)) is not None
    }
    for module, parts in norms.values():
        put_in(module, FusedNorm, parts)
    return tuple(norms)


def _fuse_rotary(model: nn.Module) -> tuple[str, ...]:
    rotations = {
        name: module
        for name, module in model.named_modules()
        if boundary_of(module) is None and rotates(type(module).forward)
    }
    for module in rotations.values():
        put_in(module, FusedRotary)
    return tuple(rotations)


def _keep_copies(model: nn.Module, weights: DenseWeights, fused: Mapping[str, Any]) -> None:
    policy = policy_of(model)
    if policy is None or any(parameter.is_meta for parameter in model.parameters()):
        return
    for layer in fused.values():
        base = layer.get_base_layer()
        weights.keep(base, working_dtype(policy.compute, base.weight))


def unfuse(model: nn.Module) -> None:
    """Take the fused paths out of a model: every module has its own class again, and all copies of weights are gone."""
    attention: AttentionReport | None = model.__dict__.pop(_ATTENTION, None)
    if attention is not None:
        attention.undo()
    take_experts_out(model)
    for module in model.modules():
        take_out(module)


def _default_budget(on_cpu: bool) -> int:
    return int(psutil.virtual_memory().available) // 4 if on_cpu else 0
