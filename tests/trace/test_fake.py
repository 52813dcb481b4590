"""The twin: the same modules on fakes, and a model that is as before."""

from __future__ import annotations

import io
import pickle
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import isotype
from isotype.trace.fake.twin import fake_inputs, fake_like, fake_mode, twin_of
from tests.pairwise import pairwise
from tests.small import BF16, FP16, FP32, net


class Holding(nn.Module):
    """Holds whatever a module of the user's may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.plain = torch.ones(3)
        self.listed = [torch.ones(2), {"inner": torch.zeros(1, dtype=BF16)}]
        self.same = self.proj.weight
        self.numbers = [1, 2]
        self.lock = threading.Lock()
        self.file = io.StringIO("text")
        self.generator = torch.Generator()
        self.act = torch.relu
        self.nothing = None
        self.register_parameter("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.numbers.append(3)
        return self.act(self.proj(x)) + self.table


def test_names_classes_dtypes_shapes_and_flags() -> None:
    model = net()
    model.head.weight.requires_grad_(False)
    model.layers[0].eval()
    twin = twin_of(model, fake_mode())
    real, fake = dict(model.named_parameters()), dict(twin.named_parameters())
    assert list(real) == list(fake)
    for name, parameter in real.items():
        twin_parameter = fake[name]
        assert isinstance(twin_parameter, FakeTensor)
        assert isinstance(twin_parameter, nn.Parameter)
        facts = [(p.dtype, p.shape, p.stride(), p.requires_grad) for p in (parameter, twin_parameter)]
        assert facts[0] == facts[1]
    for (name, module), (other_name, other) in zip(model.named_modules(), twin.named_modules(), strict=True):
        assert (name, type(module), module.training) == (other_name, type(other), other.training)
        assert module is not other


def test_every_tensor_that_a_module_holds_is_faked_and_the_rest_copied() -> None:
    model = Holding()
    twin: Any = twin_of(model, fake_mode())
    held = [twin.table, twin.scratch, twin.plain, twin.listed[0], twin.listed[1]["inner"]]
    assert all(isinstance(each, FakeTensor) for each in held)
    assert twin.listed[1]["inner"].dtype == BF16
    assert twin.same is twin.proj.weight
    assert twin.numbers == [1, 2]
    assert twin.numbers is not model.numbers
    assert twin.act is torch.relu
    assert twin.absent is None


def _binds_default(layer: nn.Linear) -> Any:
    return lambda x, layer=layer: layer(x) + layer.weight.sum()


def _nests(layer: nn.Linear) -> Any:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    return lambda *args: multiply(*args)


def _keeps_in_containers(layer: nn.Linear) -> Any:
    tensors = {"weights": (layer.weight, [layer.bias])}
    return lambda x, *, also=tensors: x @ tensors["weights"][0].T + also["weights"][1][0]


def _calls_itself(layer: nn.Linear) -> Any:
    def forward(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return layer(forward(x, times - 1)) if times else x

    return forward


def _shares_a_list(layer: nn.Linear) -> Any:
    stored: list[Any] = [layer]

    def store(x: torch.Tensor) -> None:
        stored.append(x)

    def forward(x: torch.Tensor) -> Any:
        store(x)
        return stored[0](stored[-1])

    return forward


@pytest.mark.parametrize(
    "stores", [_binds_default, _nests, _keeps_in_containers, _calls_itself, _shares_a_list]
)
def test_a_forward_that_stores_its_layer_uses_the_twins_layer(stores: Any) -> None:
    """A library that patches the layers of a model in a loop binds each of them as the default of an argument."""
    model = nn.ModuleDict({"inner": nn.Linear(4, 4)})
    model.forward = stores(model["inner"])  # type: ignore[method-assign, unused-ignore]
    mode = fake_mode()
    twin: Any = twin_of(model, mode)
    with mode:
        twin(torch.ones(2, 4)).sum().backward()
    assert isinstance(twin["inner"].weight.grad, FakeTensor)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_belongs_to_the_process_is_shared() -> None:
    model = Holding()
    twin: Any = twin_of(model, fake_mode())
    assert twin.lock is model.lock
    assert twin.generator is model.generator


def test_state_that_a_forward_keeps_stays_in_the_twin() -> None:
    model = Holding()
    mode = fake_mode()
    twin = twin_of(model, mode)
    with mode:
        twin(torch.ones(2, 4))
    assert twin.numbers == [1, 2, 3]
    assert model.numbers == [1, 2]


def test_tied_weights_and_shared_modules_stay_tied() -> None:
    model = nn.ModuleDict(
        {"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False), "norm": nn.LayerNorm(4)}
    )
    model["head"].weight = model["embed"].weight
    model["again"] = model["norm"]
    twin = twin_of(model, fake_mode())
    assert twin["head"].weight is twin["embed"].weight
    assert twin["again"] is twin["norm"]
    assert len(list(twin.parameters())) == 3


def test_a_model_on_the_meta_device_becomes_one_on_a_cpu() -> None:
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 20, dtype=BF16)
    twin = twin_of(model, fake_mode())
    assert (twin.weight.device.type, twin.weight.dtype) == ("cpu", BF16)
    assert model.weight.is_meta


def test_hooks_are_copied() -> None:
    seen: list[type] = []
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    mode = fake_mode()
    with mode:
        twin_of(model, mode)(torch.ones(1, 2))
    assert seen == [FakeTensor]
    handle.remove()
    assert len(twin_of(model, mode)._forward_hooks) == 0


def test_bound_methods_are_the_twins_own() -> None:
    """accelerate's hooks replace `forward` by a bound method in the module's dict."""
    model = nn.Linear(2, 2)
    model.forward = model.forward  # type: ignore[method-assign]
    twin: Any = twin_of(model, fake_mode())
    assert twin.__dict__["forward"].__self__ is twin
    assert model.__dict__["forward"].__self__ is model


class Calls:
    """Calls a function. The lock prevents a copy after the function has been copied."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.lock = function, threading.Lock()

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class Wrapper(Calls):
    """Refuses to be pickled or copied, like accelerate's conversion of outputs to float32."""

    def __getstate__(self) -> None:
        raise pickle.PicklingError


