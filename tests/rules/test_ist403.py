from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isotype.records.trace import Call, Failure, Operand, Origin
from isotype.rules.ist403_packed_raw import explains, find
from tests.rules.samples import BF16, FP16, FP32, LAYER, call, operand, packed, trace, weight

COLUMN = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 1x2048)"
ATTENTION = "model.layers.0.self_attn"


def test_a_dense_tensor_where_codes_belong() -> None:
    (finding,) = find(trace([packed(packed=BF16)]))
    assert finding.message == "1 quantized weight holds bfloat16 values where packed codes belong"


def test_a_product_with_codes() -> None:
    product = call("aten.mm.default", operand(FP16), operand(torch.int8, "parameter", "q_proj.weight"))
    (finding,) = find(trace([packed()], [product, product]))
    assert finding.severity == "error"
    assert finding.message == "float16 activations are multiplied with packed int8 codes"
    assert finding.cause == "q_proj.weight holds int8 codes"
    assert finding.notes == ("1 more such product",)


def test_a_plain_layer_around_codes() -> None:
    (finding,) = find(trace([weight(dtype=torch.uint8, shape=(2048, 1))]))
    assert finding.message == "1 plain Linear layer holds packed uint8 codes"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            "RuntimeError: a and b must have same reduction dim, but got [32, 64] X [1, 1024].",
            "holds packed codes",
        ),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 1x2048)", "holds packed codes"),
        ("RuntimeError: shape '[2048, 1]' is invalid for input of size 4096", "holds packed codes"),
        (
            "RuntimeError: only Tensors of floating point dtype can require gradients",
            "holds uint8 codes, which have no gradient",
        ),
        (
            "TypeError: nn.Module.to only accepts floating point or complex dtypes, but got desired dtype=torch.uint8",
            "a module is cast to uint8, the dtype of packed codes",
        ),
    ],
)
def test_failures_that_codes_explain(error: str, cause: str) -> None:
    failure = Failure("forward", "model.layers.0.self_attn", "model.py:1", error)
    (finding,) = find(trace([packed()], failure=failure))
    assert cause in finding.cause


@pytest.mark.parametrize(
    "error",
    ["RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 32x64)", "KeyError: 'labels'"],
)
def test_other_failures_are_silent(error: str) -> None:
    assert not list(find(trace([packed()], failure=Failure("forward", "", "", error))))


def test_a_quantized_layer_is_silent() -> None:
    assert not list(find(trace([packed(), packed(packed=BF16, storage=BF16)])))


def test_packed_codes_in_a_module_of_ones_own() -> None:
    held = weight("blocks.0.W", torch.uint8, shape=(2048, 1), kind="other", module_class="Fused")
    failure = Failure("forward", "blocks.0", "fused.py:7", COLUMN)
    (finding,) = find(trace([held], failure=failure))
    assert finding.severity == "error"
    assert finding.cause == "blocks.0.W holds packed codes of shape [2048, 1]"
    assert "dequantize_4bit" in finding.fixes[0].description
    assert explains(trace([held], failure=failure), failure)


def test_a_layer_whose_owner_reads_its_weight() -> None:
    (finding,) = find(trace([packed()], failure=Failure("forward", ATTENTION, "activation.py:1", COLUMN)))
    assert finding.fixes[0].description.startswith(f"do not quantize {LAYER} (llm_int8_skip_modules)")


