"""Errors of code around a step: their cause and their fix, without a script."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from isotype.preflight.script.output import Output
from isotype.preflight.script.outside import calls_of, outside
from isotype.records.finding import Finding, Fix
from isotype.trace.dtype_history import remembered
from tests.rules.traces import BF16, traced


def test_only_an_update_of_averages_fails_for_their_dtype() -> None:
    """A forward of float32 averages with a bfloat16 input raises an error about its own operands."""
    x, model = torch.ones(2, 8, dtype=BF16), nn.Linear(8, 8, dtype=BF16)
    averages = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn()).float()
    averages.n_averaged += 1
    step = traced(model, lambda model: model(x).sum())
    with pytest.raises(RuntimeError, match="dtype") as update:
        averages.update_parameters(model)
    with pytest.raises(RuntimeError, match="dtype") as forward:
        averages(x)
    assert outside(update.value, model, step, {}).cause.startswith("AveragedModel holds 2 of 2 parameters")
    assert outside(forward.value, model, step, {}).cause == ""


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=BF16)

    def decode(self, z: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        inner: torch.Tensor = self.inner(z * scale)
        return inner

    def free_and_decode(self, z: torch.Tensor) -> torch.Tensor:
        scaled = z * 2
        del z
        return self.decode(scaled)


def test_a_model_with_weights_of_the_same_names_holds_no_averages() -> None:
    """bghira/SimpleTuner #356: a VAE is no average of the UNet. The call to trace again is that of the method."""
    z, model, vae = torch.ones(2, 4), nn.Linear(8, 8), Vae()
    step = traced(model, lambda model: model(torch.ones(2, 8)).sum())
    with pytest.raises(RuntimeError, match="dtype") as raised:
        vae.decode(z)
    assert outside(raised.value, model, step, {}).cause == ""
    method, forward = calls_of(raised.value)
    assert (method.model, method.method) == (vae, "decode")
    assert method.inputs["z"] is z
    assert (forward.model, forward.method) == (vae.inner, "")
    with pytest.raises(RuntimeError, match="dtype") as raised:
        vae.free_and_decode(z)
    # The first method has lost its argument.
    assert [call.method for call in calls_of(raised.value)] == ["decode", ""]


def test_the_reasons_for_a_backward_that_raises() -> None:
    x, model = torch.ones(2, 8), nn.Linear(8, 8)
    step = traced(model, lambda model: model(x).sum())
    frozen = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad") as detached:
        model(x).sum().detach().backward()
    with pytest.raises(RuntimeError, match="does not require grad") as without:
        frozen(x).sum().backward()
    with pytest.raises(RuntimeError, match="scalar outputs") as vector:
        model(x).sum(-1).backward()
    assert outside(detached.value, model, step, {}).help.startswith(
        "compute the loss outside of torch.no_grad()"
    )
    assert outside(without.value, frozen, step, {}).help.startswith(
        "no parameter of the model requires a gradient"
    )
    with_kernels = replace(
        step, untraced={"the kernels of Int8Tensor weights": "they are traced as dense weights"}
    )
    assert outside(detached.value, model, with_kernels, {}).help.endswith(
        "; the kernels of Int8Tensor weights may have no backward"
    )
    assert outside(vector.value, model, step, {}).help == "call backward on a scalar, such as loss.mean()"


@pytest.mark.parametrize("layer", ["Linear4bit", "Linear8bitLt"])
def test_a_frozen_quantized_model_gets_adapters(layer: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    options = {"has_fp16_weights": False} if layer == "Linear8bitLt" else {}
    frozen = nn.Sequential(getattr(bnb.nn, layer)(32, 32, **options)).requires_grad_(False).to("cpu")
    step = traced(nn.Linear(8, 8), lambda model: model(torch.ones(2, 8)).sum())
    with pytest.raises(RuntimeError, match="does not require grad") as raised:
        frozen(torch.ones(2, 32)).sum().backward()
    assert outside(raised.value, frozen, step, {}).help == (
        "no parameter of the model requires a gradient: add adapters (get_peft_model)"
    )


def test_a_fix_that_was_tried_is_shown_before_others() -> None:
    """QwenLM/Qwen-VL #802: the first fix of a finding may be useless if it was not tried."""
    printed = Console(file=StringIO(), width=200)
    fixes = Fix("cast the input", "safe"), Fix("run under autocast", "safe", verified=True)
    Output(printed).brief([Finding("error", "operands differ", code="IST101", fixes=fixes)])
    assert isinstance(printed.file, StringIO)
    assert printed.file.getvalue().count("= help") == 1
    assert "= help   run under autocast   (by hand; safe; verified)" in printed.file.getvalue()


def test_an_update_with_states_that_a_load_has_cast() -> None:
    """pytorch/pytorch #43706: `load_state_dict` casts float32 averages of a bfloat16 weight to bfloat16."""

    class Averaged(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                wide = parameter.float()
                average = self.state[parameter].setdefault("average", torch.zeros_like(wide))
                parameter.sub_(average.lerp_(wide, 0.5).to(parameter.dtype))

    model, x = nn.Linear(8, 8, dtype=BF16), torch.ones(2, 8, dtype=BF16)
    first, resumed = Averaged(model.parameters()), Averaged(model.parameters())
    step = traced(model, lambda model: model(x).sum())
    first.step()
    with remembered():
        resumed.load_state_dict(first.state_dict())
        with pytest.raises(RuntimeError, match="dtype") as raised:
            resumed.step()
        described = outside(raised.value, model, step, {})
    assert described.cause.startswith("load_state_dict at test_outside.py:")
    assert described.cause.endswith(" has cast average from float32 to bfloat16")
    assert described.help == "after load_state_dict, assign these states again from the loaded dict"