def in_closure(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)


def in_method(function: Callable[..., Any]) -> Callable[..., Any]:
    return types.MethodType(lambda _, *args: function(*args), object())


def in_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = {"functions": [function]}
    return lambda *args: options["functions"][0](*args)


WRAPPERS = (in_closure, in_method, in_options, partial, Wrapper, Calls)


@pairwise("first, second, third", WRAPPERS, WRAPPERS, WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_wrappers_of_a_forward_call_the_twins_forward(first: Any, second: Any, third: Any) -> None:
    """TRL and accelerate replace a model's `forward` by wrappers of the bound method."""
    model = net()
    for wrapper in (first, second, third):
        model.forward = wrapper(model.forward)  # type: ignore[method-assign]
    twin = twin_of(model, mode := fake_mode())
    ran: list[nn.Module] = []
    for each in (model, twin):
        each.head.register_forward_hook(lambda module, *_: ran.append(module))
    for each in (model, twin):
        with mode if each is twin else nullcontext():
            each(torch.zeros(1, 4, dtype=torch.long))
    assert ran == [model.head, twin.head]


class CallsInDict(Calls, dict[str, Any]):
    """Is of a class that `object.__new__` refuses."""


@pytest.mark.parametrize("wrap", [list, tuple, CallsInDict])
def test_an_attribute_that_cannot_be_copied_is_shared_with_all_its_parts(wrap: Callable[[Any], Any]) -> None:
    model: Any = net()
    model.calls = wrap([CallsInDict(torch.sin)] if wrap is not CallsInDict else torch.sin)
    twin = twin_of(model, fake_mode())
    call = twin.calls if wrap is CallsInDict else twin.calls[0]
    assert call(torch.zeros(1)) == 0


@pytest.mark.parametrize("kind", [Calls, Wrapper, CallsInDict])
def test_a_twins_hooks_can_be_removed_if_their_owner_cannot_be_copied(kind: Any) -> None:
    """A trace removes the hooks of FSDP2 from a twin. Process groups in FSDP2's state refuse a copy."""
    model, owner = net(), kind(torch.sin)
    model.head.register_forward_pre_hook(owner.__call__)
    model.head.register_forward_hook(owner)
    twin: Any = twin_of(model, fake_mode())
    for hooks in (twin.head._forward_pre_hooks, twin.head._forward_hooks):
        assert len(hooks) == 1
        hooks.clear()
    assert len(model.head._forward_pre_hooks) == len(model.head._forward_hooks) == 1


def test_a_twin_of_a_twin() -> None:
    mode = fake_mode()
    first = twin_of(net(), mode)
    second = twin_of(first, mode)
    assert {id(p) for p in first.parameters()}.isdisjoint(id(m) for m in second.modules())
    assert [p.dtype for p in second.parameters()] == [p.dtype for p in first.parameters()]


def test_strides_and_dtypes_of_a_fake() -> None:
    mode = fake_mode()
    made = fake_like(torch.ones(4, 6, dtype=FP16).T, mode)
    assert (made.shape, made.stride(), made.dtype) == ((6, 4), (1, 6), FP16)
    assert fake_like(made, mode) is made
    assert fake_like(torch.ones(2).to_sparse(), mode).layout == torch.strided


def test_inputs_of_any_structure() -> None:
    given = {"x": torch.ones(2, requires_grad=True), "ids": torch.zeros(2, dtype=torch.long), "n": 3}
    nested = {**given, "more": [torch.ones(1), {"mask": torch.ones(1, dtype=torch.bool)}]}
    faked = fake_inputs(nested, fake_mode())
    assert all(isinstance(faked[name], FakeTensor) for name in ("x", "ids"))
    assert faked["x"].requires_grad
    assert faked["n"] == 3
    assert isinstance(faked["more"][1]["mask"], FakeTensor)
    assert type(given["x"]) is torch.Tensor


# ------------------------------------------------------------------------------------------------ quantized layers


@pytest.fixture(scope="module")
def bnb() -> Any:
    return pytest.importorskip("bitsandbytes")


def test_a_4bit_layer_keeps_its_class_and_state(bnb: Any) -> None:
    layer = bnb.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=BF16, compress_statistics=True)
    model = nn.ModuleDict({"proj": layer.to(BF16).to("cpu").requires_grad_(False)})
    bits, state = model["proj"].weight.data.clone(), model["proj"].weight.quant_state
    mode = fake_mode()
    twin = twin_of(model, mode)
    weight: Any = twin["proj"].weight
    assert isinstance(weight, bnb.nn.Params4bit)
    assert type(weight).__name__ == "Params4bit"
    assert isinstance(weight, FakeTensor)
    assert (weight.quant_state.dtype, weight.quant_state.quant_type) == (BF16, "nf4")
    assert isinstance(weight.quant_state.absmax, FakeTensor)
    assert isinstance(weight.quant_state.state2.absmax, FakeTensor)
    weight.quant_state.dtype = FP32
    assert model["proj"].weight.quant_state is state
    assert state.dtype == BF16
    with mode:
        assert twin["proj"](torch.ones(2, 64, dtype=BF16)).shape == (2, 64)
    assert torch.equal(model["proj"].weight.data, bits)


