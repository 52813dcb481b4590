"""What decide() chooses, why, and what it refuses: whole policies and whole messages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isotype.core import VERSION
from isotype.core.dtypes import COMPUTE_DTYPES
from isotype.core.errors import CheckpointError, PrecisionError, Problem
from isotype.precision.decide import PrecisionRequest, decide
from isotype.precision.devices.names import profile_names
from isotype.precision.devices.profile import device_profile
from isotype.precision.facts import ModelFacts, QuantizationFacts
from isotype.precision.policy import POLICY_FILE, LayerStorage, PrecisionPolicy
from tests.refusals import refused

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
T4, A100, CPU = device_profile("t4"), device_profile("a100"), device_profile("cpu-generic")
LLAMA = ModelFacts("llama", model_type="llama", trained_dtype=BF16)
GPT_OSS = replace(LLAMA, source="gpt-oss", pinned=("input_layernorm", "norm"), pinned_strict=("sinks",))
NF4 = QuantizationFacts("bitsandbytes", "nf4", BF16, double_quant=True, quant_storage=torch.uint8)


@pytest.mark.parametrize(
    ("trained", "profile", "quantization", "compute"),
    [
        (BF16, A100, None, BF16),  # trained in it, runs natively
        (F16, A100, None, F16),
        (F32, A100, None, F32),
        (BF16, T4, None, F16),  # no native bfloat16: the best it has, with loss scaling
        (BF16, CPU, None, F32),  # a CPU without native 16-bit
        (F16, CPU, None, F32),
        (None, A100, None, BF16),  # nothing says: the best
        (F32, A100, "nf4", BF16),  # rounded weights gain nothing from float32 matmuls
        (F32, CPU, "nf4", F32),
    ],
)
def test_auto_takes_the_trained_dtype_where_it_runs_natively_else_the_best(
    trained, profile, quantization, compute
):
    policy = decide(
        replace(LLAMA, trained_dtype=trained), profile, PrecisionRequest(quantization=quantization)
    )
    assert policy.compute == compute
    assert policy.loss_scaling == (compute == F16)
    assert policy.master == F32
    assert policy.storage == (quantization or str(compute).removeprefix("torch."))
    # Nobody has measured the ranges.
    assert bool(policy.warnings) == (compute == F16 != trained)
    assert all(reason for _, _, reason in policy.rows())


def test_auto_on_a_t4_says_why():
    reason = decide(LLAMA, T4, PrecisionRequest()).reasons["compute"]
    assert reason.startswith("the checkpoint was trained in bfloat16; ")
    assert reason.endswith(", so float16 is used")


def test_an_explicit_dtype_that_is_slow_is_honoured_with_a_warning():
    policy = decide(LLAMA, T4, PrecisionRequest(dtype="bf16"))
    assert policy.compute == BF16
    assert policy.warnings[0].startswith("bfloat16 on NVIDIA T4: ")
    assert "expect it to be slow" in policy.warnings[0]


def test_a_requested_float32_is_honoured_with_a_warning():
    """hiyouga/LLaMA-Factory #6244 trains with `bf16: false`; axolotl-ai-cloud/axolotl #3323, too."""
    warning = "float32 on NVIDIA A100 SXM 80 GB: its matmuls run 16 times slower than bfloat16's"
    assert decide(LLAMA, A100, PrecisionRequest(dtype="float32")).warnings == (warning,)


def test_float16_of_a_bfloat16_checkpoint_warns_about_range():
    assert decide(LLAMA, A100, PrecisionRequest(dtype="float16")).warnings == (
        "value ranges were not measured: a matmul overflows if its inputs or results exceed float16's 65504 "
        "(isotype.measure_ranges finds such matmuls; loss scaling protects gradients only)",
    )


def test_pins_hold_in_every_16_bit_dtype_and_nowhere_else():
    for dtype in (BF16, F16):
        assert decide(GPT_OSS, A100, PrecisionRequest(dtype=dtype)).pinned == (
            "input_layernorm",
            "norm",
            "sinks",
        )
    assert decide(GPT_OSS, A100, PrecisionRequest(dtype=F32)).pinned == ()


