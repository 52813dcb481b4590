"""What is refused before anything is sharded; tests/distributed shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotype.core.errors import PrecisionError, UsageError
from isotype.model.shard import device_of, integers_named, shard_model
from isotype.precision.policy import PrecisionPolicy

POLICY = PrecisionPolicy(compute=torch.bfloat16, storage="bfloat16")


def test_the_device_of_a_policy_is_one_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU a torch that is built for CUDA names its device all the same, unless it is asked to check."""

    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    assert device_of(replace(POLICY, device="t4")) == torch.device("cpu")


def test_one_process_alone_is_told_how_to_start_several() -> None:
    with pytest.raises(UsageError, match="torchrun --nproc_per_node N"):
        shard_model(torch.nn.Linear(2, 2), POLICY)


def test_a_torch_that_shards_no_integers_is_named_with_a_cure() -> None:
    with pytest.raises(PrecisionError, match="--bnb_4bit_quant_storage bfloat16"), integers_named():
        torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="another"), integers_named():
        raise RuntimeError("another")
