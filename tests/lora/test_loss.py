"""Per-token log-probabilities and the language-model loss against float64, and against TRL's own function."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from isotype.lora.loss import logits, softmax
from isotype.lora.loss.log_probs import PerToken, log_probs, log_probs_of_logits
from isotype.lora.loss.logits import Head
from tests.allocations import peak_of
from tests.pairwise import pairwise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDE = ("entropy", "logsumexp", "mean_logits", "log_sum_sq_probs", "is_top1")
SOFT = ("log_probs", "entropy", "logsumexp", "mean_logits")

# What is compared is relative to the largest entry. A logit is rounded once to the compute dtype, with an error of eps / 2
# of itself: of up to 4 for the sizes below, so that a probability is off by 2 eps; then gradients are rounded two more times.
TOLERANCE = {dtype: 6 * torch.finfo(dtype).eps for dtype in DTYPES} | {torch.float32: 2e-5}


def make(
    tokens: int, width: int, vocabulary: int, dtype: torch.dtype, *, bias: bool = False, seed: int = 0
) -> tuple[Head, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, width, generator=draw) / math.sqrt(width)
    hidden = torch.randn(tokens, width, generator=draw)
    shift = torch.randn(vocabulary, generator=draw).to(dtype) if bias else None
    return (
        Head(weight.to(dtype), shift),
        hidden.to(dtype),
        torch.randint(vocabulary, (tokens,), generator=draw),
    )


def reference(head: Head, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every result from whole logits, in the dtype of what is given: float64."""
    z = F.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    logp = (z / head.temperature).log_softmax(-1)
    return {
        "log_probs": logp.gather(-1, targets[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "logsumexp": (z / head.temperature).logsumexp(-1),
        "mean_logits": (z / head.temperature).mean(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
    }


def leaf(x: torch.Tensor | None, dtype: torch.dtype | None = None) -> Any:
    return None if x is None else x.detach().to(dtype or x.dtype, copy=True).requires_grad_()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    return ((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-12)).item()


def weights_of(tokens: int, seed: int = 1) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tokens, generator=draw) for name in SOFT}


def total(results: Any, names: tuple[str, ...], tokens: int) -> torch.Tensor:
    """Some loss in which each token counts differently."""
    get = results.get if isinstance(results, dict) else lambda name: getattr(results, name)
    each: list[torch.Tensor] = [(get(name) * weights_of(tokens)[name].to(get(name))).sum() for name in names]
    return torch.stack(each).sum()


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.25},
    "temperature": {"temperature": 0.7},
    "all": {"softcap": 3.0, "scale": 2.0, "temperature": 1.5},
}


