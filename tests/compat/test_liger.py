"""A model with Liger's kernels, as `_apply_liger_kernel_to_instance` leaves it, under a policy and fused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.compat.liger import without_liger
from isotype.lora.modules import FusedMlp, FusedNorm
from isotype.model.enforce import enforce_model
from isotype.train.policy import enforce_trainer
from tests.models import quiet, tiny_model


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("Liger's forward was called")


def name(self: Any) -> str:
    return "LigerRMSNorm"


def patched(model: Any) -> Any:
    """Norms and MLPs with methods bound to them, of functions that say they are Liger's."""
    for function in (forward, name):
        function.__module__ = "liger_kernel.transformers.rms_norm"
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            for key, method in {"forward": forward, "_get_name": name}.items():
                module.__dict__[key] = method.__get__(module, type(module))  # type: ignore[attr-defined]
    return model


def adapted() -> Any:
    with quiet():
        return peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))


def test_enforce_takes_ligers_methods_out_and_says_so() -> None:
    model = adapted()
    policy = isotype.resolve_precision(model, dtype="float32", device="cpu")
    enforce_model(model, policy)
    ids = torch.arange(1, 9)[None]
    expected = model(input_ids=ids).logits
    patched(model)
    with pytest.raises(AssertionError, match="Liger's forward was called"):
        model(input_ids=ids)
    changes = enforce_model(model, policy)
    assert {change.what for change in changes} == {
        "Liger's forward -> the module's own, which follows the policy"
    }
    assert len(changes) == 2 * 3 + 1  # of two layers two norms and a MLP, and the last norm
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert "LigerRMSNorm" not in str(model)
    assert enforce_model(model, policy) == ()


def test_fused_modules_are_called_again() -> None:
    model = adapted()
    isotype.fuse(model)
    patched(model)
    fused = [module for module in model.modules() if isinstance(module, (FusedNorm, FusedMlp))]
    assert fused
    assert all("forward" in module.__dict__ for module in fused)
    without_liger(model)
    assert not any("forward" in module.__dict__ for module in fused)
    model(input_ids=torch.arange(1, 9)[None])


def test_methods_of_others_stay() -> None:
    model = nn.Linear(2, 2)
    model.forward = model.forward  # type: ignore[method-assign]
    assert without_liger(model) == ()
    assert "forward" in model.__dict__


def test_a_trainer_is_kept_from_putting_them_in() -> None:
    model = adapted()
    policy = isotype.resolve_precision(model, dtype="float32", device="cpu")
    enforce_model(model, policy)
    arguments = SimpleNamespace(use_liger_kernel=True)
    accelerator = SimpleNamespace(state=SimpleNamespace(mixed_precision="no"), scaler=None)
    trainer = SimpleNamespace(model=model, args=arguments, accelerator=accelerator)
    (change,) = enforce_trainer(trainer, policy)
    assert (
        str(change) == "use_liger_kernel: True -> False: Liger's forwards would replace the policy's forwards"
    )
    assert not arguments.use_liger_kernel
