"""Values: what follows from the inputs is real, what follows from weights is a stand-in, nobody's tensor is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from isotype.compat.torch import FakeTensor
from isotype.contracts.contract import contracts_for
from isotype.precision.devices.profile import device_profile
from isotype.trace.fake.functions import Functions
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.twin import fake_inputs, fake_mode
from isotype.trace.fake.values import LIMIT

Program = Callable[..., Any]


def followed(program: Program, inputs: dict[str, torch.Tensor], known: bool = True) -> Any:
    """`program(**inputs)` on fakes; `known`: whether the values of the inputs are."""
    mode = fake_mode()
    recorder = FakeRecorder(contracts_for("cpu"), torch.float32, mode)
    fakes = fake_inputs(inputs, mode)
    if known:
        for name, value in inputs.items():
            recorder.values.give(fakes[name], value.clone())
    with mode, recorder, Functions(recorder, device_profile("cpu")):
        return program(**fakes)


X = torch.tensor([[3, 0, 5], [0, 7, 0]])

READS: dict[str, Program] = {
    "item": lambda x: x[0, 2].item(),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.float().mean()),
    "bool": lambda x: bool((x > 4).any()),
    "if": lambda x: "many" if x.sum() > 10 else "few",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "len of nonzero": lambda x: [tuple(each.shape) for each in (x.nonzero(), x[0].nonzero())],
    "nonzero": lambda x: x.nonzero().tolist(),
    "nonzero as tuple": lambda x: [each.tolist() for each in x.nonzero(as_tuple=True)],
    "mask": lambda x: x[x > 0].tolist(),
    "masked_select": lambda x: x.masked_select(x > 3).tolist(),
    "unique": lambda x: [each.tolist() for each in x.unique(return_counts=True)],
    "bincount": lambda x: x.flatten().bincount().tolist(),
    "repeat_interleave": lambda x: torch.arange(3).repeat_interleave(x[0]).tolist(),
    "equal": lambda x: (torch.equal(x, x.clone()), torch.equal(x, x + 1)),
    "is_nonzero": lambda x: x[0, 1].is_nonzero(),
    "split": lambda x: [part.shape[0] for part in torch.arange(8).split(x[0].tolist())],
    "range": lambda x: list(range(x[0, 0])),
    "max": lambda x: x.max(dim=1).indices.tolist(),
    "topk": lambda x: x.topk(2).values.tolist(),
    "loop": lambda x: [number * 2 for row in x.tolist() for number in row if number],
    "cu_seqlens": lambda x: torch.nn.functional.pad((x > 0).sum(1).cumsum(0), (1, 0)).tolist(),
    "assert_async": lambda x: torch._assert_async((x >= 0).all()),
}


def test_a_mask_that_is_expanded_over_hidden_values_selects_as_many_as_it_has() -> None:
    hidden = torch.zeros(2, 3, LIMIT)

    def program(x: torch.Tensor) -> tuple[int, int]:
        mask = (x > 4).unsqueeze(-1).expand_as(hidden)
        return hidden[mask].numel(), hidden.masked_select(mask).numel()

    assert followed(program, {"x": X}) == (2 * LIMIT, 2 * LIMIT)


@pytest.mark.parametrize("name", READS)
def test_values_that_follow_from_the_inputs_are_real(name: str) -> None:
    assert followed(READS[name], {"x": X}) == READS[name](x=X)


@pytest.mark.parametrize("name", [name for name in READS if name not in ("split", "range")])
def test_values_that_nobody_knows_get_a_stand_in(name: str) -> None:
    """The program runs on, with something of the right type."""
    found = followed(READS[name], {"x": X}, known=False)
    assert type(found) is type(READS[name](x=X))


def test_a_drawn_index_is_one_that_can_be_drawn() -> None:
    """Dropout of blocks indexes by such numbers: 1 is no index of a single block."""
    for bounds, expected in (((1,), 0), ((4,), 1), ((0, 1), 0), ((2, 9), 2), ((-5, 0), -1)):
        draw = lambda x, bounds=bounds: torch.randint(*bounds, (1,)).item()  # noqa: E731
        assert followed(draw, {"x": X}) == expected
    order = followed(lambda x: x[0, torch.randperm(3)].tolist(), {"x": X})
    assert sorted(order) == sorted(X[0].tolist())
    assert followed(lambda x: torch.randint(0, 9, (2,)).max().item(), {"x": X}) == 1, "not known"


@pytest.mark.parametrize("drawn", [(), (1,), (1, 1, 1)])
def test_a_layer_that_chance_may_skip_is_kept(drawn: tuple[int, ...]) -> None:
    """Stochastic depth and LayerDrop, also of probability zero."""
    skipped = followed(lambda x: [bool(torch.rand(drawn) < chance) for chance in (0.0, 0.1, 0.5)], {"x": X})
    assert skipped == [False] * 3


def test_a_factorisation_of_weights_succeeds() -> None:
    square = torch.eye(3)
    assert followed(lambda x: torch.linalg.cholesky_ex(x).info.item(), {"x": square}, known=False) == 0
    assert (
        followed(lambda x: bool(torch.any(torch.linalg.inv_ex(x).info)), {"x": square}, known=False) is False
    )


def test_an_int8_product_has_no_outliers_and_is_dense() -> None:
    """bitsandbytes' own fake kernel leaves the number of columns with large values open: no step is traced through it."""
    pytest.importorskip("bitsandbytes")
    operators = torch.ops.bitsandbytes

    def product(x: torch.Tensor) -> list[tuple[Any, ...]]:
        codes, scales, columns = operators.int8_vectorwise_quant(x, 6.0)
        weight, absmax = torch.zeros(5, 8, dtype=torch.int8), torch.ones(5)
        out, outliers = operators.int8_mixed_scaled_mm(x, codes, weight, scales, absmax, columns)
        return [(tuple(each.shape), each.dtype) for each in (codes, scales, columns, out, outliers)]

    x = torch.ones(3, 8, dtype=torch.float16)
    assert followed(product, {"x": x}, known=False) == product(x)
    assert operators.int8_vectorwise_quant(x, 0.0)[2] is None
    assert followed(lambda x: operators.int8_vectorwise_quant(x, 0.0)[2], {"x": x}, known=False) is None


