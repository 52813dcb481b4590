"""LoRA linear layers in one function against float64, every gradient too."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from torch import nn
from transformers.pytorch_utils import Conv1D

from isotype.lora import linear
from isotype.lora.adapted import Adapter, Layer
from isotype.lora.gates import GATES
from isotype.lora.linear import Spec, lora_linear
from isotype.lora.weights import DenseWeights
from tests.cpus import no_bfloat16_loops, pretend
from tests.pairwise import pairwise

# Relative error of a tensor's norm. One rounding to b digits is off by at most 2^-b (b: 9 in bfloat16, 12 in float16, 25
# in float32); a value passes through up to ten (W, X, A, X Aᵀ, s B, their products, the sum, and in the backward dY and
# its own), and sums of few terms cancel: a factor of two more.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
BASES = ("dense", "conv1d", "nf4", "fp4", "nf4-double", "int8")


def base_layer(kind: str, rows: int, columns: int, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """A frozen base layer of `kind`, and its weight `[rows, columns]` in float64."""
    values = torch.randn(rows, columns) / columns**0.5
    layer: Any
    if kind == "dense":
        layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
        layer.weight.data = values.to(dtype)
        weight = layer.weight
    elif kind == "conv1d":
        layer = Conv1D(rows, columns).to(dtype)
        layer.weight.data = values.t().contiguous().to(dtype)
        weight = layer.weight.t()
    elif kind == "int8":
        layer = bitsandbytes.nn.Linear8bitLt(columns, rows, bias=False, has_fp16_weights=False)
        layer.weight.data = values.half()
        layer = layer.to("cpu")
        layer.init_8bit_state()
        weight = layer.state.CB.double() * layer.state.SCB.double()[:, None] / 127
    else:
        name, _, double = kind.partition("-")
        layer = bitsandbytes.nn.Linear4bit(
            columns, rows, bias=False, compute_dtype=dtype, quant_type=name, compress_statistics=bool(double)
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            values, requires_grad=False, quant_type=name, compress_statistics=bool(double)
        )
        layer = layer.to("cpu")
        layer.weight.quant_state.dtype = torch.float32
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    layer.requires_grad_(False)
    return layer, weight.detach().double()


def tensors_of(layer: Layer, rows: int, columns: int) -> list[torch.Tensor]:
    made = [torch.randn(rows) for _ in layer.biases]
    for adapter in layer.adapters:
        made += [torch.randn(adapter.rank, columns) / columns**0.5, torch.randn(rows, adapter.rank) / 4]
        if adapter.magnitude:
            made.append(torch.rand(rows) + 0.5)
    return [tensor.requires_grad_() for tensor in made]


def expected(
    layers: Sequence[Layer], weights: Sequence[torch.Tensor], x: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The outputs by the formulas of the papers, written out, in the dtype of the arguments."""
    left, outputs = iter(tensors), []
    for layer, weight in zip(layers, weights, strict=True):
        bias = sum((next(left) * scale for scale in layer.biases), torch.zeros(()))
        y = x @ weight.t()
        for adapter in layer.adapters:
            down, up = next(left), next(left)
            y = y + adapter.scale * (x @ down.t()) @ up.t()
            if adapter.magnitude:
                norm = (weight + adapter.scale * up @ down).norm(dim=1).detach()
                y = y * (next(left) / norm)
        outputs.append(y + bias)
    return outputs


def double(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).norm() / wanted.norm()) if wanted.norm() else float(found.norm())


PLAIN = (Adapter(3, 0.5),)
VARIANTS = {
    "lora": PLAIN,
    "none": (),
    "rank-1": (Adapter(1, 2.0),),
    "rank-256": (Adapter(256, 16.0 / 256**0.5),),
    "two": (Adapter(2, 0.5), Adapter(5, 1.5)),
    "dora": (Adapter(4, 0.5, magnitude=True),),
}
INPUTS = {"three": (2, 3), "row": (1,), "empty": (0,), "odd": (7, 1, 5)}


@pairwise("dtype, variant, kind", TOLERANCES, VARIANTS, BASES)
def test_outputs_and_gradients_are_those_of_float64(kind: str, variant: str, dtype: torch.dtype) -> None:
    outputs_and_gradients(kind, variant, dtype, compiled=False)