@pytest.fixture(params=[True, False], ids=["loops", "torch"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The softmax by compiled loops, where there is a compiler, and by torch's operators."""
    if not request.param:
        monkeypatch.setattr(softmax, "_is_by_loops", lambda *_: False)


@pytest.mark.usefixtures("loops")
@pairwise(
    "dtype, bias, feature, names",
    DTYPES,
    [pytest.param(False, id=""), pytest.param(True, id="bias")],
    FEATURES,
    [pytest.param(("log_probs",), id="ahead"), pytest.param(SOFT, id="again")],
)
def test_results_and_gradients(
    dtype: torch.dtype, bias: bool, feature: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, hidden, targets = make(29, 17, 203, dtype, bias=bias)
    head = replace(head, **FEATURES[feature])
    exact = replace(head, weight=head.weight.double(), bias=None if head.bias is None else head.bias.double())
    x, expected_x = leaf(hidden), leaf(hidden, torch.float64)
    expected = reference(exact, expected_x, targets)
    monkeypatch.setattr(logits, "SCRATCH", 7 * 203 * dtype.itemsize)  # chunks of several sizes
    found = log_probs(head, x, targets, WIDE, gradients=names)
    for name in (*SOFT, "log_sum_sq_probs"):
        assert getattr(found, name).dtype == torch.float32
        assert error(getattr(found, name), expected[name]) < TOLERANCE[dtype], name
    total(found, names, 29).backward()
    total(expected, names, 29).backward()
    assert x.grad.dtype == dtype
    assert error(x.grad, expected_x.grad) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_trained_head(dtype: torch.dtype, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "SCRATCH", 8 * 97 * dtype.itemsize)
    head, hidden, targets = make(31, 13, 97, dtype, bias=True)
    tensors = [leaf(hidden), leaf(head.weight), leaf(head.bias)]
    exact = [leaf(t, torch.float64) for t in tensors]
    for (x, weight, bias), results in ((tensors, None), (exact, reference)):
        own = Head(weight, bias, **FEATURES[feature])
        made = results(own, x, targets) if results else log_probs(own, x, targets, SOFT[1:], gradients=SOFT)
        total(made, SOFT, 31).backward()
    for found, expected in zip(tensors, exact, strict=True):
        assert found.grad.dtype == dtype
        assert error(found.grad, expected.grad) < TOLERANCE[dtype]


@pytest.mark.usefixtures("loops")
@pairwise("vocabulary, tokens", [1, 2, 5, 1031], [0, 1, 2, 7, 8, 9], strength=1)
def test_sizes(tokens: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "SCRATCH", 4 * 4 * vocabulary)
    head, hidden, targets = make(tokens, 3, vocabulary, torch.float32)
    x, expected_x = leaf(hidden), leaf(hidden, torch.float64)
    found = log_probs(head, x, targets, WIDE)
    expected = reference(replace(head, weight=head.weight.double()), expected_x, targets)["log_probs"]
    assert found.log_probs.shape == (tokens,)
    assert torch.allclose(found.log_probs.double(), expected, atol=2e-6)
    found.log_probs.sum().backward()
    expected.sum().backward()
    assert torch.allclose(x.grad.double(), expected_x.grad, atol=2e-6)


@pytest.mark.parametrize("ahead", [True, False])
def test_empty_batch_with_a_trained_head(ahead: bool) -> None:
    head, hidden, targets = make(0, 3, 5, torch.float32, bias=True)
    x, weight, bias = leaf(hidden), leaf(head.weight) if not ahead else head.weight, leaf(head.bias)
    log_probs(Head(weight, bias if not ahead else None), x, targets).log_probs.sum().backward()
    assert x.grad.shape == (0, 3)
    if not ahead:
        assert not weight.grad.any()
        assert not bias.grad.any()


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    head, hidden, targets = make(4, 3, 5, torch.float32)
    assert not log_probs(head, hidden, targets).log_probs.requires_grad
    with torch.no_grad():
        assert not log_probs(head, leaf(hidden), targets).log_probs.requires_grad


@pairwise(
    "compute, stored, given, gradients", DTYPES, DTYPES, DTYPES, [("log_probs",), ("log_probs", "entropy")]
)
def test_autocast_decides_the_compute_dtype(
    compute: torch.dtype, stored: torch.dtype, given: torch.dtype, gradients: tuple[str, ...]
) -> None:
    head, hidden, targets = make(11, 16, 61, stored)
    hidden = hidden.to(given)
    x, expected_x = leaf(hidden), leaf(hidden, torch.float64)
    off = (
        compute == torch.float32
    )  # on a CPU autocast has no float32: there it is off, and the caller names the dtype
    with torch.autocast("cpu", dtype=torch.bfloat16 if off else compute, enabled=not off):
        working = torch.float32 if off else None
        found = log_probs(head, x, targets, ("entropy",), gradients=gradients, working=working)
        found.log_probs.sum().backward()
    expected = reference(replace(head, weight=head.weight.double()), expected_x, targets)["log_probs"]
    expected.sum().backward()
    coarsest = max(TOLERANCE[dtype] for dtype in (compute, stored, given))
    assert error(found.log_probs, expected.detach()) < coarsest
    assert x.grad.dtype == given
    assert error(x.grad, expected_x.grad) < coarsest


def test_without_autocast_the_weight_decides() -> None:
    head, hidden, targets = make(5, 16, 61, torch.bfloat16)
    wide = log_probs(head, hidden.float(), targets, ("logsumexp",))
    assert torch.equal(wide.logsumexp, log_probs(head, hidden, targets, ("logsumexp",)).logsumexp)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gradients", [("log_probs",), ("log_probs", "entropy")], ids=["ahead", "again"])
def test_working_in_float32_is_exact_but_for_the_last_rounding(
    dtype: torch.dtype, gradients: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU that emulates 16-bit products: the weight is cast part by part, the parts' sum is rounded once."""
    monkeypatch.setattr("isotype.lora.loss.logits._PART", 4 * 16 * 10)
    head, hidden, targets = make(11, 16, 61, dtype)
    x, expected_x = leaf(hidden), leaf(hidden, torch.float64)
    found = log_probs(head, x, targets, ("entropy",), gradients=gradients, working=torch.float32)
    expected = reference(replace(head, weight=head.weight.double()), expected_x, targets)
    for name in ("log_probs", "entropy"):
        assert error(getattr(found, name), expected[name]) < TOLERANCE[torch.float32]
    found.log_probs.sum().backward()
    expected["log_probs"].sum().backward()
    assert error(x.grad, expected_x.grad) < torch.finfo(dtype).eps


@pytest.mark.parametrize("gradients", [("log_probs",), ("log_probs", "entropy")], ids=["ahead", "again"])
def test_float16_under_a_large_loss_scale(gradients: tuple[str, ...]) -> None:
    """The gradient of a sum over one token at a scale of 65536: the rows in between must not overflow or be rounded to 0."""
    head, hidden, targets = make(6, 32, 5003, torch.float16)
    hidden[0] = head.weight[targets[0]] * 20  # a token that the model is sure of: its gradient is small
    x, expected_x = leaf(hidden), leaf(hidden, torch.float64)
    scale = 65536 / 256
    (log_probs(head, x, targets, gradients=gradients).log_probs.sum() * scale).backward()
    exact = reference(replace(head, weight=head.weight.double()), expected_x, targets)["log_probs"]
    (exact.sum() * scale).backward()
    for found, expected in zip(x.grad, expected_x.grad, strict=True):
        assert error(found, expected) < 0.02  # each row by itself
    large = leaf(hidden.float())
    (log_probs(head, large, targets, gradients=gradients).log_probs.sum() * 65536).backward()
    assert error(large.grad, expected_x.grad * 256) < TOLERANCE[torch.float16]


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("gradients", [("log_probs",), ("log_probs", "entropy")], ids=["ahead", "again"])
def test_a_sure_token(gradients: tuple[str, ...]) -> None:
    """Where 1 - p is below the smallest step of float32, log p and its gradient are still right."""
    weight = torch.eye(4)
    x, expected_x = (
        leaf(torch.tensor([[25.0, 0, 0, 0]])),
        leaf(torch.tensor([[25.0, 0, 0, 0]]), torch.float64),
    )
    found = log_probs(Head(weight), x, torch.tensor([0]), gradients=gradients).log_probs
    z = expected_x @ weight.double()
    expected = -torch.log1p((z[:, 1:] - z[:, :1]).exp().sum(-1))
    found.sum().backward()
    expected.sum().backward()
    assert math.isclose(found.item(), expected.item(), rel_tol=1e-5)
    assert torch.allclose(x.grad.double(), expected_x.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("gradients", [("log_probs",), ("log_probs", "entropy")], ids=["ahead", "again"])
def test_graph_is_used_twice_and_so_is_hidden(gradients: tuple[str, ...]) -> None:
    head, hidden, targets = make(5, 8, 23, torch.float32)
    x = leaf(hidden)
    found = log_probs(head, x, targets, gradients=gradients).log_probs
    found.sum().backward(retain_graph=True)
    once = x.grad.clone()
    found.sum().backward()
    assert torch.equal(x.grad, 2 * once)
    x.grad = None
    (log_probs(head, x, targets).log_probs + log_probs(head, x, targets).log_probs).sum().backward()
    assert torch.allclose(x.grad, 2 * once)


def test_hidden_need_not_be_contiguous() -> None:
    head, hidden, targets = make(6, 8, 23, torch.float32)
    x = leaf(hidden.t().contiguous())
    y = leaf(hidden)
    for given in (x.t(), y):
        log_probs(head, given, targets).log_probs.sum().backward()
    assert torch.allclose(x.grad.t(), y.grad, atol=1e-6)
    expanded = leaf(hidden[:1])
    log_probs(head, expanded.expand(6, 8), targets).log_probs.sum().backward()
    assert expanded.grad.shape == (1, 8)


def test_gradient_that_was_not_announced() -> None:
    head, hidden, targets = make(3, 4, 7, torch.float32)
    found = log_probs(head, leaf(hidden), targets, ("entropy",))
    with pytest.raises(RuntimeError, match=r"the gradient of entropy, but .*gradients=\['log_probs'\]"):
        found.entropy.sum().backward()  # type: ignore[union-attr]


def test_gradient_of_zeros_need_not_be_announced() -> None:
    """What a graph of torch.compile gives to results that it only reads."""
    head, hidden, targets = make(3, 4, 7, torch.float32)
    plain, read = leaf(hidden), leaf(hidden)
    log_probs(head, plain, targets).log_probs.sum().backward()
    found = log_probs(head, read, targets, ("entropy",))
    (found.log_probs.sum() + 0 * found.entropy.sum()).backward()  # type: ignore[union-attr]
    assert torch.equal(plain.grad, read.grad)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_top1_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    """The same as `argmax` over rounded logits, which in bfloat16 are often equal."""
    weight = torch.zeros(6, 4, dtype=dtype)
    weight[[1, 2, 4]] = 1.0
    hidden = torch.ones(6, 4, dtype=dtype)
    found = log_probs(Head(weight), hidden, torch.arange(6), ("is_top1",)).is_top1
    assert found.tolist() == [False, True, False, False, False, False]  # type: ignore[union-attr]
    # On small whole numbers every product is exact: what is equal is equal in every dtype.
    draw = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randint(-2, 3, (n, 8), generator=draw).to(dtype) for n in (301, 40))
    best = (hidden.float() @ weight.float().t()).argmax(-1)
    assert log_probs(Head(weight), hidden, best, ("is_top1",)).is_top1.all()  # type: ignore[union-attr]
    others = (best + 1) % 301
    expected = (hidden.float() @ weight.float().t()).argmax(-1) == others
    assert torch.equal(log_probs(Head(weight), hidden, others, ("is_top1",)).is_top1, expected)  # type: ignore[arg-type]


def trl_log_probs(
    head: Head, hidden: torch.Tensor, targets: torch.Tensor, outputs: tuple[str, ...] = ()
) -> tuple[torch.Tensor, ...]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    found: tuple[torch.Tensor, ...] = ChunkedLogProbFunction.apply(
        hidden, head.weight, head.bias, targets, head.temperature, 1000, head.softcap, head.scale, outputs
    )
    return found


@pytest.mark.usefixtures("loops")
@pairwise("dtype, spread", DTYPES, [0.3, 1.0, 4.0], strength=1)
def test_at_least_as_close_as_trl(dtype: torch.dtype, spread: float) -> None:
    head, hidden, targets = make(64, 96, 2003, dtype)
    head = replace(head, weight=head.weight * spread)
    likely = F.linear(hidden.float(), head.weight.float()).argmax(-1)
    targets = torch.where(torch.arange(64) % 2 == 0, likely, targets)
    incoming = weights_of(64)["log_probs"]
    expected_x = leaf(hidden, torch.float64)
    expected = reference(replace(head, weight=head.weight.double()), expected_x, targets)["log_probs"]
    expected.backward(incoming.double())
    distance = {}
    for name in ("isotype", "trl"):
        x = leaf(hidden)
        found = (
            log_probs(head, x, targets).log_probs if name == "isotype" else trl_log_probs(head, x, targets)[0]
        )
        found.backward(incoming)
        distance[name] = (
            (found.double() - expected).norm().item(),
            (x.grad.double() - expected_x.grad).norm().item(),
        )
    # float32: both are at the noise of the order of sums. The gradient of a token is rounded twice, where TRL's backward, which sums
    # in float32 at several times the cost, rounds it once: sqrt(2) at most, as long as the logits' own rounding is no larger.
    slack = 2.0 if dtype == torch.float32 else 1.0
    assert distance["isotype"][0] <= slack * distance["trl"][0]
    assert distance["isotype"][1] <= max(slack, math.sqrt(2) if spread < 1 else 1.1) * distance["trl"][1]


def test_the_same_results_as_trl() -> None:
    head, hidden, targets = make(9, 16, 61, torch.float32, bias=True)
    head = replace(head, softcap=3.0, scale=0.5, temperature=0.9)
    names = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    ours, theirs = log_probs(head, hidden, targets, names), trl_log_probs(head, hidden, targets, names)
    for name, value in zip(("log_probs", *names), theirs, strict=True):
        assert torch.allclose(getattr(ours, name).float(), value.float(), atol=1e-5), name


def test_results_of_whole_logits() -> None:
    head, hidden, targets = make(9, 16, 61, torch.float32)
    expected = log_probs(replace(head, temperature=0.7), hidden, targets, WIDE)
    found = log_probs_of_logits(F.linear(hidden, head.weight), targets, 0.7)
    for name in ("log_probs", *WIDE):
        assert torch.allclose(getattr(found, name).float(), getattr(expected, name).float(), atol=1e-5), name


def language_model_loss(
    head: Head,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross-entropy of `labels` after `hidden`, float32 scalar; 0 where no token has a label.

    Each token with a label adds `-(1 - s) log p_t + s (logsumexp(z) - mean(z)) + z_loss logsumexp(z)^2`: label smoothing `s`
    over the whole vocabulary (https://arxiv.org/abs/1512.00567 section 7) and the z-loss of
    https://arxiv.org/abs/2204.02311 section 5.
    """
    mask = labels != -100
    more = ("logsumexp",) * bool(smoothing or z_loss) + ("mean_logits",) * bool(smoothing)
    found = log_probs(head, hidden[mask], labels[mask], more, gradients=("log_probs", *more))
    loss = -(1 - smoothing) * found.log_probs
    if found.logsumexp is not None:
        loss = loss + z_loss * found.logsumexp.square()
        if found.mean_logits is not None:
            loss = loss + smoothing * (found.logsumexp - found.mean_logits)
    return loss.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


@pairwise("dtype, smoothing, z_loss, items", DTYPES, [0.0, 0.1], [0.0, 1e-2], [None, 17])
def test_language_model_loss(dtype: torch.dtype, smoothing: float, z_loss: float, items: int | None) -> None:
    head, hidden, targets = make(12, 16, 61, dtype)
    labels = targets.masked_fill(torch.arange(12) % 3 == 0, -100).view(3, 4)
    x, expected_x = leaf(hidden.view(3, 4, 16)), leaf(hidden.view(3, 4, 16), torch.float64)
    found = language_model_loss(head, x, labels, smoothing=smoothing, z_loss=z_loss, num_items_in_batch=items)
    logits = expected_x @ head.weight.double().t()
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    expected = expected + z_loss * (logits.logsumexp(-1).square() * (labels != -100)).sum()
    expected = expected / (items or (labels != -100).sum())
    found.backward()
    expected.backward()
    assert found.dtype == torch.float32
    assert error(found, expected.detach()) < TOLERANCE[dtype]
    assert error(x.grad, expected_x.grad) < TOLERANCE[dtype]
    assert not x.grad[labels == -100].any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_label_at_all(smoothing: float) -> None:
    head, hidden, _ = make(4, 8, 11, torch.float32)
    x = leaf(hidden)
    loss = language_model_loss(head, x, torch.full((4,), -100), smoothing=smoothing)
    loss.backward()
    assert loss.item() == 0
    assert not x.grad.any()


def test_float16_logits_are_not_copied_in_float32() -> None:
    head, _, targets = make(64, 8, 500, torch.float16)
    call = logits.Call(1.0, None, 1.0, torch.float16, (), frozenset(), differentiated=True)
    scratch = logits.Scratch(call, head.weight, None, 64, other=True, slope=True)
    values, exact = scratch.logits.normal_(), torch.zeros(64)
    outputs = {name: torch.zeros(64) for name in ("log_probs", "logsumexp", "entropy")}
    peak, _ = peak_of(lambda: softmax.softmax(scratch, values, exact, targets, outputs, ahead=True))
    assert peak < values.numel() * 4


def test_fewer_tokens_never_take_more_scratch_memory() -> None:
    """A check has only a bound of the number of labels."""
    head, _, _ = make(1, 8, 50, torch.float32)
    call = logits.Call(1.0, None, 1.0, torch.float32, (), frozenset(), differentiated=True)
    sizes = [
        logits.Scratch(call, head.weight, None, tokens, other=True, slope=True).logits.numel()
        for tokens in range(0, 1200, 25)
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1] == sizes[-2] < 1200 * 50


def test_logits_are_never_whole() -> None:
    """Memory stays at the scratch, however many tokens, and below what torch takes here for the whole product.

    A CPU without products of bfloat16 takes memory of its own for each, hence relative to it.
    """
    head, hidden, targets = make(2000, 8, 5000, torch.bfloat16)

    def peak(tokens: int) -> int:
        x = leaf(hidden[:tokens])
        return peak_of(lambda: log_probs(head, x, targets[:tokens], ("entropy",)).log_probs.sum().backward())[
            0
        ]

    assert isinstance(log_probs(head, hidden, targets), PerToken)
    assert peak(2000) < peak(768) * 1.1 < peak_of(lambda: hidden @ head.weight.t())[0]


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_that_cannot_be(dtype: torch.dtype) -> None:
    head, hidden, targets = make(90, 17, 203, dtype, bias=True)
    targets = targets % 200
    assert head.bias is not None
    head.bias[200:] = -torch.inf
    x, expected_x = leaf(hidden), leaf(hidden, torch.float64)
    exact = replace(head, weight=head.weight.double(), bias=head.bias.double())
    found, expected = log_probs(head, x, targets, ("logsumexp",)), reference(exact, expected_x, targets)
    found.log_probs.sum().backward()
    expected["log_probs"].sum().backward()
    for made, wanted in (
        (found.log_probs, expected["log_probs"]),
        (found.logsumexp, expected["logsumexp"]),
        (x.grad, expected_x.grad),
    ):
        assert error(made, wanted) < TOLERANCE[dtype]


@pytest.mark.usefixtures("loops")
def test_targets_of_another_dtype_and_a_bias_with_gaps() -> None:
    head, hidden, targets = make(90, 17, 203, torch.float32, bias=True)
    plain = log_probs(head, hidden, targets)
    assert head.bias is not None
    gaps = replace(head, bias=torch.stack([head.bias, head.bias + 1], dim=1)[:, 0])
    for found in (log_probs(head, hidden, targets.int()), log_probs(gaps, hidden, targets)):
        torch.testing.assert_close(found.log_probs, plain.log_probs, rtol=1e-6, atol=1e-6)
