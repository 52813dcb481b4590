"""Part 3: fused layers and kernels against float64, models of several dtypes in turn and at once, and the host's time of small batches."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .commands import Options, call, last_json
from .runner import Row

STORAGES = ("none", "nf4", "fp4", "int8")
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"use_rslora": True}, {"use_dora": True})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WrongError(Exception):
    """What ran gave other numbers than it should."""


def limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return {"layers": 120.0, "kernels": 150.0, "switching": 60.0, "small adapters": 60.0, "host time": 60.0}


def run(options: Options, name: str) -> Iterator[Row]:
    """The results of a job."""
    yield from _JOBS[name](options)


def _layers(options: Options) -> Iterator[Row]:
    """Relative errors of a fused layer and of PEFT's own against float64, the largest of output and gradients."""
    worse = []
    for storage in STORAGES[:2] if options.small else STORAGES:
        for variant in VARIANTS[:1] if options.small else VARIANTS:
            for dtype in DTYPES:
                own, peft = (
                    _error(storage, variant, dtype, options.device, fuse=fuse) for fuse in (True, False)
                )
                row = {"storage": storage, **variant, "dtype": str(dtype), "fused": own, "peft": peft}
                text = f"{storage} {' '.join(variant)} {dtype}: fused {own:.1e}, PEFT {peft:.1e}"
                # NaN is worse than anything.
                if not own <= 1.5 * peft + 1e-6:
                    worse.append(text)
                    row["failed"] = "less exact than PEFT"
                yield {**row, "text": text}
    if worse:
        raise WrongError(f"less exact than PEFT: {'; '.join(worse)}")


def _error(storage: str, variant: dict[str, Any], dtype: torch.dtype, device: str, *, fuse: bool) -> float:
    import isotype

    model = adapted(storage, variant, dtype, device)
    x = torch.randn(3, 37, 256, generator=torch.Generator().manual_seed(1)).to(device, dtype).requires_grad_()
    exact = _exact(model, x.detach())
    if fuse:
        isotype.fuse(model, {"x": x.detach()})
    errors = [
        float((result.double() - one).norm() / one.norm().clamp_min(1e-30))
        for result, one in zip(_step(model, x), exact, strict=True)
    ]
    return max(errors, key=lambda error: float("inf") if error != error else error)


class _Net(torch.nn.Module):
    def __init__(self, make: Callable[[int, int], torch.nn.Module]) -> None:
        super().__init__()
        self.up, self.down = make(256, 512), make(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.nn.functional.silu(self.up(x)))
        return result


def adapted(storage: str, variant: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """Two adapted layers with weights of the same seed."""
    import peft

    torch.manual_seed(0)

    def make(columns: int, rows: int) -> torch.nn.Module:
        dense = torch.nn.Linear(columns, rows, dtype=dtype)
        if storage == "none":
            return dense
        import bitsandbytes as bnb

        if storage == "int8":
            layer: Any = bnb.nn.Linear8bitLt(columns, rows, has_fp16_weights=False)
            layer.weight = bnb.nn.Int8Params(dense.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            layer = bnb.nn.Linear4bit(columns, rows, compute_dtype=dtype, quant_type=storage)
            layer.weight = bnb.nn.Params4bit(dense.weight.data, requires_grad=False, quant_type=storage)
        layer.bias = dense.bias
        quantized: torch.nn.Module = layer
        return quantized

    net = _Net(make).to(device)
    config = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=["up", "down"], init_lora_weights=False, **variant
    )
    return peft.get_peft_model(net, config)


def _step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """[output, gradient of x, gradients of the adapters]"""
    out = model(x)
    weight = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), [x, *trained])]