def test_a_checkpoint_saved_quantized_keeps_its_format():
    policy = decide(replace(LLAMA, quantization=NF4), A100, PrecisionRequest(dtype="float16"))
    assert (policy.storage, policy.double_quant, policy.compute) == ("nf4", True, F16)
    assert policy.reasons["storage"] == "the checkpoint is saved in nf4"


def test_full_training_stores_the_weights_as_masters():
    policy = decide(LLAMA, A100, PrecisionRequest(dtype="bfloat16", trainable="full"))
    assert (policy.storage, policy.compute, policy.autocast) == ("float32", BF16, BF16)


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "compressed-tensors", "awq"])
def test_some_quantized_weights_are_dequantized_and_may_be_quantized_again(method):
    facts = replace(LLAMA, quantization=QuantizationFacts(method, method))
    policy = decide(facts, A100, PrecisionRequest())
    assert policy.storage == "bfloat16"
    assert policy.reasons["storage"] == (
        f"{method} weights are dequantized once at load, because the format has no backward"
    )
    assert decide(facts, A100, PrecisionRequest(quantization="nf4")).storage == "nf4"


def test_a_model_in_memory_keeps_the_layers_it_has():
    facts = replace(LLAMA, quantization=QuantizationFacts("fp8", "fp8", in_memory=True))
    with pytest.raises(PrecisionError, match="llama is quantized with fp8"):
        decide(facts, A100, PrecisionRequest())


def test_gradients_are_reduced_in_the_dtype_of_the_masters():
    assert decide(LLAMA, A100, PrecisionRequest(dtype="bf16")).reduce == F32
    policy = decide(LLAMA, A100, PrecisionRequest(dtype="bf16", master="bf16"))
    assert policy.reduce == BF16
    assert ("gradient reduction", "bfloat16", "gradients have the dtype of their masters") in (policy.rows())


def test_float32_storage_with_16_bit_compute_says_what_it_relies_on_and_costs():
    policy = decide(GPT_OSS, A100, PrecisionRequest(dtype="bf16", storage="float32"))
    assert (policy.storage, policy.plain, policy.compute, policy.master) == ("float32", F32, BF16, F32)
    assert policy.autocast == BF16
    assert policy.warnings == (
        "float32 storage: every step casts the frozen weights to bfloat16 and they take twice the memory",
    )
    rows = {role: (dtype, reason) for role, dtype, reason in policy.rows()}
    assert rows["matmuls"] == (
        "bfloat16",
        "as requested; autocast casts float32 weights to it at each matmul; outside autocast the model computes in float32",
    )
    assert rows["residual stream"] == ("float32", "as the weights, because autocast casts only at matmuls")
    assert rows["frozen base weights"] == ("float32", "as requested")
    assert rows["norms"] == (
        "float32 inside",
        "the variance is float32; RMSNorm returns its input's dtype, and LayerNorm returns float32 under CUDA autocast",
    )
    assert rows["pinned parameters"][1].endswith("; their outputs are cast to float32")
    text = " ".join(str(policy).split())
    assert "outside autocast the model computes in float32" in text


def test_storage_in_the_compute_dtype_is_the_default():
    assert decide(LLAMA, A100, PrecisionRequest(dtype="bf16", storage=BF16)) == decide(
        LLAMA, A100, PrecisionRequest(dtype="bf16")
    )


@pytest.mark.parametrize(
    ("facts", "asked", "problem"),
    [
        (
            LLAMA,
            PrecisionRequest(storage="float32", quantization="nf4"),
            Problem(
                "storage float32 with weights quantized in nf4",
                "one of the two",
                "omit the storage (the weights are stored in nf4), or use an unquantized checkpoint and omit the "
                "quantization",
            ),
        ),
        (
            replace(LLAMA, quantization=NF4),
            PrecisionRequest(storage="bf16"),
            Problem(
                "storage bfloat16 with weights quantized in nf4",
                "one of the two",
                "omit the storage (the weights are stored in nf4), or use an unquantized checkpoint and omit the "
                "quantization",
            ),
        ),
        (
            LLAMA,
            PrecisionRequest(storage="int8"),
            Problem("storage int8", "a float dtype", "request quantization int8 instead of storage"),
        ),
        (
            LLAMA,
            PrecisionRequest(storage="float64"),
            Problem("storage float64", "float32, bfloat16 or float16", "give one of these"),
        ),
        (
            LLAMA,
            PrecisionRequest(dtype="float32", storage="bf16"),
            Problem(
                "storage bfloat16 with compute float32",
                "storage float32, because autocast does not cast weights to float32",
                "set no storage dtype, or compute in bfloat16",
            ),
        ),
        (
            LLAMA,
            PrecisionRequest(storage="bf16", trainable="full"),
            Problem(
                "storage bfloat16 with every weight trainable and float32 masters",
                "the dtype of the masters, because the weights are the masters",
                "set no storage dtype, or train adapters (--use_peft True, or trainable='lora' in Python)",
            ),
        ),
    ],
)
def test_storage_that_cannot_be(facts, asked, problem):
    with pytest.raises(PrecisionError) as caught:
        decide(facts, A100, asked)
    assert caught.value.problems == (problem,)
    assert caught.value.hint.startswith("nearest policy that works: ")


