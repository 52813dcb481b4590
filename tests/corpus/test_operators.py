"""Operators beyond those of the architectures, and the custom layers of reports: quantizers, VeRA, distributions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

import isotype
from isotype.contracts.contract import contracts_for
from isotype.preflight.apply import apply_actions, take_back
from tests.pairwise import pairwise
from tests.small import BF16, FP16, FP32


class Then(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8, dtype=dtype)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.lin(x)).float().mean()


def given(dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 4, 8, dtype=dtype)}


# Functions that refuse 16 bits before any operator runs.
REFUSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "quantile": lambda h: torch.quantile(h.flatten(), 0.8),
    "linalg_pinv": lambda h: torch.linalg.pinv(h),
    "linalg_lstsq": lambda h: torch.linalg.lstsq(h, h).solution,
    "fft_rfft": lambda h: torch.fft.rfft(h).abs(),
}


@pairwise("name, device", sorted(REFUSE), ["cpu", "t4"], strength=1)
def test_a_function_that_takes_float32_only(name: str, device: str) -> None:
    report = isotype.check(Then(REFUSE[name]), given(), device=device)
    (finding,) = report.errors
    assert (finding.code, finding.op) == ("IST109", f"torch.{name}")
    assert "bfloat16" in finding.cause
    with pytest.raises((RuntimeError, NotImplementedError)):
        Then(REFUSE[name])(**given())
    assert isotype.check(Then(REFUSE[name], FP32), given(FP32), device=device).ok


def test_least_squares_of_two_dtypes() -> None:
    """Only one operand was cast to float32."""
    module = Then(lambda h: torch.linalg.lstsq(h.float(), h).solution)
    report = isotype.check(module, given(), device="cpu")
    (finding,) = report.errors
    assert (finding.code, "bfloat16" in finding.cause, report.trace.failure) == ("IST109", True, None)
    assert any(fix.verified for fix in finding.fixes)
    assert not any("to bfloat16" in fix.description for fix in finding.fixes)


@pytest.mark.parametrize("other", [torch.complex128, FP32])
@pytest.mark.parametrize(
    "act", [torch.matmul, nnf.linear, lambda a, b: a[0].index_put((torch.arange(4),), b[:4])]
)
def test_a_complex_operand_beside_one_of_another_dtype(
    act: Callable[..., torch.Tensor], other: torch.dtype
) -> None:
    module = Then(lambda h: act(h.to(torch.complex64), torch.ones(8, 8, dtype=other)).abs(), FP32)
    (finding,) = isotype.check(module, given(FP32), device="cpu", verify=False).errors
    with pytest.raises(RuntimeError) as real:
        module(**given(FP32))
    assert finding.cause == f"RuntimeError: {real.value}"
    assert "x.to(torch.complex64)" in finding.fixes[0].text


@pytest.mark.parametrize("act", [torch.matmul, lambda a, b: torch.einsum("ij,jk->ik", a, b)])
def test_a_transform_of_float16_beside_complex64(act: Callable[..., torch.Tensor]) -> None:
    def model(h: torch.Tensor, dtype: torch.dtype = torch.complex32) -> torch.Tensor:
        h = torch.fft.rfft(h.half().flatten(1)[:, :8]).to(dtype)
        return act(h, torch.ones(5, 5, dtype=torch.complex64)).abs()

    (finding,) = isotype.check(Then(model, FP32), given(FP32), device="t4", verify=False).errors
    assert (finding.code, "returns complex32" in finding.fixes[0].text) == ("IST199", True)
    fixed = Then(lambda h: model(h, torch.complex64), FP32)
    assert not isotype.check(fixed, given(FP32), device="t4", verify=False).errors


def test_its_line_is_what_to_change() -> None:
    (finding,) = isotype.check(Then(REFUSE["quantile"]), given(), device="cpu").errors
    assert any(fix.verified and fix.actions[0].kind == "line" for fix in finding.fixes)


def test_an_error_of_another_kind_stays_what_it_is() -> None:
    def wrong(h: torch.Tensor) -> torch.Tensor:
        return torch.quantile(h.flatten(), 2.0)  # refused in float32 too

    assert not [
        each for each in isotype.check(Then(wrong), given(), device="cpu").findings if each.code == "IST109"
    ]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", ["cuda", "rocm"])
@pytest.mark.parametrize("op", ["_linalg_svd", "_linalg_eigh", "linalg_qr", "linalg_cholesky_ex"])
def test_linear_algebra_has_no_16_bit_kernels_on_a_gpu_either(kind: str, op: str, dtype: torch.dtype) -> None:
    verdict = contracts_for(kind).judge(f"aten.{op}.default", (dtype,))
    assert verdict is not None
    assert (verdict.accepted, verdict.assumed) == (False, True)
    wide = contracts_for(kind).judge(f"aten.{op}.default", (FP32,))
    assert wide is None or wide.accepted


def test_arguments_of_a_distribution_are_taken_to_be_good() -> None:
    def sampled(h: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(h, h.exp()).log_prob(torch.zeros(8, dtype=h.dtype))

    assert not [
        each for each in isotype.check(Then(sampled), given(), device="cpu").findings if each.code == "IST199"
    ]


def _ctc(h: torch.Tensor) -> torch.Tensor:
    scores = h.log_softmax(-1).transpose(0, 1)
    one = torch.ones(2, 1, dtype=torch.long)
    return nnf.ctc_loss(scores, one, torch.tensor([4, 4]), torch.tensor([1, 1]))


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_ctc_loss(device: str) -> None:
    assert {each.code for each in isotype.check(Then(_ctc), given(), device=device).errors} == {"IST109"}
    assert not [
        each
        for each in isotype.check(Then(_ctc, FP32), given(FP32), device=device).findings
        if each.code in ("IST109", "IST199")
    ]


MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross": lambda h: torch.linalg.cross(h[..., :3], torch.ones(2, 4, 3)),
    "put": lambda h: torch.zeros(64).put(torch.arange(8), h[0, 0]),
    "heaviside": lambda h: torch.heaviside(h.detach(), torch.ones(8)) + h,
    "complex": lambda h: torch.complex(h, torch.zeros(2, 4, 8)).abs(),
    "allclose": lambda h: h if torch.allclose(h.detach(), torch.zeros(2, 4, 8)) else h * 2,
}


@pytest.mark.parametrize("name", sorted(MIXED))
def test_operators_that_were_not_in_the_table(name: str) -> None:
    assert isotype.check(Then(MIXED[name]), given(), device="cpu").errors
    with pytest.raises(RuntimeError):
        Then(MIXED[name])(**given())
    assert isotype.check(Then(MIXED[name], FP32), given(FP32), device="cpu").ok
    Then(MIXED[name], FP32)(**given(FP32))


class Shared(nn.Module):
    """VeRA as it was: frozen shared projections and trained vectors, all float32, nothing casts."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.next = nn.Linear(8, 8, dtype=BF16), nn.Linear(8, 8, dtype=BF16)
        self.register_buffer("vera_A", torch.randn(4, 8))
        self.register_buffer("vera_B", torch.randn(8, 4))
        self.lambda_d, self.lambda_b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lambda_d * nnf.linear(x, self.vera_A)
        return self.base(x) + self.lambda_b * nnf.linear(low, self.vera_B)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Shared(), nn.Linear(8, 8, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).float().mean()


