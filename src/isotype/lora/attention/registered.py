"""Registers attention functions in transformers: compiled loops on a CPU, torch's variable-length kernels on a GPU."""

import inspect
import re
import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from isotype.compat.torch import FakeTensor, is_transformed
from isotype.compat.transformers import attention_of, takes_attention
from isotype.core.dtypes import autocast_dtype, dtype_name
from isotype.core.names import plural
from isotype.lora.attention import lengths, strips
from isotype.lora.attention.plan import attention_to_nothing, block_rows, plan_of, plan_of_mask
from isotype.lora.unpadded import MOST_TOKENS, Sequences, Unpadded, packed, tried, unpadded
from isotype.model.enforce import policy_of
from isotype.precision.devices.attention import (
    AttentionCall,
    attention_kernel,
    enabled_attention,
    needs_repeated_heads,
)
from isotype.precision.devices.cpu import multiplies_by_amx
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.devices.simulated import device_type_of

NAME, REPEATED, LENGTHS = "isotype", "isotype_repeated", "isotype_lengths"
"""Names of isotype's functions in transformers' registries, for `model.set_attn_implementation`."""

_AMX_IS_FASTER = 1 << 16
"""If keys × head size is at least this number, torch's kernel without a mask is faster on CPUs with AMX (benchmarks/attention.py)."""


@dataclass
class AttentionReport:
    """The result of `use_fast_attention`. Each later call of the model's attention may add entries to the report.

    Attributes:
        in_use: True if the model now uses one of isotype's attention functions.
        reason: the reason why the model keeps its own attention; None if `in_use`.
        repeated: title of the device if it needs repeated keys and values for a fused kernel; else None.
        slow: the reason why attention stores all scores in memory on this device; None if it does not store them.
        left: reason to use torch's kernel -> number of calls.
        sides: the sides (`left`, `right`) of a row from which padding may be removed (see `isotype.lora.unpadded`). For a model
            without weights, None until `sides_of` tries a small copy.
        padded: the reason why a batch keeps its padding on this GPU; None if padding may be removed.
        name: the name of isotype's function in transformers; "" if no function is used.
    """

    in_use: bool
    reason: str | None = None
    repeated: str | None = None
    slow: str | None = None
    left: Counter[str] = field(default_factory=Counter)
    sides: frozenset[str] | None = frozenset()
    padded: str | None = None
    name: str = ""
    _undo: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.in_use:
            _register()  # for a fused model that is unpickled in another process

    @property
    def by_lengths(self) -> bool:
        """True if a variable-length kernel of the GPU computes the attention of rows that are concatenated."""
        return self.in_use and self.name == LENGTHS

    def undo(self) -> None:
        while self._undo:
            model, before = self._undo.pop()
            model.set_attn_implementation(before)

    def __str__(self) -> str:
        if not self.in_use:
            return f"attention: unchanged: {self.reason}"
        left = [f"  {plural(n, 'call')} left to torch's kernel: {why}" for why, n in self.left.items()]
        if self.repeated:
            return f"attention: keys and values are repeated for each head of the queries, because {self.repeated} has no fused kernel for grouped heads"
        if self.by_lengths:
            head = "attention: torch's kernels; variable-length kernels for concatenated rows"
            return "\n".join([head, *left])
        return "\n".join(["attention: one compiled function for each layer on this CPU", *left])


_reports: weakref.WeakKeyDictionary[nn.Module, AttentionReport] = weakref.WeakKeyDictionary()


def use_fast_attention(
    model: nn.Module, device: str | None = None, profile: DeviceProfile | None = None
) -> AttentionReport:
    """Replace the `sdpa` attention of a model on a CPU by isotype's compiled loops, if this machine has a compiler.

    On other devices, the model keeps `sdpa`, which calls FlashAttention or cuDNN there. If FlashAttention supports the
    compute dtype, its variable-length kernel is used for rows that were concatenated to remove their padding. On an NVIDIA
    GPU without a fused kernel for grouped heads, keys and values are repeated for torch's kernel. If the user chose
    `eager` or `flex_attention`, the model keeps this choice. Results differ only by rounding.

    Args:
        model: a transformers model, or a model that contains one (a PEFT model); changed in place.
        device: kind of device (`"cpu"`, `"cuda"`) for which a model without weights is prepared.

    Returns:
        A report of the decision and its reason.
    """
    owners = _owners(model)
    reason = _why_not(owners, device)
    if reason is None:
        blank = any(parameter.is_meta for parameter in owners[0].parameters())
        return _put(model, NAME, AttentionReport(True, sides=None if blank else tried(owners[0]).sides))
    if profile is None or not owners:
        return AttentionReport(False, reason)
    policy = policy_of(model)
    dtype = owners[0].dtype if policy is None else policy.compute
    grouped = any(getattr(module, "num_key_value_groups", 1) > 1 for module in owners[0].modules())
    common = AttentionCall(dtype, 2, 1, (64, 64, 64))
    if grouped and attention_kernel(profile, common, enabled=enabled_attention()) == "math":
        return _with_repeated_heads(model, profile, dtype)
    return _with_lengths(model, profile, dtype, reason)


