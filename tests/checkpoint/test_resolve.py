"""resolve_precision: the same policy from a module, its config and its directory; problems of library versions."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import isotype
from isotype.checkpoint import resolve
from isotype.core.errors import CheckpointError, PrecisionError
from isotype.precision.versions import Incompatibility
from tests.refusals import refused


def test_module_config_and_directory_agree(saved):
    path = saved("gpt-oss", torch.bfloat16)
    config = AutoConfig.from_pretrained(path)
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    policies = [
        isotype.resolve_precision(given, device="a100", quantization="nf4")
        for given in (path, str(path), config, module)
    ]
    assert policies[0].compute == torch.bfloat16
    assert policies[0].pinned
    assert all(policy == policies[0] for policy in policies)


def test_dtypes_are_taken_as_torch_dtypes_and_as_names(saved):
    path = saved("llama", torch.float32)
    policies = {
        isotype.resolve_precision(path, dtype=d, device="a100") for d in ("bf16", "bfloat16", torch.bfloat16)
    }
    assert len(policies) == 1


def test_what_is_no_model_is_refused():
    with pytest.raises(CheckpointError):
        isotype.resolve_precision("./nowhere")
    with pytest.raises(PrecisionError):
        isotype.resolve_precision(3)
    with pytest.raises(PrecisionError, match="t5"):
        isotype.resolve_precision(torch.nn.Linear(2, 2), device="t5")


def test_a_plain_module_has_a_policy_too():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).to(torch.bfloat16)
    assert isotype.resolve_precision(module, device="h100").compute == torch.bfloat16


def test_versions_that_do_not_fit_are_obstacles_here_and_no_matter_for_a_device_elsewhere(saved, monkeypatch):
    incompatibility = Incompatibility(
        ("peft 0.1", "transformers 5"), "peft 0.19 or newer", "peft>=0.19", "error"
    )
    monkeypatch.setattr("isotype.precision.versions.incompatible_here", lambda: (incompatibility,))
    path = saved("llama", torch.float32)
    assert refused(PrecisionError, isotype.resolve_precision, path, device="cpu") == (
        "1 conflict in the requested precision\n"
        "  - peft 0.1 and transformers 5\n"
        "    expected  versions that fit: peft 0.19 or newer\n"
        '    fix       pip install --upgrade "peft>=0.19"'
    )
    assert isotype.resolve_precision(path, device="t4").device == "t4"


def test_quantization_without_bitsandbytes_says_what_to_install(saved, monkeypatch):
    monkeypatch.setattr(resolve, "installed", lambda: {"torch": "2.13.0", "bitsandbytes": None})
    with pytest.raises(PrecisionError, match="quantization nf4 without bitsandbytes"):
        isotype.resolve_precision(saved("llama", torch.float32), quantization="nf4", device="cpu")
