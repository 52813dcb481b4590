"""TRL still keeps the arguments of its fused head where `isotype.compat.trl` reads them."""

from __future__ import annotations

import ast
import copy
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import trl
import trl.trainer.utils
from torch import nn
from trl.kernels import chunked_logprob

import isotype
from isotype.compat.trl import (
    NAMES,
    head_arguments,
    headless_forward,
    incompatibilities,
    inputs_of_policy,
    is_fused_forward,
    lacking,
    lacking_inside,
    put_forward,
)
from isotype.preflight.run import run
from isotype.records.request import StepRequest

SOURCE = Path(isotype.__file__).parent


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_trainers_of_policies_name_the_inputs_of_the_model(trainer: type) -> None:
    assert {"input_ids", "attention_mask", "pixel_values", "image_sizes"} < inputs_of_policy(trainer)
    assert "batch_num_images" not in inputs_of_policy(trainer)


def test_the_arguments_of_a_head_are_in_the_closure_of_its_forward() -> None:
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    assert not is_fused_forward(model.forward)
    trl.trainer.utils.add_fused_lm_head(model, temperature=0.5, cast_lm_head_to_fp32=True)
    assert is_fused_forward(model.forward)
    assert head_arguments(model.forward.__func__) == {
        "temperature": 0.5,
        "cast_lm_head_to_fp32": True,
        "outputs": ("log_probs",),
    }
    assert incompatibilities(trl.trainer.utils) == []
    put_forward(model, lambda self: None)
    copied = copy.deepcopy(model)  # TRL's forward of the copy calls the original
    assert headless_forward(copied).__self__ is copied
    assert headless_forward(copied).__func__ is transformers.LlamaForCausalLM.forward


def add_fused_lm_head(model: Any, temp: float = 1.0, outputs: tuple[str, ...] = ()) -> Any:
    """As a later TRL might have it: one argument renamed, one gone."""

    def forward() -> Any:
        return temp, outputs

    return forward


def test_a_renamed_variable_is_named_before_a_head_is_made_and_after() -> None:
    later = SimpleNamespace(__name__="trl.trainer.utils", add_fused_lm_head=add_fused_lm_head)
    assert incompatibilities(later) == [
        "the forward of add_fused_lm_head does not store temperature",
        "the forward of add_fused_lm_head does not store cast_lm_head_to_fp32",
    ]
    assert incompatibilities(SimpleNamespace(__name__="trl.trainer.utils")) == [
        "trl.trainer.utils has no add_fused_lm_head"
    ]
    with pytest.raises(LookupError, match="does not store temperature, cast_lm_head_to_fp32"):
        head_arguments(add_fused_lm_head(None))


def test_every_name_that_is_imported_from_trl_is_one_that_is_looked_for() -> None:
    texts = (file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))
    trees = (ast.parse(text) for text in texts if "trl" in text)
    imported = {
        (node.module, alias.name)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl"
        for alias in node.names
    }
    looked_for = {(module, name) for module, names in NAMES.items() for name in names}
    assert {pair for pair in imported if ".".join(pair) not in NAMES} <= looked_for
    assert not lacking()
    assert not lacking_inside()


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_completions_are_kept_where_a_checkpoint_looks_for_them(name: str) -> None:
    source = inspect.getsource(getattr(trl, name))
    assert "self._buffered_inputs = None" in source
    assert "self._step = 0" in source


@pytest.mark.parametrize("device", ["h100", "t4", "xpu", "m3-max", "cpu"])
def test_trl_s_head_runs_as_on_the_device(device: str) -> None:
    """GPUs of NVIDIA, AMD and Intel launch Triton kernels. CUDA devices need no float32 copies of the logits."""
    tokens, vocabulary = 64, 2048

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, dtype=torch.float16)
            self.head = nn.Linear(8, vocabulary, bias=False, dtype=torch.float16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            targets = torch.zeros(tokens, dtype=torch.int64)
            head = self.head.weight, None, targets, 1.0, vocabulary
            result: torch.Tensor = chunked_logprob.ChunkedLogProbFunction.apply(self.layer(x), *head)[0]  # type: ignore[no-untyped-call]
            return result.sum()

    x = torch.ones(tokens, 8, dtype=torch.float16)
    report = run(StepRequest(Model(), {"x": x}, device=device), verify=False, measure=False)
    assert report.trace.failure is None
    assert not list(report.trace.breaches())
    kernels = {call.op for call in report.trace.calls if call.op.startswith("triton")}
    on_gpu = device in ("h100", "t4", "xpu")
    assert kernels == ({"triton._forward_kernel", "triton._backward_kernel"} if on_gpu else set())
    copies = 4 * tokens * vocabulary
    activations = max(kinds.get("activations", 0) for kinds in report.memory.phases.values())
    assert (activations < copies) == (device in ("h100", "t4"))
    assert (torch.float32 in report.flops) == (device in ("xpu", "m3-max", "cpu"))