def _owners(model: nn.Module) -> list[Any]:
    from transformers import PreTrainedModel

    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _put(model: nn.Module, name: str, report: AttentionReport) -> AttentionReport:
    _register()
    report.name, owner = name, _owners(model)[0]
    before = _implementations(owner.config)
    owner.set_attn_implementation(_replaced(before, name))
    report._undo.append((owner, before))
    for module in model.modules():
        _reports[module] = report
    return report


def _with_repeated_heads(model: nn.Module, profile: DeviceProfile, dtype: torch.dtype) -> AttentionReport:
    """Repeat keys and values if this enables a fused kernel for `dtype`. Otherwise, report why attention is slow."""
    if not needs_repeated_heads(profile, dtype):
        slow = (
            f"{profile.title} has no fused kernel for {dtype_name(dtype)}, so all scores are stored (float32)"
        )
        return AttentionReport(False, slow, slow=slow)
    reason = _why_not_registered(_owners(model))
    if reason is not None:
        slow = f"{profile.title} has no fused kernel for grouped heads, and {reason}"
        return AttentionReport(False, reason, slow=slow)
    return _put(model, REPEATED, AttentionReport(True, repeated=profile.title))


def _with_lengths(
    model: nn.Module, profile: DeviceProfile, dtype: torch.dtype, reason: str
) -> AttentionReport:
    """Use the variable-length kernel if a trial of the model gives the same results; otherwise report `reason`."""
    owners = _owners(model)
    why = lengths.why_not_lengths(profile, dtype, owners[0].config) or _why_not_registered(owners)
    if why is None and any(parameter.is_meta for parameter in owners[0].parameters()):
        why = "variable-length attention was not tried, because the model has no weights"
    if why is not None:
        return AttentionReport(False, reason, padded=why)
    report = _put(model, LENGTHS, AttentionReport(True))
    trial = tried(owners[0])
    why = ", ".join(report.left) or trial.reason
    if why:
        report.undo()
        return AttentionReport(False, reason, padded=why)
    report.sides = trial.sides
    return report


def without_padding(model: nn.Module, inputs: Mapping[str, Any], read: torch.Tensor) -> Unpadded | None:
    """Return a batch without its padding; None if attention needs the padding, or if removing it saves no time.

    Args:
        read: True at the positions whose results the caller needs, bool `[rows, length]`.
    """
    report = _reports.get(model)
    by_lengths = report is not None and report.by_lengths
    return unpadded(inputs, sides_of(model), read, most=None if by_lengths else MOST_TOKENS)


def packed_by_lengths(model: nn.Module, inputs: Mapping[str, Any]) -> Sequences | None:
    """Return the sequences of a packed batch; None if the model's attention does not use sequence lengths."""
    report = _reports.get(model)
    return packed(inputs) if report is not None and report._undo and report.by_lengths else None


def sides_of(model: nn.Module) -> frozenset[str]:
    """Return the sides of rows from which padding can be removed; an empty set if isotype does not compute the attention."""
    report = _reports.get(model)
    if report is None or not report._undo:
        return frozenset()
    if report.sides is None:
        report.sides = tried(report._undo[0][0]).sides
    return report.sides


def _why_not(owners: list[Any], device: str | None) -> str | None:
    if not owners:
        return "the model is no transformers model"
    devices = {parameter.device.type for parameter in owners[0].parameters()}
    devices = ({device} if devices == {"meta"} and device is not None else devices) - {"cpu", "meta"}
    if devices:
        return f"the model is on {', '.join(sorted(devices))}, where torch's kernel is fast"
    return _why_not_registered(owners) or strips.compiled_strips().reason


def _why_not_registered(owners: list[Any]) -> str | None:
    chosen = {attention_of(owner.config) for owner in owners}
    if "sdpa" not in chosen:
        return f"the attention implementation is {', '.join(sorted(map(str, chosen)))}"
    for owner in owners:
        if not takes_attention(owner):
            return f"{type(owner).__name__} has its own attention, outside of transformers' registry"
        source = inspect.getsource(sys.modules[type(owner).__module__])
        if re.search(r"_attn_implementation\s*(==|!=|in|not in)\s[^\n]*[\"']sdpa[\"']", source):
            return f"the code of {type(owner).__name__} compares the implementation's name with sdpa"
    return None


def _implementations(config: Any) -> Any:
    parts = ((key, getattr(config, key, None)) for key in config.sub_configs)
    inner = {key: _implementations(part) for key, part in parts if part is not None}
    return {"": attention_of(config), **inner} if inner else attention_of(config)


