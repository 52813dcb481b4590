"""torch still has what `isotype.compat.torch` names, and it still means what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from isotype.compat.torch import (
    COMPILED_CALL,
    DISPATCH_MODES,
    EXTRA_STATE,
    FAKE_LOGGER,
    FUNCTION_MODES,
    HELD,
    MODULE_CALL,
    TENSOR_DATA,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UncompiledMode,
    base_of,
    copy_each,
    current_node,
    dispatch_depth,
    dispatch_keys,
    fake_of,
    file_offset,
    forget_gradient_hooks,
    forget_parametrized,
    forward_hooks,
    forward_pre_hooks,
    has_kernel,
    in_backward,
    is_compiled,
    is_profiled,
    is_simulated,
    is_traced,
    is_transformed,
    last_node_number,
    mark_as_parameter,
    multiply_each,
    no_saved_tensor_hooks,
    node_number,
    operator_packet,
    operator_schema,
    original,
    own_buffers,
    own_modules,
    own_parameters,
    own_state,
    parsed_to,
    run_backward,
    stack_of,
    stays_at_the_bottom,
    storage_key,
    storage_of,
    unscale_,
    version_of,
    without_dispatch,
    without_functions,
    without_modes,
)

aten = torch.ops.aten


class Seen(UncompiledMode):
    """Keeps the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Keeps the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_kernels_of_operators() -> None:
    assert has_kernel("aten::mm", "cpu")
    assert not has_kernel("aten::mm", "a device that is none")
    # A composition of other operators is no kernel of its own.
    assert not has_kernel("aten::_fused_rms_norm", "cpu")
    assert has_kernel("aten::mm", "cuda") == torch.backends.cuda.is_built()


def test_modes_and_their_stacks() -> None:
    with Seen() as seen:
        assert dispatch_depth() == 1
        assert DISPATCH_MODES.at(DISPATCH_MODES.length() - 1) is seen
        with without_modes():
            torch.ones(2)
        torch.zeros(2)
    assert [operator_packet(each) for each in seen.operators] == [aten.zeros]
    assert stack_of(seen) is DISPATCH_MODES
    with Called() as called:
        with without_functions():
            torch.ones(2)
        torch.zeros(2)
        mode = FUNCTION_MODES.pop()
        FUNCTION_MODES.push(mode)
        assert mode is called
    assert called.functions == [torch.zeros]
    assert stack_of(called) is FUNCTION_MODES
    with torch.device("meta"):
        assert not stays_at_the_bottom(called)


@pytest.mark.newest  # torch 2.10 wraps no mode yet
def test_a_mode_is_still_wrapped_in_a_switch_of_the_compiler_unless_it_says_otherwise() -> None:
    """Where this fails, torch wraps no mode any more, and `UncompiledMode` can be a plain one."""

    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert hasattr(Plain.__torch_dispatch__, "__wrapped__")
    assert not hasattr(Seen.__torch_dispatch__, "__wrapped__")


def test_a_default_device_stays_at_the_bottom_of_the_stack() -> None:
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        assert stays_at_the_bottom(FUNCTION_MODES.at(0))
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


