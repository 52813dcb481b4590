"""4-bit layers that compute in float32 though the model runs in 16 bit."""

from __future__ import annotations

import copy
from typing import Any

import torch

from isotype.precision.policy import PrecisionPolicy
from tests.corpus.cases.crashes_parts import BF16, FP16, FP32, lora, nf4
from tests.corpus.cases.training_parts import loaded
from tests.corpus.scenario import Broken, Scenario
from tests.models import tiny_batch
from tests.reality import real_step


def compute_dtype_left(dtype: torch.dtype, name: str = "llama") -> Broken:
    """`BitsAndBytesConfig(load_in_4bit=True)`: transformers sets the compute dtype to float32."""
    return Broken(lora(nf4(loaded(name, dtype), FP32)), tiny_batch(name), device="a100")


def first_input_decides() -> Broken:
    """A compute dtype that is not marked as set: the first input, float32 here, replaces it."""
    model: Any = nf4(loaded("llama"), BF16)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_type_is_set = False
    policy = PrecisionPolicy(compute=BF16, storage="nf4")
    return Broken(lora(model), tiny_batch("llama"), policy=policy)


def computes_in_float32(broken: Broken) -> str | None:
    """4-bit layers whose compute dtype is float32 after one real forward."""
    model = copy.deepcopy(broken.model)
    outcome = real_step(model, broken.inputs, broken.autocast, phases=("forward",))
    assert outcome.error is None, outcome.error
    layers = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    wide = [layer for layer in layers if layer.compute_dtype == FP32]
    return f"{len(wide)} of {len(layers)} 4-bit layers multiply in float32" if wide else None


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "bnb-2077",
        lambda: compute_dtype_left(BF16),
        ("IST404",),
        r"_proj",
        cost=computes_in_float32,
    ),
    Scenario(
        "h2ogpt-682",
        lambda: compute_dtype_left(FP16, "mistral"),
        ("IST404",),
        r"_proj",
        cost=computes_in_float32,
    ),
    Scenario(
        "bnb-1623",
        first_input_decides,
        ("IST404",),
        r"_proj",
        cost=computes_in_float32,
        notes="bitsandbytes 0.50 marks a compute dtype it is given; the mark is taken away as it was missing then.",
    ),
)

LEFT_OUT: dict[str, str] = {}
