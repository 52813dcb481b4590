"""The first value that is no number, against a naive mode that looks at every operator, and hooks at every module."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from isotype.records.nonfinite import NonFinite
from isotype.trace.nonfinite.again import StopReason, first_nonfinite
from isotype.trace.nonfinite.cause import TensorCall
from isotype.trace.recorder import CallPlace
from tests.models import quiet
from tests.naive import Naive, broken
from tests.pairwise import pairwise

FP16, FP32 = torch.float16, torch.float32


def llama(dtype: torch.dtype = FP16, attention: str = "eager") -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=60,
        num_key_value_heads=2, attn_implementation=attention, attention_dropout=0.1,
    )  # fmt: skip
    with quiet():
        return transformers.LlamaForCausalLM(config).to(dtype).train()


def batch(rows: int = 3, length: int = 10) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 60, (rows, length))
    return {"input_ids": ids, "labels": ids}


def step(model: Any, given: Mapping[str, Any], scale: float = 1.0) -> Callable[[], Iterator[torch.Tensor]]:
    def run() -> Iterator[torch.Tensor]:
        torch.manual_seed(7)
        loss = model(**given).loss
        (loss * scale).backward()
        yield loss

    return run


def naive(run: Callable[[], Iterator[torch.Tensor]], over: bool = True) -> Any:
    with Naive(over) as mode:
        for _ in run():
            pass
    return mode.first


def first_module(model: Any, run: Callable[[], Iterator[torch.Tensor]]) -> str:
    """The first module to end with a result that is not finite, of finite operands and weights."""
    ended: list[str] = []

    def hook(name: str) -> Any:
        def leave(module: Any, args: Any, result: Any) -> None:
            values = result if isinstance(result, (torch.Tensor, tuple)) else tuple(result.values())
            if broken(values) and not broken(args):
                ended.append(name)

        return leave

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    for _ in run():
        pass
    for handle in handles:
        handle.remove()
    return ended[0]


def found(model: Any, given: Mapping[str, Any], scale: float | None = None) -> NonFinite:
    first = first_nonfinite(model, step(model, given, scale or 1.0), [given], scale)
    assert first is not None
    return first


def overflowing(model: Any, place: str) -> None:
    """Weights with which float16 ends at `place`."""
    for layer in model.model.layers:
        layer.input_layernorm.weight.data *= 20  # o_proj sees more of what follows
        layer.post_attention_layernorm.weight.data *= 20
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        factor = 100 if place == "self_attn" else 0.05
        model.model.layers[1].get_submodule(name).weight.data *= factor
    if place != "self_attn":
        model.get_submodule(place).weight.data.normal_(0, 15000)


@pairwise(
    "attention, place",
    ["eager", "sdpa"],
    [
        "model.layers.0.mlp.down_proj",
        "model.layers.2.mlp.up_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.self_attn.q_proj",
        "lm_head",
    ],
    strength=1,
)
def test_overflow_in_the_forward(place: str, attention: str):
    model, given = llama(attention=attention), batch()
    assert first_nonfinite(model, step(model, given), [given]) is None
    overflowing(model, place)
    run = step(model, given)
    first = found(model, given)
    assert (first.op, first.result.shape) == naive(run)
    assert (first.phase, first.module) == ("forward", first_module(model, run))
    assert first.module == place
    assert first.cause == "range"
    assert first.exact is not None
    assert first.exact > 65504
    assert all(operand.finite for operand in first.operands)
    assert set(first.rows) <= {0, 1, 2}
    assert first.batch == 3


def test_overflow_of_attention_scores():
    model, given = llama(), batch()
    overflowing(model, "self_attn")
    run = step(model, given)
    first = found(model, given)
    assert (first.op, first.result.shape) == naive(run)
    assert (first.op, first.module, first.cause) == ("aten.bmm.default", "model.layers.1.self_attn", "range")


def test_the_exact_value_is_that_of_float32():
    model = nn.Linear(4, 2, bias=False).half()
    model.weight.data.copy_(torch.tensor([[60000.0, 0, 0, 0], [0, 1, 0, 0]]))
    given = {"x": torch.tensor([[1.0, 1, 0, 0], [1.2, 0, 0, 0]]).half()}

    def run() -> Iterator[torch.Tensor]:
        yield model(given["x"]).sum()

    first = first_nonfinite(model, run, [given])
    assert first is not None
    exact = float((given["x"].double() @ model.weight.detach().double().T).abs().max())
    assert first.exact == pytest.approx(exact, rel=1e-6)
    assert (first.op, first.cause, first.rows) == ("aten.mm.default", "range", (1,))
    assert [(o.role, o.largest) for o in first.operands] == [
        ("self", float(given["x"].max())),
        ("mat2", 60000.0),
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("scale", [2.0**24, 2.0**30, 2.0**40])
def test_overflow_in_the_backward_at_the_loss_scale(scale: float, attention: str):
    model, given = llama(attention=attention), batch()
    run = step(model, given, scale)
    first = found(model, given, scale)
    assert (first.op, first.result.shape) == naive(run)
    assert (first.phase, first.cause, first.scale) == ("backward", "range", scale)
    assert first.exact is not None
    assert first.exact > 65504


def test_a_poisoned_weight_is_named():
    model, given = llama(), batch()
    weight = model.model.layers[1].mlp.gate_proj.weight
    weight.data[3, 5] = math.nan
    first = found(model, given)
    assert (first.op, first.result.shape) == naive(step(model, given), over=False)
    assert first.module == "model.layers.1.mlp.gate_proj"
    assert first.cause == "weight"
    assert first.culprit is not None
    assert (first.culprit.name, first.culprit.nan) == ("model.layers.1.mlp.gate_proj.weight", 1)


def test_a_poisoned_batch_is_named_with_its_row():
    model, ids = llama(FP32), batch()["input_ids"]
    embedded = model.model.embed_tokens(ids).detach()
    embedded[2, 4, 7] = math.nan
    given = {"inputs_embeds": embedded, "labels": ids}
    first = found(model, given)
    assert (first.op, first.result.shape) == naive(step(model, given), over=False)
    assert (first.cause, first.rows) == ("input", (2,))
    assert first.culprit is not None
    assert first.culprit.name == "inputs_embeds"


def test_labels_of_which_none_counts():
    model, given = llama(FP32), batch()
    given["labels"] = torch.full_like(given["labels"], -100)
    first = found(model, given)
    assert (first.op, first.result.shape) == naive(step(model, given))
    assert (first.op, first.cause, first.phase) == ("aten.nll_loss_forward.default", "labels", "forward")


class Attention(nn.Module):
    """Softmax of masked scores; the mask comes by a fill, by addition or by `where`."""

    def __init__(self, masked_by: str) -> None:
        super().__init__()
        self.weight, self.masked_by = nn.Parameter(torch.ones(4)), masked_by

    def forward(self, scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        scores = scores * self.weight
        if self.masked_by == "fill":
            scores = scores.masked_fill(~keep, -math.inf)
        elif self.masked_by == "where":
            scores = torch.where(keep, scores, -math.inf)
        elif self.masked_by == "least":
            least = torch.finfo(scores.dtype).min
            mask = torch.zeros_like(scores).masked_fill(~keep, least) + torch.zeros_like(scores).masked_fill(
                ~keep, least
            )
            scores = scores + mask
        elif self.masked_by == "tensor":
            mask = torch.where(keep, torch.tensor(0.0, dtype=scores.dtype), torch.finfo(scores.dtype).min)
            scores = scores + mask + mask
        else:
            mask = torch.empty_like(scores)
            mask[:] = 0
            scores = scores + mask.masked_fill_(~keep, -math.inf)
        return torch.softmax(scores, -1)


def attended(masked_by: str, keep: torch.Tensor) -> NonFinite | None:
    torch.manual_seed(3)
    model = Attention(masked_by).half()
    given = {"scores": torch.randn(2, 3, 4).half() * 20, "keep": keep}

    def run() -> Iterator[torch.Tensor]:
        loss = model(**given).float().square().sum()
        loss.backward()
        yield loss

    return first_nonfinite(model, run, [given])


@pytest.mark.parametrize("masked_by", ["fill", "where", "add", "least", "tensor"])
def test_masks_are_no_findings_but_softmax_of_nothing_is(masked_by: str):
    keep = torch.ones(2, 3, 4, dtype=torch.bool)
    keep[..., 2:] = False
    assert attended(masked_by, keep) is None
    keep[1, 2] = False
    first = attended(masked_by, keep)
    assert first is not None
    assert (first.op, first.cause, first.phase) == ("aten._softmax.default", "row", "forward")


@pytest.mark.parametrize(
    ("make", "op", "entries"),
    [
        (lambda x: x / (x - x), "aten.div.Tensor", (1.0, 0.0)),
        (lambda x: (x - x) / (x - x), "aten.div.Tensor", (0.0, 0.0)),
        (lambda x: (x - x) / torch.tensor(0), "aten.div.Tensor", (0.0, 0.0)),
        (lambda x: (x - x).log(), "aten.log.default", (0.0,)),
        (lambda x: (-x).sqrt(), "aten.sqrt.default", (-1.0,)),
        (lambda x: x[:0].mean(), "aten.mean.default", ()),
        (lambda x: (1 - torch.ones(2)) * -math.inf * x, "aten.mul.Tensor", (0.0, -math.inf)),
    ],
)
def test_what_is_no_number_in_any_dtype(make: Any, op: str, entries: tuple[float, ...]):
    model = nn.Linear(2, 2)
    given = {"x": torch.ones(2)}

    def run() -> Iterator[torch.Tensor]:
        yield make(given["x"] * model.weight.detach().sign().abs()[0]).sum()

    first = first_nonfinite(model, run, [given])
    assert first is not None
    assert (first.op, first.entries) == (op, entries)
    assert first.cause == ("domain" if entries else "empty")


def test_the_ctc_loss_keeps_logarithms_of_zero():
    model, lengths = nn.Linear(4, 5), torch.tensor([8, 8])

    def run() -> Iterator[torch.Tensor]:
        scores = model(torch.ones(8, 2, 4)).log_softmax(-1)
        loss = torch.nn.functional.ctc_loss(scores, torch.tensor([[1, 2], [3, 1]]), lengths, lengths // 4)
        yield (loss * 1e30) * 1e30

    first = first_nonfinite(model, run)
    assert first is not None
    assert first.op == "aten.mul.Tensor"


def test_a_constant_is_named_where_it_reached_the_loss_and_nothing_else_did():
    model = nn.Linear(2, 2)

    def run() -> Iterator[torch.Tensor]:
        yield model(torch.ones(1, 2)).masked_fill(torch.tensor([[True, False]]), -math.inf).sum()

    first = first_nonfinite(model, run)
    assert first is not None
    assert (first.op, first.cause) == ("aten.masked_fill.Scalar", "constant")


def test_gradients_are_named_where_only_their_norm_is_not_finite():
    model = nn.Linear(2, 1, bias=False).half()
    model.weight.data.fill_(0.001)

    def run() -> Iterator[torch.Tensor]:
        loss = (model(torch.full((1, 2), 250.0).half()) * 200).sum()
        loss.backward()
        yield loss

    first = first_nonfinite(model, run)
    assert first is not None
    assert (first.phase, first.cause) == ("unscale", "range")
    assert "norm" in first.op
    assert first.exact == pytest.approx(50000 * math.sqrt(2), rel=1e-3)  # each is rounded to float16


def test_nothing_is_left_behind():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[2].eval()
    x = torch.randn(4, 3)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    state = torch.get_rng_state()

    def run() -> Iterator[torch.Tensor]:
        model.train()
        loss = model(x * math.inf).sum()
        loss.backward()
        yield loss

    assert first_nonfinite(model, run, [{"x": x}]) is not None
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(g, v) for g, v in zip(gradients, values, strict=True) if g is not None)
    assert all(
        b is buffers[name][0] and torch.equal(b, buffers[name][1]) for name, b in model.named_buffers()
    )
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model] == [True, True, False]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_checkpointed_blocks_and_accumulated_micro_batches():
    model, given = llama(), batch()
    model.gradient_checkpointing_enable()
    other = {name: value.clone() for name, value in given.items()}
    other["labels"] = torch.full_like(other["labels"], -100)

    def run() -> Iterator[torch.Tensor]:
        for each in (given, other):
            loss = model(**each).loss
            loss.backward()
            yield loss

    assert first_nonfinite(model, step(model, given), [given]) is None
    first = first_nonfinite(model, run, [given, other])
    assert first is not None
    assert (first.cause, first.phase) == ("labels", "forward")


def test_reasons_to_stop():
    reason = StopReason()
    scales = itertools.count()
    assert reason.of(1.0, 2.0, None) is None
    assert reason.of(math.nan, 2.0, lambda: 65536.0) == "the loss is not finite"
    assert reason.of(1.0, math.inf, None) == "the gradient is not finite"
    assert all(reason.of(1.0, math.inf, lambda: 2.0**16 / 2 ** next(scales)) is None for _ in range(16))
    why = reason.of(1.0, math.inf, lambda: 1.0)
    assert why == "the gradient is not finite at any loss scale: 17 steps were skipped in a row"
    assert reason.of(1.0, 1.0, lambda: 1.0) is None
    assert reason.of(1.0, math.inf, lambda: 1.0) is None


class _OnApple(torch.Tensor):
    """A tensor that has no float64, as on an Apple GPU."""

    def double(self) -> torch.Tensor:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")

    def cpu(self, *_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_counts_on_an_apple_gpu_are_read_in_float64_on_the_cpu() -> None:
    count = torch.tensor(3).as_subclass(_OnApple)  # type: ignore[no-untyped-call]
    call = TensorCall(torch.ops.aten.div.Tensor, (torch.ones(2), count), {}, CallPlace("", "a.py:1", 1))
    read = [operand.tensor for operand in call.operands if operand.original is None]
    assert [(number.dtype, number.item()) for number in read] == [(torch.float64, 3.0)]