def test_what_runs_is_told_from_what_is_simulated_traced_or_profiled() -> None:
    states: list[tuple[bool, bool, bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        states.append((is_simulated(), is_traced(), is_profiled()))
        return x + 1

    look(torch.ones(1))
    with FakeTensorMode():
        look(torch.ones(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        look(torch.ones(1))
    assert states == [(False, False, False), (True, False, False), (False, False, True)]


def test_operators_have_a_packet_and_a_schema() -> None:
    assert operator_packet(aten.add.Tensor) is aten.add
    assert [each.name for each in operator_schema(aten.mm.default).arguments] == ["self", "mat2"]
    assert operator_schema(len) is None


def test_nodes_of_the_graph_during_a_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    assert y.grad_fn is not None
    assert node_number(y.grad_fn) == last_node_number()
    seen: list[Any] = []

    def hook(_: torch.Tensor) -> None:
        seen.append((current_node() is not None, in_backward()))

    y.register_hook(hook)  # type: ignore[no-untyped-call]
    assert current_node() is None
    assert not in_backward()
    run_backward(
        (y.sum(),), (torch.tensor(1.0),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert seen == [(True, True)]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_a_leaf_without_hooks_has_none_that_autograd_would_look_at() -> None:
    leaf = torch.ones(1, requires_grad=True)
    handle = leaf.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    handle.remove()
    forget_gradient_hooks(leaf)
    assert leaf._post_accumulate_grad_hooks is None
    (leaf * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None


def test_storages_views_and_versions() -> None:
    memory = torch.empty(4, 4, device="meta")
    view = memory[1:]
    assert storage_of(view) == storage_of(memory) == storage_key(memory.untyped_storage())
    assert storage_of(torch.empty(4, 4, device="meta")) != storage_of(memory)
    assert base_of(view) is memory
    assert base_of(memory) is memory
    assert dispatch_keys(memory) == dispatch_keys(view) != dispatch_keys(torch.ones(1))


def test_versions_count_writes() -> None:
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    assert before is not None
    assert version_of(x) == before + 1


def test_what_counts_no_writes_has_no_version() -> None:
    with torch.inference_mode():
        x = torch.zeros(2)
    with pytest.raises(RuntimeError, match="version counter"):
        _ = x._version
    assert version_of(x) is None


def test_a_tensor_is_made_a_parameter_and_a_fake_over_memory() -> None:
    class Other(torch.Tensor):
        pass

    tensor = torch.ones(1).as_subclass(Other)  # type: ignore[no-untyped-call]
    assert not isinstance(tensor, nn.Parameter)
    mark_as_parameter(tensor)
    assert isinstance(tensor, nn.Parameter)
    with without_dispatch():
        fake = fake_of(torch.empty(2, device="meta"), torch.device("cpu"))
    assert isinstance(fake, FakeTensor)


def test_arguments_of_to_data_and_unscale() -> None:
    device, dtype, *_ = parsed_to("cpu", torch.float16)
    assert (device, dtype) == (torch.device("cpu"), torch.float16)
    with Called() as called:
        _ = torch.ones(1).data
    assert TENSOR_DATA in called.functions
    gradient, bad = torch.tensor([4.0, torch.inf]), torch.zeros(1)
    unscale_([gradient], bad, torch.tensor(0.5))
    assert (gradient.tolist(), bad.item()) == ([2.0, torch.inf], 1.0)


def test_many_tensors_are_multiplied_and_copied_by_one_call() -> None:
    sources = [torch.tensor([1.0, 1 + 2**-9]), torch.tensor([[3.0]])]
    targets = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.bfloat16)]
    with Seen() as seen:
        products = multiply_each(sources, [2.0, 0.5])
        copy_each(targets, products)
    assert [each.tolist() for each in products] == [[2.0, 2 + 2**-8], [[1.5]]]
    assert [each.tolist() for each in targets] == [[2.0, 2.0], [[1.5]]]
    assert [str(each) for each in seen.operators] == [
        "aten._foreach_mul.ScalarList",
        "aten._foreach_copy_.default",
    ]


@pytest.mark.newest  # torch 2.10 records the place only under fake tensors, so the file is read by torch.load
def test_a_storage_on_the_meta_device_knows_its_place_in_the_file(tmp_path: Path) -> None:
    values = torch.arange(4, dtype=torch.int32)
    torch.save(values, tmp_path / "values.pt")
    storage = torch.load(tmp_path / "values.pt", map_location="meta", weights_only=True).untyped_storage()
    offset = file_offset(storage)
    assert offset is not None
    assert (tmp_path / "values.pt").read_bytes()[offset:][:16] == values.numpy().tobytes()
    assert file_offset(values.untyped_storage()) is None


def test_what_a_module_holds() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    module.register_buffer("scale", torch.ones(1))
    assert list(own_parameters(module[0])) == ["weight", "bias"]
    assert list(own_buffers(module)) == ["scale"]
    assert list(own_modules(module)) == ["0"]
    assert all(name in vars(module) for name in HELD)
    module.register_forward_hook(lambda *_: None)
    assert (len(forward_hooks(module)), len(forward_pre_hooks(module))) == (1, 0)
    state: dict[str, Any] = {}
    own_state(module, state, "a.")
    assert list(state) == ["a.scale"]
    assert EXTRA_STATE == "_extra_state"
    assert not is_compiled(module)
    assert original(module) is module


def test_the_code_in_which_a_module_calls_its_forward() -> None:
    import inspect

    names: list[Any] = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = inspect.currentframe()
            while frame is not None:
                names.append(frame.f_code)
                frame = frame.f_back
            return x

    Looks()(torch.ones(1))
    assert MODULE_CALL in names


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_modules_are_told_from_others() -> None:
    module = nn.Linear(2, 2)
    wrapped = torch.compile(module)
    assert isinstance(wrapped, nn.Module)
    assert is_compiled(wrapped)
    assert original(wrapped) is module
    module.compile()
    assert is_compiled(module)


def test_what_a_fake_kernel_refuses_is_still_logged_with_a_traceback() -> None:
    """Where this fails, torch says nothing, and the logger need not be silenced."""
    import logging

    class Kept(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.records: list[logging.LogRecord] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.records.append(record)

    kept, logger = Kept(), logging.getLogger(FAKE_LOGGER)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(kept)
    try:
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
    finally:
        logger.removeHandler(kept)
        logger.propagate = before
    assert any(record.exc_info for record in kept.records)


def test_transforms_are_seen() -> None:
    seen: list[bool] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed())
        return x.sum()

    x = torch.ones(2, 3)
    torch.func.grad(noted)(x)
    torch.func.vmap(noted)(x)
    assert seen == [True] * 2
    noted(x.requires_grad_()).backward()  # type: ignore[no-untyped-call]
    with torch.inference_mode():
        noted(x)
    assert seen == [True] * 2 + [False] * 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def test_torch_still_refuses_functions_without_setup_context() -> None:
    """The reason why fused paths leave transformed code to torch's operators."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: Doubled.apply(x).sum())(torch.ones(2))  # type: ignore[no-untyped-call]


def test_modules_still_keep_their_compiled_call_in_an_attribute() -> None:
    assert getattr(nn.Module, COMPILED_CALL) is None
    assert not is_compiled(nn.Linear(1, 1))


def test_a_cached_value_of_a_parametrized_tensor_is_dropped() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Twice())
    with parametrize.cached():
        first = layer.weight
        assert layer.weight is first
        forget_parametrized(layer, "weight")
        assert layer.weight is not first


def test_hooks_of_saved_tensors_are_taken_out_and_put_back() -> None:
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), no_saved_tensor_hooks():
            x.exp()
        assert seen == []
        x.exp()
    assert seen == [x.shape]
