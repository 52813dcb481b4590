"""torch still says which devices an operator has a kernel for."""

from __future__ import annotations

import torch

from isotype.compat.torch import has_kernel


def test_kernels_of_operators() -> None:
    assert has_kernel("aten::mm", "cpu")
    assert not has_kernel("aten::mm", "a device that is none")
    # A composition of other operators is no kernel of its own.
    assert not has_kernel("aten::_fused_rms_norm", "cpu")
    assert has_kernel("aten::mm", "cuda") == torch.backends.cuda.is_built()
