"""What is refused before anything is sharded; tests/distributed shards."""

from __future__ import annotations

import pytest
import torch

from isotype.core.errors import PrecisionError, UsageError
from isotype.model.shard import integers_named, shard_model
from isotype.precision.policy import PrecisionPolicy

POLICY = PrecisionPolicy(compute=torch.bfloat16, storage="bfloat16")


def test_one_process_alone_is_told_how_to_start_several() -> None:
    with pytest.raises(UsageError, match="torchrun --nproc_per_node N"):
        shard_model(torch.nn.Linear(2, 2), POLICY)


def test_a_torch_that_shards_no_integers_is_named_with_a_cure() -> None:
    with pytest.raises(PrecisionError, match="--bnb_4bit_quant_storage bfloat16"), integers_named():
        torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="another"), integers_named():
        raise RuntimeError("another")
