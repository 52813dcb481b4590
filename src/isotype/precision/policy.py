"""The precision policy: the dtype of every role of a training run, decided once, each with its reason.

`decide` is pure: facts about the model, a device profile and the user's wishes go in, a policy or one error that
names every conflict comes out. `isotype.resolve_precision` gathers the facts and calls it.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isotype.dtypes import COMPUTE_DTYPES, QUANTIZATIONS, dtype_name, parse_dtype
from isotype.errors import CheckpointError, PrecisionError, Problem

if TYPE_CHECKING:
    from isotype.checkpoint.facts import ModelFacts
    from isotype.precision.hardware import DeviceProfile

POLICY_FILE = "precision_policy.json"
"""Name of the file in a saved adapter's folder that holds the policy it was trained under."""

TRAINABLE = ("lora", "full")

_ROLES = (
    ("storage", "frozen base weights"),
    ("compute", "matmuls and residual stream"),
    ("master", "trainable parameters"),
    ("optimizer", "optimizer state"),
    ("reduce", "gradient reduction"),
    ("pinned", "pinned parameters"),
    ("norms", "norms"),
    ("buffers", "rotary and other buffers"),
    ("loss", "softmax and loss"),
    ("loss_scaling", "loss scaling"),
)


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of one training run. A value: pass it, compare it, save it; it never changes.

    Attributes:
        compute: dtype of matmul operands and of the residual stream.
        storage: how a frozen base weight lies in memory: a float dtype's name, `"nf4"`, `"fp4"` or `"int8"`.
        master: dtype of trainable parameters, which the optimizer updates.
        reduce: dtype in which gradients are summed across ranks.
        loss_scaling: whether a GradScaler is needed (float16 compute with float32 masters, nothing else).
        trainable: `"lora"` (adapters on a frozen base) or `"full"` (every weight).
        device: name of the device profile the policy was decided for.
        pinned: patterns of parameters that stay float32; a parameter is pinned if its name contains one.
        double_quant: whether the quantization constants are quantized too (nf4 and fp4 only).
        quant_storage: dtype of the packed 4-bit bytes; FSDP needs the compute dtype here.
        reasons: role -> why.
        warnings: what an explicit request costs.
    """

    compute: torch.dtype
    storage: str
    master: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    loss_scaling: bool = False
    trainable: str = "lora"
    device: str = "cpu"
    pinned: tuple[str, ...] = ()
    double_quant: bool = False
    quant_storage: torch.dtype = torch.uint8
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def quantized(self) -> bool:
        """Whether base weights are stored in a quantization format."""
        return self.storage in QUANTIZATIONS

    @property
    def plain(self) -> torch.dtype:
        """Dtype of frozen weights that are neither quantized nor pinned (embeddings, norms, lm_head)."""
        return self.compute if self.quantized else parse_dtype(self.storage)

    @property
    def autocast(self) -> torch.dtype | None:
        """Dtype for `torch.autocast`, or None where float32 compute needs none."""
        return None if self.compute == torch.float32 else self.compute

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """(role, dtype, reason) for every role, in reading order."""
        dtypes = {
            "storage": self.storage + (" (double quantization)" if self.double_quant else ""),
            "compute": dtype_name(self.compute),
            "master": dtype_name(self.master),
            "optimizer": dtype_name(self.master),
            "reduce": dtype_name(self.reduce),
            "pinned": "float32" if self.pinned else "none",
            "norms": "float32 inside" if self.compute != torch.float32 else "float32",
            "buffers": "float32",
            "loss": "float32",
            "loss_scaling": "on" if self.loss_scaling else "off",
        }
        return tuple((title, dtypes[role], self.reasons.get(role, "")) for role, title in _ROLES)

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        indent = " " * (sum(widths) + 4)
        lines = []
        for role, dtype, reason in rows:
            wrapped = textwrap.wrap(reason, 110 - len(indent)) or [""]
            lines.append(f"{role:<{widths[0]}}  {dtype:<{widths[1]}}  {wrapped[0]}".rstrip())
            lines += [indent + part for part in wrapped[1:]]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in values.items()}
        return {**plain, "reasons": dict(self.reasons)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrecisionPolicy:
        """The policy that `to_dict` described."""
        dtypes = {k: getattr(torch, values[k]) for k in ("compute", "master", "reduce", "quant_storage")}
        rest = {**values, **dtypes, "pinned": tuple(values["pinned"]), "warnings": tuple(values["warnings"])}
        return cls(**rest)

    def save(self, directory: str | Path) -> Path:
        """Write the policy as readable JSON into `directory` (temporary name, then rename)."""
        path = Path(directory) / POLICY_FILE
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
        return path

    @classmethod
    def read(cls, directory: str | Path) -> PrecisionPolicy | None:
        """The policy saved in `directory`, or None where there is none.

        Raises:
            CheckpointError: the file is there but is not a policy.
        """
        path = Path(directory) / POLICY_FILE
        if not path.is_file():
            return None
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                "unreadable precision policy",
                [
                    Problem(
                        f"{path}: {error}", "the JSON that isotype wrote", "delete the file to decide anew"
                    )
                ],
            ) from error


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None and "auto" mean: decide for me."""

    dtype: str | torch.dtype = "auto"
    quantization: str | None = None
    trainable: str = "lora"
    master: str | torch.dtype | None = None
    double_quant: bool | None = None
    quant_storage: str | torch.dtype | None = None


