"""A small config, and steps whose memory follows a formula instead of a trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers.modeling_layers import GradientCheckpointingLayer

from isotype.preflight.setup import setup_of
from isotype.records.memory import Memory
from isotype.records.request import StepRequest
from isotype.records.trace import Call, Operand, Origin, Trace
from tests.models import CONFIGS


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = CONFIGS["llama"]()
    config.num_hidden_layers, config.max_position_embeddings = 4, 512
    config.save_pretrained(folder)
    return folder / "config.json"


def step_of(request: StepRequest) -> Trace:
    """Weights take 1 MiB in 4 bits, else 4 MiB; a token takes 4 KiB, and a quarter of this in recomputed layers."""
    setup = setup_of(request)
    rows, tokens = setup.batch["input_ids"]
    policy = setup.policy
    assert policy is not None
    layers = [module for module in request.model.modules() if isinstance(module, GradientCheckpointingLayer)]
    on = sum(module.gradient_checkpointing for module in layers) / len(layers)
    sizes = {
        "weights": 2**20 * (1 if policy.quantized else 4),
        "activations": int(rows * tokens * 2**10 * (4 - 3 * on)),
    }
    numbers = Operand("self", policy.compute, (rows * tokens, 64), Origin("input", policy.compute, "x"))
    product = Call(
        "aten.mm.default",
        "forward",
        "",
        "",
        (numbers, numbers),
        ((policy.compute, (rows * tokens, 64)),),
        flops=int(rows * tokens * 10**6 * (3 + on)),
    )
    return Trace(setup, (product,), (), {}, Memory({"forward": sizes}))  # type: ignore[dict-item]


def noted(shapes: list[tuple[int, ...]], request: StepRequest) -> Trace:
    trace = step_of(request)
    if request.phases:  # else only the weights are counted
        shapes.append(trace.setup.batch["input_ids"])
    return trace


def by_formula(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the list of traced shapes. No layer is fused: a formula knows none."""
    shapes: list[tuple[int, ...]] = []
    patch.setattr("isotype.train.preflight.step.trace_of", partial(noted, shapes))
    patch.setattr("isotype.train.preflight.step._fuse", lambda plan, model: ())
    return shapes


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    return by_formula(monkeypatch)
