"""Quantized stacks against bitsandbytes' own parameters, and as parts of modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from bitsandbytes.nn import parametrize as bnb
from torch import nn

from isotype.core.formats import why_dense
from isotype.core.names import plain_name
from isotype.model.experts.quantize import blank_stack, quantize_parts
from isotype.model.experts.stack import (
    QuantizedStack,
    adopt_stacks,
    codes_of,
    place_stack,
    quantized_stack,
    stacked_weights,
)

SHAPE = torch.Size((6, 24, 40))  # 15 blocks an expert: constants of constants straddle experts
FOUR_BITS = pytest.mark.parametrize("form", ["nf4", "fp4"])
NESTED = pytest.mark.parametrize("double_quant", [False, True])


class Experts(nn.Module):
    """One stacked weight that its forward reads expert by expert."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.up = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x @ self.up[expert].T.float() for expert in range(len(self.up))])


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(SHAPE) * 0.02).to(dtype)


def quantized(storage: str, dense: torch.Tensor | None = None, **settings: bool) -> Experts:
    dense = weight() if dense is None else dense
    module = Experts(dense.clone())
    parts = [dense[:1], dense[1:4], dense[4:]]
    place_stack(module, "up", *quantize_parts(parts, dense.shape, storage, dense.dtype, **settings))
    return module


def theirs(form: str, double_quant: bool) -> Experts:
    module = Experts(weight())
    bnb.replace_parameter_4bit(module, "up", compress_statistics=double_quant, quant_type=form)
    return module


@FOUR_BITS
@NESTED
def test_codes_constants_and_values_are_those_of_bitsandbytes(form: str, double_quant: bool) -> None:
    ours, wanted = quantized(form, double_quant=double_quant), theirs(form, double_quant)
    state, expected = ours.state_dict(), wanted.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert torch.equal(ours.up, wanted.up)
    assert ours.up.dtype == torch.bfloat16


@FOUR_BITS
@NESTED
def test_bitsandbytes_reads_a_saved_stack(form: str, double_quant: bool) -> None:
    ours = quantized(form, double_quant=double_quant)
    state = ours.state_dict()
    module = Experts(weight())
    module.up = nn.Parameter(state.pop("up"), requires_grad=False)
    constants = {name.removeprefix("up."): value for name, value in state.items()}
    bnb.replace_parameter_4bit_prequantized(module, "up", constants, torch.device("cpu"))
    assert torch.equal(module.up, ours.up)


@NESTED
@pytest.mark.parametrize("storage", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_is_that_of_the_whole(storage: str, double_quant: bool, dtype: torch.dtype) -> None:
    module = quantized(storage, weight(dtype), double_quant=double_quant)
    stack, codes = quantized_stack(module, "up"), codes_of(module, "up")
    assert stack is not None
    whole = stack(codes)
    for start, stop in ((0, 1), (2, 5), (5, 6), (0, 6)):
        part = stack.part(codes, start, stop)
        assert part.dtype == dtype
        assert torch.equal(part, whole[start:stop])
    largest = weight(dtype).abs().max().float()
    assert (whole - weight(dtype)).abs().max() < largest / (6 if storage == "nf4" else 200)


def test_int8_scales_lie_over_the_input_dimension() -> None:
    dense = weight(torch.float32) * torch.logspace(0, -3, 40)  # columns of very different size
    straight, turned = quantized("int8", dense), quantized("int8", dense, transposed=True)
    stacks = [quantized_stack(module, "up") for module in (straight, turned)]
    assert [tuple(stack.scales.shape) for stack in stacks if stack] == [(6, 24, 1), (6, 1, 40)]
    errors = [(module.up - dense).abs()[..., -1].max() for module in (straight, turned)]
    assert errors[1] < errors[0] / 100
    assert torch.equal(turned.state_dict()["up.SCB"], stacks[1].scales)  # type: ignore[union-attr]


@NESTED
@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_casts_move_and_change_no_constant(storage: str, double_quant: bool) -> None:
    module = quantized(storage, double_quant=double_quant)
    before = {name: value.clone() for name, value in module.named_buffers()}
    module.half().to(torch.float64).requires_grad_(False)
    for name, value in module.named_buffers():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype
    meta = copy.deepcopy(module).to("meta")
    assert all(value.is_meta for value in (*meta.parameters(), *meta.buffers()))
    assert not any(value.is_meta for value in module.buffers())
    assert meta.up.shape == SHAPE
    assert meta.state_dict().keys() == module.state_dict().keys()


def test_a_copy_has_its_own_codes() -> None:
    module = quantized("nf4")
    other = copy.deepcopy(module)
    codes_of(other, "up").zero_()
    quantized_stack(other, "up").dtype = torch.float32  # type: ignore[union-attr]
    assert codes_of(module, "up").count_nonzero() > 0
    assert module.up.dtype == torch.bfloat16
    assert other.up.dtype == torch.float32
    assert not torch.equal(module.up.float(), other.up)
    stack = pickle.loads(pickle.dumps(quantized_stack(module, "up")))
    assert torch.equal(stack(codes_of(module, "up")), module.up)


@NESTED
@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_a_state_dict_is_loaded(storage: str, double_quant: bool) -> None:
    module = quantized(storage, double_quant=double_quant)
    other = quantized(storage, weight() * 2, double_quant=double_quant)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.up, module.up)


