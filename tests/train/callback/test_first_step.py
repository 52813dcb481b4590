"""The check of a running training's step by its first batch."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard

import isotype
from isotype.lora.loss.trl_head import put_head
from isotype.report.check.report import Report
from isotype.trace.fake.values import Values
from isotype.train.callback import before_first_step


def report_of(model: Any, batch: dict[str, Any], folder: Path) -> Report:
    """Return the report of the check at the first call of a model."""
    reports: list[Report] = []
    arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to="none")
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    before_first_step(model, arguments, optimizer, reports.append)
    model(**batch)
    (report,) = reports
    return report


def test_the_optimizer_of_the_training_counts_and_not_the_name_in_its_arguments(tmp_path: Path) -> None:
    """`optim` names a fused AdamW."""
    setup = report_of(torch.nn.Linear(4, 4), {"input": torch.ones(2, 4)}, tmp_path).trace.setup
    assert (setup.optimizer, setup.learning_rate) == ("AdamW", 1e-3)


@pytest.mark.parametrize(("ranges", "measured"), [(None, 0), ("measure", 1)])
def test_a_float16_step_is_measured_only_where_nobody_has_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranges: Any, measured: int
) -> None:
    """A training has decided its policy; to measure again would take more memory at the first batch than any step."""
    seen: list[Any] = []
    monkeypatch.setattr("isotype.preflight.run.measured", lambda *args: (seen.append(args), (None, ()))[1])
    model, ids = torch.nn.Sequential(torch.nn.Linear(4, 4)).half(), torch.ones(2, 4, dtype=torch.float16)
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    before_first_step(model, arguments, None, lambda _: None, None, ranges)
    model(ids)
    assert len(seen) == measured


def test_a_trace_is_gone_before_the_step_begins(tmp_path: Path) -> None:
    """A trace has reference cycles and values of small tensors, which would occupy memory during the step."""
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=128,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).train()
    put_head(model)
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    alive: list[int] = []

    def count(_: Report) -> None:
        alive.append(sum(type(each) is Values for each in gc.get_objects()))

    gc.collect(2)
    before_first_step(model, arguments, torch.optim.AdamW(model.parameters()), count)
    gc.disable()
    try:
        ids = torch.ones(2, 4, dtype=torch.long)
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    finally:
        gc.enable()
    assert alive == [0]


@pytest.mark.parametrize("lengths", [(12, 5, 7), (12, 12, 12)])
def test_padding_that_the_step_leaves_out_is_not_traced(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=128,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    isotype.fuse(model)
    put_head(model)
    mask = torch.tensor([[1] * length + [0] * (12 - length) for length in lengths])
    ids = torch.arange(36).view(3, 12) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    rows: list[int] = []
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:-1].numel()))
    report = report_of(model.train(), {**batch, "fused_lm_head": True}, tmp_path)
    assert report.ok, report
    shapes = [shape for call in report.trace.calls if ".mlp" in call.module for _, shape in call.results]
    traced = {math.prod(shape) // 48 for shape in shapes if shape[-1:] == (48,)}
    assert report.trace.failure is None
    assert (rows, traced & {sum(lengths), mask.numel()}) == ([sum(lengths)], {sum(lengths)})


@pytest.mark.parametrize("weights", [8_000_000, 0])
def test_packed_rows_of_our_own_forward_are_wired_as_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: int
) -> None:
    """The forward passes position ids and no mask, on the model's own layers and on a small model of its class."""
    monkeypatch.setattr("isotype.model.small.MOST_WEIGHTS", weights)
    monkeypatch.setattr("isotype.model.small.MOST_WEIGHTS_OF_CLASS", 32_000_000)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=128,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).train()
    put_head(model)
    ids = torch.arange(4, 16)[None]
    positions = torch.tensor([[*range(6), *range(6)]])
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids,
        "position_ids": positions,
    }
    for packed in (False, True):
        model.__dict__["_isotype_packed_rows"] = packed
        reach = report_of(model, {**batch, "fused_lm_head": True}, tmp_path).trace.reach
        assert reach is not None
        assert not reach.undecided
        assert (reach.leak("packed row") is None) == packed


@pytest.mark.parametrize(("put", "codes"), [(put_head, set()), (lambda model: None, {"IST903"})])
def test_the_shift_of_labels_is_the_fused_heads(tmp_path: Path, put: Any, codes: set[str]) -> None:
    """BartForCausalLM compares logits and labels of the same token; TRL's fused head shifts the labels."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, decoder_layers=1, decoder_ffn_dim=48, decoder_attention_heads=2,
        max_position_embeddings=64, is_decoder=True, is_encoder_decoder=False, dropout=0.0,
    )  # fmt: skip
    model = transformers.BartForCausalLM(config)
    put(model)
    ids = torch.randint(5, 60, (2, 12))
    fused = {"fused_lm_head": True} if codes == set() else {}
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **fused}
    assert {finding.code for finding in report_of(model, batch, tmp_path).errors} == codes


@pytest.mark.usefixtures("process_group")
def test_parameters_that_fsdp_has_gathered_are_those_of_the_optimizer(tmp_path: Path) -> None:
    """FSDP2 gathers the parameters outside of the blocks before the whole model's forward."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model[1])
    fully_shard(model)
    report = report_of(model, {"input": torch.ones(2, 4)}, tmp_path)
    assert report.findings == ()
    assert report.trace.unheld == ()
