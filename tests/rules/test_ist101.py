from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.reality import real_step
from tests.rules.traces import found, traced, verified
from tests.small import BF16, ids, line, net, wide_norms

RULE = "ist101_operands"


def test_norms_that_return_float32() -> None:
    (finding,) = verified(wide_norms(3), ids(), "IST101")
    assert finding.severity == "error"
    assert finding.message == "float32 instead of bfloat16 in an operator that requires equal dtypes"
    assert (finding.module, finding.op, finding.phase) == ("layers.0.proj", "aten.addmm.default", "forward")
    assert finding.cause == "layers.0.norm.weight is float32"
    assert len(finding.evidence) == 2
    assert finding.evidence[0] == "layers.0.norm.weight is float32"
    assert finding.evidence[1].startswith("mul with an operand of another dtype returns float32 at small.py:")
    assert finding.evidence[1].endswith(" in layers.0.norm")
    assert finding.notes == (
        "2 more operators in 3 modules fail for the same cause",
        "the device raises: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
    )
    assert finding.places == ("layers.0.proj", "layers.1.proj", "layers.2.proj")
    assert line(finding.source).startswith("small.py:")
    assert [(fix.description, fix.safety, fix.verified) for fix in finding.fixes] == [
        ("return each ScaledNorm's output in bfloat16", "safe", True),
        ("cast the outputs of layers.*.norm to bfloat16", "safe", True),
        ("cast the inputs of layers.*.proj to bfloat16", "safe", True),
    ]


@pytest.mark.real_cpu
def test_the_device_is_quoted_word_for_word() -> None:
    (finding,) = found(RULE, traced(wide_norms(), ids()))
    outcome = real_step(wide_norms(), ids())
    assert (outcome.phase, outcome.module) == (finding.phase, finding.module)
    assert f"the device raises: {outcome.error}" in finding.notes


def test_one_dtype_throughout() -> None:
    assert found(RULE, traced(net(), ids())) == []


def test_autocast_hides_it() -> None:
    assert found(RULE, traced(wide_norms(), ids(), autocast=torch.bfloat16)) == []


def test_a_layers_weight_and_bias_are_cast_together() -> None:
    """The bias is what `addmm` is given first; cast alone it would leave the weight as mismatched as before."""
    model = nn.Sequential(
        nn.Linear(4, 32).to(BF16), nn.Sequential(nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 2))
    )
    (finding,) = verified(model, {"input": torch.ones(2, 4, dtype=BF16)}, "IST101")
    assert finding.cause == "1.0.weight is float32"
    assert [(fix.description, fix.verified) for fix in finding.fixes] == [
        ("let each Linear of 1.* compute in bfloat16 and cast its inputs and outputs", True),
        ("run the step under autocast to bfloat16", True),
        ("cast 1.*.weight, 1.*.bias to bfloat16", True),
    ]


class _Lora(nn.Module):
    """A hand-written LoRA layer: A and B are float32 parameters of the layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4, dtype=BF16).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.zeros(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.A.T @ self.B.T  # type: ignore[no-any-return]


def test_parameters_of_one_layer_are_one_cause() -> None:
    (finding,) = found(RULE, traced(_Lora(), {"x": torch.ones(2, 4, dtype=BF16)}))
    assert finding.cause == "A is float32"
    assert finding.notes[0] == "1 more operator fails for the same cause"


class Projected(nn.Module):
    """A projector of two layers in float32 between a tower and a decoder in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.projector, self.decoder = (
            nn.Sequential(*(nn.Linear(4, 4, dtype=BF16) for _ in range(number))) for number in (3, 2, 3)
        )
        self.projector.float().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.projector(self.tower(x)).to(BF16))


def test_a_part_in_float32_is_one_finding() -> None:
    (finding,) = verified(Projected(), {"x": torch.ones(2, 4, dtype=BF16)}, "IST101")
    assert finding.cause == "projector.0.weight is float32"
    assert finding.notes[0] == "1 more operator in 2 modules fails for the same cause"
    assert finding.fixes[0].description == "cast projector.*.weight, projector.*.bias to bfloat16"
    assert finding.fixes[0].verified


class Mixes(nn.Module):
    """A layer of two inputs: with one of them in bfloat16, their sum is still float32."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, dtype=BF16)

    def forward(self, noise: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return self.proj(noise + actions)


def test_the_cast_of_inputs_names_every_input_that_it_changes() -> None:
    (finding,) = verified(Mixes(), {"noise": torch.ones(2, 4), "actions": torch.ones(2, 4)}, "IST101")
    assert finding.cause == "the input noise is float32"
    assert finding.fixes[0].description == "pass noise, actions to the model in bfloat16"


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, dtype=BF16)

    def forward(self, hidden: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        assert timestep.dtype == torch.float32
        return self.proj(hidden) * torch.sin(timestep)[:, None].to(BF16)


def test_the_cast_of_inputs_keeps_numbers_per_row() -> None:
    """spacepxl/WanTraining #10: in bfloat16, the timestep 987.2 would be 988."""
    (finding,) = verified(Timed(), {"hidden": torch.ones(2, 4), "timestep": torch.rand(2) * 1000}, "IST101")
    assert finding.fixes[0].description == "pass hidden to the model in bfloat16"
    assert finding.fixes[0].verified