@pytest.mark.parametrize(
    "error", [COLUMN, "RuntimeError: shape '[2048, 1]' is invalid for input of size 4096"]
)
def test_an_adapter_that_reads_the_packed_weight(error: str) -> None:
    """PEFT's LoHa and LoKr on a 4-bit model; LoRA calls the layer."""
    base = replace(packed(), name=f"{LAYER}.base_layer.weight", module=f"{LAYER}.base_layer")
    adapter = weight(f"{LAYER}.lokr_w1.default", adapter=True, trainable=True, module=LAYER)
    failure = Failure("forward", LAYER, "lokr/layer.py:1", error)
    (finding,) = find(trace([base, adapter], failure=failure))
    assert finding.fixes[0].description.startswith("train quantized layers with LoRA")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: expected scalar type torch.uint8 but found torch.float32",
        "RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [2, 1] but got: [2, 4].",
    ],
)
def test_layers_whose_weights_a_module_reads(error: str) -> None:
    """As in transformers' Mamba: `self.dt_proj.weight @ time_step`."""
    read = [
        replace(packed(), name=f"mixer.{name}.weight", module=f"mixer.{name}", reader="MambaMixer")
        for name in ("x_proj", "dt_proj")
    ]
    embedding = replace(weight("embeddings.weight", module_class="Embedding"), tied=("lm_head.weight",))
    step = trace(
        [embedding, *read, packed()], failure=Failure("forward", "mixer", "modeling_mamba.py:1", error)
    )
    (finding,) = find(step)
    assert finding.cause == "MambaMixer reads the packed codes of mixer.x_proj, mixer.dt_proj"
    skipped = '["mixer.x_proj", "mixer.dt_proj", "lm_head"]'
    assert finding.fixes[0].description.endswith(f"BitsAndBytesConfig(…, llm_int8_skip_modules={skipped})")
    assert explains(step, step.failure)
    other = replace(step, failure=Failure("forward", "mixer", "", "KeyError: 'labels'"))
    assert not list(find(other))


def test_a_buffer_that_holds_the_codes_of_a_quantized_weight() -> None:
    """MNoorFawi/curlora #5: an adapter keeps `layer.weight` as a buffer."""
    base = replace(packed(), shape=(2048, 1))
    buffer = weight("adapter.W", base.dtype, shape=(2048, 1), kind="other", buffer=True)
    failure = Failure("forward", "adapter", "model.py:1", COLUMN)
    (finding,) = find(trace([base, buffer], failure=failure))
    assert finding.cause == "adapter.W holds packed codes of shape [2048, 1]"


def test_a_column_that_is_no_code() -> None:
    failure = Failure("forward", "scale", "model.py:1", COLUMN)
    column = weight("scale.table", torch.uint8, shape=(2048, 1), kind="other", buffer=True)
    assert not list(find(trace([column], failure=failure)))
    assert not explains(trace([column], failure=failure), failure)


def casts(codes: torch.dtype, *before: str, module: str = ATTENTION) -> list[Call]:
    """Activations cast to `codes` and back, after operators named `before`."""
    there = call("aten._to_copy.default", operand(FP32), result=codes, module=module)
    kept = Operand("self", codes, (32, 64), Origin("cast", codes, "to", module, there.source))
    return [
        *(call(name, operand(FP32), module=module) for name in before),
        there,
        call("aten._to_copy.default", kept, result=BF16, module=LAYER),
    ]


def test_activations_cast_to_the_dtype_of_codes() -> None:
    (finding,) = find(trace([packed()], casts(torch.uint8)))
    assert finding.severity == "error"
    assert finding.message == "float32 activations are cast to uint8, the dtype of packed codes"
    assert finding.cause == f"a cast at model.py:1 to uint8, the storage dtype of {LAYER}.weight"


def test_a_convolution_refuses_activations_that_are_codes() -> None:
    """modelscope/ms-swift #698: no cast back follows, because the step ends."""
    error = "RuntimeError: expected scalar type Byte but found BFloat16"
    failure = Failure("forward", f"{ATTENTION}.conv", "model.py:2", error)
    (finding,) = find(trace([packed()], casts(torch.uint8)[:1], failure=failure))
    assert finding.message == "float32 activations are cast to uint8, the dtype of packed codes"
    assert finding.notes[-1] == f"the step ends with {error}"


def test_casts_to_whole_numbers_that_are_meant() -> None:
    assert not list(find(trace([packed()], casts(torch.uint8, "aten.round.default"))))  # quantizes on purpose
    assert not list(find(trace([packed()], casts(torch.uint8)[:1])))  # a mask: never float again
    assert not list(find(trace([packed()], casts(torch.int8))))  # not the codes' dtype
    assert not list(find(trace([packed()], casts(torch.uint8, module="model.visual"))))  # no codes there
    assert not list(find(trace([weight()], casts(torch.uint8))))
