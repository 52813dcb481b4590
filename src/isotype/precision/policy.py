"""The precision policy: the dtype of every role of a training run, each with its reason."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from isotype.core.dtypes import QUANTIZATIONS, dtype_name, parse_dtype
from isotype.core.errors import CheckpointError, Problem

POLICY_FILE = "precision_policy.json"
"""Name of the file in a saved adapter's folder that holds the policy it was trained under."""

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
        storage: how a frozen base weight is stored: a float dtype's name, `"nf4"`, `"fp4"` or `"int8"`.
        master: dtype of trainable parameters, which the optimizer updates.
        reduce: dtype in which gradients are summed across ranks: the masters', whose gradients they are.
        loss_scaling: whether a GradScaler is needed (float16 compute with float32 masters, nothing else).
        trainable: `"lora"` (adapters on a frozen base) or `"full"` (every weight).
        device: name of the device profile the policy was decided for.
        pinned: patterns of parameters that stay float32; a parameter is pinned if its name contains one.
        double_quant: whether the quantization constants are quantized too (nf4 and fp4 only).
        quant_storage: dtype of the packed 4-bit bytes; FSDP needs the compute dtype here.
        keep_frozen: whether frozen float weights stay in the dtype they have, whatever `storage` says: true of a
            policy that was read off a model (`PrecisionCallback` without a policy).
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
    keep_frozen: bool = False
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
        # Where autocast casts float weights at each matmul, the residual stream is not in the compute dtype.
        titles = dict(_ROLES) | ({"compute": "matmuls"} if self.plain != self.compute else {})
        return tuple((titles[role], dtypes[role], self.reasons.get(role, "")) for role, _ in _ROLES)

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
                        f"{path}: {error}", "the JSON that isotype wrote", "delete the file to decide again"
                    )
                ],
            ) from error
