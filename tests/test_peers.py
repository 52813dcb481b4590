"""A handful of architectures fused and plain; all of them, and PEFT's and TRL's own tests, are in `benchmarks/peers.py`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from benchmarks import peers as benchmark
from benchmarks.peer_suites import plugin, trajectories
from benchmarks.peer_suites.suites import Comparison, why_stopped

from tests import peers
from tests.pairwise import pairwise
from tests.peers import LABELS, MODES, PADDINGS, WAYS, Case, Peers, distances, generate_cases, step_cases
from tests.zoo import ARCHITECTURES

_DECODERS = ("llama", "gpt2", "gemma3_text", "qwen3_moe")
_OTHERS = ("bart-s2s", "t5-s2s", "bert-cls")


@pytest.fixture(autouse=True)
def _libraries_may_warn() -> Iterator[None]:
    """Padding, caches and checkpointing of tiny models: what counts here is what comes out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_same(case: Case) -> None:
    (result,) = Peers(case.architecture, case.mode).results([case])
    assert result.verdict == "same", result


@pairwise("name, mode, padding, labels", _DECODERS, MODES, PADDINGS, LABELS, strength=1)
def test_steps_of_decoders(name: str, mode: str, padding: str, labels: str) -> None:
    assert_same(Case(name, mode, padding, labels))


@pairwise("name, mode, padding, labels", _OTHERS, MODES, PADDINGS[:3], LABELS, strength=1)
def test_steps_of_encoders(name: str, mode: str, padding: str, labels: str) -> None:
    assert_same(Case(name, mode, padding, labels))


@pairwise("name, padding, way", _DECODERS, ["none", "left"], WAYS, strength=1)
def test_generation_of_decoders(name: str, padding: str, way: str) -> None:
    assert_same(Case(name, "eval", padding, way=way))


@pairwise("name, padding, way", _OTHERS[:2], ["none", "right"], WAYS, strength=1)
def test_generation_of_encoder_decoders(name: str, padding: str, way: str) -> None:
    assert_same(Case(name, "eval", padding, way=way))


def test_a_wrong_number_anywhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fusing that doubles one adapter: the loss, logits, gradients, and tokens of generation show it."""

    def doubled(model: Any) -> None:
        layer = model.base_model.model.model.layers[1].mlp.down_proj
        layer.scaling["default"] *= 2

    monkeypatch.setattr(peers, "fuse", doubled)
    step, generation = Case("llama", "eval", "left", "masked"), Case("llama", "eval", "none", way="cache")
    seen, tokens = Peers("llama", "eval").results([step, generation])
    assert seen.verdict == tokens.verdict == "differs"
    assert {"loss", "logits", "gradients"} <= seen.sizes.keys()
    assert "scores" in tokens.sizes


def test_what_raises_fused_alone_is_told_from_what_raises_anyhow(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama", "eval", "none", "whole")
    monkeypatch.setattr(
        peers, "fuse", lambda model: model.get_base_model().lm_head.register_forward_hook(_stop)
    )
    (result,) = Peers("llama", "eval").results([case])
    assert (result.verdict, result.detail) == ("raises", "ArithmeticError: no")
    broken = Peers("llama", "eval")
    broken.model.get_base_model().lm_head.register_forward_hook(_stop)
    (result,) = broken.results([case])
    assert (result.verdict, result.detail) == ("skipped", "plain PEFT raises ArithmeticError: no")


def _stop(*_: Any) -> None:
    raise ArithmeticError("no")


def test_gradients_are_compared_beside_the_whole() -> None:
    one = {"loss": torch.ones(()), "a": torch.tensor([100.0]), "b": torch.tensor([1e-9])}
    other = {"loss": torch.ones(()), "a": torch.tensor([100.0]), "b": torch.tensor([3e-9])}
    assert distances(one, other)["b"] < 1e-8
    assert distances(one, {**other, "a": torch.tensor([101.0])})["a"] == pytest.approx(0.01, rel=0.05)
    assert distances(one, {"loss": torch.ones(())})["a"] == float("inf")


def test_every_axis_is_a_case() -> None:
    assert len(step_cases("llama")) == len(MODES) * len(PADDINGS) * len(LABELS)
    assert len(generate_cases("llama")) == 2 * len(WAYS)
    assert not generate_cases("bert-cls")
    assert {case.padding for case in step_cases("whisper-s2s")} == {"none"}


def test_the_benchmark_runs_whole_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.options_of([]).parts == list(benchmark.PARTS)
    assert benchmark.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(ARCHITECTURES)


def test_a_file_that_does_not_run_is_no_success() -> None:
    """PEFT's tests import diffusers: without it no file of theirs was collected, and nothing was broken."""
    output = "E   ModuleNotFoundError: No module named 'diffusers'\nERROR tests/test_a.py\n1 error in 9 s\n"
    assert why_stopped(2, output, 60) == "status 2 | ModuleNotFoundError: No module named 'diffusers'"
    assert why_stopped(-1, "..", 60) == "more than 60 s | .."
    assert not any(why_stopped(status, "", 60) for status in (0, 1, 5))
    ends = Comparison("test_a.py", {}, {}, ("plain: status 2",))
    assert not ends.broken
    assert not ends.good


