"""Decides the precision policy from the model's facts, a device profile, the user's request and measured ranges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from isotype.core.dtypes import COMPUTE_DTYPES, dtype_name, parse_dtype
from isotype.core.errors import PrecisionError, Problem
from isotype.core.formats import FOUR_BITS, MXFP4, QUANTIZATIONS, REQUESTABLE
from isotype.core.names import listed
from isotype.precision.by_ranges import decide_by_ranges
from isotype.precision.devices.profile import DeviceProfile
from isotype.precision.facts import ModelFacts, unreadable
from isotype.precision.policy import LayerStorage, PrecisionPolicy
from isotype.precision.ranges import Ranges

TRAINABLE = ("lora", "full")
_TRAIN_ADAPTERS = "train adapters (--use_peft True, or trainable='lora' in Python)"


@dataclass(frozen=True)
class PrecisionRequest:
    """The precision that the user requests. None and "auto" leave the decision to isotype.

    Attributes:
        layers: linear layers in another format than `quantization`.
        base_memory: limit of the base weights' bytes for the quantization `"mixed"`. `precision.damages` chooses the formats.
        quantized_parts: `"language"` to quantize only the language model; `"all"` to quantize also the towers and projectors of
            other media.
    """

    dtype: str | torch.dtype = "auto"
    quantization: str | None = None
    trainable: str = "lora"
    master: str | torch.dtype | None = None
    double_quant: bool | None = None
    quant_storage: str | torch.dtype | None = None
    storage: str | torch.dtype | None = None
    layers: tuple[LayerStorage, ...] = ()
    base_memory: int | None = None
    quantized_parts: str = "language"


def decide(
    facts: ModelFacts,
    profile: DeviceProfile,
    request: PrecisionRequest,
    obstacles: Sequence[Problem] = (),
    ranges: Ranges | None = None,
) -> PrecisionPolicy:
    """Return the policy for a model, a device and the request of the user.

    Raises PrecisionError if the request has conflicts. The error lists the conflicts with their fixes, the problems
    `obstacles` with library versions, and the nearest policy that works.
    """
    draft = _Draft(facts, profile, request)
    compute, master, storage = draft.roles()
    problems, warnings, reasons = [*obstacles, *draft.problems], draft.warnings, draft.reasons
    pinned = () if compute == torch.float32 else (*facts.pinned, *facts.pinned_strict)
    if problems:
        raise PrecisionError(
            f"{len(problems)} conflict{'s' if len(problems) > 1 else ''} in the requested precision",
            problems,
            hint=_nearest(facts, profile, request, obstacles),
        )
    double_quant, quant_storage = _packing(facts, request, storage)
    whole = request.quantized_parts == "all"
    quantizes = storage in QUANTIZATIONS and facts.saved_format is None
    dense, read = facts.dense if quantizes and not whole else (), facts.never_quantized if quantizes else ()
    plain = compute if storage in QUANTIZATIONS else parse_dtype(storage)
    reasons |= fixed_reasons(compute, plain, pinned, facts.uncast)
    experts = kept_experts(facts, request)
    if experts:
        how = "as they are stored, and are dequantized when tokens use them"
        reasons["storage"] += f"; experts stay in {experts}, {how}"
    routers = facts.routers and compute != torch.float32
    if routers:
        why = "rounding changes the order of the scores, and tokens go to other experts"
        reasons["routers"] = f"routers choose experts by score: {why}"
    by_ranges = decide_by_ranges(replace(facts, dense=dense), profile, compute, storage, ranges)
    reasons |= by_ranges.reasons
    if dense:
        reasons["storage"] += _DENSE.format(dtype_name(plain))
    if read:
        reasons["storage"] += _READ.format(listed(read), dtype_name(plain))
    warnings += by_ranges.warnings
    if plain != compute:
        name = dtype_name(plain)
        casts = f"autocast casts {name} weights to it at each matmul"
        reasons["compute"] += f"; {casts}; outside autocast the model computes in {name}"
        reasons["residual"] = "as the weights, because autocast casts only at matmuls"
    return PrecisionPolicy(
        compute=compute,
        storage=storage,
        master=master,
        reduce=master,
        loss_scaling=compute == torch.float16,
        trainable=request.trainable,
        device=profile.name,
        pinned=tuple(sorted(set(pinned))),
        double_quant=double_quant,
        quant_storage=quant_storage,
        wide_residual=by_ranges.wide and plain == compute,
        layers=request.layers,
        dense=dense,
        never_quantized=read and (*read, *facts.kept),
        exceptions=by_ranges.exceptions,
        loss_scale=by_ranges.loss_scale,
        experts=experts,
        routers=routers,
        reasons=reasons,
        warnings=tuple(warnings),
    )


@dataclass(frozen=True)
class _Draft:
    """An unfinished decision on a policy: problems and warnings so far, and the reason for each role."""

    facts: ModelFacts
    profile: DeviceProfile
    request: PrecisionRequest
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def roles(self) -> tuple[torch.dtype, torch.dtype, str]:
        """Return (compute dtype, master dtype, storage). The result is valid only if `problems` is empty."""
        storage_format = self._storage_format()
        compute = self._compute(storage_format)
        master = self._master(compute)
        return compute, master, self._storage(storage_format, compute, master)

    def _refuse(self, actual: str, expected: str, fix: str) -> None:
        self.problems.append(Problem(actual, expected, fix))

    def _storage_format(self) -> str | None:
        requested = self.request.quantization
        saved = self.facts.quantization.format if self.facts.quantization else None
        if self.request.trainable not in TRAINABLE:
            self._refuse(f"trainable={self.request.trainable!r}", "'lora' or 'full'", "set one of the two")
        if requested not in (None, *REQUESTABLE):
            expected = f"one of {', '.join(REQUESTABLE)} or none"
            self._refuse(f"quantization {requested!r}", expected, "give one of these")
            return None
        if self.request.trainable == "full" and (requested or saved in QUANTIZATIONS):
            what = f"every weight trainable, but the weights are stored in {requested or saved}"
            expected = "float weights, because quantized weights have no gradient"
            self._refuse(what, expected, f"{_TRAIN_ADAPTERS}, or omit the quantization")
        if saved in QUANTIZATIONS:
            if requested not in (None, saved):
                what = f"quantization {requested}, but {self.facts.source} is saved in {saved}"
                fix = f"omit the quantization (the checkpoint's {saved} is kept), or use the 16-bit original"
                self._refuse(what, f"{saved}, or an unquantized checkpoint", fix)
            self.reasons["storage"] = f"the checkpoint is saved in {saved}"
            return saved
        if problem := unreadable(self.facts):
            self.problems.append(problem)
        elif requested == MXFP4 and not (self.facts.quantization and self.facts.quantization.experts):
            trained = self.facts.trained_dtype
            stores = saved or (dtype_name(trained) if trained else "another format")
            what = f"quantization {MXFP4}, but {self.facts.source} stores its weights in {stores}"
            expected = f"a checkpoint with experts in {MXFP4}, like gpt-oss, because isotype keeps this format, but converts no weights to it"
            self._refuse(what, expected, "request nf4 or int8, or omit the quantization")
        elif requested and requested != MXFP4:
            self.reasons["storage"] = "as requested"
            return requested
        return None

    def _compute(self, storage_format: str | None) -> torch.dtype:
        if self.request.dtype in ("auto", None):
            compute, self.reasons["compute"] = _auto_compute(self.facts, self.profile, storage_format)
            return compute
        compute = parse_dtype(self.request.dtype)
        name = dtype_name(compute)
        self.reasons["compute"] = "as requested"
        if compute not in COMPUTE_DTYPES:
            expected = "float32, bfloat16 or float16"
            self._refuse(f"compute dtype {name}", expected, "use one of these, or auto")
            return compute
        support, best = self.profile.supports(compute), self.profile.best_dtype()
        slower = self.profile.slower(compute, best)
        times = "slow" if slower is None else f"{slower:.2g} times slower"
        if support == "refused":
            expected = f"one of {', '.join(sorted(dtype_name(d) for d in self.profile.native))}"
            fix = f"{self.profile.reason(compute)}; use {dtype_name(best)}, or auto"
            self._refuse(f"compute dtype {name} on {self.profile.title}", expected, fix)
        elif support == "emulated":
            why = f"{self.profile.reason(compute)}; expect it to be {times}"
            runs = f"the best dtype of this device is {dtype_name(best)}"
            self.warnings.append(f"{name} on {self.profile.title}: {why} ({runs})")
        elif slower is not None and slower >= 1.5:
            matmuls = f"its matmuls run {times} than {dtype_name(best)}'s"
            self.warnings.append(f"{name} on {self.profile.title}: {matmuls}")
        return compute

    def _master(self, compute: torch.dtype) -> torch.dtype:
        if self.request.master is None:
            self.reasons["master"] = "float32 keeps small updates; each use casts to the compute dtype"
            return torch.float32
        master = parse_dtype(self.request.master)
        name = dtype_name(master)
        self.reasons["master"] = "as requested"
        if master not in COMPUTE_DTYPES:
            fix = "omit it, because float32 is right"
            self._refuse(f"master dtype {name}", "float32, bfloat16 or float16", fix)
        elif compute == torch.float32 and master != torch.float32:
            what = f"float32 compute with {name} masters"
            expected = "masters with at least the precision of the compute dtype"
            self._refuse(what, expected, f"omit the master dtype, or compute in {name}")
        elif compute == torch.float16 and master != torch.float32:
            scaler = f"a GradScaler, which cannot unscale {name} gradients"
            expected = f"float32 masters, because float16 compute needs {scaler}"
            fix = "omit the master dtype, or compute in bfloat16"
            self._refuse(f"float16 compute with {name} masters", expected, fix)
        elif master != torch.float32:
            lost = "every update smaller than half a unit in the last place of the weight"
            self.warnings.append(f"{name} masters lose {lost}")
        return master

    def _storage(self, storage_format: str | None, compute: torch.dtype, master: torch.dtype) -> str:
        options = " and ".join(n for n in ("double_quant", "quant_storage") if getattr(self.request, n))
        if options and storage_format not in FOUR_BITS:
            what = f"{options} with {storage_format or 'no'} quantization"
            self._refuse(what, "quantization nf4 or fp4", f"request nf4 or fp4, or omit {options}")
        if self.request.storage is not None:
            return self._requested_storage(self.request.storage, storage_format, compute, master)
        if storage_format:
            return storage_format
        if self.request.trainable == "full":
            self.reasons["storage"] = "every weight is trainable, so the weights are the masters"
            return dtype_name(master)
        saved = self.facts.quantization
        if saved and saved.dequantized and not kept_experts(self.facts, self.request):
            keeps = f"; --quantization {MXFP4} keeps experts as they are stored" if saved.experts else ""
            why = f"because the format has no backward{keeps}"
            self.reasons["storage"] = f"{saved.format} weights are dequantized once at load, {why}"
        else:
            self.reasons["storage"] = "frozen weights are stored in the compute dtype, so no step casts them"
        return dtype_name(compute)

    def _requested_storage(
        self, requested: str | torch.dtype, form: str | None, compute: torch.dtype, master: torch.dtype
    ) -> str:
        if requested in QUANTIZATIONS:
            fix = f"request quantization {requested} instead of storage"
            self._refuse(f"storage {requested}", "a float dtype", fix)
            return form or dtype_name(compute)
        storage = parse_dtype(requested)
        name, low = dtype_name(storage), dtype_name(compute)
        if storage not in COMPUTE_DTYPES:
            self._refuse(f"storage {name}", "float32, bfloat16 or float16", "give one of these")
        if form:
            drop = f"omit the storage (the weights are stored in {form})"
            fix = f"{drop}, or use an unquantized checkpoint and omit the quantization"
            self._refuse(f"storage {name} with weights quantized in {form}", "one of the two", fix)
            return form
        if self.request.trainable == "full" and storage != master:
            what = f"storage {name} with every weight trainable and {dtype_name(master)} masters"
            expected = "the dtype of the masters, because the weights are the masters"
            self._refuse(what, expected, f"set no storage dtype, or {_TRAIN_ADAPTERS}")
        elif compute == torch.float32 != storage:
            what, fix = f"storage {name} with compute float32", f"set no storage dtype, or compute in {name}"
            self._refuse(what, "storage float32, because autocast does not cast weights to float32", fix)
        self.reasons["storage"] = "as requested"
        if storage != compute and self.request.trainable == "lora":
            memory = " and they take twice the memory" if storage == torch.float32 else ""
            self.warnings.append(f"{name} storage: every step casts the frozen weights to {low}{memory}")
        return name


def kept_experts(facts: ModelFacts, request: PrecisionRequest) -> str:
    """Return the format of the checkpoint if stacked experts keep it; else ""."""
    saved = facts.quantization
    if saved is None or not saved.experts or request.trainable == "full":
        return ""
    return saved.experts if request.quantization or saved.in_memory or not saved.dequantized else ""


def _auto_compute(facts: ModelFacts, profile: DeviceProfile, form: str | None) -> tuple[torch.dtype, str]:
    trained, best = facts.trained_dtype, profile.best_dtype()
    if trained is None or trained not in COMPUTE_DTYPES:
        return best, f"the best dtype that {profile.title} runs natively; the checkpoint names no dtype"
    name = dtype_name(trained)
    if trained == torch.float32 and form and best != torch.float32:
        worse = f"slower and no more precise than {dtype_name(best)} matmuls"
        return best, f"{form} weights are rounded already, so float32 matmuls would be {worse}"
    if profile.supports(trained) == "native":
        return trained, f"the checkpoint was trained in {name}, and {profile.title} runs this dtype natively"
    return (
        best,
        f"the checkpoint was trained in {name}; {profile.reason(trained)}, so {dtype_name(best)} is used",
    )


def _packing(facts: ModelFacts, request: PrecisionRequest, storage: str) -> tuple[bool, torch.dtype]:
    """Return (True for double quantization, dtype of the packed 4-bit weights)."""
    if storage not in FOUR_BITS:
        return False, torch.uint8
    saved, packed = facts.quantization, request.quant_storage
    if saved and saved.format == storage:
        return bool(saved.double_quant), saved.quant_storage or torch.uint8
    packed = torch.uint8 if packed in (None, "uint8", torch.uint8) else parse_dtype(packed)
    return bool(request.double_quant), packed


_DENSE = (
    "; towers and projectors stay {}: they are a small part of the weights, and every image or audio token passes through them "
    "(--quantized_parts all quantizes them)"
)
_READ = (
    "; {} stay {}, because packed codes cannot be trained, and the code of the model cannot compute with them"
)


def _nearest(
    facts: ModelFacts, profile: DeviceProfile, request: PrecisionRequest, obstacles: Sequence[Problem]
) -> str | None:
    """Return a line that describes the nearest policy that works; None if no policy works."""
    if obstacles:
        return None
    changes: tuple[Mapping[str, Any], ...] = (
        {"master": None},
        {"storage": None},
        {"double_quant": None, "quant_storage": None},
        {"dtype": "auto"},
        {"dtype": "auto", "master": None},
        {"quantization": None},
        {"trainable": "lora"},
        {"trainable": "lora"} | dict.fromkeys(("quantization", "double_quant", "quant_storage", "storage")),
        {f.name: f.default for f in fields(PrecisionRequest)},
    )
    for change in changes:
        candidate = replace(request, **change)
        draft = _Draft(facts, profile, candidate)
        draft.roles()
        if draft.problems:
            continue
        policy = decide(facts, profile, candidate)
        return (
            f"nearest policy that works: compute {dtype_name(policy.compute)}, storage {policy.storage}, "
            f"masters {dtype_name(policy.master)}, trainable {policy.trainable}"
        )
    return None


def fixed_reasons(
    compute: torch.dtype, plain: torch.dtype, pinned: Sequence[str], uncast: Sequence[str]
) -> dict[str, str]:
    """Return role -> reason, for the roles that the user cannot choose."""
    name = dtype_name(compute)
    low = compute != torch.float32
    outputs = f"their outputs are cast to {dtype_name(plain)}"
    if uncast:
        start = "no cast for the outputs of" if set(pinned) <= set(uncast) else f"{outputs}, except for"
        outputs = f"{start} modules with {', '.join(uncast)}, because their own code decides"
    return {
        "optimizer": "the dtype of the masters that the optimizer updates",
        "reduce": "gradients have the dtype of their masters",
        "pinned": (
            f"the model's author keeps float32 for {', '.join(sorted(set(pinned)))}; {outputs}"
            if pinned
            else ("the model keeps no parameter in float32" if low else "everything is float32 already")
        ),
        "norms": (
            "the variance is float32; RMSNorm returns its input's dtype, and LayerNorm returns float32 under CUDA autocast"
            if low
            else "as everything else"
        ),
        "buffers": f"never rounded, because {name} would shift rotary positions"
        if low
        else "as everything else",
        "loss": "log-sum-exp over the vocabulary needs the range and the digits of float32",
        "loss_scaling": (
            "float16 gradients underflow below 6e-8 without loss scaling"
            if compute == torch.float16
            else f"{name} has the range of float32"
            if compute == torch.bfloat16
            else "float32 gradients do not underflow"
        ),
    }
