"""Code that names the simulated device runs on the twin, and whatever was changed for it is put back."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import isotype
from isotype.compat.torch_device import cpu_stands_for, written_for
from isotype.precision.devices.profile import device_profile
from isotype.preflight.run import run
from isotype.records.request import StepRequest
from tests.small import BF16, FP16, FP32, Seen

X = torch.randn(2, 8)
Act = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Linear(nn.Module):
    """A layer and whatever `act` does with it."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer, x).sum()


def report(act: Act, device: str = "a100", **arguments: Any) -> isotype.Report:
    request = StepRequest(Linear(act), {"x": X}, device=device, **arguments)
    return run(request, verify=False, measure=False)  # what is measured runs for real


def _autocast_of_old(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        outer = torch.cuda.amp.autocast()
    with outer:
        return layer(x)


def _under(layer: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.autocast(*args, **kwargs):
        return layer(x)


MOVES: dict[str, Act] = {
    "to": lambda layer, x: layer(x) + torch.ones(8).to("cuda"),
    "to with a number": lambda layer, x: layer(x) + torch.ones(8).to(torch.device("cuda:1"), FP32),
    "cuda": lambda layer, x: layer(x) + torch.ones(8).cuda(non_blocking=True),
    "to a device of its parts": lambda layer, x: layer(x) + torch.ones(8).to(torch.device("cuda", 1)),
    "made there": lambda layer, x: layer(x) + torch.ones(8, device="cuda"),
    "pinned": lambda layer, x: layer(x) + torch.ones(8, pin_memory=True).pin_memory().to("cuda"),
    "a module": lambda layer, x: layer.to("cuda")(x),
    "of its number": lambda layer, x: layer(x) + torch.ones(8, device=x.get_device()).to(0),
    "of its number in words": lambda layer, x: layer(x) + torch.ones(8, device=f"cuda:{x.get_device()}"),
    "type": lambda layer, x: layer(x) + torch.ones(8).type(torch.cuda.FloatTensor),
    "type in words": lambda layer, x: layer(x) + torch.ones(8).type("torch.cuda.FloatTensor"),
    "made by its type": lambda layer, x: layer(x) + torch.cuda.FloatTensor(2, 8).fill_(1),
    "default device": lambda layer, x: layer(x) + _made_under_a_device(),
}


def _made_under_a_device() -> torch.Tensor:
    with torch.device("cuda"):
        return torch.ones(8)


@pytest.mark.parametrize("name", MOVES)
def test_what_names_the_device_runs(name: str) -> None:
    assert report(MOVES[name]).status == "clean"


def test_what_the_device_is_asked_between_operators_is_answered() -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.current_device() == torch.cuda.max_memory_allocated() == 0
        return layer(x)

    assert report(act).status == "clean"


@pytest.mark.parametrize(
    ("act", "dtype"),
    [
        (lambda layer, x: _under(layer, x, "cuda", dtype=BF16), BF16),
        (lambda layer, x: _under(layer, x, device_type="cuda", dtype=FP16), FP16),
        (lambda layer, x: _under(layer, x, "cuda"), FP16),
        (lambda layer, x: _under(layer, x, x.device.type), FP16),
        (lambda layer, x: _under(layer, x, "cuda", enabled=False), FP32),
        (_autocast_of_old, FP16),
    ],
)
def test_autocast_of_the_device_is_on_where_the_code_says_so(act: Act, dtype: torch.dtype) -> None:
    found = [call.results for call in report(act).trace.calls if "addmm" in call.op]
    assert found[0][0][0] == dtype


@torch.autocast("cuda", enabled=False)
def _in_float32(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def test_a_function_that_was_decorated_before_is_kept_out_of_autocast() -> None:
    found = report(_in_float32, autocast="bfloat16").trace.calls
    assert {call.autocast for call in found if "addmm" in call.op} == {None}


def test_code_that_asks_whether_autocast_is_on_is_told() -> None:
    seen = Seen()

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"))
        seen.append(torch.get_autocast_dtype("cuda"))
        return layer(x)

    report(act, autocast="bfloat16")
    report(act)
    assert seen.all() == [True, True, BF16, False, False, FP16]


def _product(cast_inputs: torch.dtype | None) -> tuple[Act, Seen]:
    """What multiplies by a function of its own, and the dtypes that the function is given."""
    seen = Seen()

    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=cast_inputs)
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            seen.append(x.dtype)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.T, x.T @ gradient

    return lambda layer, x: Product.apply(layer(x), layer.weight), seen


def test_the_backward_of_a_function_runs_under_the_autocast_of_its_forward() -> None:
    """`custom_fwd` keeps what it was told, `custom_bwd` puts it on again."""
    act, _ = _product(None)
    assert report(act, autocast="bfloat16").status == "clean"


def test_a_type_of_the_device_is_a_dtype() -> None:
    found = report(lambda layer, x: layer(layer(x).type(torch.cuda.HalfTensor)))
    assert [finding.code for finding in found.errors] == ["IST101"]


def test_code_that_asks_where_a_tensor_is_is_told_the_device() -> None:
    seen = Seen()

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.is_cuda, x.is_cpu, x.is_mps, layer.weight.is_cuda)
        return layer(x)

    report(act)
    report(act, "cpu")
    assert seen.all() == [True, False, False, True, False, True, False, False]


def test_random_numbers_come_from_a_generator_of_the_device() -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(device="cuda").manual_seed(1)
        assert isinstance(generator, torch.Generator)
        assert not isinstance(x, torch.Generator)
        torch.cuda.manual_seed_all(1)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        with torch.random.fork_rng(devices=[0]):
            return layer(x) + torch.randn(2, 8, generator=generator, device="cuda")

    assert report(act).status == "clean"


def test_streams_and_events_have_nothing_to_wait_for() -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        side = torch.cuda.Stream()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        side.wait_stream(torch.cuda.current_stream())
        start.record()
        with torch.cuda.device(0), torch.cuda.stream(side), torch.cuda.nvtx.range("layer"):
            y = layer(x)
        y.record_stream(side)
        torch.cuda.current_stream().wait_event(side.record_event())
        end.record()
        assert end.query()
        assert start.elapsed_time(end) == 0
        return y

    assert report(act).status == "clean"


@pytest.mark.parametrize("kernel", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_an_attention_kernel_of_the_device_has_a_stand_in(kernel: str) -> None:
    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q = layer(x)[None, None]
        with sdpa_kernel(SDPBackend.__members__[kernel]):
            return nn.functional.scaled_dot_product_attention(q, q, q)

    before = _cur_sdpa_kernel_backends()
    ops = {call.op for call in report(act, "h100", autocast=torch.bfloat16).trace.calls}
    assert any("_scaled_dot_product_flash" in op for op in ops) == (kernel != "MATH")
    assert _cur_sdpa_kernel_backends() == before


def _mod_by_parameter(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = layer(x)[None, None]
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + layer.bias[i])


@pytest.mark.newest  # torch 2.10 runs it on a CPU, the backward as well
@pytest.mark.parametrize(
    "act", [lambda layer, x: flex_attention(*[layer(x)[None, None]] * 3), _mod_by_parameter]
)
def test_flex_attention_has_a_stand_in(act: Act) -> None:
    """verl-project/verl #994: a CPU has no backward of it, and its kernel is compiled."""
    for autocast in (None, torch.bfloat16):
        traced = report(act, "h100", autocast=autocast)
        assert (traced.errors, traced.trace.failure) == ((), None)
        assert traced.trace.reached == 2
        (call,) = (call for call in traced.trace.calls if "flash" in call.op and call.phase == "forward")
        assert call.operands[0].dtype == (autocast or torch.float32)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        act(nn.Linear(8, 8), X)


@pytest.mark.parametrize(("device", "native"), [("t4", False), ("a100", True)])
def test_what_the_device_can_do_is_answered_from_its_profile(device: str, native: bool) -> None:
    profile = device_profile(device)
    with cpu_stands_for(profile):
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.is_bf16_supported(including_emulation=False) == native
        assert torch.cuda.get_device_name() == profile.title
        assert torch.cuda.mem_get_info()[1] == profile.memory_bytes
        assert torch.cuda.get_device_capability() == profile.capability
        assert (torch.cuda.get_device_properties(0).major >= 8) == native


def test_a_function_is_given_what_custom_fwd_casts() -> None:
    """It casts what is on the device that it is told."""
    act, seen = _product(FP32)
    assert not report(act, autocast="float16").errors
    assert seen.all() == [FP32]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_older_names_of_the_autocast_dtype_mean_that_of_the_step() -> None:
    seen = Seen()

    def act(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_autocast_gpu_dtype())
        torch.set_autocast_gpu_dtype(FP16)
        seen.append(layer(x).dtype)
        return layer(x)

    report(act, autocast="bfloat16")
    assert seen.all() == [BF16, FP16]


def test_what_is_made_for_the_device_is_made_on_the_cpu() -> None:
    with written_for(device_profile("t4")):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.cuda.set_device(0)
        model = nn.Linear(8, 8).to(device)
        made = [torch.ones(8, device=device), X.cuda(), model.weight, nn.Linear(2, 2, device="cuda:0").bias]
    assert device == "cuda"
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_a_device_by_its_number_is_the_simulated_one() -> None:
    """transformers loads 4-bit weights to `torch.cuda.current_device()`, a number."""
    with written_for(device_profile("t4")):
        named = torch.device(torch.cuda.current_device())
        assert (named.type, named.index) == ("cuda", 0)
        assert torch.ones(2).to(named).device.type == "cpu"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.full((1,), 2.0, device="cuda")


def test_code_that_runs_in_a_backward_names_the_device() -> None:
    x = torch.ones(2, requires_grad=True)
    with written_for(device_profile("t4")):
        Doubled.apply(x).sum().backward()  # type: ignore[no-untyped-call]
        (gradient,) = torch.autograd.grad(Doubled.apply(x).sum(), x)  # type: ignore[no-untyped-call]
    assert torch.equal(gradient, torch.full((2,), 2.0))
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


@pytest.mark.parametrize(
    ("name", "expected"), [("script", True), ("bitsandbytes.ops", False), ("torch._utils", False)]
)
def test_modules_that_cannot_do_without_the_device_do_not_find_it(name: str, expected: bool) -> None:
    ask = "answers = torch.cuda.is_available(), torch.accelerator.is_available(), torch.cuda.device_count() == 1"
    module = {"__name__": name, "torch": torch}
    with written_for(device_profile("t4")):
        exec(ask, module)
    assert module["answers"] == (expected,) * 3


def test_functions_without_a_function_mode_use_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")  # as saved on a GPU
    torch.save(X, tmp_path / "x.pt")
    results: list[torch.Tensor] = []
    before = (
        threading.Thread.run,
        torch.set_default_device,
        torch.nn.parallel.DistributedDataParallel.__init__,
    )
    with written_for(device_profile("t4")):
        thread = threading.Thread(target=lambda: results.append(X.cuda()))
        thread.start()
        thread.join()
        results.append(torch.load(tmp_path / "x.pt", map_location="cuda:0"))
        results.append(torch.load(tmp_path / "x.pt", None))
        results.append(torch.load(f=tmp_path / "x.pt", map_location={"cuda:0": "cuda:1"}))
        results.append(nn.Linear(2, 2).to(0).weight)
        torch.cuda.random.set_rng_state_all(torch.cuda.random.get_rng_state_all())
        torch.accelerator.synchronize()
        assert not torch.accelerator.current_stream().is_capturing()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert [tensor.device.type for tensor in results] == ["cpu"] * 5
    after = threading.Thread.run, torch.set_default_device, torch.nn.parallel.DistributedDataParallel.__init__
    assert after == before


def test_autocast_that_is_made_for_the_device_is_on_in_the_step() -> None:
    """A decorator is made long before the step; without the device it would have switched itself off."""
    with written_for(device_profile("a100")):
        act = torch.autocast("cuda", dtype=BF16)(lambda layer, x: layer(x))
    found = [call.results for call in report(act).trace.calls if "addmm" in call.op]
    assert found[0][0][0] == BF16


def test_another_device_is_not_simulated() -> None:
    """On a CPU a model that asks for CUDA does not run."""
    assert report(MOVES["cuda"], device="cpu").status == "unknown"


@pytest.mark.parametrize("device", ["t4", "mi300x", "xpu", "mps"])
def test_everything_is_put_back(device: str) -> None:
    def state() -> list[Any]:
        backends = [vars(backend).get("synchronize") for backend in (torch.cuda, torch.xpu, torch.mps)]
        autocast = [torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype]
        replaced = [torch.Generator, vars(torch.Tensor).get("record_stream"), torch.get_autocast_gpu_dtype]
        return [
            *backends,
            *autocast,
            *replaced,
            _cur_sdpa_kernel_backends(),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cpu"),
        ]

    before = state()
    with contextlib.suppress(ZeroDivisionError), cpu_stands_for(device_profile(device)):
        assert state() != before
        raise ZeroDivisionError
    assert state() == before