def test_what_only_rounds_is_no_failure() -> None:
    """PEFT's tests of DoRA and Mixtral ask for the base model's logits to the bit, which plain PEFT has: it adds zeros."""
    passed, failed = ("passed", ""), ("failed", "assert False")
    plain = dict.fromkeys(("same", "rounded", "wrong", "lost"), passed)
    fused = {"same": passed, "rounded": failed, "wrong": failed}
    tolerant = {"rounded": ("passed", "1.3e-06"), "wrong": failed}
    ends = Comparison("test_a.py", plain, fused, (), tolerant)
    assert ends.rounding == {"rounded": "1.3e-06"}
    assert ends.broken == {"wrong": "assert False", "lost": "it did not end"}
    assert Comparison("test_a.py", plain, {**plain, "rounded": failed}, (), tolerant).good


def test_a_rounding_is_let_through_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (torch, "allclose"),
        (torch.Tensor, "allclose"),
        (torch.testing, "assert_close"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(plugin, "_ROUNDINGS", roundings := [])
    plugin._allow_roundings()
    one = torch.full((3,), 0.01)
    assert torch.allclose(one, one + 5e-7)
    assert one.allclose(one)
    torch.testing.assert_close(one, one + 5e-7, rtol=0, atol=1e-9)
    assert roundings == pytest.approx([5e-7, 5e-7], rel=0.01)
    assert not torch.allclose(one, one + 1e-5)
    assert not torch.allclose(one.double(), one.double() + 5e-7)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(one, one + 3e-5)


def test_where_plain_peft_gives_nan_only_more_of_it_is_a_difference() -> None:
    """gemma3n's rows that begin with padding: PEFT's gradients are NaN, and fused fewer of them are."""
    nan, case = float("nan"), Case("llama", "eval", "left", "whole")
    judged = Peers.__new__(Peers)._judged
    plain = {"loss": torch.ones(()), "a": torch.tensor([nan, nan, 1.0])}
    for values, verdict in (([nan, 2.0, 1.0], "skipped"), ([nan, nan, nan], "differs")):
        fused = {"loss": torch.ones(()), "a": torch.tensor(values)}
        assert judged(case, plain, fused).verdict == verdict


@pytest.mark.parametrize(
    "name",
    [
        "NEFTune + accumulation",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (
                "NEFTune + packing",
                "NEFTune + padding-free",
                "dpo + NEFTune",
                "evaluation",
                "grpo",
                "kto",
            )
        ),
    ],
)
def test_a_training_is_that_of_trl_step_by_step(name: str) -> None:
    row = trajectories.compared(name, steps=3)
    assert row.verdict == "same", row
