from __future__ import annotations

from dataclasses import replace

from tests.rules.traces import FP16, FP32, batch, found, llama, on, traced

RULE = "ist602_float16"


def test_float16_on_a_cpu_without_it() -> None:
    (finding,) = found(RULE, on(traced(llama(FP16), batch()), "cpu-generic"))
    assert finding.severity == "warning"
    assert finding.message.startswith("float16 matmuls do not run in hardware on x86 CPU without")
    assert finding.cause == "base_model.model.model.embed_tokens.weight is float16"
    (fix,) = finding.fixes  # such a CPU has no bfloat16 either
    assert (fix.description, fix.safety) == ("run the step in float32 and cast the weights", "safe")


def test_a_device_that_refuses_it_is_an_error() -> None:
    trace = on(traced(llama(FP16), batch()), "cpu-generic")
    profile = trace.setup.profile
    refusing = replace(profile, emulated={}, refused={FP16: "there is no float16 here"})
    trace = replace(trace, setup=replace(trace.setup, profile=refusing))
    (finding,) = found(RULE, trace)
    assert finding.severity == "error"
    assert "do not run on" in finding.message
    assert finding.notes[0] == "there is no float16 here"


def test_float32_on_a_cpu_and_float16_on_a_gpu() -> None:
    assert found(RULE, on(traced(llama(FP32), batch()), "cpu-generic")) == []
    assert found(RULE, on(traced(llama(FP16), batch()), "t4")) == []
