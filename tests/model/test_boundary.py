"""Boundaries against a float32 reference, and everything that may be done to a model that has them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.model.boundary import Boundary, BoundarySettings, original_class, set_boundary
from tests.adapters import moved
from tests.models import tiny_batch
from tests.pairwise import pairwise
from tests.policy import autocast

Saved = Callable[..., Path]
LOW = (torch.bfloat16, torch.float16)
EPSILON = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}  # half a unit in the last place of numbers near one


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).abs().max() / reference.abs().max())


def run(
    module: nn.Module, x: torch.Tensor, outer: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Output (under autocast to `outer`), gradient of the input and of the parameters, of a sum of squares."""
    x = x.detach().requires_grad_(True)
    with torch.autocast("cpu", outer, enabled=outer is not None):
        out = module(x)
    (out.float() ** 2).sum().backward()
    assert x.grad is not None
    return out, x.grad, {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("outer", [None, *LOW])
@pytest.mark.parametrize("compute", LOW)
def test_a_float32_norm_computes_in_float32_and_returns_the_compute_dtype(
    compute: torch.dtype, outer: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(33)
    nn.init.normal_(norm.weight, 1.0, 0.2)
    x = torch.randn(2, 7, 33).to(compute)
    expected, expected_x, expected_own = run(copy.deepcopy(norm).double(), x.double())

    assert set_boundary(norm, BoundarySettings("float32", compute))
    out, grad_x, grads = run(norm, x, outer)
    assert (out.dtype, grad_x.dtype) == (compute, compute)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    # Only the output (and the gradient that comes back through it) is rounded, once.
    assert relative_error(out, expected) <= EPSILON[compute]
    assert relative_error(grad_x, expected_x) <= 4 * EPSILON[compute]
    for name, grad in grads.items():
        assert relative_error(grad, expected_own[name]) <= 2 * EPSILON[compute], name


@pytest.mark.parametrize("outer", [None, *LOW])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compute", LOW)
def test_a_linear_layer_with_masters_computes_in_the_compute_dtype(
    compute: torch.dtype, bias: bool, outer: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(33, 17, bias=bias)
    x = torch.randn(2, 7, 33).to(compute)
    expected, expected_x, expected_own = run(copy.deepcopy(linear).double(), x.double())

    assert set_boundary(linear, BoundarySettings("compute", compute))
    out, grad_x, grads = run(linear, x, outer)
    assert (out.dtype, grad_x.dtype) == (compute, compute)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    # Weight, output and gradients are rounded once each; sums of 33 and 14 products of rounded numbers.
    assert relative_error(out, expected) <= 4 * EPSILON[compute]
    assert relative_error(grad_x, expected_x) <= 4 * EPSILON[compute]
    for name, grad in grads.items():
        assert relative_error(grad, expected_own[name]) <= 4 * EPSILON[compute], name


@pytest.mark.parametrize("outer", [None, *LOW])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("low", LOW)
def test_a_16_bit_layer_computes_in_float32(low: torch.dtype, bias: bool, outer: torch.dtype | None) -> None:
    """No autocast casts to float32: the layer's own parameters are widened for the call."""
    torch.manual_seed(0)
    linear = nn.Linear(33, 17, bias=bias).to(low)
    x = torch.randn(2, 7, 33)
    expected, expected_x, expected_own = run(copy.deepcopy(linear).double(), x.double())

    assert set_boundary(linear, BoundarySettings("compute", torch.float32))
    out, grad_x, grads = run(linear, x, outer)
    assert (out.dtype, grad_x.dtype) == (torch.float32, torch.float32)
    assert {g.dtype for g in grads.values()} == {low}
    # Sums of 33 and 14 products in float32; a parameter's gradient is rounded to its dtype once.
    assert relative_error(out, expected) <= 1e-5
    assert relative_error(grad_x, expected_x) <= 1e-5
    for name, grad in grads.items():
        assert relative_error(grad, expected_own[name]) <= 2 * EPSILON[low], name


def test_outputs_of_every_structure_return_in_the_compute_dtype() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
            logits = nn.functional.linear(x, self.weight) * scale
            return {"logits": logits, "chosen": (logits.argmax(-1), None)}

    router = Router()
    x, scale = torch.randn(3, 8, dtype=torch.bfloat16), torch.ones(())
    for boundary in ("float32", "compute"):
        set_boundary(router, BoundarySettings(boundary, torch.bfloat16))
        out = router(x, scale=scale)
        assert out["logits"].dtype == torch.bfloat16
        assert out["chosen"][0].dtype == torch.int64


def test_setting_changing_and_taking_away() -> None:
    norm = nn.LayerNorm(4)
    assert set_boundary(norm, BoundarySettings("float32", torch.bfloat16))
    assert not set_boundary(norm, BoundarySettings("float32", torch.bfloat16))
    assert set_boundary(norm, BoundarySettings("float32", torch.float16))
    assert norm(torch.randn(2, 4)).dtype == torch.float16
    assert isinstance(norm, nn.LayerNorm)
    assert (type(norm).__name__, type(norm).__module__) == ("LayerNorm", nn.LayerNorm.__module__)
    assert original_class(norm) is nn.LayerNorm
    assert list(norm.state_dict()) == ["weight", "bias"]
    assert set_boundary(norm, BoundarySettings("compute", torch.float16))
    assert original_class(norm) is nn.LayerNorm
    assert set_boundary(norm, None)
    assert not set_boundary(norm, None)
    assert type(norm) is nn.LayerNorm
    assert vars(norm).keys() == vars(nn.LayerNorm(4)).keys()
    assert norm(torch.randn(2, 4)).dtype == torch.float32


def test_copies_keep_the_boundary() -> None:
    norm = nn.LayerNorm(4)
    set_boundary(norm, BoundarySettings("float32", torch.bfloat16))
    buffer = io.BytesIO()
    torch.save(norm, buffer)
    buffer.seek(0)
    x = torch.randn(2, 4)
    for twin in (
        copy.copy(norm),
        copy.deepcopy(norm),
        pickle.loads(pickle.dumps(norm)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(twin) is type(norm)
        assert twin.weight is not norm.weight or twin._parameters is norm._parameters
        assert torch.equal(twin(x), norm(x))
        assert set_boundary(twin, None)
        assert isinstance(norm, Boundary)


def test_accelerate_hooks_call_the_boundary() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    for hook_first in (True, False):
        norm = nn.LayerNorm(4)
        if hook_first:
            add_hook_to_module(norm, ModelHook())
        set_boundary(norm, BoundarySettings("float32", torch.bfloat16))
        if not hook_first:
            add_hook_to_module(norm, ModelHook())
        assert norm(torch.randn(2, 4)).dtype == torch.bfloat16
        remove_hook_from_module(norm)
        assert norm(torch.randn(2, 4)).dtype == torch.bfloat16
        set_boundary(norm, None)
        assert norm(torch.randn(2, 4)).dtype == torch.float32


@pairwise(
    "use_reentrant, quantization, with_autocast",
    [False, True],
    [None, "nf4", "int8"],
    [False, True],
    strength=1,
)
def test_gradient_checkpointing_gives_the_same_gradients(
    saved: Saved, quantization: str | None, use_reentrant: bool, with_autocast: bool
) -> None:
    policy = isotype.resolve_precision(saved("gpt-oss"), "bfloat16", quantization, device="cpu")
    model = isotype.load(saved("gpt-oss"), policy)
    model = isotype.add_lora(model, policy, r=4, modules_to_save=["lm_head"], bias="all")
    assert any(isinstance(module, Boundary) for module in model.modules())
    model.train()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        with autocast(policy) if with_autocast else torch.enable_grad():
            loss = model(**tiny_batch("gpt-oss")).loss
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    actual = gradients()
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_torch_compile_traces_through_boundaries(saved: Saved) -> None:
    """A quantized layer with an adapter, a norm and a head; captured by dynamo and run eagerly, so that no C++ compiler is needed."""
    policy = isotype.resolve_precision(saved("llama"), "bfloat16", "nf4", device="cpu")
    loaded = isotype.load(saved("llama"), policy)
    lora = {"r": 4, "target_modules": ["down_proj"], "modules_to_save": ["lm_head", "norm"]}
    model = moved(isotype.add_lora(loaded, policy, **lora)).get_base_model()
    parts = nn.Sequential(model.model.layers[0].mlp.down_proj, model.model.norm, model.lm_head)
    assert sum(isinstance(module, Boundary) for module in parts.modules()) >= 2
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, expected_x, grads = run(parts, x)
    parts.zero_grad()
    out, grad_x, compiled = run(torch.compile(parts, backend="aot_eager", fullgraph=True), x)
    # The same operators; fused casts may round once less: a few units in the last place of bfloat16.
    assert relative_error(out, expected) <= 2 * EPSILON[torch.bfloat16]
    for grad, wanted in ((grad_x, expected_x), *zip(compiled.values(), grads.values(), strict=True)):
        assert relative_error(grad, wanted) <= 16 * EPSILON[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_int8_layer_gives_under_autocast_what_it_gives_without(dtype):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    layer = bnb.nn.Linear8bitLt(512, 32, bias=False, has_fp16_weights=False)
    weight = torch.randn(32, 512)
    layer.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
    layer.requires_grad_(False).eval()
    set_boundary(layer, BoundarySettings("int8", dtype))
    x = torch.randn(3, 5, 512).to(dtype)
    with torch.no_grad():
        plain = layer(x)
        with torch.autocast("cpu", dtype=dtype):
            cast = layer(x)
    assert cast.dtype == dtype
    assert torch.equal(plain, cast)
    # 8-bit rows of weight and input: 1/127 of their largest value each, over 512 products that add like a walk.
    assert torch.allclose(plain.float(), x.float() @ weight.T, atol=2.0)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_with_a_boundary_is_pickled_as_without(layer: type[nn.RNNBase]) -> None:
    """Its own `__getstate__` leaves weak references out, which nothing can pickle."""
    made = layer(4, 4).bfloat16()
    set_boundary(made, BoundarySettings("compute", torch.bfloat16))
    x = torch.randn(2, 1, 4).bfloat16()
    for twin in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert isinstance(twin, Boundary)
        assert torch.equal(twin(x)[0], made(x)[0])