def cut(x: torch.Tensor) -> tuple[list[int], int, tuple[int, ...]]:
    """Segments that begin where a score is high, each row padded to as many as it has columns."""
    starts = x > 0.5
    columns = torch.arange(x.shape[1]).expand_as(starts)
    padded = torch.cat([columns, torch.full_like(columns, x.shape[1])], dim=1)
    begin = padded[torch.cat([starts, ~starts], dim=1)].reshape(x.shape)
    most = int(starts.sum(dim=1).max())
    lengths = torch.diff(begin[:, :most], append=torch.full((x.shape[0], 1), x.shape[1]))
    return lengths.sum(dim=1).tolist(), most, tuple(x[~starts].shape)


def test_what_follows_from_a_comparison_of_unknown_numbers_fits_together() -> None:
    scores = torch.zeros(2, 7)
    lengths, most, others = followed(cut, {"x": scores}, known=False)
    assert (lengths, most, others) == ([7, 6], 4, (7,))


def test_a_check_of_unknown_numbers_passes() -> None:
    """Validation of a distribution's arguments, for one."""

    def valid(x: torch.Tensor) -> tuple[bool, bool, bool]:
        simplex = (x >= 0).all(-1) & ((x.sum(-1) - 1).abs() < 1e-6)
        return bool((x >= 0).all()), bool(simplex.all()), bool((x > 0).any())

    assert followed(valid, {"x": torch.zeros(3, 5)}, known=False) == (True, True, True)


def test_integers_that_are_not_known_are_not_guessed() -> None:
    """Experts are found by comparing them: how many rows each gets is said elsewhere."""
    assert followed(lambda x: (x > 0).tolist(), {"x": X}, known=False) == [[True] * 3] * 2
    large = torch.zeros(LIMIT + 2)
    assert followed(lambda x: int((x > 0).sum()), {"x": large}, known=False) == 1


def test_a_number_that_the_code_makes_is_a_value_and_no_constant_of_the_mode() -> None:
    """All that is done with a constant the mode runs itself, each time: an optimizer has one for each parameter."""

    def program(x: torch.Tensor) -> tuple[Any, float]:
        made = torch.tensor(2.0)
        made += 1
        return getattr(made, "constant", "none"), (made * 2).item()

    assert followed(program, {"x": X}) == (None, 6.0)


def test_large_tensors_are_not_traced() -> None:
    size = LIMIT + 1
    assert followed(lambda x: int(x.sum()), {"x": torch.zeros(size, dtype=torch.long)}) == 1
    assert followed(lambda x: int(x.sum()), {"x": torch.zeros(LIMIT, dtype=torch.long)}) == 0


def test_random_numbers_are_not_values() -> None:
    assert followed(lambda x: torch.rand(3).tolist(), {"x": X}) == [1.0, 1.0, 1.0]
    assert followed(lambda x: torch.bernoulli(x.float() * 0).sum().item(), {"x": X}) == 1.0


def test_unset_memory_is_not_a_value() -> None:
    assert followed(lambda x: torch.empty(2).tolist(), {"x": X}) == [1.0, 1.0]
    assert followed(lambda x: x.new_empty(2).tolist(), {"x": X}) == [1, 1]