def decide(
    facts: ModelFacts, profile: DeviceProfile, wishes: Wishes, obstacles: Sequence[Problem] = ()
) -> PrecisionPolicy:
    """The policy for a model, a device and the user's wishes.

    Args:
        facts: what the checkpoint's headers and config say.
        profile: what the device can do.
        wishes: what was asked for explicitly.
        obstacles: problems found elsewhere (library versions) to be reported together with ours.

    Raises:
        PrecisionError: every conflict at once, each with what to change, and the nearest policy that works.
    """
    problems = list(obstacles)
    warnings: list[str] = []
    reasons: dict[str, str] = {}
    storage_format = _storage_format(facts, wishes, problems, reasons)
    compute = _compute(facts, profile, wishes, storage_format, problems, warnings, reasons)
    master = _master(wishes, compute, problems, warnings, reasons)
    storage = _storage(facts, wishes, storage_format, compute, master, problems, reasons)
    pinned = () if compute == torch.float32 else (*facts.pinned, *facts.pinned_strict)
    if problems:
        raise PrecisionError(
            f"{len(problems)} conflict{'s' if len(problems) > 1 else ''} in the precision asked for",
            problems,
            hint=_nearest(facts, profile, wishes, obstacles),
        )
    double_quant = _double_quant(facts, wishes, storage)
    reasons |= _fixed_reasons(compute, pinned)
    return PrecisionPolicy(
        compute=compute,
        storage=storage,
        master=master,
        reduce=torch.float32,
        loss_scaling=compute == torch.float16,
        trainable=wishes.trainable,
        device=profile.name,
        pinned=tuple(sorted(set(pinned))),
        double_quant=double_quant,
        quant_storage=_quant_storage(facts, wishes, storage),
        reasons=reasons,
        warnings=tuple(warnings),
    )


def _storage_format(
    facts: ModelFacts, wishes: Wishes, problems: list[Problem], reasons: dict[str, str]
) -> str | None:
    """The quantization format of the frozen weights, or None for a float dtype."""
    asked = wishes.quantization
    saved = facts.quantization.format if facts.quantization else None
    if wishes.trainable not in TRAINABLE:
        problems.append(Problem(f"trainable={wishes.trainable!r}", "'lora' or 'full'", "give one of the two"))
    if asked is not None and asked not in QUANTIZATIONS:
        problems.append(
            Problem(
                f"quantization {asked!r}", f"one of {', '.join(QUANTIZATIONS)} or none", "give one of these"
            )
        )
        return None
    if wishes.trainable == "full" and (asked or saved in QUANTIZATIONS):
        problems.append(
            Problem(
                f"every weight trainable, but the weights are stored in {asked or saved}",
                "float weights: quantized weights have no gradient",
                "train adapters (trainable='lora'), or leave the quantization out",
            )
        )
    if saved in QUANTIZATIONS:
        if asked not in (None, saved):
            problems.append(
                Problem(
                    f"quantization {asked}, but {facts.source} is saved in {saved}",
                    f"{saved}, or an unquantized checkpoint",
                    f"leave the quantization out (the checkpoint's {saved} is kept) or give the 16-bit original",
                )
            )
        reasons["storage"] = f"the checkpoint is saved in {saved}"
        return saved
    if asked:
        reasons["storage"] = "as asked"
        return asked
    if saved and saved != "mxfp4":
        problems.append(
            Problem(
                f"{facts.source} is quantized with {saved}",
                "float weights, mxfp4, or bitsandbytes nf4, fp4 or int8",
                "give the unquantized original and a quantization of " + ", ".join(QUANTIZATIONS),
            )
        )
    return None


