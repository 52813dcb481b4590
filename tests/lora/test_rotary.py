"""Rotary positions by compiled loops against float64, and which attention layers get them.

Tolerance: one rounding to b digits is off by at most 2^-b of a value (b: 24 in float32, 9 in bfloat16); the two products, which may
cancel, are float32's.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.cohere import modeling_cohere
from transformers.models.glm import modeling_glm
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from isotype.lora import rotary
from isotype.lora.loops import elementwise
from isotype.lora.rotary import NAME, rotates, with_loops
from tests.cpus import no_compiler
from tests.lora.watched import Watched
from tests.pairwise import pairwise

TOLERANCES = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
STANDARD = modeling_llama.apply_rotary_pos_emb
Tensors = tuple[torch.Tensor, ...]
# batch, query heads, key heads, tokens, dim, batch of the tables
SHAPES = [
    (2, 3, 1, 5, 64, 2), (2, 9, 3, 33, 64, 1), (1, 4, 4, 7, 8, 1), (3, 2, 1, 4, 2, 3), (2, 2, 2, 3, 6, 1), (1, 2, 1, 9, 34, 1),
    (2, 3, 1, 200, 80, 2), (1, 1, 1, 1, 128, 1), (2, 2, 1, 0, 16, 1), (0, 2, 1, 4, 16, 1),
]  # fmt: skip


needs_compiler = pytest.mark.lacking(no_compiler())


def replacement(rotate: Any = STANDARD) -> Any:
    return rotary._replacement(rotate)


def given(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensors:
    """q, k, which lie as a layer's products do, cos and sin of halves that differ."""
    batch, heads, key_heads, tokens, dim, tables = shape
    torch.manual_seed(0)
    q, k = ((3 * torch.randn(batch, tokens, n, dim)).to(dtype).transpose(1, 2) for n in (heads, key_heads))
    cos, sin = (torch.randn(tables, tokens, dim).to(dtype) for _ in range(2))
    return q, k, cos, sin


def exact(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
    found: Tensors = STANDARD(q.double(), k.double(), cos.double(), sin.double())
    return found


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float, terms: torch.Tensor) -> None:
    """Within `tolerance` of the value, and float32's of the larger `terms` that it is the sum of."""
    assert found.shape == wanted.shape
    excess = (found.double() - wanted).abs() - tolerance * wanted.abs()
    assert not excess.numel() or bool((excess <= 2.0**-22 * terms).all())


@pytest.mark.usefixtures("threads")
@pairwise("threads, shape, dtype", [1, 3], SHAPES, TOLERANCES, indirect=["threads"])
def test_values_and_gradients(rotations: list[bool], dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    q, k, cos, sin = given(shape, dtype)
    d_q, d_k = (torch.randn_like(x) for x in (q, k))
    wide = [x.double().requires_grad_() for x in (q, k)]
    wanted = exact(*wide, cos, sin)
    wanted_grads = torch.autograd.grad(wanted, wide, (d_q.double(), d_k.double()))
    inputs = [x.clone().requires_grad_() for x in (q, k)]
    found = replacement()(*inputs, cos, sin)
    grads = torch.autograd.grad(found, inputs, (d_q, d_k))
    assert rotations == [False, False, True, True]
    largest = 4 * cos.abs().amax() * sin.abs().amax() if cos.numel() else torch.tensor(0.0)
    for made, right, source in zip((*found, *grads), (*wanted, *wanted_grads), (q, k, d_q, d_k), strict=True):
        assert made.dtype == dtype
        assert made.stride() == torch.empty_like(source).stride()
        terms = largest * (source.abs().amax() if source.numel() else 0.0)
        close(made.detach(), right.detach(), TOLERANCES[dtype], terms)


@needs_compiler
def test_bfloat16_is_closer_to_float64_than_torchs_operators() -> None:
    q, k, cos, sin = given((2, 4, 2, 32, 64, 2), torch.bfloat16)
    for grad in (False, True):
        tables = (cos, -sin.roll(32, -1)) if grad else (cos, sin)  # what the gradient is of the same formula
        wanted = exact(q, k, *tables)
        found = [elementwise.rotate(x, cos, sin, back=grad) for x in (q, k)]
        for one, other, right in zip(found, STANDARD(q, k, *tables), wanted, strict=True):
            assert float((one - right).norm()) < 0.8 * float((other - right).norm())


def layouts() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "contiguous": torch.randn(2, 3, 5, 8),
        "tokens first": torch.randn(5, 2, 3, 8).permute(1, 2, 0, 3),
        "part of a head": torch.randn(2, 5, 3, 20)[..., 4:12].transpose(1, 2),
        "part of a product": torch.randn(2, 5, 9, 8)[:, :, 3:6].transpose(1, 2),
        "every other token": torch.randn(2, 3, 10, 8)[:, :, ::2],
        "last first": torch.randn(8, 5, 3, 2).permute(3, 2, 1, 0),
        "every other number": torch.randn(2, 3, 5, 16)[..., ::2],
        "one number": torch.randn(()).expand(2, 3, 5, 8),
        "one head": torch.randn(2, 1, 5, 8).expand(2, 3, 5, 8),
        "one row": torch.randn(1, 3, 5, 8).expand(2, 3, 5, 8),
        "windows": torch.randn(200).as_strided((2, 3, 5, 8), (7, 5, 3, 1)),
    }