def test_no_cast_of_inputs_is_offered_for_what_the_module_holds_itself() -> None:
    """Untried too: what `isotype run` says under a traceback is read by somebody who will try it."""
    model = nn.Sequential(nn.Linear(4, 32).to(BF16), nn.Linear(32, 4))
    (finding,) = found(RULE, traced(model, {"input": torch.ones(2, 4, dtype=BF16)}))
    assert finding.cause == "1.weight is float32"
    assert not [action for fix in finding.fixes for action in fix.actions if action.kind == "input"]


def test_a_loss_is_not_mended_by_the_inputs_of_the_model() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(
            model(torch.ones(2, 4, dtype=BF16)).sigmoid(), torch.ones(2, 4)
        )

    (finding,) = found(RULE, traced(nn.Linear(4, 4).to(BF16), loss))
    assert not [action for fix in finding.fixes for action in fix.actions if action.kind == "input"]


def test_a_plain_tensor_that_the_model_holds() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.classes = nn.Linear(4, 4), torch.ones(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.proj(x) @ self.classes

    (finding,) = verified(Holding().to(BF16), {"x": torch.ones(2, 4, dtype=BF16)}, "IST101")
    assert finding.cause == "classes, an unregistered tensor that model.to() does not cast, is float32"
    # What nobody asked for (the cast rounds) comes after what is the caller's.
    assert [(fix.description, fix.safety) for fix in finding.fixes[::2]] == [
        ("run the step under autocast to bfloat16", "safe"),
        ("cast the unregistered tensor classes to bfloat16", "unsafe"),
    ]
    assert all(fix.verified for fix in finding.fixes)
    assert verified(Holding(), {"x": torch.ones(2, 4)}, "IST101") == []


def test_the_weights_of_an_unregistered_module() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.blocks = nn.Linear(4, 4), [nn.Linear(4, 4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](self.proj(x))  # type: ignore[no-any-return]

    (finding,) = verified(Holding().to(BF16), {"x": torch.ones(2, 4, dtype=BF16)}, "IST101")
    assert (
        finding.cause == "blocks.0.weight, an unregistered tensor that model.to() does not cast, is float32"
    )
    cast = finding.fixes[-1]
    assert {action.target for action in cast.actions} == {"blocks.*.weight", "blocks.*.bias"}
    assert cast.verified


def test_a_sparse_matrix_meets_another_dtype() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.edges = nn.Linear(4, 4), torch.eye(5).to_sparse()

        def forward(self, x: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
            return torch.sparse.mm(self.edges if edges is None else edges, self.proj(x))

    model, x = Graph().to(BF16), torch.ones(5, 4, dtype=BF16)
    with pytest.raises(RuntimeError) as raised:
        model(x)
    (finding,) = verified(model, {"x": x}, "IST101")
    assert finding.cause.startswith("edges, an unregistered tensor")
    assert f"the device raises: {raised.value}" in finding.notes
    assert finding.fixes[-1].verified
    model.edges = model.edges.to(BF16)
    assert verified(model, {"x": x}, "IST101") == []
    (finding,) = verified(Graph(), {"x": x.float(), "edges": model.edges}, "IST101")
    assert finding.cause == "the input edges is bfloat16"


class Scheduled(nn.Module):
    """A layer over inputs that an array is added to."""

    def __init__(self, dtype: type) -> None:
        super().__init__()
        self.proj, self.noise = nn.Linear(8, 8, dtype=BF16), np.linspace(0, 1, 8, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.from_numpy(self.noise)
        out: torch.Tensor = self.proj(x + noise)
        return out


@pytest.mark.real_cpu
@pytest.mark.parametrize(("dtype", "name"), [(np.float64, "float64"), (np.float32, "float32")])
def test_numpy_is_named_where_its_array_becomes_a_tensor(dtype: type, name: str) -> None:
    inputs = {"x": torch.ones(2, 8, dtype=BF16)}
    assert "must have the same dtype" in str(real_step(Scheduled(dtype), inputs).error)
    (finding,) = verified(Scheduled(dtype), inputs, "IST101")
    assert finding.cause.startswith(f"a tensor from NumPy is {name}, first used at test_ist101.py:")
    assert finding.fixes[0].verified


class Router(nn.Module):
    """Computes in float32; `.bfloat16()` of the whole model casts the weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.softmax(nn.functional.linear(x.float(), self.weight), -1)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(8, 8), Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        out: torch.Tensor = self.router(hidden).to(hidden.dtype)
        return out


def test_weights_of_code_that_casts_to_float32_can_be_float32() -> None:
    """deepspeedai/DeepSpeed #7747: the router of Ernie 4.5 switches autocast off."""
    inputs = {"x": torch.ones(2, 8, dtype=BF16)}
    (finding,) = verified(Routed().bfloat16(), inputs, "IST101")
    first = finding.fixes[0]
    assert (first.description, first.safety, first.verified) == (
        "let router compute in float32 and cast its inputs and outputs",
        "safe",
        True,
    )


def test_norms_and_biases_that_one_loop_has_cast_are_one_finding() -> None:
    """`for p in model.parameters(): if p.ndim == 1: p.data = p.data.float()`, as before a k-bit training."""
    model = wide_norms()
    model.layers[1].proj.bias = None  # type: ignore[union-attr]
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = parameter.data.float()
    (finding,) = verified(model, ids(), "IST101")
    first = next(fix for fix in finding.fixes if fix.scope == "model")
    assert (first.safety, first.verified) == ("safe", True)
    assert first.description.endswith("inputs and outputs, and return each norm's output in bfloat16")
