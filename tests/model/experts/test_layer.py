"""Adapted experts of transformers' classes against float64 modules whose weights have the adapters' deltas formed, and against PEFT."""

from __future__ import annotations

import copy
import inspect
from functools import cache, partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.core.formats import why_dense
from isotype.model.experts import layer
from isotype.model.experts.quantize import blank_stack, quantize_parts
from isotype.model.experts.stack import (
    QuantizedStack,
    place_stack,
    quantized_stack,
    seen_dense,
    shape_of,
    stacked_weights,
)
from tests.pairwise import pairwise
from tests.zoo import ARCHITECTURES

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss-cls", "deepseek_v2", "deepseek_v3",
    "glm4_moe", "olmoe", "granitemoe", "llama4_text", "lfm2_moe", "jamba", "nemotron_h", "aria_text", "afmoe",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS, RANK = 11, 5


@cache
def _experts(name: str) -> nn.Module:
    architecture = next(each for each in ARCHITECTURES.values() if each.name == name)
    _, experts = next(iter(layer.outermost(architecture.build(torch.float32))))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return experts


class _Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.experts(*inputs)


def mxfp4_stack(
    shape: torch.Size, storage: str, dtype: torch.dtype, *, transposed: bool
) -> tuple[torch.Tensor, QuantizedStack]:
    """Random blocks of values up to 1.5."""
    codes, stack = blank_stack(shape, storage, dtype, transposed=transposed, device="cpu")
    codes.random_(generator=torch.Generator().manual_seed(4))
    stack.get_buffer("scales").random_(122, 126, generator=torch.Generator().manual_seed(6))
    return codes, stack