@pairwise("dtype, variant, kind", [torch.float32, torch.bfloat16], VARIANTS, ["dense", "nf4", "int8"])
def test_so_are_those_of_compiled_loops(kind: str, variant: str, dtype: torch.dtype) -> None:
    outputs_and_gradients(kind, variant, dtype, compiled=True)


LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("working", "result"), [*((torch.float32, low) for low in LOW), *((low, torch.float32) for low in LOW)]
)
def test_products_in_one_dtype_and_outputs_in_another(
    working: torch.dtype, result: torch.dtype, compiled: bool
) -> None:
    torch.manual_seed(12)
    made = [base_layer("dense", rows, 37, working) for rows in (70, 5, 33)]
    layers = [
        Layer(base, biases, VARIANTS[variant])
        for (base, _), biases, variant in zip(made, ((1.0,), (), ()), ("lora", "dora", "two"), strict=True)
    ]
    tensors = [
        t for layer, rows in zip(layers, (70, 5, 33), strict=True) for t in tensors_of(layer, rows, 37)
    ]
    x = torch.randn(81, 37).to(result)
    outputs = lora_linear(
        Spec(tuple(layers), DenseWeights(), working, result, compiled=compiled), (x,), tensors
    )
    wanted = expected(layers, [weight for _, weight in made], x.double(), double(tensors))
    for one, other in zip(outputs, wanted, strict=True):
        assert one.dtype == result
        assert error(one, other) < max(TOLERANCES[working], TOLERANCES[result])