def _replaced(implementations: Any, name: str) -> Any:
    if isinstance(implementations, dict):
        return {key: _replaced(inner, name) for key, inner in implementations.items()}
    return name if implementations == "sdpa" else implementations


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, forward in ((NAME, attention_forward), (REPEATED, lengths.repeated_attention_forward)):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, sdpa_mask)
    AttentionInterface.register(LENGTHS, lengths_attention_forward)
    AttentionMaskInterface.register(LENGTHS, lengths.lengths_mask)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute a layer's attention by compiled loops. The signature is the signature of transformers'
    `AttentionInterface`.

    Args:
        query: `[batch, query heads, queries, head]`.
        key, value: `[batch, key heads, keys, head]`.
        attention_mask: a mask with four dimensions: bool, or numbers to add to the scores; None for causal or full
            attention.
        scaling: factor of the scores; None means 1 / √head.
        is_causal: True if attention without a mask is causal; None means the value of `module.is_causal`.

    Returns:
        (`[batch, queries, query heads, head]`, None)
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] > 1
    inputs = q, k, v = _under_autocast(query, key, value)
    reason = _why_not_call(inputs, attention_mask, causal, kwargs)
    if reason is None and not (q.numel() and k.numel()):
        return attention_to_nothing(q, k, v).transpose(1, 2), None
    # A trace calls torch's kernel, which has the same dtypes and at least as many FLOPs as the loops.
    if reason is None and q.shape[2] > 1 and not isinstance(q, FakeTensor):
        rows = block_rows(q.shape[1] // k.shape[1])
        if attention_mask is None:
            plan = plan_of((len(q), q.shape[2], k.shape[2]), rows, causal=causal)
        else:
            plan = plan_of_mask(attention_mask, len(q), rows)
        if plan.closed_finitely:
            reason = "the mask hides all keys of some queries by finite numbers instead of -inf"
        else:
            return strips.attention(q, k, v, plan, scaling).transpose(1, 2), None
    report = _reports.get(module)
    if report is not None and reason is not None:
        report.left[reason] += 1

    foreseen = reason is None and isinstance(q, FakeTensor)
    dtypes = (torch.bool, torch.float32, q.dtype)
    if foreseen and attention_mask is not None and attention_mask.dtype in dtypes:
        # The loops do not save the mask for the backward; torch's kernel saves a mask for every layer.
        attention_mask, is_causal = None, False

    def of_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = sdpa_attention_forward(
            module, q, k, v, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )[0]
        return out

    if foreseen and strips.attention_dtype(q) != q.dtype:
        # On a CPU that emulates the dtype, the loops work on float32 copies.
        return strips.traced(of_torch, q, k, v), None
    return of_torch(query, key, value), None


def lengths_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Sequences | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention by a variable-length kernel if the mask is a `Sequences`, else by `sdpa`.

    Arguments and results are those of `attention_forward`. If the kernel does not support a call, `sdpa` computes it
    with a mask that is made from the sequences. Raises NotImplementedError if the window of the layer differs from the
    window of the mask, as in layers with chunked attention.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = attention_mask
    if isinstance(mask, Sequences):
        if (kwargs.get("sliding_window") or None) != mask.window:
            raise NotImplementedError("the layer attends in parts, not in a sliding window")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        inputs = _under_autocast(query, key, value)
        reason = lengths.why_not_call(inputs, mask, causal, kwargs)
        if reason is None:
            return lengths.by_lengths(inputs, mask, scale=scaling, causal=causal), None
        if (report := _reports.get(module)) is not None:
            report.left[reason] += 1
        mask = mask.mask(query.shape[2], causal=causal)
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return result


def _under_autocast(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the inputs cast to autocast's dtype, because torch's kernel also casts them."""
    low = autocast_dtype(inputs[0].device.type)
    return inputs if low is None else tuple(x.to(low) for x in inputs)


def _why_not_call(
    inputs: tuple[torch.Tensor, ...], mask: torch.Tensor | None, causal: bool, kwargs: dict[str, Any]
) -> str | None:
    q, k, v = inputs
    batch, heads, queries, _ = q.shape
    if device_type_of(q) != "cpu":
        return f"the call is on {device_type_of(q) or q.device.type}"
    if torch.compiler.is_compiling():
        return "the call is compiled"
    if is_transformed():
        return "a transform of torch.func runs the call"
    if not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values have several dtypes"
    if q.dtype == torch.float64:
        return "queries, keys and values are float64"
    if kwargs.get("dropout"):
        return "the call has dropout"
    if kwargs.get("position_bias") is not None:
        return "the call has a position bias"
    names = (*lengths.CHANGES, "output_attentions")
    extras = [name for name in names if kwargs.get(name) is not None and kwargs[name] is not False]
    if extras:
        return f"the call has {', '.join(extras)}"
    if len(k) != batch or heads % k.shape[1]:
        return "queries and keys have batches or heads that do not match"
    if (uncompiled := strips.compiled_strips().reason) is not None:
        return uncompiled  # the fused model was unpickled in another process
    if causal and queries != k.shape[2]:
        return "the call is causal with more keys than queries"
    if mask is None:
        by_amx = q.dtype == torch.bfloat16 and k[0, 0].numel() >= _AMX_IS_FASTER and multiplies_by_amx()
        return "torch's kernel is faster for long rows with AMX" if by_amx else None
    if mask.requires_grad:
        return "the mask needs a gradient"
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        return f"the mask is {dtype_name(mask.dtype)}"
    fits = mask.dim() == 4 and len(mask) in (1, batch) and mask.shape[1] in (1, heads)
    if not fits or tuple(mask.shape[2:]) != (queries, k.shape[2]):
        return "the mask has another shape than the scores"
    return None
