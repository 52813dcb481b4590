from __future__ import annotations

from dataclasses import replace

from isotype.records.finding import Action
from isotype.records.trace import Operand, Origin
from isotype.rules.ist305_optimizer import find
from tests.rules.samples import BF16, FP32, adapter, norm, operand, refused, trace, weight


def test_a_fused_step_over_two_dtypes() -> None:
    step = refused(
        "aten._fused_adamw_.default",
        "optimizer",
        operand(FP32, "parameter", "w"),
        operand(BF16, "gradient", "w"),
        message="expected scalar type Float but found BFloat16",
    )
    (finding,) = find(trace([adapter(FP32)], [step], optimizer="adamw_fused"))
    assert finding.severity == "error"
    assert finding.message == "aten._fused_adamw_.default mixes bfloat16 and float32"
    assert finding.cause == "the gradient of w is bfloat16"
    assert finding.fixes[0].actions == (Action("setting", "optimizer", "adamw"),)


def test_an_optimizer_of_ones_own_that_mixes_dtypes() -> None:
    step = refused(
        "aten.lerp_.Scalar",
        "optimizer",
        operand(FP32, "operator", "zeros_like"),
        operand(BF16, "gradient", "aten._to_copy.default"),
    )
    of = Origin("gradient", BF16, "aten._to_copy.default", before=Origin("parameter", BF16, "embed.weight"))
    step = replace(step, operands=(step.operands[0], replace(step.operands[1], origin=of)))
    (finding,) = find(trace([adapter(FP32)], [step], optimizer="Mine"))
    assert finding.cause == "the gradient of embed.weight is bfloat16"
    assert finding.fixes[0].actions == (Action("line", "model.py:1", "float32"),)


def test_a_constant_of_another_dtype() -> None:
    step = refused(
        "aten.lerp_.Tensor",
        "optimizer",
        operand(BF16, "parameter", "w"),
        operand(BF16, "gradient", "w"),
        operand(FP32, "constant", "tensor"),
    )
    (finding,) = find(trace([adapter(FP32)], [step], optimizer="Mine"))
    assert finding.cause == "tensor returns float32"


def test_masters_beside_bfloat16_parameters() -> None:
    (finding,) = find(trace([adapter(FP32), weight("lm_head.weight", BF16, trainable=True)]))
    assert finding.message == "1 trainable parameter is bfloat16, 1 float32"


def test_one_dtype_and_pinned_parameters_are_silent() -> None:
    assert not list(find(trace([adapter(FP32)])))
    mixed = [norm(FP32, trainable=True), weight("lm_head.weight", BF16, trainable=True)]
    assert not list(find(trace(mixed, scaler=True)))  # IST302
    assert not list(find(trace([adapter(FP32), adapter(BF16, "model.norm.lora_B.default.weight")])))  # IST502
    assert not list(find(trace([adapter(BF16), norm(FP32, trainable=True, pinned=True)])))


def test_lists_are_shown_and_mended_by_parameter() -> None:
    names = ("a.weight", "b.weight")
    weights = [weight(name, FP32, trainable=True) for name in names]
    parameters = [
        Operand(f"self[{i}]", FP32, (8, 8), Origin("parameter", FP32, name)) for i, name in enumerate(names)
    ]
    gradients = [Operand(f"grads[{i}]", BF16, (8, 8), Origin("gradient", BF16, "mm")) for i in range(2)]
    step = refused("aten._fused_adamw_.default", "optimizer", *parameters, *gradients)
    (finding,) = find(trace(weights, [step], optimizer="adamw_fused"))
    assert finding.cause == "the gradient of a.weight is bfloat16"
    assert [operand.role for operand in finding.operands] == ["self[0]", "grads[0]"]
    assert finding.fixes[0].actions == tuple(Action("gradient", name, "float32") for name in names)
    assert finding.fixes[1].actions == (Action("setting", "optimizer", "adamw"),)


