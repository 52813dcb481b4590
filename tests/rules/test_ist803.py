from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import isotype
from isotype.records.finding import Action
from isotype.rules.ist803_positions import find
from tests.rules.samples import BF16, FP32, call, operand, refused, trace, weight, with_modules

NAME = "model.rotary_emb.inv_freq"


def test_cast_frequencies_are_computed_again() -> None:
    (finding,) = find(trace([weight(NAME, BF16, buffer=True, module_class="LlamaRotaryEmbedding")]))
    assert finding.severity == "warning"
    assert finding.cause == "the buffer model.rotary_emb.inv_freq is bfloat16"
    assert finding.fixes[0].actions == (Action("buffer", NAME, "float32"),)


def test_a_buffer_that_no_operator_uses_is_silent() -> None:
    buffer = weight(NAME, BF16, buffer=True, module_class="LlamaRotaryEmbedding")
    used = call("aten._to_copy.default", operand(BF16, "buffer", NAME))
    assert len(list(find(trace([buffer], [used])))) == 1
    assert not list(find(trace([buffer], [call("aten.mm.default", operand(BF16, "buffer", "other"))])))


def test_frequencies_of_unknown_origin_are_the_users() -> None:
    (finding,) = find(trace([weight(NAME, BF16, buffer=True, module_class="Rotary")]))
    assert finding.fixes[0].actions[0].kind == "advice"


def test_angles_by_a_rounded_product() -> None:
    product = call("aten.bmm.default", operand(BF16), module="layer.emb", autocast=BF16)
    (finding,) = find(with_modules(trace(calls=[product]), layer__emb="OldRotaryEmbedding"))
    assert finding.message == "rotary angles are computed in bfloat16"
    assert finding.cause == "autocast in bfloat16 at model.py:1 in layer.emb"


def test_float32_positions_and_other_products_are_silent() -> None:
    wide = call("aten.bmm.default", operand(FP32), result=FP32, module="layer.rotary_emb")
    other = call("aten.bmm.default", operand(BF16))
    assert not list(find(trace([weight(NAME, FP32, buffer=True)], [wide, other])))


class Rotated(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(8, 8), use
        self.register_buffer("freqs_cis", torch.polar(torch.ones(2, 4), torch.rand(2, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, table = self.layer(x), self.freqs_cis[:1]
        turned = torch.view_as_complex(hidden.float().view(-1, 4, 2))
        if self.use == "product":
            return torch.view_as_real(turned * table).mean()
        if self.use == "cast":
            return torch.view_as_real(turned * table.to(x.dtype)).mean()
        if self.use == "fourier":
            return (torch.fft.fft(hidden.float()) * table.real.repeat(1, 2)).to(torch.float32).mean()
        sines = torch.view_as_real(table)[..., 1] if self.use == "parts" else table.imag
        return (hidden * sines.repeat(1, 2).to(x.dtype)).float().mean()


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("use", ["product", "cast", "fourier", "parts", "imag"])
@pytest.mark.parametrize("cast", ["to(bfloat16)", "bfloat16()"])
def test_a_complex_table_that_a_cast_made_real(use: str, cast: str) -> None:
    """Llama's reference code keeps `freqs_cis`, a complex table, which `.to(bfloat16)` makes real."""
    model = Rotated(use)
    model = model.bfloat16() if cast == "bfloat16()" else model.to(BF16)
    report = isotype.check(model, {"x": torch.ones(2, 8, dtype=BF16)}, device="cpu", verify=False)
    causes = [finding.cause for finding in report.errors if finding.code == "IST803"]
    real = "the buffer freqs_cis is bfloat16: model.to(dtype) discards the imaginary part of a complex buffer"
    if use == "cast" and cast == "bfloat16()":
        (cause,) = causes
        assert cause.startswith("a cast to bfloat16 at test_ist803.py:")
    else:
        assert causes == [real] * (cast == "to(bfloat16)" and use != "fourier")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        crashes = use in ("parts", "imag") and cast == "to(bfloat16)"
        with pytest.raises(RuntimeError, match="complex") if crashes else warnings.catch_warnings():
            model(torch.ones(2, 8, dtype=BF16))


def test_the_error_of_a_refused_operator_is_quoted_once() -> None:
    message = "view_as_real is only supported for complex tensors"
    call = refused("aten.view_as_real.default", "forward", operand(BF16), message=message)
    (finding,) = find(trace(calls=[call]))
    assert finding.notes == (f"the device raises: {message}",)


class Spectrum(nn.Module):
    """Two correct uses: a real table with an imaginary unit, and a product whose imaginary part is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("freqs", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.layer(x).view(-1, 4, 2))
        z = z * torch.exp(self.freqs * torch.tensor(1j))
        return (z * z.conj()).to(torch.float32).mean()


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_a_computed_tensor_may_have_no_imaginary_part() -> None:
    report = isotype.check(Spectrum(), {"x": torch.ones(2, 8)}, device="cpu", verify=False)
    (finding,) = (finding for finding in report.findings if finding.code == "IST803")
    assert finding.severity == "warning"
    assert "a cast to float32" in finding.cause
    assert finding.fixes[0].description.endswith("or cast .real if the imaginary part is zero")
