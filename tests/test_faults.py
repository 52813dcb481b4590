"""Every kind of fault finds a place in some model of the zoo, and breaks what it says it breaks."""

from __future__ import annotations

import pytest
import torch

from tests.faults import FAULTS, HEALTHY, Setup
from tests.reality import real_step
from tests.zoo import ARCHITECTURES

SAMPLE = ("llama", "qwen3_moe", "gpt2", "llava-vl", "bert-cls", "t5-s2s")

# fault -> (architecture, phase in which its bfloat16 step crashes, what the error says)
CRASHES = {
    "norms-wide": ("llama", "forward", "same dtype"),
    "one-weight-wide": ("llama", "forward", "same dtype"),
    "head-wide": ("llama", "forward", "same dtype"),
    "norm-bias-wide": ("gpt2", "forward", "expected scalar type BFloat16 but found Float"),
    "raw-lora": ("llama", "forward", "same dtype"),
    "lora-uncast": ("llama", "forward", "same dtype"),
    "write-index-put": ("llama", "forward", "Index put requires the source and destination dtypes match"),
    "write-scatter": ("llama", "forward", "Expected self.dtype to be equal to src.dtype"),
    "backward-wide": ("llama", "backward", "same dtype"),
}
RUNS = ("lora-float32", "rotary-rounded", "write-slice", "nf4", "int8", "checkpointing", "mask-float")


def _setup(name: str, dtype: torch.dtype) -> Setup:
    architecture = ARCHITECTURES[name]
    return Setup(architecture.build(dtype), architecture.batch(dtype=dtype), dtype, None)


def _step(name: str, fault: str, dtype: torch.dtype) -> tuple[str, str]:
    setup = _setup(name, dtype)
    assert FAULTS[fault].inject(setup)
    outcome = real_step(setup.model, setup.batch, scaler=setup.scaler, optimizer=setup.optimizer)
    return outcome.phase, str(outcome.error or "")


def test_there_are_enough_kinds() -> None:
    assert len(FAULTS) >= 20


@pytest.mark.filterwarnings("ignore")  # peft warns of layers it finds unusual
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_finds_a_place_and_says_what_it_did(name: str) -> None:
    said = [FAULTS[name].inject(_setup(architecture, torch.bfloat16)) for architecture in SAMPLE]
    assert any(said)
    assert all(text is None or text for text in said)


def test_no_fault_is_no_fault() -> None:
    setup = _setup("llama", torch.bfloat16)
    assert HEALTHY.inject(setup) == "LlamaForCausalLM as it is"
    assert real_step(setup.model, setup.batch).error is None


@pytest.mark.parametrize(("fault", "expected"), CRASHES.items())
def test_these_crash_where_they_should(fault: str, expected: tuple[str, str, str]) -> None:
    name, phase, message = expected
    seen_phase, error = _step(name, fault, torch.bfloat16)
    assert seen_phase == phase
    assert message in error


def test_a_scaler_over_float16_parameters_is_refused_when_it_unscales() -> None:
    phase, error = _step("llama", "scaler", torch.float16)
    assert (phase, error) == ("unscale", "Attempting to unscale FP16 gradients.")


@pytest.mark.parametrize("fault", RUNS)
def test_these_are_silent(fault: str) -> None:
    assert _step("llama", fault, torch.bfloat16) == ("", "")