def test_every_conflict_at_once_with_the_nearest_policy_that_works():
    facts = replace(LLAMA, quantization=NF4, source="llama-nf4")
    asked = PrecisionRequest(dtype="float16", quantization="int8", trainable="full", master="bfloat16")
    assert refused(PrecisionError, decide, facts, A100, asked) == (
        "3 conflicts in the requested precision\n"
        "  - every weight trainable, but the weights are stored in int8\n"
        "    expected  float weights, because quantized weights have no gradient\n"
        "    fix       train adapters (--use_peft True, or trainable='lora' in Python), or omit the quantization\n"
        "  - quantization int8, but llama-nf4 is saved in nf4\n"
        "    expected  nf4, or an unquantized checkpoint\n"
        "    fix       omit the quantization (the checkpoint's nf4 is kept), or use the 16-bit original\n"
        "  - float16 compute with bfloat16 masters\n"
        "    expected  float32 masters, because float16 compute needs a GradScaler, which cannot unscale bfloat16 gradients\n"
        "    fix       omit the master dtype, or compute in bfloat16\n"
        "  = nearest policy that works: compute bfloat16, storage nf4, masters float32, trainable lora"
    )


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (PrecisionRequest(quantization="nf5"), "quantization 'nf5'"),
        (PrecisionRequest(trainable="some"), "trainable='some'"),
        (PrecisionRequest(double_quant=True), "double_quant with no quantization"),
        (
            PrecisionRequest(quantization="int8", double_quant=True, quant_storage="bfloat16"),
            "double_quant and quant_storage with int8 quantization",
        ),
        (PrecisionRequest(dtype="float32", master="bf16"), "float32 compute with bfloat16 masters"),
        (PrecisionRequest(dtype="float64"), "compute dtype float64"),
        (PrecisionRequest(master="float64"), "master dtype float64"),
    ],
)
def test_a_request_that_makes_no_sense_is_named(asked, given):
    with pytest.raises(PrecisionError) as caught:
        decide(LLAMA, A100, asked)
    assert given in [problem.given for problem in caught.value.problems]
    assert caught.value.hint.startswith("nearest policy that works: ")


def test_a_quantized_format_that_cannot_be_trained_is_refused():
    facts = replace(LLAMA, source="llama-gptq", quantization=QuantizationFacts("gptq", "gptq-4bit"))
    with pytest.raises(PrecisionError) as caught:
        decide(facts, A100, PrecisionRequest())
    assert caught.value.problems[0].given == "llama-gptq is quantized with gptq-4bit"
    assert caught.value.problems[0].expected.startswith("float weights, GGUF, mxfp4, fp8")
    assert caught.value.hint is None  # nothing the user asked for is the cause


def test_obstacles_found_elsewhere_are_reported_together():
    obstacle = Problem("bitsandbytes 0.1", "0.49", "pip install -U bitsandbytes")
    with pytest.raises(PrecisionError) as caught:
        decide(LLAMA, A100, PrecisionRequest(quantization="nf5"), [obstacle])
    assert [p.given for p in caught.value.problems] == ["bitsandbytes 0.1", "quantization 'nf5'"]


def test_the_printed_table_fits_a_terminal_and_names_every_role():
    text = str(decide(GPT_OSS, T4, PrecisionRequest(quantization="nf4", double_quant=True)))
    assert max(len(line) for line in text.splitlines()) <= 110
    for role in (
        "frozen base weights",
        "matmuls",
        "residual stream",
        "trainable parameters",
        "loss scaling",
    ):
        assert role in text
    assert "nf4 (double quantization)" in text


