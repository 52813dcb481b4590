from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import isotype
from isotype.compat.torch_fsdp import fake_process_group
from tests.corpus.cases.crashes_parts import nf4
from tests.rules.traces import BF16, FP32, batch, found, llama, of_llama, traced

RULE = "ist204_output_copies"


class Float32Outputs(nn.Module):
    """What `Accelerator.prepare` makes of a model: every output is cast after the loss is there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        output = self.model(**inputs)
        return {"loss": output.loss, "logits": output.logits.float()}


def chunked(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    pieces = zip(logits.flatten(0, 1).split(8), targets.flatten().split(8), strict=True)
    return torch.stack([nn.functional.cross_entropy(rows.float(), wanted) for rows, wanted in pieces]).mean()


def test_a_copy_that_nothing_reads() -> None:
    (finding,) = found(RULE, traced(Float32Outputs(llama()), batch()))
    assert finding.message == "1 output is copied to float32 (16.0 KiB): no operator uses the copies"
    assert finding.cause.startswith("a cast to float32 at test_ist204.py:")
    assert finding.cost is not None
    assert finding.cost.memory_bytes == 2 * 16 * 128 * 4
    assert finding.severity in ("note", "warning")


def test_a_copy_by_accelerate_in_the_training_of_a_trainer() -> None:
    """A user of transformers' Trainer cannot unwrap the model, and autocast must not be lost with the cast."""
    from accelerate.utils import convert_outputs_to_fp32

    model = llama()
    model.forward = convert_outputs_to_fp32(model.forward)
    (finding,) = found(RULE, traced(model, batch()))
    (fix,) = finding.fixes
    assert fix.description.startswith("with transformers' Trainer, set use_liger_kernel=True")
    assert fix.description.endswith("and call it under torch.autocast")
    (other,) = found(RULE, traced(Float32Outputs(llama()), batch()))
    assert other.fixes[0].description == "keep the outputs in bfloat16: remove the cast"


def test_a_copy_that_the_loss_reads_in_pieces() -> None:
    inputs = batch()
    ids = inputs["input_ids"]
    (finding,) = found(RULE, traced(llama(), lambda m: chunked(m(input_ids=ids).logits.float(), ids)))
    assert (
        finding.message == "1 output is copied to float32 (16.0 KiB): the loss uses the copies piece by piece"
    )
    assert finding.fixes[0].description == "split the outputs first, and then cast each piece to float32"


def test_each_piece_cast_by_itself() -> None:
    ids = batch()["input_ids"]
    assert found(RULE, traced(llama(), lambda m: chunked(m(input_ids=ids).logits, ids))) == []


def test_the_copy_of_the_loss_itself() -> None:
    assert found(RULE, of_llama()) == []
    # A cache that is filled in training is a note: autocast's `cat` makes it float32.
    noted = found(RULE, of_llama(FP32, autocast=BF16))
    assert {finding.severity for finding in noted} <= {"note"}


class Normed(nn.Module):
    """CUDA's autocast runs group norm in float32: it casts what the norm then reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def test_a_cast_that_autocast_makes_is_read_by_what_it_was_made_for() -> None:
    report = isotype.check(
        Normed(), {"x": torch.ones(2, 3, 8, 8)}, device="a100", autocast=BF16, verify=False
    )
    assert [finding.code for finding in report.findings if finding.code == "IST204"] == []
    casts = [call for call in report.trace.calls if call.module == "norm" and "_to_copy" in call.op]
    assert casts


def test_what_a_quantized_layer_returns_has_the_dtype_that_it_was_given() -> None:
    model = nf4(llama(), BF16)
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.float()
    assert found(RULE, traced(model, batch())) == []


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        return {"logits": self.head(hidden).float(), "hidden": hidden.float()}


def test_outputs_from_which_the_script_computes_its_own_loss() -> None:
    inputs = {"x": torch.ones(64, 16, dtype=BF16)}
    assert found(RULE, traced(Pair().to(BF16), inputs)) == []
    assert found(RULE, traced(Pair().to(BF16), lambda m: m(**inputs)["logits"].mean()))  # the loss is known


def test_a_module_of_fsdp_reads_what_the_module_before_it_returns() -> None:
    """NVIDIA-NeMo/Automodel #3652."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))
    casts = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
    with fake_process_group(1) as mesh:
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=casts)
        assert found(RULE, traced(model, {"input": torch.ones(64, 16)})) == []
