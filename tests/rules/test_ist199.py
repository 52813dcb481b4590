from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import isotype
from isotype.records.finding import Finding
from isotype.records.trace import Failure
from isotype.rules.ist199_not_traced import is_about_dtypes
from tests.pairwise import pairwise
from tests.rules import samples
from tests.rules.traces import found, of_llama, traced
from tests.small import BF16

RULE = "ist199_not_traced"


class Refusing(nn.Module):
    """Raises in its forward."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner(x)
        raise self.error


def refused(error: Exception) -> list[Finding]:
    return found(RULE, traced(Refusing(error), {"x": torch.ones(2, 4)}))


def test_an_error_about_dtypes() -> None:
    (finding,) = refused(TypeError("kernel expects bfloat16 queries, got float32"))
    assert finding.severity == "error"
    assert finding.message == (
        "the step was not traced beyond the forward: TypeError: kernel expects bfloat16 queries, got float32"
    )
    assert finding.source.rpartition("/")[2].startswith("test_ist199.py:")


def test_any_other_error() -> None:
    (finding,) = refused(ValueError("the image has 3 channels, the model takes 4"))
    assert finding.severity == "warning"
    assert finding.fixes[0].actions[0].kind == "advice"


def test_an_error_of_autograd_that_the_real_step_raises_too() -> None:
    model = nn.Linear(4, 4)
    (finding,) = found(RULE, traced(model, lambda linear: linear.weight.add_(1).mean()))
    assert finding.severity == "error"
    assert "a leaf Variable that requires grad is being used in an in-place operation" in finding.cause


def test_an_error_about_integers_blames_no_float() -> None:
    (finding,) = refused(RuntimeError("expected dtype Float for the scores but got index dtype Int"))
    assert finding.message.startswith("the step was not traced beyond the forward")


def test_a_step_that_was_followed() -> None:
    assert found(RULE, of_llama()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("RuntimeError: expected scalar type Float but found BFloat16", True),
        ("RuntimeError: mat1 and mat2 must have the same dtype, but got Half and Float", True),
        ("NotImplementedError: \"addmm_impl_cpu_\" not implemented for 'Half'", True),
        ("RuntimeError: got: float != c10::BFloat16", True),
        ("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", False),
        ("KeyError: 'bfloat16'", False),
        ("ImportError: flash_attn is not installed", False),
        ("ValueError: You have to specify input_ids or inputs_embeds", False),
        ("RuntimeError: could not convert string to floating point", False),
    ],
)
def test_which_errors_are_about_dtypes(error: str, expected: bool) -> None:
    assert is_about_dtypes(Failure("forward", "", "", error)) is expected


def test_what_another_rule_explains_is_silent() -> None:
    column = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x64 and 1x2048)"
    codes = Failure("forward", samples.LAYER, "model.py:1", column)
    assert found(RULE, samples.trace([samples.packed()], failure=codes)) == []
    lost = Failure("forward", samples.LAYER, "model.py:1", "AttributeError: no attribute 'quant_state'")
    assert found(RULE, samples.trace([samples.packed(state=None)], failure=lost)) == []
    assert len(found(RULE, samples.trace([samples.packed()], failure=lost))) == 1


class Recurrent(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Linear(4, 16).to(BF16)
        self.rnn, self.out = nn.GRU(16, 2, batch_first=True).to(dtype), nn.Linear(2, 1).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.body(x))[0])


def test_a_fix_must_not_bring_to_light_another_error() -> None:
    inputs = {"x": torch.ones(2, 3, 4, dtype=BF16)}
    (finding,) = isotype.check(Recurrent(torch.float32), inputs, device="cpu").errors
    assert (finding.code, finding.cause) == ("IST101", "rnn.weight_ih_l0 is float32")
    # A boundary at the GRU alone would only move the error to the head behind it.
    autocast, line = finding.fixes
    assert (autocast.description, autocast.verified) == ("run the step under autocast to bfloat16", True)
    assert (line.description.startswith("cast the operands to bfloat16 at "), line.verified) == (True, True)
    assert isotype.check(Recurrent(BF16), inputs, device="cpu").ok


class Strict(nn.Linear):
    """Refuses inputs whose dtype is not the weight's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            raise ValueError(f"the weight is {self.weight.dtype}, expected {x.dtype}")
        return super().forward(x)


def test_a_refusal_by_the_model_has_no_fix_that_only_moves_it() -> None:
    model = nn.Sequential(Strict(4, 4, dtype=BF16), Strict(4, 4), Strict(4, 4, dtype=BF16))
    (finding,) = isotype.check(model, {"input": torch.ones(2, 4, dtype=BF16)}, device="cpu").errors
    assert (finding.code, finding.cause) == ("IST199", "1.weight is float32")
    # A boundary at the second layer would return float32, which the third layer refuses.
    assert [(fix.description, fix.verified) for fix in finding.fixes] == [
        ("cast 1.weight, 1.bias to bfloat16", True)
    ]


