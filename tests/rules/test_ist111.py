from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F  # noqa: N812

import isotype
from isotype.core.dtypes import dtype_name
from tests.reality import real_step
from tests.rules.traces import FP32, found, traced
from tests.small import Net, ids, line

RULE = "ist111_integers"


class Ending(nn.Module):
    """A layer and a function of its output, `[2, 4, 8]`."""

    def __init__(self, ending: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.ending = nn.Linear(8, 8), ending

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ending(self.layer(x))


X = {"x": torch.ones(2, 4, 8)}
OUTSIDE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "label": (lambda h: F.cross_entropy(h.flatten(0, 1), torch.full((8,), 8)), "label 8 is not one of 8 classes"),
    "row": (lambda h: h.gather(1, torch.full((2, 1, 8), 4)), "index 4 is out of range for 4 rows"),
    "negative": (lambda h: h.index_select(1, torch.tensor([-1])), "index -1 is out of range for 4 rows"),
    "list": (lambda h: h[:, torch.tensor([0, -5])], "index -5 is out of range for 4 rows"),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "int32": (
        lambda h: F.cross_entropy(h.flatten(0, 1), torch.zeros(8, dtype=torch.int32)),
        "nll_loss_forward does not accept this int32 tensor",
    ),
    "inverted": (lambda h: h * (1 - torch.ones(4, 1).bool()), "rsub does not accept this bool tensor"),
    "one-hot": (
        lambda h: F.one_hot(torch.zeros(4, dtype=torch.long), 4) @ h[0],
        "mm does not accept this int64 tensor",
    ),
    "counts": (
        lambda h: torch.zeros(8, dtype=torch.long).add_(h[0, 0]).float(),
        "add_ does not accept this int64 tensor",
    ),
}


@pytest.mark.real_cpu
@pytest.mark.parametrize("name", [*OUTSIDE, *REFUSED])
def test_what_the_real_step_refuses(name: str) -> None:
    ending, message = {**OUTSIDE, **REFUSED}[name]
    assert real_step(Ending(ending), X).phase == "forward"
    (finding,) = found(RULE, traced(Ending(ending), X, phases=("forward",)))
    assert (finding.severity, finding.message) == ("error", message)
    assert line(finding.source).startswith("test_ist111.py")


def test_a_token_without_a_row() -> None:
    batch = ids()
    batch["ids"][0, 0] = 16
    (finding,) = found(RULE, traced(Net(1), batch))
    assert finding.cause == "the input ids has 16, embed.weight has 16 rows"
    assert finding.fixes[0].description == "resize_token_embeddings(len(tokenizer)), or use ids from 0 to 15"


def test_a_row_of_many_tokens() -> None:
    many = {"ids": torch.zeros(4, 5000, dtype=torch.long)}
    assert found(RULE, traced(Net(1), many, phases=("forward",))) == []
    many["ids"][3, -1] = 17
    (finding,) = found(RULE, traced(Net(1), many, phases=("forward",)))
    assert finding.message == "index 17 is out of range for 16 rows"


@pytest.mark.parametrize(
    "ending",
    [
        lambda h: F.cross_entropy(h.flatten(0, 1), torch.tensor([7, -100] * 4)),
        lambda h: h[:, torch.tensor([3, -4])],
        lambda h: h * ~torch.ones(4, 1).bool(),
        lambda h: h - torch.ones(4, 1, dtype=torch.int32),
    ],
)
def test_what_runs_is_silent(ending: Callable[[torch.Tensor], torch.Tensor]) -> None:
    trace = traced(Ending(ending), X)
    assert found(RULE, trace) == []
    assert trace.failure is None
    assert Ending(ending)(X["x"]).dtype == FP32


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_a_gpu_does_not_multiply_integers(dtype: torch.dtype) -> None:
    def ending(h: torch.Tensor) -> torch.Tensor:
        return h + (h > 0).to(dtype) @ torch.ones(h.shape[-1], h.shape[-1], dtype=dtype)

    (finding,) = isotype.check(Ending(ending), X, device="a100", phases=("forward",)).errors
    assert finding.code == "IST111"
    assert finding.message == f"mm does not accept this {dtype_name(dtype)} tensor"
    assert "cast the operands to a float dtype" in finding.fixes[0].description
    assert dtype == torch.bool or found(RULE, traced(Ending(ending), X)) == []