def test_following_draws_no_random_numbers_and_nobodys_tensors_are_written() -> None:
    given = {"x": X.clone()}
    state = torch.get_rng_state()

    def program(x: torch.Tensor) -> Any:
        x[x == 0] = -100
        x.add_(1)
        return x.tolist()

    assert followed(program, given) == [[4, -99, 6], [-99, 8, -99]]
    assert torch.equal(given["x"], X)
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------- writing in place


def unknown() -> torch.Tensor:
    """A number that only a weight knows: the largest of three random ones, between zero and one."""
    return torch.rand(3).max()


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy_": lambda y: y.copy_(unknown().expand(4)),
    "fill_": lambda y: y.fill_(unknown()),
    "add_": lambda y: y.add_(unknown()),
    "mul_": lambda y: y.mul_(unknown()),
    "uniform_": lambda y: y.uniform_(),
    "setitem": lambda y: y.__setitem__(0, unknown()),
    "setitem slice": lambda y: y.__setitem__(slice(1, 3), unknown()),
    "setitem index": lambda y: y.__setitem__(torch.tensor([0, 2]), unknown().expand(2)),
    "view": lambda y: y.view(2, 2).add_(unknown()),
    "masked_fill_": lambda y: y.masked_fill_(y == 0, unknown()),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0]), unknown()[None]),
    "foreach": lambda y: torch._foreach_add_([torch.zeros(4), y], unknown()),
    "out": lambda y: torch.add(unknown().expand(4), 1, out=y),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_over_by_something_unknown_is_forgotten(name: str) -> None:
    def program(x: torch.Tensor) -> Any:
        y = torch.zeros(4)
        before = y.tolist()
        WRITES[name](y)
        return before, y.tolist()

    assert followed(program, {"x": X}) == ([0.0] * 4, [1.0] * 4)


def test_a_view_shares_what_is_written() -> None:
    def program(x: torch.Tensor) -> Any:
        y = torch.zeros(4)
        row = y[:2]
        row.add_(x[0, 0])
        y.mul_(2)
        return y.tolist(), row.tolist()

    assert followed(program, {"x": X}) == program(X) == ([6.0, 6.0, 0.0, 0.0], [6.0, 6.0])


def test_a_copy_does_not() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x.clone()
        y.zero_()
        return x.tolist(), y.tolist()

    assert followed(program, {"x": X}) == program(X)


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.add_(1),
        lambda table: table.__setitem__(0, 7.0),
        lambda table: table.copy_(unknown().expand(4)),
        lambda table: table[1:3].fill_(2),
        lambda table: torch._foreach_add_([table], 1.0),
        lambda table: torch.add(unknown().expand(4), 1, out=table),
    ],
    ids=["add_", "setitem", "copy_", "view", "foreach", "out"],
)
def test_tensors_outside_of_the_model_are_not_written(write: Program) -> None:
    table = torch.zeros(4)
    version = table._version
    followed(lambda x: write(table), {"x": X})
    assert table.tolist() == [0.0] * 4
    assert table._version == version


def test_tensors_outside_of_the_model_get_no_gradient_function() -> None:
    table, weight = torch.zeros(4), nn.Parameter(torch.ones(4))
    followed(lambda x: table.copy_(weight * 2), {"x": X})
    assert not table.requires_grad
    assert table.grad_fn is None


def test_what_is_written_into_a_tensor_outside_of_the_model_is_read_again() -> None:
    table = torch.zeros(2)
    assert followed(lambda x: (table.add_(x.sum()), (table + 1).tolist())[1], {"x": X}) == [16.0, 16.0]


def test_tensors_outside_of_the_model_are_read() -> None:
    table = torch.ones(4)
    assert followed(lambda x: (table + x.sum()).tolist(), {"x": X}) == [16.0] * 4


def test_errors_of_the_real_kernel_are_left_to_the_contracts() -> None:
    """Mixed dtypes that both are known: the real kernel refuses them, the step goes on."""
    followed(lambda x: torch.mm(x.float(), torch.ones(3, 3, dtype=torch.bfloat16)), {"x": X})


# ------------------------------------------------------------------------------------------------- small programs

_UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda a: a + 1,
    lambda a: a * 2 - 3,
    lambda a: a % 3,
    lambda a: a.flip(0),
    lambda a: a.cumsum(0),
    lambda a: a.sort().values,
    lambda a: a.argsort(stable=True),
    lambda a: a.unique(),
    lambda a: a[a > 1],
    lambda a: (a % 2 == 0).nonzero().flatten(),
    lambda a: a[1:],
    lambda a: a.clone(),
    lambda a: torch.arange(a.sum().abs().item() % 5),
    lambda a: a.reshape(-1, 1).expand(-1, 2).reshape(-1),
    lambda a: a.masked_fill(a == 0, 9),
    lambda a: torch.bincount(a.abs()),
    lambda a: torch.tensor([int(each) for each in a.tolist()], dtype=torch.long),
)
_BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: torch.cat([a, b]),
    lambda a, b: a + b.sum(),
    lambda a, b: a[b.abs() % max(1, len(a))] if len(a) else b,
    lambda a, b: torch.where(a > b.sum(), a, -a),
    lambda a, b: a.add_(b.sum()),
    lambda a, b: a.clone().index_fill_(0, b.abs() % len(a), 5) if len(a) else b,
    lambda a, b: a[: len(b)].mul_(2),
    lambda a, b: torch.isin(a, b).long(),
)
_STEPS = st.lists(
    st.tuples(st.integers(0, len(_UNARY) + len(_BINARY) - 1), st.integers(0, 20), st.integers(0, 20)),
    min_size=1,
    max_size=8,
)


def _interpret(
    steps: list[tuple[int, int, int]], first: torch.Tensor, second: torch.Tensor
) -> list[list[int]]:
    made = [first, second]
    for number, left, right in steps:
        a, b = made[left % len(made)], made[right % len(made)]
        made.append(_UNARY[number](a) if number < len(_UNARY) else _BINARY[number - len(_UNARY)](a, b))
    return [each.tolist() for each in made]


_NUMBERS = st.lists(st.integers(-4, 4), min_size=0, max_size=5)


@settings(max_examples=60)
@given(_STEPS, _NUMBERS, _NUMBERS)
def test_programs_over_integers_give_the_real_results(
    steps: list[tuple[int, int, int]], first: list[int], second: list[int]
) -> None:
    inputs = {
        name: torch.tensor(each, dtype=torch.long) for name, each in (("first", first), ("second", second))
    }
    copies = {name: each.clone() for name, each in inputs.items()}
    try:
        wanted = _interpret(steps, **copies)
    except RuntimeError:
        reject()  # torch refuses to write where elements share their memory
    assert followed(lambda first, second: _interpret(steps, first, second), inputs) == wanted
    assert [inputs["first"].tolist(), inputs["second"].tolist()] == [first, second]


def test_a_module_branches_on_its_inputs_as_the_real_one() -> None:
    taken: list[str] = []

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            taken.append("padded" if (x == 0).any() else "full")
            return x.float()

    model = Branching()
    for each in (X, X + 1):
        followed(lambda x: model(x), {"x": each})
    assert taken == ["padded", "full"]


def test_pictures_that_fill_a_batch_up_are_told_from_others() -> None:
    pictures = torch.ones(2, 3, 3, 64, 64)
    pictures[1, 1:] = 0.0

    def real_ones(pixel_values: torch.Tensor) -> tuple[int, ...]:
        each = pixel_values.to(torch.bfloat16).view(6, *pixel_values.shape[2:])
        return tuple(each[(each == 0.0).sum(dim=(-1, -2, -3)) != each.shape[1:].numel()].shape)

    def written_to(pixel_values: torch.Tensor) -> tuple[int, ...]:
        pixel_values[1, 1:] = torch.randn(3, 64, 64)
        return real_ones(pixel_values)

    mode = fake_mode()
    recorder = FakeRecorder(contracts_for("cpu"), torch.float32, mode)
    shapes = []
    for program in (real_ones, written_to):
        fakes = fake_inputs({"pixel_values": pictures}, mode)
        recorder.values.give(fakes["pixel_values"], pictures, counted=True)
        with mode, recorder, Functions(recorder, device_profile("cpu")):
            shapes.append(program(**fakes))
    assert shapes == [(4, 3, 64, 64), (6, 3, 64, 64)]


def test_numbers_of_a_uniform_distribution_lie_in_their_interval() -> None:
    """torchvision's detectors choose a size by `int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())`."""
    for bounds, expected in (((), 0.5), ((0.5,), 0.75), ((2.0, 8.0), 5.0)):
        draw = lambda x, bounds=bounds: torch.empty(1).uniform_(*bounds).item()  # noqa: E731
        assert followed(draw, {"x": X}) == expected


def test_a_tensor_made_of_fakes_runs_its_own_operators() -> None:
    """As torchao's float8 tensors do: the recorder sees the operators on the tensors inside."""
    whole = followed(lambda x: TwoTensor(x, x + 1).mul(2), {"x": X})
    assert type(whole) is TwoTensor
    assert [type(part) for part in (whole.a, whole.b)] == [FakeTensor, FakeTensor]


def test_values_in_float8_are_compared_with_infinity() -> None:
    assert followed(lambda x: x.to(torch.float8_e4m3fn).view(-1).float().sum().item(), {"x": X}) == X.sum()