def _exact(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, from the weights that the layers hold, with PEFT's own code on dense layers."""
    from isotype.lora.weights import dense

    twin = copy.deepcopy(model)
    for layer in (twin.base_model.model.up, twin.base_model.model.down):
        base = layer.get_base_layer()
        linear = torch.nn.Linear(base.in_features, base.out_features, device=x.device, dtype=torch.float64)
        linear.weight.data = dense(base, torch.float32).double()
        linear.bias.data = base.bias.data.double()
        layer.base_layer = linear.requires_grad_(False)
        kind = next(
            cls for cls in type(layer).__mro__ if cls.__name__ in ("Linear", "Linear4bit", "Linear8bitLt")
        )
        if kind.__name__ != "Linear":
            from peft.tuners.lora.layer import Linear

            layer.__class__ = Linear
    return _step(twin.double(), x.double().requires_grad_())


def _kernels(options: Options) -> Iterator[Row]:
    """Every candidate of the table of kernels, at odd and large shapes, against float64: `isotype.lora.kernels`."""
    from . import kernels

    yield from kernels.rows(options)


def _small_adapters(options: Options) -> Iterator[Row]:
    """How much of an adapter's output arrives in 16 bits, see `benchmarks/small_adapter.py`."""
    for dtype in ("bfloat16",) if options.small else ("bfloat16", "float16"):
        printed = call(small_adapter_command(options, dtype))
        rows = last_json(printed)["rows"]
        yield {"dtype": dtype, "rows": rows, "text": f"{dtype}: {rows[0]}"}


def small_adapter_command(options: Options, dtype: str) -> list[str]:
    """The benchmark's command."""
    more = ["--tokens", "64", "--width", "64"] if options.small else []
    return [
        sys.executable,
        "benchmarks/small_adapter.py",
        "--device",
        options.device,
        "--dtype",
        dtype,
        *more,
    ]


def _switching(options: Options) -> Iterator[Row]:
    """Whether models of other dtypes leave a model's bits alone, in turn, alternating and at once."""
    import isotype

    device, wrong = options.device, []
    for storage in ("none", "nf4", "int8"):
        models = {dtype: adapted(storage, {}, dtype, device) for dtype in (torch.bfloat16, torch.float16)}
        inputs = {
            dtype: torch.randn(8, 64, 256, generator=torch.Generator().manual_seed(2)).to(device, dtype)
            for dtype in models
        }
        for dtype, model in models.items():
            isotype.fuse(model, {"x": inputs[dtype]})

        def step(dtype: torch.dtype, models: Any = models, inputs: Any = inputs) -> list[torch.Tensor]:
            return _step(models[dtype], inputs[dtype].clone().requires_grad_())

        alone = {dtype: step(dtype) for dtype in models}
        same = all(
            torch.equal(a, b)
            for dtype in [*models, *models] * 2
            for a, b in zip(step(dtype), alone[dtype], strict=True)
        )
        at_once = _at_once(step, alone, device, 3 if options.small else 20)
        row: dict[str, Any] = {"storage": storage, "alternating": same, "at once": at_once}
        if not (same and at_once):
            wrong.append(storage)
            row["failed"] = "other bits"
        yield {
            **row,
            "text": f"{storage}: the same bits alternating: {same}, on two streams at once: {at_once}",
        }
    if wrong:
        raise WrongError(f"other bits beside another model: {', '.join(wrong)}")


def _at_once(
    step: Callable[[torch.dtype], list[torch.Tensor]],
    alone: dict[torch.dtype, list[torch.Tensor]],
    device: str,
    times: int,
) -> bool:
    """Threads, each on a stream of its own where the device has streams."""
    results: dict[torch.dtype, list[list[torch.Tensor]]] = {dtype: [] for dtype in alone}

    def work(dtype: torch.dtype) -> None:
        if device == "cpu":
            results[dtype] = [step(dtype) for _ in range(times)]
            return
        stream: Any = torch.Stream(device=device)
        with stream:
            results[dtype] = [step(dtype) for _ in range(times)]
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(
        len(results[dtype]) == times
        and all(torch.equal(a, b) for each in results[dtype] for a, b in zip(each, alone[dtype], strict=True))
        for dtype in alone
    )


def _host_time(options: Options) -> Iterator[Row]:
    """Milliseconds of a layer's step: of the host alone, which only queues the work, and until the device is through."""
    import isotype

    steps = 3 if options.small else 50
    for storage in ("none", "nf4"):
        for path in ("PEFT", "isotype"):
            model = adapted(storage, {}, torch.bfloat16, options.device)
            x = torch.randn(1, 64, 256).to(options.device, torch.bfloat16).requires_grad_()
            if path == "isotype":
                isotype.fuse(model, {"x": x.detach()})
            for _ in range(3):
                _step(model, x)
            _wait(options.device)
            began = time.perf_counter()
            for _ in range(steps):
                _step(model, x)
            queued = time.perf_counter() - began
            _wait(options.device)
            whole = time.perf_counter() - began
            host, all_in_all = queued / steps / 2, whole / steps / 2
            row = {"storage": storage, "path": path, "host": host, "whole": all_in_all}
            text = (
                f"{storage} {path}: {1e3 * host:.2f} ms a layer on the host, {1e3 * all_in_all:.2f} ms in all"
            )
            yield {**row, "text": text}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


_JOBS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "layers": _layers,
    "kernels": _kernels,
    "switching": _switching,
    "small adapters": _small_adapters,
    "host time": _host_time,
}
