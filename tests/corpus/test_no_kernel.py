"""Functions that take no 16 bits, or none under autocast: transforms, quantiles, factorizations, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

import isotype
from tests.pairwise import pairwise
from tests.reality import real_step
from tests.small import BF16


class Head(nn.Module):
    """A linear layer, and what comes behind it."""

    def __init__(self, behind: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.proj, self.behind = nn.Linear(8, 8), behind

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.behind(self.proj(x), **more)


def _spectrum(made: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(made, n=16), n=16)


def _quantile(made: torch.Tensor) -> torch.Tensor:
    return made / torch.quantile(made.detach().abs(), 0.9)


def _solved(made: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(8, dtype=made.dtype)
    return torch.linalg.solve(made.T @ made + eye, made.T)


def _distances(made: torch.Tensor) -> torch.Tensor:
    return torch.cdist(made, made + 1)


def _ctc(made: torch.Tensor) -> torch.Tensor:
    lengths, targets = torch.tensor([2, 2]), torch.tensor([[1], [3]])
    return nnf.ctc_loss(made.view(2, 2, 8).log_softmax(-1), targets, lengths, torch.tensor([1, 1]))


def test_a_result_without_a_kernel_has_the_dtype_of_its_operands() -> None:
    class Turned(nn.Module):  # KohakuBlueleaf/LyCORIS #123
        def __init__(self) -> None:
            super().__init__()
            self.turn, self.base = nn.Parameter(torch.zeros(8, 8)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            turn, eye = self.turn - self.turn.T, torch.eye(8, dtype=self.turn.dtype)
            return nnf.linear(x, (eye + turn) @ (eye - turn).inverse() @ self.base.weight).float().sum()

    (finding,) = isotype.check(Turned().to(BF16), {"x": torch.randn(4, 8, dtype=BF16)}, device="cpu").errors
    assert finding.code == "IST109"
    assert [(fix.text.partition(" at ")[0], fix.verified) for fix in finding.fixes] == [
        ("cast the operands to float32", True)
    ]
    assert finding.fixes[0].text.endswith(", and the result back")


@pytest.mark.real_cpu
@pairwise("behind, device", [_spectrum, _quantile, _solved, _distances, _ctc], ["cpu", "h100"], strength=1)
def test_a_function_that_takes_no_16_bits(behind: Callable[..., torch.Tensor], device: str) -> None:
    model, inputs = Head(behind).to(BF16), {"x": torch.randn(4, 8, dtype=BF16)}
    assert real_step(model, inputs).error is not None
    report = isotype.check(model, inputs, device=device)
    (finding,) = report.errors
    assert (finding.code, report.trace.failure) == ("IST109", None)
    assert "bfloat16" in finding.cause
    assert any(fix.verified for fix in finding.fixes)
    edited = Head(lambda made: behind(made.float())).to(BF16)
    assert real_step(edited, inputs).error is None
    healthy = Head(behind), {"x": torch.randn(4, 8)}
    assert isotype.check(*healthy, device=device).ok


@pytest.mark.real_cpu
def test_distances_of_many_rows_are_matmuls() -> None:
    model, inputs = Head(_distances).to(BF16), {"x": torch.randn(30, 8, dtype=BF16)}
    assert real_step(model, inputs).error is None
    assert not isotype.check(model, inputs, device="h100").errors


def test_what_autocast_refuses_is_named_and_can_be_called_outside_of_it() -> None:
    def loss(made: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nnf.binary_cross_entropy(made.sigmoid(), y)

    inputs = {"x": torch.randn(2, 8), "y": torch.ones(2, 8)}
    (finding,) = isotype.check(Head(loss), inputs, device="t4", autocast="float16").errors
    assert finding.code == "IST109"
    assert "under autocast to float16" in finding.cause
    assert finding.fixes[0].verified
    safe = Head(lambda made, y: nnf.binary_cross_entropy_with_logits(made, y))
    assert isotype.check(safe, inputs, device="t4", autocast="float16").ok


def test_an_array_of_an_input_is_no_copy_of_an_output() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x) * float(x.numpy().mean())

    report = isotype.check(Mean().to(BF16), {"x": torch.ones(2, 8, dtype=BF16)}, device="h100")
    (finding,) = report.findings
    assert finding.code == "IST109"
    assert [fix.verified for fix in finding.fixes] == [True]


def test_float64_pixels_are_one_finding() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3))
    report = isotype.check(model, {"input": torch.zeros(1, 1, 8, 8, dtype=torch.float64)}, device="cpu")
    (finding,) = report.errors
    assert (finding.code, report.trace.failure) == ("IST106", None)


@pytest.mark.real_cpu
def test_weights_of_a_bag_have_the_embedding_s_dtype() -> None:
    def bag(made: torch.Tensor) -> torch.Tensor:
        chosen = torch.tensor([[0, 1]])
        return nnf.embedding_bag(chosen, made, per_sample_weights=torch.ones(1, 2), mode="sum")

    model, inputs = Head(bag).to(BF16), {"x": torch.randn(4, 8, dtype=BF16)}
    assert real_step(model, inputs).error is not None
    (finding,) = isotype.check(model, inputs, device="cpu").errors
    assert finding.code == "IST101"


@pytest.mark.parametrize(
    ("length", "device", "code"),
    [(192, "t4", ["IST109"]), (256, "mi300x", ["IST109"]), (256, "h100", [])],
)
def test_half_transforms_on_a_gpu(length: int, device: str, code: list[str]) -> None:
    """thuml/Time-Series-Library #761, advimman/lama #360: cuFFT takes float16 in sizes of a power of two."""

    def weights(made: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(made, dim=0).abs().mean()

    report = isotype.check(Head(weights), {"x": torch.randn(length, 8)}, device=device, autocast="float16")
    assert [finding.code for finding in report.errors] == code
    assert report.trace.failure is None
    if length == 192:
        (note,) = (note for note in report.errors[0].notes if "cuFFT" in note)
        assert note.endswith("powers of two when computing in half precision, but got a signal size of[192]")
        assert all(fix.verified for fix in report.errors[0].fixes)


@pytest.mark.parametrize("kind", ["fft", "irfft", "product"])
@pytest.mark.parametrize("rows", [12, 16])
def test_complex_numbers_of_halves_on_a_gpu(kind: str, rows: int) -> None:
    """torch.fft transforms `torch.chalf` on a GPU in sizes of a power of two; cuBLAS multiplies no such matrices."""

    def again(x: torch.Tensor) -> torch.Tensor:
        first = torch.fft.fft(x.half())
        if kind == "product":
            return (first @ first.T).real.float().mean()
        return (
            (torch.fft.fft(first, dim=0).real if kind == "fft" else torch.fft.irfft(first, rows, 0))
            .float()
            .mean()
        )

    report = isotype.check(
        Head(again).half(), {"x": torch.randn(rows, 8).half()}, device="a100", verify=False
    )
    (cause,) = [finding.cause for finding in report.errors if finding.code == "IST199"] or [""]
    error = "" if report.trace.failure is None else report.trace.failure.error
    if kind == "product":
        assert error.endswith("\"addmm_cuda\" not implemented for 'ComplexHalf'")
    else:
        assert error.endswith("but got a signal size of[12]") == (rows == 12) == (cause == error != "")


@pytest.mark.parametrize(
    ("size", "autocast", "found"), [(40, "float16", 1), (64, "float16", 0), (64, "bfloat16", 1)]
)
def test_a_spectrogram_on_a_gpu(size: int, autocast: str, found: int) -> None:
    """innnky/so-vits-svc #11: the loss of a vocoder takes a spectrogram of what autocast returns."""

    def spectrogram(made: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(size).to(made.dtype)
        return torch.stft(made.reshape(1, -1), size, window=window, return_complex=True).abs().mean()

    inputs = {"x": torch.randn(32, 8)}
    report = isotype.check(Head(spectrogram), inputs, device="a100", autocast=autocast)
    assert [finding.code for finding in report.errors] == ["IST109"] * found


CPU_ONLY_WIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg_pool3d": lambda made: nnf.avg_pool3d(made.view(1, 1, 2, 4, 4), 2),
    "bicubic": lambda made: nnf.interpolate(made[None, None], size=(2, 4), mode="bicubic", antialias=True),
    "cholesky_solve": lambda made: torch.cholesky_solve(made, torch.eye(4, dtype=made.dtype)),
    "gamma": lambda made: torch.distributions.Gamma(made.abs() + 1, torch.ones_like(made)).rsample(),
    "erfcx": torch.special.erfcx,
    "ndtri": lambda made: torch.special.ndtri(made.sigmoid()),
    "log_ndtr": torch.special.log_ndtr,
    "bessel_j0": lambda made: made * torch.special.bessel_j0(made.detach()),
}


@pytest.mark.real_cpu
@pytest.mark.parametrize("name", CPU_ONLY_WIDE)
def test_kernels_that_a_cpu_has_in_float32_only(name: str) -> None:
    model, inputs = Head(CPU_ONLY_WIDE[name]).to(BF16), {"x": torch.randn(4, 8, dtype=BF16)}
    error = real_step(model, inputs).error
    assert error is not None
    report = isotype.check(model, inputs, device="cpu", wiring=False)
    assert {finding.code for finding in report.errors} == {"IST109"}
    assert any(str(error).partition(": ")[2] in note for note in report.errors[0].notes)
    healthy = Head(CPU_ONLY_WIDE[name]), {"x": torch.randn(4, 8)}
    assert isotype.check(*healthy, device="cpu", wiring=False).ok


@pytest.mark.real_cpu
@pytest.mark.parametrize("device", ["cpu", "a100"])
def test_the_first_state_of_an_lstm(device: str) -> None:
    """A first state that the forward makes in the default dtype: cuDNN and oneDNN take one dtype."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.zeros(1, len(x), 8)
            return self.rnn(x, (first, first))[0].float().mean()

    model, inputs = Recurrent().to(BF16), {"x": torch.randn(2, 3, 8, dtype=BF16)}
    assert real_step(model, inputs).error is not None
    (finding,) = isotype.check(model, inputs, device=device, wiring=False).errors
    assert finding.code == "IST101"
    assert finding.cause.startswith("zeros returns float32 at test_no_kernel.py:")
    assert all(fix.verified for fix in finding.fixes)
    assert isotype.check(Recurrent(), {"x": torch.randn(2, 3, 8)}, device=device, wiring=False).ok
    autocast = isotype.check(
        Recurrent(), {"x": torch.randn(2, 3, 8)}, device=device, autocast="bfloat16", wiring=False
    )
    # A CPU without AVX512 has no bfloat16 LSTM, so autocast crashes there.
    real = real_step(Recurrent(), {"x": torch.randn(2, 3, 8)}, BF16) if device == "cpu" else None
    assert [f.code for f in autocast.errors] == (["IST109"] if real and real.error else [])


EDGES = torch.sparse_coo_tensor(torch.arange(4).expand(2, 4), torch.ones(4), (4, 4), check_invariants=True)


def _built(made: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.sparse_coo_tensor(torch.arange(4).expand(2, 4), edges, (4, 4)), made)


@pytest.mark.parametrize(
    "product",
    [lambda made, edges: torch.sparse.mm(edges, made), lambda made, edges: edges @ made, _built],
    ids=["sparse.mm", "matmul", "built in the forward"],
)
def test_sparse_products_on_a_gpu(product: Callable[..., torch.Tensor]) -> None:
    """pytorch/pytorch #144040, cai4cai/torchsparsegradutils #53: autocast casts the operands of these products."""
    inputs = {"x": torch.randn(4, 8), "edges": torch.ones(4) if product is _built else EDGES}
    (finding,) = isotype.check(Head(product), inputs, device="t4", autocast="float16", wiring=False).errors
    assert (finding.code, finding.notes[0]) == (
        "IST109",
        "the device raises: \"addmm_sparse_cuda\" not implemented for 'Half'",
    )
    (fix,) = finding.fixes
    assert (fix.text.partition(" around ")[0], fix.verified) == ("turn autocast off", True)
    healthy = isotype.check(Head(product), inputs, device="t4", wiring=False)
    assert (healthy.errors, healthy.trace.failure) == ((), None)
