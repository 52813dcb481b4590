from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from isotype.core.optimizers import state_bytes
from isotype.records.finding import Finding
from isotype.records.memory import Memory
from isotype.records.trace import Trace
from isotype.report.check.cost import sharding_words, step_words
from isotype.report.check.report import Report
from isotype.rules.ist605_memory import Saving, _fixes, _savings
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
    # 61,440 weights of frozen linear layers from 4 bytes to 0.5625.
    assert {saving.target: saving.bytes for saving in _savings(trace)}["quantization"] == 61_440 * 3.4375


@pytest.mark.parametrize(("exact", "safety"), [(torch.bfloat16, "safe"), (None, "unsafe")])
def test_storage_in_16_bits_is_safe_for_weights_that_keep_their_values(
    trace: Trace, exact: torch.dtype | None, safety: str
) -> None:
    weights = tuple(replace(weight, exact_in=exact) for weight in trace.weights)
    (finding,) = with_memory(replace(trace, weights=weights), trace.memory.peak)
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
    named = [note for note in finding.notes if note.startswith(("the step allocates ", "1 weight of "))]
    assert len(named) == 6
    logits = "the step allocates 1 tensor of 16.0 KiB: float32 [32, 128] in base_model.model.lm_head at llama/modeling_llama.py:"
    assert any(note.startswith(logits) for note in named[:4])
    assert named[4].startswith("1 weight of 32.0 KiB: float32 [128, 64] base_model.model.")


def test_checkpointing_saves_what_the_layers_save_and_no_logits(trace: Trace) -> None:
    phase, inputs = trace.memory.peak_phase, 2 * 32 * 64 * 4
    assert phase is not None
    of_layers, activations = trace.memory.saved[phase], trace.memory.phases[phase]["activations"]
    assert 0 < of_layers <= activations - 3 * 32 * 128 * 4  # the logits, their copy and its gradient
    saved = {saving.target: saving.bytes for saving in _savings(trace)}
    assert saved["gradient_checkpointing"] == of_layers - of_layers // 2 - inputs


def test_a_saving_that_hardly_suffices_may_be_enough(trace: Trace) -> None:
    saved = next(s.bytes for s in _savings(trace) if s.target == "gradient_checkpointing")
    peak = trace.memory.peak
    for part, words in ((0.99, ", which may be enough"), (0.5, ", which is enough")):
        (finding,) = with_memory(trace, (peak - part * saved) / 0.85)
        (text,) = (fix.description for fix in finding.fixes if fix.description.startswith("checkpoint"))
        assert text.partition(" less")[2] == words
    (finding,) = with_memory(trace, (peak - 1.05 * saved) / 0.85)
    assert not any(
        fix.description.startswith("checkpoint the layers' activations: ") for fix in finding.fixes
    )


@pytest.mark.parametrize("seed", range(40))
def test_each_fix_is_enough_and_none_of_its_parts_is(trace: Trace, seed: int) -> None:
    rng = random.Random(seed)
    names = ("gradient_checkpointing", "logits", "quantization", "dtype", "optim", "eval_accumulation_steps")
    over = rng.randint(1, 200)
    savings = [
        Saving(f"<{name}>", rng.randint(1, 100), name, "x", rng.random() < 0.5)
        for name in rng.sample(names, rng.randint(1, 6))
    ]
    shown = list(_fixes(trace, savings, over))
    sets = [
        parts
        for n in range(1, 7)
        for parts in combinations(savings, n)
        if sum(part.bytes for part in parts) >= over
        and not {"quantization", "dtype"} <= {p.target for p in parts}
    ]
    assert bool(shown) == bool(sets)
    assert {saving.how for saving in savings if saving.bytes >= over} <= {
        f.description.partition(":")[0] for f in shown
    }
    for fix in shown:
        parts = [saving for saving in savings if saving.how in fix.description]
        assert tuple(parts) in sets
        assert [action.target for action in fix.actions] == [part.target for part in parts]
        assert fix.safety == ("safe" if all(part.safe for part in parts) else "unsafe")
        assert not any(tuple(p for p in parts if p is not left) in sets for left in parts)
    small = [parts for parts in sets if all(part.bytes < over for part in parts)]
    if any(part.safe for parts in small for part in parts) and small:
        safe = any(all(part.safe for part in parts) for parts in small)
        assert [fix.safety for fix in shown if len(fix.actions) > 1] == ["safe" if safe else "unsafe"]


def test_savings_that_are_not_enough_together_are_a_note(trace: Trace) -> None:
    (finding,) = with_memory(trace, 1)
    assert finding.fixes == ()
    (note,) = (note for note in finding.notes if note.startswith("not enough, even together: "))
    assert "store the frozen linear layers in nf4 (about 206 KiB less)" in note
    (finding,) = with_memory(trace, trace.memory.peak)
    assert not any(note.startswith("not enough") for note in finding.notes)


@pytest.mark.parametrize(
    ("optimizer", "saves"),
    [
        ("adamw", True),
        ("adamw_32bit", True),
        ("adamw_8bit", False),
        ("adamw_torch_4bit", False),
        ("adafactor", False),
    ],
)
def test_states_in_8_bits_are_advised_only_if_they_are_smaller(
    trace: Trace, optimizer: str, saves: bool
) -> None:
    shapes = [(4096, 512), (64, 8192), (512,)]
    weights = [
        replace(w, trainable=True, shape=s, kind="linear")
        for w, s in zip(trace.weights, shapes, strict=False)
    ]
    states = sum(state_bytes("adamw_bnb" if optimizer == "adamw" else optimizer, shape) for shape in shapes)
    memory = Memory({"backward": {"optimizer": states, "activations": 1000}})
    savings = _savings(on(replace(trace, weights=tuple(weights), memory=memory), "t4"))
    saved = [saving.bytes for saving in savings if saving.target == "optim"]
    small = sum(state_bytes("adamw_8bit", shape) for shape in shapes)
    assert saved == ([states - small] if saves else [])


def test_a_loss_in_chunks_is_advised_only_for_logits_of_all_tokens(trace: Trace) -> None:
    def advised(trace: Trace) -> bool:
        return any(
            saving.how.startswith("compute the loss from the logits of a part") for saving in _savings(trace)
        )

    logits = 32 * 128 * 4
    trace = replace(
        trace, memory=Memory({"backward": {"activations": 6 * logits}}, saved={"backward": logits})
    )
    assert advised(trace)
    vocabulary = {weight.name for weight in trace.weights if weight.kind == "embedding"}
    wider = [replace(w, shape=(512, 64)) if w.name in vocabulary else w for w in trace.weights]
    assert not advised(replace(trace, weights=tuple(wider)))
