from __future__ import annotations

import torch

from isotype.rules.ist405_absmax import find
from tests.rules.samples import BF16, packed, trace


def test_rounded_scales() -> None:
    (finding,) = find(trace([packed(absmax=BF16)]))
    assert finding.severity == "error"
    assert finding.message == "the scales of 1 quantized weight are bfloat16"
    (on_cpu,) = find(trace([packed(absmax=BF16)], device="cpu"))
    assert on_cpu.severity == "warning"


def test_float32_and_quantized_scales_are_silent() -> None:
    assert not list(find(trace([packed(), packed(absmax=torch.uint8), packed(state=None)])))