def _compute(
    facts: ModelFacts,
    profile: DeviceProfile,
    wishes: Wishes,
    storage_format: str | None,
    problems: list[Problem],
    warnings: list[str],
    reasons: dict[str, str],
) -> torch.dtype:
    trained = facts.trained_dtype
    if wishes.dtype in ("auto", None):
        best = profile.best_dtype()
        if trained is None or trained not in COMPUTE_DTYPES:
            reasons["compute"] = f"the best that {profile.title} runs natively; the checkpoint names no dtype"
            return best
        name = dtype_name(trained)
        if trained == torch.float32 and storage_format and best != torch.float32:
            reasons["compute"] = (
                f"{storage_format} weights are rounded already, so {dtype_name(best)} matmuls lose nothing that "
                "float32 ones would keep and run faster"
            )
            return best
        if profile.supports(trained) == "native":
            reasons["compute"] = f"the checkpoint was trained in {name} and {profile.title} runs it natively"
            return trained
        reasons["compute"] = (
            f"the checkpoint was trained in {name}; {profile.reason(trained)}, so the best it has is taken"
        )
        return best
    compute = parse_dtype(wishes.dtype)
    name = dtype_name(compute)
    reasons["compute"] = "as asked"
    if compute not in COMPUTE_DTYPES:
        problems.append(
            Problem(f"compute dtype {name}", "float32, bfloat16 or float16", "give one of these, or auto")
        )
        return compute
    support = profile.supports(compute)
    if support == "refused":
        problems.append(
            Problem(
                f"compute dtype {name} on {profile.title}",
                f"a dtype it runs: {', '.join(sorted(dtype_name(d) for d in profile.native))}",
                f"{profile.reason(compute)}; use {dtype_name(profile.best_dtype())}, or auto",
            )
        )
    elif support == "emulated":
        warnings.append(
            f"{name} on {profile.title}: {profile.reason(compute)}; expect it to be slow "
            f"({dtype_name(profile.best_dtype())} is what it runs best)"
        )
    if compute == torch.float16 and trained == torch.bfloat16:
        warnings.append(
            "the checkpoint was trained in bfloat16: activations above 65504 overflow in float16 "
            "(loss scaling guards the gradients, not the activations)"
        )
    return compute


def _master(
    wishes: Wishes,
    compute: torch.dtype,
    problems: list[Problem],
    warnings: list[str],
    reasons: dict[str, str],
) -> torch.dtype:
    if wishes.master is None:
        reasons["master"] = "small updates survive; cast to the compute dtype where they are used"
        return torch.float32
    master = parse_dtype(wishes.master)
    name = dtype_name(master)
    reasons["master"] = "as asked"
    if master not in COMPUTE_DTYPES:
        problems.append(
            Problem(f"master dtype {name}", "float32, bfloat16 or float16", "leave it out: float32 is right")
        )
    elif compute == torch.float32 and master != torch.float32:
        problems.append(
            Problem(
                f"compute float32 with {name} masters",
                "masters of at least the precision that is computed in",
                f"leave the master dtype out, or compute in {name}",
            )
        )
    elif compute == torch.float16 and master != torch.float32:
        problems.append(
            Problem(
                f"compute float16 with {name} masters",
                "float32 masters: float16 compute needs a GradScaler, and it cannot unscale "
                f"{name} gradients",
                "leave the master dtype out, or compute in bfloat16",
            )
        )
    elif master != torch.float32:
        warnings.append(
            f"{name} masters lose every update smaller than half a unit in the last place of the weight"
        )
    return master