@pytest.mark.parametrize("bias", [None, 0.0, 8.0])
@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        (torch.float16, False),  # no CPU's loops take float16
        (torch.bfloat16, False),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.lacking(no_bfloat16_loops())),
    ],
    ids=str,
)
def test_an_adapter_below_the_last_digit_of_the_base_is_not_lost(
    dtype: torch.dtype, compiled: bool, bias: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled:
        pretend("cpu-avx512", monkeypatch)
    torch.manual_seed(8)
    base, weight = base_layer("dense", 256, 64, dtype)
    layer = Layer(base, () if bias is None else (1.0,), (Adapter(4, 1.0),))
    down = torch.randn(4, 64).to(dtype).float()
    up = (torch.randn(256, 4) * torch.finfo(dtype).eps / 100).to(dtype).float()
    x = torch.randn(1024, 64).to(dtype).requires_grad_()
    biases = [] if bias is None else [torch.randn(256).add(bias).to(dtype)]
    spec = Spec((layer,), DenseWeights(), dtype, dtype, compiled=compiled)
    (made,) = lora_linear(spec, (x,), [*biases, down, up])
    own = (x.double() @ down.double().t()) @ up.double().t()
    assert share(made - sum(biases, x.double() @ weight.t()), own) == pytest.approx(1, abs=0.1)
    grad = torch.randn_like(made)
    (found,) = torch.autograd.grad(made, x, grad)
    of_adapter = (grad.double() @ up.double()) @ down.double()
    assert share(found - grad.double() @ weight, of_adapter) == pytest.approx(1, abs=0.1)


def share(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How much of what is wanted is found beside what was rounded to a larger neighbour: 1 where nothing is lost."""
    return float((found * wanted).sum().detach() / wanted.square().sum().detach())


def test_float64_keeps_its_digits() -> None:
    torch.manual_seed(9)
    base, weight = base_layer("dense", 10, 37, torch.float64)
    layer = Layer(base, (1.0,), VARIANTS["two"])
    tensors = double(tensors_of(layer, 10, 37))
    x = torch.randn(5, 37, dtype=torch.float64, requires_grad=True)
    (made,) = lora_linear(Spec((layer,), DenseWeights(), torch.float64, torch.float64), (x,), tensors)
    (wanted,) = expected([layer], [weight], x, tensors)
    grad = torch.randn_like(made)
    found = torch.autograd.grad(made, [x, *tensors], grad)
    for one, other in zip(found, torch.autograd.grad(wanted, [x, *tensors], grad), strict=True):
        assert error(one, other) < 1e-14


def outputs_and_gradients(kind: str, variant: str, dtype: torch.dtype, *, compiled: bool) -> None:
    torch.manual_seed(len(kind) + len(variant))
    columns = 64 if kind in ("nf4", "nf4-double", "fp4") else 37
    for rows, shape, biases in zip(
        ((16, 10), (33,), (5, 64), (1,)), INPUTS.values(), ((1.0,), (), (1.0, 0.5), (2.0,)), strict=True
    ):
        made = [base_layer(kind, count, columns, dtype) for count in rows]
        layers = [Layer(base, biases, VARIANTS[variant]) for base, _ in made]
        tensors = [t for layer, n in zip(layers, rows, strict=True) for t in tensors_of(layer, n, columns)]
        x = torch.randn(*shape, columns).to(dtype).requires_grad_()
        spec = Spec(tuple(layers), DenseWeights(), dtype, dtype, compiled=compiled)
        outputs = lora_linear(spec, (x,), tensors)
        grads = [torch.randn_like(output) for output in outputs]
        (x64,), tensors64 = double([x]), double(tensors)
        outputs64 = expected(layers, [weight for _, weight in made], x64, tensors64)
        found = [*outputs, *torch.autograd.grad(outputs, [x, *tensors], grads)]
        wanted = [*outputs64, *torch.autograd.grad(outputs64, [x64, *tensors64], [g.double() for g in grads])]
        assert [tensor.dtype for tensor in found] == [dtype] * (len(rows) + 1) + [torch.float32] * len(
            tensors
        )
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape
            assert error(one, other) < TOLERANCES[dtype]


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: x.clamp_min(0),
    "relu2": lambda x: x.clamp_min(0) ** 2,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


@pairwise("dtype, gate", TOLERANCES, GATES, strength=1)
def test_a_gated_product_is_formed_again_in_the_backward(gate: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    base, weight = base_layer("dense", 9, 37, dtype)
    layer = Layer(base, (), PLAIN)
    tensors = tensors_of(layer, 9, 37)
    first, second = (torch.randn(2, 5, 37).to(dtype).requires_grad_() for _ in range(2))
    spec = Spec((layer,), DenseWeights(), dtype, dtype, GATES[gate])
    (output,) = lora_linear(spec, (first, second), tensors)
    grad = torch.randn_like(output)
    (first64, second64), tensors64 = double([first, second]), double(tensors)
    product = ACTIVATIONS[gate](first64) * second64
    (output64,) = expected([layer], [weight], product, tensors64)
    found = [output, *torch.autograd.grad(output, [first, second, *tensors], grad)]
    wanted = [output64, *torch.autograd.grad(output64, [first64, second64, *tensors64], grad.double())]
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 2 * TOLERANCES[dtype]  # the activation and the product are rounded, too


@pytest.fixture(params=[False, True], ids=["by products", "by torch's kernel"])
def dropout_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs' way to drop, too: torch has its kernels on CPUs, where they draw the same numbers."""
    monkeypatch.setattr(linear, "device_type_of", lambda _: "cuda" if request.param else "cpu")


@pytest.mark.usefixtures("dropout_kernel")
def test_dropout_leaves_the_base_alone_and_its_mask_serves_the_backward() -> None:
    torch.manual_seed(2)
    base, weight = base_layer("dense", 12, 40, torch.float32)
    adapters = (Adapter(4, 0.5, dropout=0.5), Adapter(3, 1.0))
    layer = Layer(base, (), adapters)
    tensors = tensors_of(layer, 12, 40)
    x = torch.randn(30, 40, requires_grad=True)
    torch.manual_seed(3)
    (output,) = lora_linear(Spec((layer,), DenseWeights(), x.dtype, x.dtype), (x,), tensors)
    torch.manual_seed(3)
    kept = torch.empty(30, 40, dtype=torch.bool).bernoulli_(0.5)
    a, b, c, d = tensors
    wanted = x @ weight.float().t() + 0.5 * (x * kept * 2) @ a.t() @ b.t() + x @ c.t() @ d.t()
    grad = torch.randn_like(output)
    for one, other in zip(
        [output, *torch.autograd.grad(output, [x, *tensors], grad)],
        [wanted, *torch.autograd.grad(wanted, [x, *tensors], grad)],
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("dropout_kernel")
def test_dropout_of_everything_leaves_zeros() -> None:
    base, weight = base_layer("dense", 3, 5, torch.float32)
    layer = Layer(base, (), (Adapter(2, 1.0, dropout=1.0),))
    x, tensors = torch.randn(4, 5, requires_grad=True), tensors_of(layer, 3, 5)
    (output,) = lora_linear(Spec((layer,), DenseWeights(), x.dtype, x.dtype), (x,), tensors)
    torch.testing.assert_close(output, x @ weight.float().t())
    d_x, d_down, d_up = torch.autograd.grad(output.sum(), [x, *tensors])
    torch.testing.assert_close(d_x, weight.float().sum(0).expand(4, 5))
    assert not d_down.any()
    assert not d_up.any()


def one_layer(dtype: torch.dtype = torch.float32) -> tuple[Spec, list[torch.Tensor]]:
    torch.manual_seed(4)
    base, _ = base_layer("dense", 6, 8, dtype)
    layer = Layer(base, (1.0,), PLAIN)
    return Spec((layer,), DenseWeights(), dtype, dtype), tensors_of(layer, 6, 8)


def test_a_backward_can_be_repeated_and_an_input_used_twice() -> None:
    spec, tensors = one_layer()
    x = torch.randn(3, 8, requires_grad=True)
    (once,) = lora_linear(spec, (x,), tensors)
    (twice,) = lora_linear(spec, (x,), tensors)
    total = (once + twice).sum()
    first = torch.autograd.grad(total, [x, *tensors], retain_graph=True)
    second = torch.autograd.grad(total, [x, *tensors])
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    (alone,) = lora_linear(spec, (x,), tensors)
    torch.testing.assert_close(first[0], 2 * torch.autograd.grad(alone.sum(), x)[0])


def test_a_consumer_may_write_into_the_output_and_a_producer_into_a_gradient() -> None:
    spec, tensors = one_layer()
    x = torch.randn(3, 8, requires_grad=True)
    (output,) = lora_linear(spec, (x,), tensors)
    grad = torch.ones(3, 6)
    wanted = torch.autograd.grad(output, [x, *tensors], grad, retain_graph=True)
    output.mul_(2)
    found = torch.autograd.grad(output, [x, *tensors], grad / 2)
    assert grad.eq(1).all()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_inputs_of_any_layout_and_dtype_are_cast_once() -> None:
    spec, tensors = one_layer(torch.bfloat16)
    x = torch.randn(8, 3, 4).transpose(0, 2).requires_grad_()
    (output,) = lora_linear(spec, (x,), tensors)
    assert output.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(output.float().sum(), x)
    assert grad.dtype == torch.float32
    assert grad.shape == x.shape


def test_autocast_does_not_reach_inside() -> None:
    spec, tensors = one_layer()
    x = torch.randn(3, 8)
    (plain,) = lora_linear(spec, (x,), tensors)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            (inside,) = lora_linear(spec, (x,), tensors)
        torch.testing.assert_close(inside, plain, rtol=0, atol=0)


def test_the_result_has_its_own_dtype() -> None:
    spec, tensors = one_layer()
    (output,) = lora_linear(replace(spec, result=torch.float16), (torch.randn(3, 8),), tensors)
    assert output.dtype == torch.float16


def test_an_output_that_nobody_uses_has_no_gradient() -> None:
    torch.manual_seed(5)
    layers = tuple(Layer(base_layer("dense", n, 8, torch.float32)[0], (), PLAIN) for n in (4, 6))
    tensors = [t for layer, n in zip(layers, (4, 6), strict=True) for t in tensors_of(layer, n, 8)]
    x = torch.randn(3, 8, requires_grad=True)
    spec = Spec(layers, DenseWeights(), x.dtype, x.dtype)
    _, used = lora_linear(spec, (x,), tensors)
    grads = torch.autograd.grad(used.sum(), tensors, allow_unused=True)
    assert not grads[0].any()
    assert grads[1] is None
    assert all(grad is not None and grad.any() for grad in grads[2:])


def test_only_x_and_its_product_with_a_are_saved() -> None:
    spec, tensors = one_layer()
    x = torch.randn(300, 8, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[:1] == (300,):
            saved.append(tensor.shape[1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lora_linear(spec, (x,), tensors)
    assert saved == [8, 3]


def test_without_gradient_nothing_is_kept() -> None:
    spec, tensors = one_layer()
    with torch.no_grad():
        (output,) = lora_linear(replace(spec, keep=False), (torch.randn(3, 8),), tensors)
    assert output.grad_fn is None


@pytest.mark.parametrize(("kind", "dtype"), [*itertools.product(("nf4", "int8", "dense"), TOLERANCES)])
def test_a_kept_copy_changes_nothing(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    base, _ = base_layer(kind, 32, 64, torch.float32)
    layer = Layer(base, (), PLAIN)
    tensors, x = tensors_of(layer, 32, 64), torch.randn(5, 64, requires_grad=True)
    results = []
    for budget in (0, 1 << 20):
        weights = DenseWeights(budget)
        (output,) = lora_linear(Spec((layer,), weights, dtype, dtype), (x,), tensors)
        results.append([output, *torch.autograd.grad(output.sum(), [x, *tensors])])
        needed = budget and (kind != "dense" or dtype != torch.float32)
        assert weights.bytes == (32 * 64 * dtype.itemsize if needed else 0)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_copy_follows_its_weight() -> None:
    base, _ = base_layer("dense", 4, 8, torch.float32)
    weights = DenseWeights(1 << 20)
    layer: Any = base
    assert torch.equal(weights.matrix(base, torch.bfloat16), layer.weight.bfloat16())
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(weights.matrix(base, torch.bfloat16), layer.weight.bfloat16())
    del base, layer
    gc.collect(2)
    assert weights.bytes == 0


def test_torch_operators_need_one_dense_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bases = [base_layer("nf4", 32, 64, torch.float32)[0] for _ in range(3)]
    layers = tuple(Layer(base, (), VARIANTS["lora"]) for base in bases)
    tensors = [each.requires_grad_() for layer in layers for each in tensors_of(layer, 32, 64)]
    written: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    matrix = DenseWeights.matrix

    def watched(weights: DenseWeights, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in written))
        written.append(weakref.ref(result := matrix(weights, layer, dtype)))
        return result

    monkeypatch.setattr(DenseWeights, "matrix", watched)
    x = torch.randn(3, 64, requires_grad=True)
    outputs = lora_linear(Spec(layers, DenseWeights(), torch.float32, torch.float32), (x,), tensors)
    torch.autograd.grad(sum(y.sum() for y in outputs), x)
    assert alive == [0] * 6


@pairwise("bias, kind, variant", [False, True], ["nf4", "fp4", "nf4-double"], ["lora", "two", "none"])
def test_few_rows_times_packed_weights(
    kind: str, variant: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU without gradients: two layers, one of which is left to a dequantized weight. No dtype but bfloat16 rounds more."""
    torch.manual_seed(0)
    bases, matrices = zip(*(base_layer(kind, 9, 64, torch.bfloat16) for _ in range(2)), strict=True)
    layers = [Layer(base, (1.0,) * bias, VARIANTS[variant]) for base in bases]
    tensors = [each for layer in layers for each in tensors_of(layer, 9, 64)]
    seen: list[Any] = []

    def in_4_bits(_: DenseWeights, layer: Any, x: torch.Tensor) -> bool:
        seen.append(layer)
        return layer is bases[0]

    monkeypatch.setattr(DenseWeights, "in_4_bits", in_4_bits)
    x = torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        spec = Spec(tuple(layers), DenseWeights(), torch.bfloat16, torch.float32, keep=False)
        outputs = lora_linear(spec, (x,), tensors)
    wanted = expected(layers, matrices, x.double(), double(tensors))
    assert [error(y, exact) < TOLERANCES[torch.bfloat16] for y, exact in zip(outputs, wanted, strict=True)] == [
        True, True
    ]  # fmt: skip
    assert seen == list(bases)
    lora_linear(Spec(tuple(layers), DenseWeights(), torch.bfloat16, torch.float32), (x,), tensors)
    assert seen == list(bases), "what a backward follows is dequantized"
