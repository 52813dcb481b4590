from __future__ import annotations

import torch

from isotype.rules.ist702_fsdp_storage import find
from tests.rules.samples import BF16, packed, trace


def test_bytes_under_fsdp1() -> None:
    (finding,) = find(trace([packed()], fsdp=1))
    assert finding.severity == "error"
    assert finding.message == "FSDP1 cannot flatten uint8: 1 nf4 weight is stored in this dtype"
    assert finding.fixes[0].description == "load with bnb_4bit_quant_storage=bfloat16"


def test_int8_has_no_storage_to_choose() -> None:
    (finding,) = find(trace([packed(None, format="int8", packed=torch.int8, storage=torch.int8)], fsdp=1))
    assert finding.fixes[0].actions[0].target == "quantization"


def test_float_storage_and_other_runs_are_silent() -> None:
    assert not list(find(trace([packed(packed=BF16, storage=BF16)], fsdp=1)))
    assert not list(find(trace([packed()])))
