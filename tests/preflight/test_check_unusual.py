"""check raises nothing of its own: what it cannot trace is a finding, with all that was seen."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from isotype.core.errors import UsageError
from isotype.preflight.check import check
from isotype.report.check.record import repair_outlook
from isotype.rules import Rule, all_rules
from isotype.train.callback import before_first_step
from tests.small import BF16, FP16, WIDTH, ids, net, wide_norms

X = {"x": torch.ones(2, WIDTH)}


class Coded(torch.Tensor):
    """A weight in codes, which knows `detach`, a copy and the product with it and refuses everything else."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> Coded:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)  # type: ignore[attr-defined]
        made.codes = codes
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Coded(args[0].codes, args[0].dtype)
        if func in (torch.ops.aten.mm.default, torch.ops.aten.t.default, torch.ops.aten.addmm.default):
            dense = tree_map(lambda a: a.codes.to(a.dtype) if isinstance(a, Coded) else a, args)
            return func(*dense)
        raise NotImplementedError(f"{func} is not implemented for Coded")


def coded() -> nn.Module:
    made = nn.Linear(WIDTH, WIDTH, bias=False)
    made.weight = nn.Parameter(Coded(torch.ones(WIDTH, WIDTH, dtype=torch.int8)), requires_grad=False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), made)


class OwnNew(nn.Linear):
    """A class that is made by another function than `Class()`."""

    def __new__(cls, *args: Any, width: int) -> OwnNew:
        return super().__new__(cls)

    def __init__(self, *, width: int) -> None:
        super().__init__(width, width)


class OwnCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("this layer cannot be copied")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" in vars(self) and not isinstance(
            value, (nn.Module, nn.Parameter, int, bool, type(None))
        ):
            raise AttributeError(f"{name} is frozen")
        super().__setattr__(name, value)


