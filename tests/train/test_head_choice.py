"""The language-model head for a GPU: measured with the test's clock, cached, and used by the trainer's forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

import isotype.lora.loss.trl_head
from isotype.core.files import write_whole
from isotype.lora.loss import head_choice
from isotype.lora.loss.head_choice import (
    HeadChoice,
    HeadShape,
    Times,
    card_name,
    stored_times,
    times_file,
    token_class,
)
from isotype.lora.loss.trl_head import HEAD_CHOICE, own_is_better, use_own_head
from tests.train.test_trl_head import causal, given, holder

SHAPE = HeadShape(50, 16, 256, torch.float32, torch.float32, ("entropy", "is_top1"))
CARD = "A card of the tests"


@pytest.fixture(autouse=True)
def another_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_choice, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(head_choice, "_KNOWN", {})


def clock(
    ours: float, theirs: float, ran: list[Any] | None = None
) -> Callable[[Callable[[], object]], float]:
    """Return a function that calls its argument, and returns `ours` and `theirs` milliseconds in turn."""
    times = itertools.cycle((ours, theirs))

    def timed(call: Callable[[], object]) -> float:
        call()
        (ran if ran is not None else []).append(call)
        return next(times)

    return timed


def weight(shape: HeadShape = SHAPE) -> torch.Tensor:
    drawn = torch.randn(shape.vocabulary, shape.hidden, generator=torch.Generator().manual_seed(0))
    return drawn.to(shape.stored)


def choose(*arguments: Any, timer: Callable[[Callable[[], object]], float], card: str) -> HeadChoice:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_choice, "event_timer", lambda _: timer)
        patch.setattr(head_choice, "card_name", lambda _: card)
        return head_choice.choose(*arguments)


def never(call: Callable[[], object]) -> float:
    raise AssertionError("measured again")


@pytest.mark.parametrize(("ours", "theirs"), [(2.0, 3.0), (3.0, 2.0)])
def test_the_faster_one_is_taken_and_kept(
    ours: float, theirs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = choose(weight(), None, SHAPE, timer=clock(ours, theirs), card=CARD)
    assert choice.isotype == (ours < theirs)
    first = "isotype's" if ours < theirs else "TRL's"
    assert choice.text == (
        f"{first}: isotype's {ours:.3g} ms, TRL's {theirs:.3g} ms (256 tokens, 50 words, width 16, float32, entropy, is_top1; "
        f"measured now on {CARD})"
    )
    assert stored_times(times_file(CARD)) == {
        str(SHAPE): Times({"TRL's": theirs, "isotype's": ours}, round(theirs / ours, 3))
    }
    monkeypatch.setattr(head_choice, "_KNOWN", {})  # another process
    again = choose(weight(), None, SHAPE, timer=never, card=CARD)
    assert again == HeadChoice(choice.isotype, choice.text.replace("measured now", "as measured before"))


def test_another_card_torch_or_shape_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(weight(), None, SHAPE, timer=clock(2, 3), card=CARD)
    other = replace(SHAPE, tokens=512)
    assert not choose(weight(), None, other, timer=clock(3, 2), card=CARD).isotype
    assert not choose(weight(), None, SHAPE, timer=clock(3, 2), card="Another").isotype
    assert len(stored_times(times_file(CARD))) == 2
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert stored_times(times_file(CARD)) == {}


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, stored=torch.bfloat16, compute=torch.bfloat16),
        replace(SHAPE, stored=torch.float16, gradients=("log_probs", "entropy")),
        replace(SHAPE, trained=True, capped=True, outputs=()),
    ],
    ids=str,
)
def test_both_heads_run_as_the_trainer_calls_them(shape: HeadShape) -> None:
    """Forward and backward of both heads run in turns: one warm-up, then five measurements."""
    ran: list[Any] = []
    matrix = weight(shape)
    before = matrix.clone()
    choose(matrix, torch.zeros(50, dtype=shape.stored), shape, timer=clock(1, 2, ran), card=CARD)
    assert len(ran) == 12
    assert torch.equal(matrix, before)
    assert not matrix.requires_grad
    assert matrix.grad is None


def test_the_median_decides() -> None:
    times = iter([9.0, 9.0, *[1.0, 2.0] * 3, *[90.0, 2.0] * 2])

    def timed(call: Callable[[], object]) -> float:
        return next(times)

    assert choose(weight(), None, SHAPE, timer=timed, card=CARD).isotype
    assert stored_times(times_file(CARD))[str(SHAPE)] == Times({"TRL's": 2.0, "isotype's": 1.0}, 2.0)


def test_what_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(call: Callable[[], object]) -> float:
        raise torch.OutOfMemoryError("no room")

    choice = choose(weight(), None, SHAPE, timer=full, card=CARD)
    assert choice == HeadChoice(False, "TRL's: not enough memory to measure both heads")

    class Sharded(torch.Tensor):
        pass

    sharded = weight().as_subclass(Sharded)
    assert not choose(sharded, None, SHAPE, timer=never, card=CARD).isotype

    def broken(*args: Any) -> Any:
        raise RuntimeError("PTX was made for another card\nand more")

    monkeypatch.setattr(head_choice, "_theirs", broken)
    choice = choose(weight(), None, SHAPE, timer=clock(1, 2), card=CARD)
    assert choice == HeadChoice(
        True, "isotype's, because TRL's failed: RuntimeError: PTX was made for another card"
    )
    assert stored_times(times_file(CARD)) == {}


def test_a_damaged_file_is_measured_again_and_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    file = times_file(CARD)
    file.parent.mkdir()
    write_whole(file, '{"a": {"isotype": 1}}')
    assert stored_times(times_file(CARD)) == {}
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where the folder would be")
    choice = choose(weight(), None, SHAPE, timer=clock(1, 2), card=CARD)
    assert f"measured now, not stored: [Errno 17] File exists: '{file.parent}'" in choice.text


@pytest.mark.parametrize(("tokens", "stands"), [(0, 256), (300, 512), (512, 512), (100_000, 2048)])
def test_classes_of_tokens(tokens: int, stands: int) -> None:
    assert token_class(tokens) == stands


def test_the_name_of_a_card_is_its_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda _: SimpleNamespace(get_device_name=lambda device: f"card {device.index}"),
    )
    assert card_name(torch.device("cuda", 1)) == "card 1"


@pytest.mark.parametrize("faster", [True, False])
def test_a_trainer_takes_the_one_that_was_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with Triton, where both heads can compute the loss; the trainer stores the line for the report."""
    shapes: list[HeadShape] = []

    def choice(matrix: torch.Tensor, bias: Any, shape: HeadShape) -> HeadChoice:
        shapes.append(shape)
        return HeadChoice(faster, "a line")

    real = own_is_better
    calls: list[bool] = []

    def on_gpu(model: Any, *, smoothing: bool = False, faster: bool = False) -> bool:
        assert real(model, smoothing=smoothing, faster=faster)
        calls.append(faster)
        return faster

    monkeypatch.setattr(isotype.lora.loss.trl_head, "choose", choice)
    monkeypatch.setattr(isotype.lora.loss.trl_head, "own_is_better", on_gpu)
    model = causal("llama")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    args = SimpleNamespace(
        bf16=True, fp16=False, per_device_train_batch_size=2, max_length=200, entropy_coef=0.1
    )
    trainer = holder(model, args=args, accelerator=SimpleNamespace(num_processes=1))
    use_own_head(trainer)
    width = model.config.hidden_size
    assert shapes == [
        HeadShape(
            model.config.vocab_size,
            width,
            512,
            torch.float32,
            torch.bfloat16,
            ("entropy",),
            ("log_probs", "entropy"),
            True,
        )
    ]
    assert vars(trainer)[HEAD_CHOICE] == "a line"
    calls.clear()
    model(**given(), fused_lm_head=True)
    assert calls == [faster]


def test_trls_stays_on_a_gpu_until_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal("llama")
    monkeypatch.setattr("transformers.utils.is_triton_available", lambda: True)
    on_gpu = SimpleNamespace(
        weight=SimpleNamespace(device=torch.device("cuda"), is_floating_point=lambda: True)
    )
    monkeypatch.setattr(isotype.lora.loss.trl_head, "_projects", lambda model: True)
    monkeypatch.setattr(model, "get_output_embeddings", lambda: on_gpu)
    assert not own_is_better(model)
    assert own_is_better(model, faster=True)
    assert own_is_better(model, smoothing=True)