@needs_compiler
@pytest.mark.parametrize("name", layouts())
def test_layouts(name: str) -> None:
    x = layouts()[name]
    cos, sin = (torch.randn(1, 5, 8).expand(2, 5, 8) for _ in range(2))
    wanted = elementwise.rotate(x.contiguous(), cos.contiguous(), sin.contiguous())
    assert torch.equal(elementwise.rotate(x, cos, sin), wanted)
    transposed = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (cos, sin))
    assert torch.equal(elementwise.rotate(x, *transposed), wanted)
    inputs = [layouts()["contiguous"].requires_grad_() for _ in range(2)]
    for rotate in (STANDARD, replacement()):
        made = rotate(inputs[0], inputs[1], cos, sin)
        made[0].backward(x)
    torch.testing.assert_close(inputs[0].grad, 2 * elementwise.rotate(x, cos, sin, back=True))


@needs_compiler
def test_what_needs_a_gradient_gets_one() -> None:
    q, k, cos, sin = given((2, 3, 1, 5, 8, 1))
    for needed in ((True, True), (True, False), (False, True), (False, False)):
        inputs = [x.detach().clone().requires_grad_(need) for x, need in zip((q, k), needed, strict=True)]
        made = replacement()(*inputs, cos, sin)
        assert tuple(x.requires_grad for x in made) == needed
        for x, need, out in zip(inputs, needed, made, strict=True):
            if need:
                (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
                assert torch.equal(grad, elementwise.rotate(torch.ones_like(out), cos, sin, back=True))
    alone = q.clone().requires_grad_()
    made = replacement()(alone, alone, cos, sin)
    made[1].sum().backward()  # the other's is none
    assert alone.grad is not None
    with torch.no_grad():
        assert not replacement()(alone, alone, cos, sin)[0].requires_grad


class _None(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@needs_compiler
def test_no_gradient_stays_none() -> None:
    q, k, cos, sin = given((2, 3, 1, 5, 8, 1))
    q.requires_grad_()
    _None.apply(replacement()(q, k, cos, sin)[0]).sum().backward()  # type: ignore[no-untyped-call]
    assert q.grad is None


def test_what_is_left_to_the_original(rotations: list[bool]) -> None:
    seen: list[tuple[Any, ...]] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return "original"

    rotate = replacement(original)
    q, k, cos, sin = given((2, 3, 1, 5, 8, 2))
    trained = cos.clone().requires_grad_()
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, cos, sin, None), {}),
        ((q, k, cos, sin), {"unsqueeze_dim": 2}),
        ((q, k, cos, sin), {"position_ids": torch.arange(5)}),
        ((q, k, cos), {"sin": sin}),
        ((q, None, cos, sin), {}),
        ((q.bfloat16(), k.bfloat16(), cos, sin), {}),
        ((q, k.bfloat16(), cos, sin), {}),
        ((q, k, cos, sin.bfloat16()), {}),
        ((q.half(), k.half(), cos.half(), sin.half()), {}),
        ((q.double(), k.double(), cos.double(), sin.double()), {}),
        ((q.to("meta"), k.to("meta"), cos.to("meta"), sin.to("meta")), {}),
        ((q, k, cos[..., :4], sin[..., :4]), {}),
        ((q[..., :7], k[..., :7], cos[..., :7], sin[..., :7]), {}),
        ((q[:1], k[:1], cos, sin), {}),
        ((q, k[:, :, :1], cos, sin), {}),
        ((q[0], k[0], cos, sin), {}),
        ((q, k, cos[:, None], sin[:, None]), {}),
        ((q, k, trained, sin), {}),
        ((q, k, cos, [sin]), {}),
    ]
    for args, kwargs in others:
        assert rotate(*args, **kwargs) == "original"
        assert all(one is other for one, other in zip(seen[-1][0], args, strict=True))
        assert seen[-1][1] == kwargs
    with FakeTensorMode():
        assert rotate(*(torch.empty(x.shape) for x in (q, k, cos, sin))) == "original"
    assert not rotations
    assert len(seen) == len(others) + 1
    for kwargs in ({}, {"unsqueeze_dim": 1}):
        rotate(q, k, cos, sin, **kwargs)
    with torch.no_grad():
        rotate(q, k, trained, sin)
    assert rotations == [False] * 6
    assert len(seen) == len(others) + 1


def interleaved(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    made: Any = modeling_cohere.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)
    return made


