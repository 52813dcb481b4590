"""Why a role has its dtype, where nothing about the model or the device has to be asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isotype.core.dtypes import dtype_name


def fixed_reasons(compute: torch.dtype, plain: torch.dtype, pinned: Sequence[str]) -> dict[str, str]:
    """Role -> why, of the roles that follow from the compute dtype, the float weights' dtype and the pins."""
    name = dtype_name(compute)
    low = compute != torch.float32
    return {
        "optimizer": "as the masters it belongs to",
        "reduce": "gradients have the dtype of the masters they belong to",
        "pinned": (
            f"kept by the model's author: {', '.join(sorted(set(pinned)))}; their outputs return to {dtype_name(plain)}"
            if pinned
            else ("the model pins no parameter" if low else "everything is float32 already")
        ),
        "norms": (
            "variance in float32; RMSNorm returns its input's dtype, LayerNorm under CUDA autocast float32"
            if low
            else "as everything else"
        ),
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


def autocast_reasons(compute: str, plain: torch.dtype) -> dict[str, str]:
    """Role -> why, where autocast casts float weights of another dtype; `compute` is the compute dtype's reason."""
    name = dtype_name(plain)
    return {
        "compute": (
            f"{compute}; autocast casts {name} weights to it at each matmul; outside autocast the model computes in "
            f"{name}"
        ),
        "residual": "as the weights: autocast casts at each matmul only",
    }