def _storage(
    facts: ModelFacts,
    wishes: Wishes,
    storage_format: str | None,
    compute: torch.dtype,
    master: torch.dtype,
    problems: list[Problem],
    reasons: dict[str, str],
) -> str:
    asked_for = [
        name
        for name, value in (("double_quant", wishes.double_quant), ("quant_storage", wishes.quant_storage))
        if value
    ]
    if asked_for and storage_format not in ("nf4", "fp4"):
        problems.append(
            Problem(
                f"{' and '.join(asked_for)} with {storage_format or 'no'} quantization",
                "quantization nf4 or fp4",
                "ask for one, or leave " + " and ".join(asked_for) + " out",
            )
        )
    if storage_format:
        return storage_format
    if wishes.trainable == "full":
        reasons["storage"] = "every weight is trainable, so the weights are the masters"
        return dtype_name(master)
    if facts.quantization and facts.quantization.format == "mxfp4":
        reasons["storage"] = "mxfp4 weights are dequantized once at load: they have no backward"
    else:
        reasons["storage"] = "frozen weights lie in the compute dtype, so no step casts them"
    return dtype_name(compute)


def _double_quant(facts: ModelFacts, wishes: Wishes, storage: str) -> bool:
    if storage not in ("nf4", "fp4"):
        return False
    if facts.quantization and facts.quantization.format == storage:
        return bool(facts.quantization.double_quant)
    return bool(wishes.double_quant)


def _quant_storage(facts: ModelFacts, wishes: Wishes, storage: str) -> torch.dtype:
    if storage not in ("nf4", "fp4"):
        return torch.uint8
    if facts.quantization and facts.quantization.format == storage:
        return facts.quantization.quant_storage or torch.uint8
    asked = wishes.quant_storage
    if asked in (None, "uint8", torch.uint8):
        return torch.uint8
    return parse_dtype(asked)


def _fixed_reasons(compute: torch.dtype, pinned: Sequence[str]) -> dict[str, str]:
    name = dtype_name(compute)
    low = compute != torch.float32
    return {
        "optimizer": "as the masters it belongs to",
        "reduce": "sums over many ranks do not round",
        "pinned": (
            f"kept by the model's author: {', '.join(sorted(set(pinned)))}; their outputs return to {name}"
            if pinned
            else ("the model pins no parameter" if low else "everything is float32 already")
        ),
        "norms": f"variance in float32, output returned in {name}" if low else "as everything else",
        "buffers": f"never rounded: {name} would shift rotary positions" if low else "as everything else",
        "loss": "log-sum-exp over the vocabulary needs the range and the digits",
        "loss_scaling": (
            "float16 gradients underflow below 6e-8 without it"
            if compute == torch.float16
            else f"{name} has the range of float32"
            if compute == torch.bfloat16
            else "float32 gradients do not underflow"
        ),
    }


def _nearest(
    facts: ModelFacts, profile: DeviceProfile, wishes: Wishes, obstacles: Sequence[Problem]
) -> str | None:
    """The first policy that works among wishes that give up ever more, described in one line."""
    if obstacles:
        return None
    given_up: tuple[Mapping[str, Any], ...] = (
        {"master": None},
        {"double_quant": None, "quant_storage": None},
        {"dtype": "auto"},
        {"dtype": "auto", "master": None},
        {"quantization": None},
        {"trainable": "lora"},
        {"trainable": "lora", "quantization": None, "double_quant": None, "quant_storage": None},
        {f.name: f.default for f in fields(Wishes)},
    )
    for change in given_up:
        candidate = replace(wishes, **change)
        try:
            _check_only(facts, profile, candidate)
        except PrecisionError:
            continue
        policy = decide(facts, profile, candidate)
        return (
            f"nearest policy that works: compute {dtype_name(policy.compute)}, storage {policy.storage}, "
            f"masters {dtype_name(policy.master)}, trainable {policy.trainable}"
        )
    return None


def _check_only(facts: ModelFacts, profile: DeviceProfile, wishes: Wishes) -> None:
    problems: list[Problem] = []
    storage_format = _storage_format(facts, wishes, problems, {})
    compute = _compute(facts, profile, wishes, storage_format, problems, [], {})
    master = _master(wishes, compute, problems, [], {})
    _storage(facts, wishes, storage_format, compute, master, problems, {})
    if problems:
        raise PrecisionError("", problems)