class Labelled(nn.Module):
    """A layer and the cross entropy of its output, `[4, 8]`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), labels)


class Looked(nn.Module):
    """Functions that need integers or a mask, called with a float input `at` of ones, `[2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return torch.stack([call(self.table.weight, at).sum() for call in FLOATS.values()]).sum()


FLOATS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda t, at: t[at],
    "index_put": lambda t, at: t.index_put((at,), t[:2]),
    "index_select": lambda t, at: t.index_select(0, at),
    "gather": lambda t, at: t.gather(0, at[None]),
    "take": lambda t, at: t.take(at),
    "take_along_dim": lambda t, at: torch.take_along_dim(t[:, :2], at[None], 0),
    "put": lambda t, at: t.put(at, t[0, :2]),
    "scatter": lambda t, at: t.scatter(0, at[None], 1.0),
    "scatter_add": lambda t, at: t.scatter_add(0, at[None], t[:1]),
    "index_add": lambda t, at: t.index_add(0, at, t[:2]),
    "index_copy": lambda t, at: t.index_copy(0, at, t[:2]),
    "index_fill": lambda t, at: t.index_fill(0, at, 1.0),
    "index_reduce": lambda t, at: t.index_reduce(0, at, t[:2], "amax"),
    "embedding": lambda t, at: F.embedding(at, t),
    "_embedding_bag": lambda t, at: F.embedding_bag(at[None], t),
    "one_hot": lambda t, at: F.one_hot(at, 3) * t[:2],
    "nll_loss_forward": lambda t, at: F.cross_entropy(t[:2], at),
    "nll_loss2d_forward": lambda t, at: F.nll_loss(t[:2, :, None, None], at[:, None, None]),
    "multi_margin_loss": lambda t, at: F.multi_margin_loss(t[:2], at),
    "multilabel_margin_loss_forward": lambda t, at: F.multilabel_margin_loss(t[0, :2], at),
    "masked_fill": lambda t, at: t[:2].masked_fill(at[:, None], 0.0),
    "masked_scatter": lambda t, at: t[:2].masked_scatter(at[:, None], t),
    "masked_select": lambda t, at: t[:2].masked_select(at[:, None]),
    "where": lambda t, at: torch.where(at[:, None], t[:2], 0.0),
}  # fmt: skip


@pytest.mark.newest  # the tables have the words of torch 2.13
def test_floats_in_place_of_integers() -> None:
    """deepspeedai/DeepSpeed #5701, QwenLM/Qwen3 #44: a library casts the token ids together with the batch."""
    trace = traced(Looked(), {"at": torch.ones(2)}, phases=("forward",))
    messages = {}
    for call in trace.breaches():
        messages.setdefault(
            call.op.split(".")[1].removesuffix("_"), call.breach.message if call.breach else ""
        )
    for name, function in FLOATS.items():
        with pytest.raises((RuntimeError, IndexError)) as raised:
            function(torch.ones(4, 3), torch.ones(2))
        assert str(raised.value).startswith(messages[name]), name
    (finding,) = found(RULE, trace)
    assert (finding.cause, finding.fixes[0].description) == ("the input at is float32", "pass at in int64")


@pytest.mark.parametrize("name", ["nll_loss_forward", "multi_margin_loss", "multilabel_margin_loss_forward"])
def test_the_backward_of_float_labels_is_traced(name: str) -> None:
    model = Looked()
    trace = traced(model, lambda _: FLOATS[name](model.table.weight, torch.ones(2)).sum())
    assert (trace.failure, len(found(RULE, trace))) == (None, 1)
    assert all(call.breach.message for call in trace.breaches() if call.breach is not None)


def test_labels_that_autocast_casts_have_the_input_as_their_cause() -> None:
    model, labels = nn.Linear(8, 8), {"x": torch.ones(4, 8), "labels": torch.ones(4, dtype=torch.bfloat16)}
    (finding,) = found(RULE, traced(Labelled(model), labels, autocast=torch.bfloat16, phases=("forward",)))
    assert (finding.cause, finding.fixes[0].description[:20]) == (
        "the input labels is bfloat16",
        "pass labels in int64",
    )


def test_token_ids_in_16_bits() -> None:
    (finding,) = found(
        RULE, traced(Looked(), {"at": torch.ones(2, dtype=torch.bfloat16)}, phases=("forward",))
    )
    assert finding.fixes[0].description == "pass at in int64: bfloat16 rounds numbers above 256"


def test_floats_that_may_be_labels_are_silent() -> None:
    assert not found(RULE, traced(Ending(lambda h: F.cross_entropy(h, h.detach().softmax(-1))), X))


class _SoftTokens(nn.Embedding):
    """A table that also multiplies with probabilities, as Ovis's visual embedding (modelscope/ms-swift #5565)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if x.is_floating_point() else super().forward(x)


def test_lora_on_an_embedding_that_gets_floats() -> None:
    inner = nn.Sequential()
    inner.add_module("table", _SoftTokens(10, 8))
    model = get_peft_model(inner, LoraConfig(r=2, target_modules=["table"]))
    (finding,) = found(RULE, traced(model, {"input": torch.ones(10, 10)}, phases=("forward",)))
    assert finding.fixes[0].description.startswith("remove table from the adapter (exclude_modules='table')")
    assert not found(RULE, traced(model, {"input": torch.ones(10, dtype=torch.long)}, phases=("forward",)))


def test_a_product_that_refuses_integers_is_one_finding() -> None:
    """The backward of the layer refuses the same tensor."""
    (finding,) = found(RULE, traced(Ending(lambda h: h), {"x": torch.ones(2, 4, 8, dtype=torch.long)}))
    assert (finding.phase, finding.message) == ("forward", "addmm does not accept this int64 tensor")
    assert [fix.description for fix in finding.fixes] == [
        "cast the int64 tensor to float32 at test_ist111.py:28"
    ]


class Masked(nn.Module):
    """Attention with the mask of a tokenizer, which has zeros and ones."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.project(states)[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads, mask[:, None, None])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_an_integer_mask_of_attention(dtype: torch.dtype) -> None:
    """seal-rg/recurrent-pretraining #23. A cast to the queries' dtype would add 1 to the scores."""
    mask = torch.ones(2, 6, dtype=dtype)
    step = traced(Masked(), {"states": torch.zeros(2, 6, 8, dtype=torch.bfloat16), "mask": mask})
    (finding,) = found("ist111_integers", step)
    assert finding.message == f"scaled_dot_product_attention does not accept this {dtype_name(dtype)} tensor"
    assert finding.cause == f"the input mask is {dtype_name(dtype)}"
    assert finding.fixes[0].description.startswith("call .bool() on the mask at test_ist111.py:")
    assert step.failure is None