class Counting(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise TypeError("a width is needed")
        return super().__call__(*args, **kwargs)


class OwnMeta(nn.Linear, metaclass=Counting):
    pass


class Slotted(nn.Module):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        object.__setattr__(self, "scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.scale


class Tied(nn.Module):
    """Holds what cannot be copied, and a hook that closes over itself."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.lock = nn.Linear(WIDTH, WIDTH), threading.Lock()
        self.numbers = (number for number in range(3))
        self.proj.register_forward_hook(lambda _, given, result: result * self.proj.weight.sum())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.proj(x)


class Refusing(nn.Module):
    """An attribute whose copy fails with an error of its own."""

    class Handle:
        def __deepcopy__(self, memo: Any) -> Any:
            raise KeyError("no copies")

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.handle = nn.Linear(WIDTH, WIDTH), self.Handle()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


class Hooked(nn.Module):
    """CarperAI/trlx #213: a hook that stores an output in the module, for the value head."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.kept: list[torch.Tensor] = []
        self.proj.register_forward_hook(lambda _, __, output: self.kept.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.clear()
        self.proj(x)
        return self.head(self.kept[-1])  # type: ignore[no-any-return]


def _scripted() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Linear(WIDTH, WIDTH)))


CASES: dict[str, Any] = {
    "coded": coded,
    "own __new__": lambda: nn.Sequential(OwnNew(width=WIDTH)),
    "own __deepcopy__ and __setattr__": lambda: nn.Sequential(OwnCopy(WIDTH, WIDTH)),
    "metaclass": lambda: nn.Sequential(OwnMeta(WIDTH, WIDTH)),
    "slots": Slotted,
    "hook that uses its module": Hooked,
    "lock, generator, closing hook": Tied,
    "attribute that refuses": Refusing,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "compiled": lambda: torch.compile(nn.Linear(WIDTH, WIDTH)),
    "scripted": _scripted,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_unusual_models_are_traced(case: str) -> None:
    model = CASES[case]()

    def loss(m: nn.Module) -> Any:
        return m(X["x"]).sum()

    before = {name: (id(tensor), tensor.grad) for name, tensor in model.named_parameters()}
    report = check(model, loss, device="cpu", verify=False)
    assert report.ok
    assert report.complete, str(report)
    assert {name: (id(tensor), tensor.grad) for name, tensor in model.named_parameters()} == before
    if case != "compiled":
        loss(model).backward()


def test_a_lazy_layer_that_has_seen_no_batch() -> None:
    (finding,) = check(nn.Sequential(nn.LazyLinear(WIDTH)), {"input": X["x"]}, device="cpu").findings
    assert finding.code == "IST199"
    assert "Call `forward` with a dummy batch to initialize the parameters" in finding.message


class Broken(nn.Linear):
    """Its buffers cannot be asked for."""

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("no buffers here")


def test_a_failure_of_the_check_itself_is_a_finding() -> None:
    report = check(Broken(WIDTH, 2), {"input": X["x"]}, device="cpu")
    (finding,) = [finding for finding in report.findings if finding.code == "IST199"]
    assert finding.severity == "warning"
    assert finding.message == "the step could not be checked, because KeyError: 'no buffers here'"
    assert finding.source.rpartition("/")[2].startswith("test_check_unusual.py:")
    assert report.status == "unknown"
    assert "could not be checked" in str(report)
    report.to_json()


def test_a_rule_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Any) -> Any:
        raise ZeroDivisionError("by zero")

    rules = (*all_rules(), Rule("IST299", "fails", "", failing))
    monkeypatch.setattr("isotype.rules.all_rules", lambda: rules)
    report = check(wide_norms(), ids(), device="cpu", verify=False)
    assert [finding.code for finding in report.errors] == ["IST101"]
    (failed,) = [finding for finding in report.findings if finding.code == "IST199"]
    assert failed.message == "the rule IST299 could not check the step, because ZeroDivisionError: by zero"


def test_a_failure_while_fixes_are_tried_leaves_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise IndexError("in a fix")

    monkeypatch.setattr("isotype.preflight.run.apply_actions", failing)
    report = check(wide_norms(), ids(), device="cpu")
    assert [finding.code for finding in report.errors] == ["IST101"]
    assert not any(fix.verified for fix in report.errors[0].fixes if fix.actions[0].kind == "parameter")


def test_wrong_arguments_still_raise() -> None:
    with pytest.raises(UsageError):
        check(net().to(BF16), ids(), phases=("nowhere",), device="cpu")


def test_a_training_goes_on_where_its_check_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise LookupError("in the check")

    monkeypatch.setattr("isotype.train.callback.run", failing)
    arguments = SimpleNamespace(
        device="cpu", fp16=False, bf16=False, optim="adamw_torch", learning_rate=1e-3, world_size=1,
        gradient_accumulation_steps=1,
    )  # fmt: skip
    model = nn.Linear(WIDTH, 2)
    before_first_step(model, arguments, None, lambda _: pytest.fail("there is no report"))
    assert model(X["x"]).shape == (2, 2)
    (record,) = caplog.records
    assert record.getMessage().startswith("the step was not checked, because LookupError: in the check (")


def test_layers_with_an_attribute_of_the_name_of_checkpointing() -> None:
    class Layer(nn.Linear):
        gradient_checkpointing = None

    report = check(nn.Sequential(Layer(4, 4)), lambda model: model(torch.ones(2, 4)).sum(), device="cpu")
    assert "no gradient checkpointing" in report.trace.setup.details


class _Mixed(nn.Module):
    """Two layers of different dtypes, and after them code that a trace can run (`whole`) or not."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.first, self.second, self.whole = nn.Linear(4, 4), nn.Linear(4, 4, dtype=BF16), whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(x))
        if not self.whole:
            raise ValueError("this code needs real numbers")
        return h.float().mean()


def test_a_fix_is_verified_only_if_the_whole_step_was_traced() -> None:
    for whole in (True, False):
        report = check(_Mixed(whole), {"x": torch.ones(2, 4)}, device="cpu", optimizer="sgd")
        fixes = [finding.fixes[0] for finding in report.findings if finding.code == "IST101"]
        assert [(fix.verified, fix.works) for fix in fixes] == [(whole, True)]
        assert fixes[0].outcome.endswith("traced to its end") != whole


class Recurrent(nn.Module):
    """Adds a float16 adapter's embeddings to bfloat16 ones: a GRU in bfloat16 refuses the float32 sum."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Embedding(9, WIDTH, dtype=BF16), nn.Embedding(9, WIDTH, dtype=FP16)
        self.recurrent = nn.GRU(WIDTH, WIDTH, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.recurrent(self.base(x) + self.adapter(x))[0]
        return output


@pytest.mark.exhaustive
def test_a_finding_without_a_fix_gets_the_fix_of_another_finding_that_resolves_both() -> None:
    """A cast of the GRU's input alone lets the step reach Adam's 0 / 0 in unused float16 embeddings."""
    report = check(Recurrent(), {"x": torch.ones(3, 2, dtype=torch.int64)}, device="cpu")
    refusal, scaling = report.errors[0], next(f for f in report.findings if f.code == "IST303")
    assert refusal.code == "IST199"
    assert refusal.fixes == scaling.fixes[:1]
    assert refusal.fixes[0].outcome == "the step then runs clean"
    assert refusal not in repair_outlook(report)["left"]