requests = st.builds(
    PrecisionRequest,
    dtype=st.sampled_from(["auto", "float32", "bf16", "fp16", F16, "float64"]),
    quantization=st.sampled_from([None, "nf4", "fp4", "int8", "gguf"]),
    trainable=st.sampled_from(["lora", "full", "none"]),
    master=st.sampled_from([None, "float32", "bfloat16", "float16"]),
    double_quant=st.sampled_from([None, False, True]),
    quant_storage=st.sampled_from([None, "uint8", "bfloat16"]),
    storage=st.sampled_from([None, "float32", "bf16", F16, "nf4", "float64"]),
)
facts_strategy = st.builds(
    ModelFacts,
    source=st.just("model"),
    trained_dtype=st.sampled_from([None, F32, F16, BF16, torch.float64]),
    quantization=st.sampled_from(
        [None, NF4, QuantizationFacts("mxfp4", "mxfp4"), QuantizationFacts("awq", "awq-4bit")]
    ),
    pinned=st.sampled_from([(), ("norm",)]),
)
profiles = st.sampled_from([device_profile(name) for name in profile_names() if name != "cpu"])


@given(facts=facts_strategy, profile=profiles, asked=requests)
def test_whatever_is_asked_ends_in_a_coherent_policy_or_in_named_problems(facts, profile, asked):
    policy, problems = None, ()
    try:
        policy = decide(facts, profile, asked)
    except PrecisionError as error:
        problems = error.problems
    assert all(problem.given and problem.expected and problem.fix for problem in problems)
    assert (policy is None) == bool(problems)
    if policy is None:
        return
    assert policy.compute in COMPUTE_DTYPES
    assert profile.supports(policy.compute) != "refused"
    assert policy.loss_scaling == (policy.compute == F16)
    assert not (policy.loss_scaling and policy.master != F32)
    assert policy.quantized == (policy.storage in ("nf4", "fp4", "int8"))
    assert not (policy.quantized and policy.trainable == "full")
    assert policy.reduce == policy.master
    assert policy.quantized or policy.plain == policy.compute or policy.autocast is not None
    assert PrecisionPolicy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


def test_a_saved_policy_is_readable_and_comes_back_equal(tmp_path):
    policy = decide(GPT_OSS, T4, PrecisionRequest(quantization="nf4"))
    policy.save(tmp_path)
    assert json.loads((tmp_path / POLICY_FILE).read_text())["compute"] == "float16"
    back = PrecisionPolicy.read(tmp_path)
    assert back == policy
    assert back.reasons == policy.reasons
    assert [path.name for path in tmp_path.iterdir()] == [POLICY_FILE]


def test_no_policy_and_a_broken_one(tmp_path):
    assert PrecisionPolicy.read(tmp_path) is None
    for text in ("{}", "[" * 100_000):
        (tmp_path / POLICY_FILE).write_text(text)
        with pytest.raises(CheckpointError, match="unreadable precision policy"):
            PrecisionPolicy.read(tmp_path)


def test_a_policy_of_another_format_version_is_its_own_error(tmp_path):
    policy = PrecisionPolicy(BF16, "nf4")
    file = policy.save(tmp_path)
    values = json.loads(file.read_text())
    assert values.pop("format_version") == 1
    file.write_text(json.dumps(values))  # as isotype 0.1.0 wrote it
    assert PrecisionPolicy.read(tmp_path) == policy
    file.write_text(json.dumps({**values, "format_version": 2, "unknown": 3}))
    with pytest.raises(CheckpointError, match="another format version") as error:
        PrecisionPolicy.read(tmp_path)
    assert f"{file}: format version 2; isotype {VERSION} reads version 1" in str(error.value)


def test_the_code_book_of_a_layer_is_that_of_its_format():
    layers = (LayerStorage("a", "nf4-32-fitted"), LayerStorage("b", "fp4"), LayerStorage("c", "bfloat16"))
    policy = PrecisionPolicy(BF16, "int8", layers=layers)
    assert [policy.code_book_of(module) for module in "abcd"] == ["nf4", "fp4", "bfloat16", "int8"]