def test_what_breaks_first_comes_of_nothing_later() -> None:
    model = Two()
    report = isotype.check(model, given(), device="cpu")
    with pytest.raises(RuntimeError):
        model(**given())
    assert ("first", "the buffer first.vera_A is float32") in {
        (each.module, each.cause) for each in report.errors
    }
    isotype.repair(model, report)
    model(**given())


class Packed(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.ones(8, 8, dtype=torch.uint8), requires_grad=False)
        self.meta = {"scale": torch.rand(8, 1, dtype=dtype), "zero": torch.rand(8, 1, dtype=dtype)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.packed - self.meta["zero"]) * self.meta["scale"]).t()


def test_a_scale_that_a_module_keeps_in_a_dict_has_a_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8, dtype=BF16), Packed(FP16))
    x = torch.randn(2, 8, dtype=BF16)
    report = isotype.check(model, lambda m: m(x).float().mean(), device="cpu")
    (finding,) = report.errors
    assert finding.cause.startswith("1.meta.zero, an unregistered tensor")
    together = [fix for fix in finding.fixes if fix.verified and fix.actions[0].kind == "buffer"]
    assert [action.target for action in together[0].actions] == ["1.meta.zero", "1.meta.scale"]
    undos = apply_actions(model, together[0].actions)
    model(x).float().mean().backward()
    take_back(undos)
    assert {model[1].meta[name].dtype for name in ("scale", "zero")} == {FP16}
    healthy = nn.Sequential(nn.Linear(8, 8, dtype=BF16), Packed(BF16))
    assert isotype.check(healthy, lambda m: m(x).float().mean(), device="cpu").ok