def widened(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return STANDARD(q.float(), k.float(), cos, sin, unsqueeze_dim)


def multimodal(q: Any, k: Any, cos: Any, sin: Any, sections: list[int], unsqueeze_dim: int = 1) -> Any:
    return STANDARD(q, k, cos, sin, unsqueeze_dim)


def one_of_them(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return STANDARD(q, k, cos, sin)[0]


def reversed_pair(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return STANDARD(q, k, cos, sin)[::-1]


def in_float32(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    made = STANDARD(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return tuple(x.to(q.dtype) for x in made)


def test_what_is_a_rotation() -> None:
    known = (STANDARD, modeling_gpt_neox.apply_rotary_pos_emb, in_float32)
    others = (
        interleaved,
        modeling_cohere.apply_rotary_pos_emb,
        modeling_glm.apply_rotary_pos_emb,
        multimodal,
        widened,
        one_of_them,
        reversed_pair,
        lambda q, k: (q, k),
        lambda q, k, cos, sin: None,
    )
    assert all(rotary._is_rotation(each) for each in known)
    assert not any(rotary._is_rotation(each) for each in others)


def names(forward: Any, **more: Any) -> Any:
    """`forward` as a module would have it that has the function."""
    return FunctionType(
        forward.__code__,
        {"torch": torch, "__builtins__": __builtins__, NAME: STANDARD, **more},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )


def test_which_forwards_are_copied() -> None:
    def calling(self: Any, *x: Any) -> Any:
        return apply_rotary_pos_emb(*x)  # type: ignore[name-defined]  # noqa: F821

    def silent(self: Any, *x: Any) -> Any:
        return x

    def attribute(self: Any, *x: Any) -> Any:
        return self.apply_rotary_pos_emb(*x)

    def writing(self: Any, *x: Any) -> Any:
        global count
        count = 1  # type: ignore[name-defined]
        return apply_rotary_pos_emb(*x)  # type: ignore[name-defined]  # noqa: F821

    assert rotates(names(calling))
    assert not rotates(calling)
    for other in (silent, attribute, writing):
        assert not rotates(names(other))
        assert with_loops(names(other)) is not None
    decorated = names(calling)
    decorated.__wrapped__ = calling
    assert not rotates(decorated), "it is not in the closure"
    assert not rotates(names(calling, **{NAME: torch.nn.Identity()}))
    assert not rotates(nn.Linear.forward)
    assert not rotates(len)


def test_a_decorator_stays_around_the_copy(rotations: list[bool]) -> None:
    """As that of transformers 5.24, which renames an argument: without it a cache of keys would be overlooked."""

    def renamed(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if "before" in kwargs:
                kwargs["now"] = kwargs.pop("before")
            return function(*args, **kwargs)

        return wrapped

    def calling(self: Any, *x: Any, now: Any = None) -> Any:
        return *apply_rotary_pos_emb(*x), now  # type: ignore[name-defined]  # noqa: F821

    inner = names(calling)
    inner.__kwdefaults__ = calling.__kwdefaults__
    decorated = renamed(renamed(inner))
    assert rotates(decorated)
    fused = with_loops(decorated)
    assert fused is not decorated
    x = given((2, 3, 1, 5, 8, 1))
    *turned, now = fused(None, *x, before=7)
    assert now == 7
    assert rotations
    for output, wanted in zip(turned, decorated(None, *x)[:2], strict=True):
        torch.testing.assert_close(output, wanted)
    assert (
        decorated.__wrapped__.__wrapped__.__globals__[NAME]
        is not fused.__wrapped__.__wrapped__.__globals__[NAME]
    )


def test_closures_defaults_and_keywords_are_kept(rotations: list[bool]) -> None:
    class Below(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1

    factor = 3.0

    class Attention(Below):
        def forward(self, x: Any, cos: Any, sin: Any = None, *, shift: float = 2.0) -> Any:
            q, k = apply_rotary_pos_emb(x, x, cos, cos if sin is None else sin)  # type: ignore[name-defined]  # noqa: F821
            return factor * super().forward(q) + k + shift

    plain: Any = Attention.forward
    made = names(plain)
    made.__kwdefaults__ = plain.__kwdefaults__
    Attention.forward = made  # type: ignore[method-assign]
    q, _, cos, sin = given((2, 3, 1, 5, 8, 1))
    module = Attention()
    for args, kwargs in (((q, cos), {}), ((q, cos, sin), {"shift": 1.0})):
        wanted = made(module, *args, **kwargs)
        rotations.clear()
        torch.testing.assert_close(with_loops(made)(module, *args, **kwargs), wanted)
        assert rotations == [False, False]


@needs_compiler
def test_whatever_watches_operators_sees_the_loops() -> None:
    q, k, cos, sin = given((2, 3, 1, 5, 8, 1))
    q.requires_grad_()
    with Watched() as seen:
        replacement()(q, k, cos, sin)[0].sum().backward()
    assert seen.own == ["isotype::rotate"] * 3


@needs_compiler
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(default: torch.dtype) -> None:
    q, k, cos, sin = given((2, 3, 1, 5, 8, 1))
    expected = replacement()(q, k, cos, sin)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = replacement()(q, k, cos, sin)
        assert rotary._is_rotation(STANDARD)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