def test_an_int8_layer_keeps_its_class_and_scales(bnb: Any) -> None:
    layer = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to(FP16).to("cpu").requires_grad_(False)
    model = nn.ModuleDict({"proj": layer})
    scales = layer.weight.SCB
    mode = fake_mode()
    twin = twin_of(model, mode)
    weight: Any = twin["proj"].weight
    assert isinstance(weight, bnb.nn.Int8Params)
    assert isinstance(weight.SCB, FakeTensor)
    with mode:
        assert twin["proj"](torch.ones(2, 64, dtype=FP16)).shape == (2, 64)
    assert layer.weight.SCB is scales
    assert layer.state.CB is None


@pytest.mark.parametrize("nested", [True, False])
def test_packed_codes_that_have_lost_their_class_get_it_again(nested: bool) -> None:
    """bitsandbytes restores the class in the forward, which a fake tensor refuses."""
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(64, 8, compute_dtype=torch.float32, compress_statistics=nested).to("cpu")
    model: Any = nn.Sequential(layer, nn.Linear(8, 2))
    inputs = {"input": torch.randn(3, 64)}
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    report = isotype.check(model, inputs, device="cpu")
    assert report.trace.failure is None
    assert type(layer.weight) is nn.Parameter
    model(**inputs).sum().backward()
