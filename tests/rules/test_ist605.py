from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotype.records.finding import Finding
from isotype.records.memory import Memory
from isotype.records.trace import Trace
from isotype.report.check.cost import sharding_words, step_words
from isotype.report.check.report import Report
from isotype.rules.ist605_memory import _savings
from tests.rules.traces import BF16, FP32, batch, found, llama, of_llama, on, traced

RULE = "ist605_memory"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced(llama(FP32, layers=2), batch())  # of one layer there is nothing to checkpoint


def with_memory(trace: Trace, amount: float) -> list[Finding]:
    trace = on(trace, "t4")
    profile = replace(trace.setup.profile, memory_bytes=int(amount))
    return found(RULE, replace(trace, setup=replace(trace.setup, profile=profile)))


def test_it_does_not_fit(trace: Trace) -> None:
    (finding,) = with_memory(trace, trace.memory.peak / 2)
    assert finding.severity == "error"
    assert finding.message.startswith(
        f"the step does not fit: {trace.memory.peak / 1024:.3g} KiB at the peak of the "
    )
    room = int(0.85 * (trace.memory.peak // 2))
    assert f", more than {room / 1024:.3g} KiB (85 % of NVIDIA T4's " in finding.message
    assert finding.cost is not None
    assert finding.cost.memory_bytes == trace.memory.peak - room
    texts = [fix.description for fix in finding.fixes]
    # 61,440 weights of frozen linear layers from 4 bytes to 0.5625.
    assert any(text.startswith("store the frozen linear layers in nf4: about 206 KiB less") for text in texts)
    assert any(text.startswith("checkpoint the layers' activations: about") for text in texts)
    assert any(text.startswith("store the frozen weights in 16 bits: about 1") for text in texts)


@pytest.mark.parametrize(("exact", "safety"), [(torch.bfloat16, "safe"), (None, "unsafe")])
def test_storage_in_16_bits_is_safe_for_weights_that_keep_their_values(
    trace: Trace, exact: torch.dtype | None, safety: str
) -> None:
    weights = tuple(replace(weight, exact_in=exact) for weight in trace.weights)
    (finding,) = with_memory(replace(trace, weights=weights), trace.memory.peak / 2)
    assert [fix.safety for fix in finding.fixes if "in 16 bits" in fix.description] == [safety]


def test_memory_that_deepspeed_shards_is_not_judged(trace: Trace) -> None:
    step = on(trace, "t4")
    profile = replace(step.setup.profile, memory_bytes=trace.memory.peak // 2)
    step = replace(step, setup=replace(step.setup, profile=profile, deepspeed=True, devices=8))
    assert not found(RULE, step)
    report = Report(step, ())
    assert report.fits is None
    assert step_words(report).partition(";")[0].endswith(" on each, if DeepSpeed shards and offloads nothing")
    assert sharding_words(step.setup) == "DeepSpeed on 8 devices"


def test_predictions_of_an_evaluation(trace: Trace) -> None:
    # Sharding, checkpointing and shorter training rows do not shorten what an evaluation keeps.
    kinds = trace.memory.phases["backward"]
    size = 100 * trace.memory.peak
    evaluated = replace(
        trace.memory, phases={**trace.memory.phases, "evaluate": {**kinds, "predictions": size}}
    )
    (finding,) = with_memory(replace(trace, memory=evaluated), size)
    assert "at the peak of the evaluation" in finding.message
    assert finding.cause.startswith("predictions take ")
    assert not any(note.startswith("one tensor") for note in finding.notes)
    texts = [fix.description for fix in finding.fixes]
    assert "eval_accumulation_steps=1" in texts[0]
    assert texts[0].endswith(", which is enough")
    assert not any(text.startswith(("checkpoint", "shard", "reduce")) for text in texts)


def test_what_a_step_may_take_is_less_than_the_whole_memory(trace: Trace) -> None:
    (finding,) = with_memory(trace, trace.memory.peak * 1.17)
    assert finding.severity == "error"
    assert with_memory(trace, trace.memory.peak * 1.18) == []


def test_it_fits(trace: Trace) -> None:
    assert with_memory(trace, trace.memory.peak * 2) == []
    assert found(RULE, on(trace, "t4")) == []
    assert found(RULE, on(of_llama(BF16), "cpu-generic")) == []  # no size is known


def test_the_largest_tensors_are_named(trace: Trace) -> None:
    (finding,) = with_memory(trace, trace.memory.peak / 2)
    named = [note for note in finding.notes if note.startswith("one ")]
    assert len(named) == 6
    logits = (
        "one tensor of 16.0 KiB: float32 [32, 128] in base_model.model.lm_head at llama/modeling_llama.py:"
    )
    assert any(note.startswith(logits) for note in named[:4])
    assert named[4].startswith("one weight of 32.0 KiB: float32 [128, 64] base_model.model.")


def test_checkpointing_saves_what_the_layers_save_and_no_logits(trace: Trace) -> None:
    phase, inputs = trace.memory.peak_phase, 2 * 32 * 64 * 4
    assert phase is not None
    of_layers, activations = trace.memory.saved[phase], trace.memory.phases[phase]["activations"]
    assert 0 < of_layers <= activations - 3 * 32 * 128 * 4  # the logits, their copy and its gradient
    (finding,) = with_memory(trace, trace.memory.peak / 2)
    less = next(
        fix.description for fix in finding.fixes if fix.description.startswith("checkpoint the layers'")
    )
    assert f"about {(of_layers - of_layers // 2 - inputs) / 1024:.3g} KiB less" in less


def test_a_saving_that_hardly_suffices_may_be_enough(trace: Trace) -> None:
    saved = next(size for _, size, target, _ in _savings(trace) if target == "gradient_checkpointing")
    peak = trace.memory.peak
    for part, words in ((1.05, ""), (0.99, ", which may be enough"), (0.5, ", which is enough")):
        (finding,) = with_memory(trace, (peak - part * saved) / 0.85)
        (text,) = (fix.description for fix in finding.fixes if fix.description.startswith("checkpoint"))
        assert text.partition(" less")[2] == words


def test_a_loss_in_chunks_is_advised_only_for_logits_of_all_tokens(trace: Trace) -> None:
    def advised(trace: Trace) -> bool:
        (finding,) = with_memory(trace, trace.memory.peak / 2)
        return any(
            fix.description.startswith("compute the loss from the logits of a part") for fix in finding.fixes
        )

    logits = 32 * 128 * 4
    trace = replace(
        trace, memory=Memory({"backward": {"activations": 6 * logits}}, saved={"backward": logits})
    )
    assert advised(trace)
    vocabulary = {weight.name for weight in trace.weights if weight.kind == "embedding"}
    wider = [replace(w, shape=(512, 64)) if w.name in vocabulary else w for w in trace.weights]
    assert not advised(replace(trace, weights=tuple(wider)))