def test_fsdp1_that_keeps_low_precision_gradients() -> None:
    name = "layers.0._fsdp_wrapped_module._flat_param"
    parameter = Operand("self[0]", FP32, (64,), Origin("parameter", FP32, name))
    gradient = Operand("tensors1[0]", BF16, (64,), Origin("gradient", BF16, "mm"))
    step = refused("aten._foreach_lerp_.Scalar", "optimizer", parameter, gradient)
    (finding,) = find(trace([weight(name, FP32, trainable=True)], [step]))
    assert "keep_low_precision_grads=False" in finding.fixes[0].description
    assert not [fix for fix in finding.fixes if "gradient" in {action.kind for action in fix.actions}]


def test_a_state_from_before_a_cast() -> None:
    kept = Operand(
        "exp_avgs[0]", FP32, (8, 8), Origin("outside", FP32, "the optimizer's exp_avg of a.weight")
    )
    parameter = Operand("self[0]", BF16, (8, 8), Origin("parameter", BF16, "a.weight"))
    step = refused("aten._fused_adamw_.default", "optimizer", parameter, kept)
    (finding,) = find(trace([weight("a.weight", BF16, trainable=True)], [step], optimizer="AdamW"))
    assert finding.cause == "the optimizer's exp_avg of a.weight is float32"
    assert [fix.actions[0].kind for fix in finding.fixes] == ["advice"]


def test_an_operator_without_a_kernel_runs_in_float32() -> None:
    step = refused("aten.linalg_qr.default", "optimizer", operand(BF16, "parameter", "w"))
    (finding,) = find(trace([adapter(BF16)], [step], optimizer="Mine"))
    assert finding.message == "aten.linalg_qr.default has no kernel for bfloat16"
    assert finding.fixes[0].text == "cast the operands at model.py:1 to float32, and the result back"


def test_every_line_of_an_optimizer_that_mixes_dtypes_is_cast() -> None:
    """deepspeedai/DeepSpeed #7746: a script's own Muon, with the name of torch's, keeps its momentum in float32."""
    state = Operand("self", FP32, (8, 8), Origin("cast", FP32, "zeros_like", source="muon.py:3"))
    gradient = Operand(
        "end", BF16, (8, 8), Origin("gradient", BF16, "w", before=Origin("parameter", BF16, "w"))
    )
    other = Operand("end", FP32, (8, 8), Origin("gradient", FP32, "w"))
    first = replace(refused("aten.lerp_.Scalar", "optimizer", state, gradient), source="muon.py:5")
    second = refused(
        "aten.lerp_.Scalar", "optimizer", replace(gradient, role="self"), replace(other, role="end")
    )
    steps = [first, replace(second, source="muon.py:6")]
    (finding,) = find(trace([weight("w", BF16, trainable=True)], steps, optimizer="Muon"))
    assert finding.cause == "the gradient of w is bfloat16"
    assert "a cast to float32 at muon.py:3" in finding.evidence
    lines = {Action("line", "muon.py:5", "float32"), Action("line", "muon.py:6", "bfloat16")}
    assert lines in [set(fix.actions) for fix in finding.fixes]


def test_of_several_optimizers_of_torch_no_line_is_cast() -> None:
    """All operators of torch's optimizers have one line, the script's call of `step`, where no cast can be written."""
    state = Operand("self", FP32, (8, 8), Origin("outside", FP32, "the optimizer's exp_avg of w"))
    gradient = Operand("end", BF16, (8, 8), Origin("gradient", BF16, "w"))
    step = trace(
        [weight("w", BF16, trainable=True)],
        [refused("aten.lerp_.Scalar", "optimizer", state, gradient)],
        optimizer="two",
    )

    def lines(kinds: tuple[str, str]) -> list[Action]:
        updates = {name: (kind, 1e-3) for name, kind in zip("wv", kinds, strict=True)}
        (finding,) = find(replace(step, setup=replace(step.setup, updates=updates)))
        return [action for fix in finding.fixes for action in fix.actions if action.kind == "line"]

    assert not lines(("AdamW", "SGD"))
    assert lines(("AdamW", "Lookahead"))