def _inputs(experts: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tokens, the experts of each, of which one is chosen by none, and their weights, which sum to less than one."""
    generator = torch.Generator().manual_seed(5)
    lay = layer.layout_of(experts)
    assert lay is not None
    count, *_ = shape_of(experts, layer.DOWN)
    up = shape_of(experts, lay.up)
    width = up[1] if lay.inputs_first else up[2]
    rows = TOKENS if lay.routed else TOKENS * count
    x = torch.randn(rows, width, generator=generator).to(dtype)
    if not lay.routed:
        return (x,)
    index = torch.stack([torch.randperm(count - 1, generator=generator)[:2] for _ in range(TOKENS)])
    scores = torch.softmax(torch.randn(TOKENS, 3, generator=generator), -1)[:, :2].to(dtype)
    return x, index, scores


def _adapted(name: str, dtype: torch.dtype, storage: str | None, rank: int = RANK) -> Any:
    """PEFT's model of one experts module, with adapters that are not zero; its weights in `dtype` or quantized."""
    experts = copy.deepcopy(_experts(name)).to(dtype).requires_grad_(False)
    block = _Block(experts)
    if storage:
        for _, module, weight in list(stacked_weights(block)):
            value = getattr(module, weight).data
            if why_dense(value.shape, storage) is None:
                turned = bool(getattr(module, "is_transposed", False))
                made = mxfp4_stack if storage == "mxfp4" else partial(quantize_parts, [value])
                place_stack(module, weight, *made(value.shape, storage, dtype, transposed=turned))
    lay = layer.layout_of(experts)
    assert lay is not None
    names = [f"experts.{lay.up}", f"experts.{layer.DOWN}"]
    config = peft.LoraConfig(
        r=rank, lora_alpha=7, use_rslora=True, target_parameters=names, target_modules=[]
    )
    with seen_dense(block):
        model: Any = peft.get_peft_model(block, config)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return model.train()


def _reference(model: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients in float64 by the class's own loop over experts, with every expert's delta formed."""
    outer = model.base_model.model.experts
    base = layer.base_of(outer)
    lay = layer.layout_of(base)
    assert lay is not None
    plain = copy.deepcopy(_experts_class(base)).double()
    leaves: dict[str, torch.Tensor] = {}
    for wrapper in layer.wrappers_of(outer):
        name = wrapper.parameter_name
        a = wrapper.lora_A["default"].weight.detach().double().requires_grad_()
        b = wrapper.lora_B["default"].weight.detach().double().requires_grad_()
        leaves |= {f"{name}.A": a, f"{name}.B": b}
        weight = getattr(base, name).detach().double()
        grouped_a, grouped_b = a.view(weight.shape[0], RANK, -1), b.view(-1, RANK, weight.shape[0])
        turned = getattr(base, "is_transposed", False)
        form = "ore,eri->eio" if turned else "ore,eri->eoi"
        delta = torch.einsum(form, grouped_b, grouped_a) * wrapper.scaling["default"]
        del plain._parameters[name]
        setattr(plain, name, weight + delta)
    x, *rest = inputs
    x = x.detach().double().requires_grad_()
    leaves["x"] = x
    if rest:
        leaves["scores"] = rest[1].detach().double().requires_grad_()
        rest[1] = leaves["scores"]
    out = inspect.unwrap(type(plain).forward)(plain, x, *rest)
    grads = torch.autograd.grad(out, list(leaves.values()), _gradient(out))
    return out.detach(), dict(zip(leaves, grads, strict=True))


def _experts_class(base: Any) -> Any:
    """The experts module without quantized stacks, whose weights are replaced anyway."""
    if not getattr(base, "parametrizations", None):
        return base
    name = next(
        each for each in FAMILIES if type(_experts(each)).__name__ in [c.__name__ for c in type(base).__mro__]
    )
    plain = copy.deepcopy(_experts(name)).requires_grad_(False)
    for parameter, value in base.named_parameters(recurse=False):
        plain._parameters[parameter] = value
    return plain


def _gradient(out: torch.Tensor) -> torch.Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)


def _ours(model: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    outer = model.base_model.model.experts
    layer.put_in(outer)
    x, *rest = inputs
    leaves = {"x": x.detach().requires_grad_()}
    if rest:
        leaves["scores"] = rest[1].detach().requires_grad_()
        rest[1] = leaves["scores"]
    for wrapper in layer.wrappers_of(outer):
        for letter in "AB":
            factor = getattr(wrapper, f"lora_{letter}")["default"].weight
            leaves[f"{wrapper.parameter_name}.{letter}"] = factor
    out = model(leaves["x"], *rest)
    return out.detach(), dict(
        zip(leaves, torch.autograd.grad(out, list(leaves.values()), _gradient(out)), strict=True)
    )


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pairwise(
    "name, dtype, storage",
    [*FAMILIES, "qwen3_moe mxfp4", "gpt_oss-cls mxfp4"],
    DTYPES,
    (None, "nf4", "int8"),
)
def test_outputs_and_gradients_are_those_of_formed_deltas(
    name: str, dtype: torch.dtype, storage: str | None
) -> None:
    name, _, packed = name.partition(" ")
    model = _adapted(name, dtype, packed or storage)
    base = layer.base_of(model.base_model.model.experts)
    inputs = _inputs(base, dtype)
    exact, gradients = _reference(model, inputs)
    out, own = _ours(model, inputs)
    assert out.dtype == dtype
    # Each of some ten products and activations on the way rounds once, to 2^-8, 2^-11 or 2^-24 of its size; sums of up to a few
    # hundred rounded terms of both signs keep the norm of the error near that of one.
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}[dtype]
    assert _error(out, exact) < tolerance
    assert {key: error for key in gradients if (error := _error(own[key], gradients[key])) >= tolerance} == {}
    for wrapper in layer.wrappers_of(model.base_model.model.experts):
        assert own[f"{wrapper.parameter_name}.A"].dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss-cls"])
@pytest.mark.parametrize("storage", [None, "nf4"])
@pytest.mark.parametrize("rows", [14, 10_000])
def test_several_experts_at_once_give_the_same(
    name: str, storage: str | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isotype.model.experts import compute

    model = _adapted(name, torch.float32, storage, rank=8)  # grouped products take whole 16 bytes
    inputs = _inputs(layer.base_of(model.base_model.model.experts), torch.float32)
    monkeypatch.setattr(compute, "_ROWS", 0)
    exact, gradients = _ours(model, inputs)
    groups: list[int] = []

    def noted(*arguments: Any) -> Any:
        made = list(whole(*arguments))
        groups.append(max(each.stop - each.first for each in made))
        return iter(made)

    whole = compute._groups
    monkeypatch.setattr(compute, "_groups", noted)
    monkeypatch.setattr(compute, "_ROWS", rows)
    monkeypatch.setattr(compute, "_DENSE_BYTES", 2 * 64 * 192 * 4)
    out, own = _ours(model, inputs)
    assert max(groups, default=0) > 1
    assert _error(out, exact.double()) < 2e-6
    assert {key: e for key in own if (e := _error(own[key], gradients[key].double())) >= 2e-6} == {}


def test_dropout_of_the_backward_is_that_of_the_forward() -> None:
    model = _adapted("qwen3_moe", torch.float64, None)
    outer = model.base_model.model.experts
    for wrapper in layer.wrappers_of(outer):
        wrapper.lora_dropout["default"] = nn.Dropout(0.4)
        wrapper.double()
    layer.put_in(outer)
    x, index, scores = _inputs(layer.base_of(outer), torch.float64)
    factors = [
        part.weight for w in layer.wrappers_of(outer) for part in (w.lora_A["default"], w.lora_B["default"])
    ]

    def run(x: torch.Tensor, scores: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return model(x, index, scores)  # type: ignore[no-any-return]

    leaves = [x.requires_grad_(), scores.requires_grad_(), *factors]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    model.eval()
    whole = run(x, scores).detach()
    model.train()
    drawn = []
    for seed in range(400):
        torch.manual_seed(seed)
        drawn.append(model(x, index, scores).detach())
    assert not torch.equal(drawn[0], drawn[1])
    # The output is linear in each of the two masks, which are drawn independently, but not in h: only the mean of the second product's
    # adapter is exact. 400 draws leave a twentieth of one draw's deviation.
    spread = torch.stack(drawn).std(0).norm() / 20
    assert (torch.stack(drawn).mean(0) - whole).norm() < 0.25 * whole.norm() + 4 * spread


def test_peft_leaves_a_factor_on_a_parametrized_weight() -> None:
    """Until this fails, `_activate_lora` and `_remove_parametrizations` of a swapped wrapper are needed."""
    model = _adapted("qwen3_moe", torch.float32, "nf4")
    inputs = _inputs(layer.base_of(model.base_model.model.experts), torch.float32)
    with pytest.warns(UserWarning, match="Could not find any LoRA parametrization"):
        model(*inputs)


def test_the_path_of_peft_is_right_on_quantized_experts() -> None:
    model = _adapted("qwen3_moe", torch.float32, "nf4")
    outer = model.base_model.model.experts
    inputs = _inputs(layer.base_of(outer), torch.float32)
    exact, _ = _ours(model, inputs)
    hook = layer.base_of(outer).register_forward_hook(
        lambda *_: None
    )  # has to be called, and so PEFT's path taken
    for _ in range(2):
        torch.testing.assert_close(model(*inputs), exact, rtol=1e-5, atol=1e-5)
    hook.remove()
    assert len(layer.base_of(outer).parametrizations["gate_up_proj"]) == 1
    with model.disable_adapter():
        assert _error(model(*inputs), exact.double()) > 1e-3
    with pytest.raises(isotype.PrecisionError, match="cannot be merged into a quantized weight"):
        model.merge_adapter()


def test_quantized_experts_with_a_forward_of_another_form_train_at_every_step(tmp_path: Path) -> None:
    """JetMoE's experts get no forward of isotype, but their wrappers need the same repairs of PEFT."""
    architecture = ARCHITECTURES["jetmoe"]
    architecture.build(torch.float32).save_pretrained(tmp_path)
    policy = isotype.resolve_precision(tmp_path, "float32", "nf4", "cpu")
    model = isotype.load(tmp_path, policy)
    stacks = [f"{name}.{leaf}" for name, _, leaf in stacked_weights(model)]
    model = isotype.add_lora(model, policy, r=2, target_parameters=stacks, init_lora_weights=False).eval()
    batch = architecture.batch()
    first = model(**batch).loss
    first.backward()
    torch.testing.assert_close(model(**batch).loss, first, rtol=0, atol=0)
    assert all(
        p.grad is not None and p.grad.any()
        for n, p in model.named_parameters()
        if "experts" in n and p.requires_grad
    )
    for stack in stacks:
        module, leaf = stack.rsplit(".", 1)
        base = layer.base_of(model.base_model.model.get_submodule(module))
        assert len(base.parametrizations[leaf]) == 1


def test_a_file_of_a_quantized_base_is_named_as_plain_peft_names_it() -> None:
    quantized = _adapted("qwen3_moe", torch.float32, "nf4")
    plain = _adapted("qwen3_moe", torch.float32, None)
    shapes = [
        {name: value.shape for name, value in peft.get_peft_model_state_dict(model).items()}
        for model in (quantized, plain)
    ]
    assert shapes[0] == shapes[1]
    assert quantized_stack(layer.base_of(quantized.base_model.model.experts), "down_proj") is not None