class Checked(nn.Module):
    def __init__(self, cast: bool, say: str | None) -> None:
        super().__init__()
        self.proj, self.cast, self.say = nn.Linear(4, 4), cast, say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, weight = self.proj(x), self.proj.weight
        made = made if self.cast else made.float()
        if self.say is None:
            assert made.dtype == weight.dtype
        elif made.dtype != weight.dtype:
            raise RuntimeError(self.say)
        return made


def test_a_check_whose_words_do_not_name_dtypes() -> None:
    inputs = {"x": torch.ones(2, 4, dtype=BF16)}
    for say in (None, "weight type must equal to input type"):
        (finding,) = isotype.check(Checked(False, say).to(BF16), inputs, device="cpu", verify=False).errors
        assert finding.message == "the model's own code does not accept float32"
        assert finding.cause.startswith("a cast to float32 at ")
        assert isotype.check(Checked(True, say).to(BF16), inputs, device="cpu").ok


class Sorted(nn.Module):
    """A check of the model's own whose words name the dtype that it takes, or the one that it does not."""

    def __init__(self, say: str) -> None:
        super().__init__()
        self.proj, self.say = nn.Linear(4, 4), say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.proj(x)
        if made.dtype == torch.bfloat16:
            raise TypeError(self.say)
        return made.float()


def test_the_dtypes_that_an_error_names_decide_which_tensor_is_odd() -> None:
    inputs = {"x": torch.ones(2, 4)}
    for say in ("scores must be float32 or float64", "Unsupported dtype BFloat16"):
        (finding,) = isotype.check(Sorted(say), inputs, device="h100", autocast="bfloat16").errors
        assert finding.code == "IST199"
        assert "bfloat16" in finding.message
        assert "linear" in finding.cause
        assert any(fix.verified for fix in finding.fixes)


class Picky(torch.optim.Optimizer):
    """An optimizer that takes one dtype, and says so in words of its own."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            assert parameter.dtype == torch.bfloat16, "only bfloat 16 is supported."
            parameter.add_(parameter.grad, alpha=-1e-3)


def test_an_optimizer_that_takes_one_dtype() -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 4)), {"input": torch.ones(2, 4)}
    report = isotype.check(model, inputs, device="cpu", optimizer=Picky)
    (finding,) = report.errors
    assert (finding.code, finding.phase, finding.cause) == ("IST199", "optimizer", "0.weight is float32")
    inputs = {"input": torch.ones(2, 4, dtype=BF16)}
    assert isotype.check(model.to(BF16), inputs, device="cpu", optimizer=Picky).ok


class Nested(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.inner, self.layout = nn.Linear(4, 4), layout

    def forward(self, rows: torch.Tensor, lone: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([rows, lone], layout=self.layout)
        return torch.nested.to_padded_tensor(self.inner(nested), 0.0).mean()


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("inside", [False, True])
def test_nested_tensors_are_not_traced(layout: torch.layout, inside: bool) -> None:
    parts = {"rows": torch.ones(3, 4), "lone": torch.ones(1, 4)}
    inputs = parts if inside else {"input": torch.nested.nested_tensor([*parts.values()], layout=layout)}
    report = isotype.check(Nested(layout) if inside else nn.Linear(4, 4), inputs, device="cpu")
    assert {(finding.code, finding.severity) for finding in report.findings} == {("IST199", "warning")}
    finding = report.findings[0]
    assert not report.complete
    assert "nested tensors cannot be traced" in finding.message
    assert "IST199" in report.to_json()


@pytest.mark.real_cpu
@pairwise(
    "optimizer, embedding, sparse, dense",
    ["adamw", "sgd", torch.optim.SparseAdam],
    [nn.Embedding, nn.EmbeddingBag],
    [False, True],
    [False, True],
)
def test_optimizers_that_refuse_the_layout_of_gradients(
    optimizer: Any, embedding: Any, sparse: bool, dense: bool
) -> None:
    layers = [embedding(8, 4, sparse=sparse), *[nn.Linear(4, 4)] * dense]
    model, ids = nn.Sequential(*layers), torch.zeros(2, 3, dtype=torch.long)
    report = isotype.check(model, {"input": ids}, device="cpu", optimizer=optimizer)
    cls = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(optimizer, optimizer)
    step = cls(model.parameters())
    model(ids).sum().backward()
    raised = ""
    try:
        step.step()
    except RuntimeError as error:
        raised = str(error).split(", ")[0]
    assert report.ok == (raised == "")
    assert [(f.code, f.phase, raised in f.message) for f in report.errors] == [
        ("IST199", "optimizer", True)
    ] * bool(raised)