def test_a_forward_makes_the_weight_dense_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = quantized("nf4"), []
    part = QuantizedStack.part
    monkeypatch.setattr(QuantizedStack, "part", lambda *args: (asked.append(1), part(*args))[1])
    x = torch.randn(3, 40)
    assert torch.equal(module(x)[2], x @ module.up[2].T.float())
    asked.clear()
    module(x)
    assert len(asked) == 1
    with pytest.raises(RuntimeError):
        module(torch.randn(3, 41))
    asked.clear()
    module.up, module.up  # noqa: B018
    assert len(asked) == 2  # nothing is kept after a forward, not after one that failed


@pytest.mark.parametrize("storage", ["nf4", "fp4", "int8"])
@NESTED
def test_a_blank_has_the_shapes_of_a_quantized_one(storage: str, double_quant: bool) -> None:
    codes, stack = blank_stack(SHAPE, storage, torch.bfloat16, double_quant=double_quant)
    module = quantized(storage, double_quant=double_quant)
    held = quantized_stack(module, "up")
    assert held is not None
    assert (codes.shape, codes.dtype) == (codes_of(module, "up").shape, codes_of(module, "up").dtype)
    wanted = {name: (value.shape, value.dtype) for name, value in held.named_buffers()}
    assert {name: (value.shape, value.dtype) for name, value in stack.named_buffers()} == wanted
    place_stack(module, "up", codes, stack)  # in the place of another one
    assert codes_of(module, "up").is_meta
    assert quantized_stack(module, "up") is stack


def test_blocks_never_straddle_experts() -> None:
    assert (
        why_dense((2, 3, 50), "nf4")
        == "an expert has 150 values, which is not a multiple of the block size 64"
    )
    assert why_dense((2, 32, 50), "nf4") is None
    assert why_dense((2, 3, 50), "int8") is None


def test_stacked_weights_are_those_of_experts() -> None:
    model = nn.Module()
    model.experts = quantized("nf4")
    model.add_module("other", Experts(weight()))
    model.add_module("conv", nn.Conv1d(4, 4, 3))
    model.add_module("block", nn.Module())
    model.block.table = nn.Parameter(torch.zeros(1, 2, 3))
    model.experts.up_bias = nn.Parameter(torch.zeros(6, 1, 24))
    assert [(name, own) for name, _, own in stacked_weights(model)] == [("experts", "up"), ("other", "up")]


def test_the_name_of_codes_is_that_of_the_weight() -> None:
    names = [plain_name(name) for name, _ in quantized("nf4").named_parameters()]
    assert names == ["up"]
    assert (
        plain_name("base_model.model.a.experts.parametrizations.gate_up_proj.original")
        == "a.experts.gate_up_proj"
    )


@FOUR_BITS
@NESTED
def test_a_stack_of_bitsandbytes_is_adopted(form: str, double_quant: bool) -> None:
    model = nn.Module()
    model.experts = theirs(form, double_quant)
    dense, state = model.experts.up.clone(), model.state_dict()
    assert adopt_stacks(model) == ["experts.up"]
    assert adopt_stacks(model) == []
    stack = quantized_stack(model.experts, "up")
    assert stack is not None
    assert torch.equal(stack.part(codes_of(model.experts, "up"), 2, 4), dense[2:4])
    again = model.state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    x = torch.randn(3, 40)
    assert torch.equal(model.experts(x)[5], x @ dense[5].T.float())


def test_a_weight_of_bitsandbytes_that_is_no_stack_of_blocks_is_left_alone() -> None:
    model = nn.Module()
    model.experts = Experts(torch.randn(4, 5, 7))
    bnb.replace_parameter_4bit(model.experts, "up")
    assert adopt_stacks(model) == []
    assert model.experts.up.shape == (4, 5, 7)
