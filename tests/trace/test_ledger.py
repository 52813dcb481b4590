"""The ledger: live bytes of a step, the same book for fakes and for real tensors, folded layers counted in full."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isotype.checkpoint.resolve import resolve_precision
from isotype.compat.torch import dense_parts
from isotype.model.walk import STANDS_FOR
from isotype.precision.devices.profile import device_profile
from isotype.preflight.check import check
from isotype.records.memory import Memory
from isotype.records.request import Setup, StepRequest
from isotype.trace.fake.step import trace_step
from isotype.trace.ledger import Ledger
from isotype.train.models import weightless_model
from tests.adapters import lora_config
from tests.pairwise import few
from tests.small import BF16, FP32, WIDTH, Block, ids, net

PHASES: Any = ("forward", "backward", "optimizer")


def traced_memory(model: nn.Module, inputs: Any, optimizer: str = "adamw") -> Memory:
    setup = Setup(device_profile("cpu"), None, False, optimizer, BF16, phases=PHASES)
    return trace_step(StepRequest(model, inputs), setup).memory


# ------------------------------------------------------------------------------------------------------- the book


def test_a_storage_counts_once_and_until_its_last_tensor_is_gone() -> None:
    book = Ledger()
    book.begin("forward")
    made = torch.zeros(10)
    book.count(made)
    view = made[2:]
    book.count(view)
    assert book.total == 40
    del made
    gc.collect(2)
    assert book.total == 40
    del view
    assert book.total == 0


@pytest.mark.filterwarnings("ignore:Sparse CS")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_counts_its_indices_and_values(layout: torch.layout) -> None:
    book = Ledger()
    book.begin("backward")
    gradient = torch.eye(4).to_sparse(layout=layout)
    book.count(gradient)
    parts = dense_parts(gradient)
    assert book.total == sum(part.untyped_storage().nbytes() for part in parts) > 0
    del gradient, parts
    assert book.total == 0


def test_peaks_by_phase_and_kind() -> None:
    book = Ledger()
    weight = torch.zeros(4)
    book.count(weight, "weights")
    book.begin("forward")
    first = torch.zeros(6)
    book.count(first)
    second = torch.zeros(2)
    book.count(second)
    del first
    book.begin("backward")
    book.count(torch.zeros(1), "gradients")
    memory = book.record()
    assert memory.phases["forward"] == {"weights": 16, "activations": 32}
    assert memory.phases["backward"] == {"weights": 16, "activations": 8, "gradients": 4}
    assert (memory.peak_phase, memory.peak) == ("forward", 48)


def test_a_storage_is_of_the_last_kind_it_was_said_to_be() -> None:
    book = Ledger()
    book.begin("backward")
    gradient = torch.zeros(4)
    book.count(gradient)
    book.count(gradient, "gradients")
    book.begin("optimizer")
    assert {kind: size for kind, size in book.record().phases["optimizer"].items() if size} == {
        "gradients": 16
    }


def test_repeats() -> None:
    book = Ledger()
    weight = torch.zeros(4)
    book.count(weight, "weights", repeats=5)
    assert book.total == 80
    del weight
    assert book.total == 0


def test_the_surplus_of_a_folded_module_goes_when_the_backward_has_left_it() -> None:
    book = Ledger()
    book.begin("forward")
    entered = book.mark()
    kept = torch.zeros(10)
    book.count(kept)
    on_ctx = torch.zeros(1)
    book.count(on_ctx)
    book.multiply("layers.1", entered, 4)
    assert book.total == 176
    book.begin("backward")
    book.backward_in("head")
    book.backward_in("layers.1.proj")
    assert book.total == 176
    del kept
    book.backward_in("layers.1.norm")
    assert book.total == 136
    book.backward_in("layers.0.norm")
    assert book.total == 16
    del on_ctx
    assert book.total == 0


# -------------------------------------------------------------------------------------------- fakes and real tensors


class _Real(TorchDispatchMode):
    """Enters every tensor that a real step makes into a ledger."""

    def __init__(self, book: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.book = book

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.book.count(leaf)
        return result


def real_memory(model: nn.Module, inputs: dict[str, torch.Tensor], optimizer: Any) -> Memory:
    """Two such steps on real tensors, in the same book."""
    book = Ledger()
    for parameter in model.parameters():
        book.count(parameter, "weights")
    for buffer in model.buffers():
        book.count(buffer, "buffers")
    for value in inputs.values():
        book.count(value, "inputs")

    def count(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        book.count(parameter.grad, "gradients")

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count)
    stepper = optimizer([each for each in model.parameters() if each.requires_grad])
    with _Real(book):
        for _ in range(2):
            book.kind = "activations"
            book.begin("forward")
            loss = model(**inputs).float().mean()
            book.begin("backward")
            loss.backward()
            del loss
            book.begin("optimizer")
            book.kind = "optimizer"
            stepper.step()
            stepper.zero_grad()
    return book.record()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.q(x) @ x.transpose(-1, -2), -1)
        return x + scores @ self.v(x)


MODELS: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "net": (lambda: net(3), ids(4, 64)),
    "linear layers": (
        lambda: nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)),
        {"input": torch.ones(256, 64)},
    ),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), {"input": torch.ones(2, 64, 16)}),
    "normed": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 8)),
        {"input": torch.ones(128, 64)},
    ),
    "frozen": (
        lambda: nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.ReLU(), nn.Linear(64, 8)),
        {"input": torch.ones(128, 64)},
    ),
}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_on_fakes_is_the_book_of_the_real_step(name: str, optimizer: str) -> None:
    make, inputs = MODELS[name]
    real = real_memory(make(), inputs, OPTIMIZERS[optimizer])
    fake = traced_memory(make(), inputs, optimizer)
    assert set(PHASES) <= set(fake.phases)
    for phase in PHASES:
        for kind in ("weights", "buffers", "inputs", "gradients"):
            assert fake.phases[phase].get(kind, 0) == pytest.approx(real.phases[phase].get(kind, 0), abs=64)
        assert sum(fake.phases[phase].values()) == pytest.approx(sum(real.phases[phase].values()), rel=0.02)


def test_the_optimizers_state() -> None:
    """AdamW: two moments of each trainable parameter, in its dtype. Adagrad has its sums before the first step."""
    model = nn.Linear(64, 64, bias=False)
    memory = traced_memory(model, {"input": torch.ones(2, 64)})
    assert memory.phases["optimizer"]["optimizer"] >= 2 * 64 * 64 * 4
    sums = traced_memory(model, {"input": torch.ones(2, 64)}, "adagrad").phases
    assert sums["forward"]["optimizer"] >= 64 * 64 * 4
    assert (
        traced_memory(model, {"input": torch.ones(2, 64)}, "sgd").phases["optimizer"].get("optimizer", 0)
        < 64 * 64 * 4 + 64
    )


# -------------------------------------------------------------------------------------------------- folded layers


class Stack(nn.Module):
    """Equal blocks; `stands` gives how many of them each kept one stands for."""

    def __init__(self, stands: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in stands)
        self.head = nn.Linear(WIDTH, 16)
        for layer, count in zip(self.layers, stands, strict=True):
            setattr(layer, STANDS_FOR, count)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("trainable", ["all", "norms"])
def test_folded_layers_count_as_the_whole_model(dtype: torch.dtype, trainable: str) -> None:
    def trace(stands: tuple[int, ...]) -> Any:
        model = Stack(stands).to(dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable == "all" or "norm" in name)
        setup = Setup(device_profile("cpu"), None, False, "adamw", dtype, phases=PHASES)
        return trace_step(StepRequest(model, ids(8, 32)), setup)

    whole, folded = trace((1,) * 12), trace((1, 11))
    assert folded.flops == whole.flops
    for phase in PHASES:
        expected, found = whole.memory.phases[phase], folded.memory.phases[phase]
        for kind in ("weights", "gradients", "inputs"):
            assert found.get(kind, 0) == pytest.approx(expected.get(kind, 0), rel=0.02, abs=8), (phase, kind)
        assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.05), phase
    count = [
        sum(call.repeats for call in each.calls if call.op == "aten.addmm.default")
        for each in (whole, folded)
    ]
    assert count[0] == count[1] == 13
    size = [sum(weight.bytes * weight.repeats for weight in each.weights) for each in (whole, folded)]
    assert size[0] == size[1]


def test_the_peak_inside_the_last_folded_layer_counts_the_others() -> None:
    """A frozen tower has its peak in the last layer, whose temporaries exist beside what all layers have saved."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 32 * WIDTH), nn.Linear(32 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(self.up(x).sin())  # saves the operand of the sine, and no result

    def peak(stands: tuple[int, ...]) -> int:
        model = Stack(stands)
        model.layers = nn.ModuleList(Wide() for _ in stands)
        for layer, count in zip(model.layers.requires_grad_(False), stands, strict=True):
            setattr(layer, STANDS_FOR, count)
        setup = Setup(device_profile("cpu"), None, False, "adamw", FP32, phases=("forward",))
        return sum(trace_step(StepRequest(model, ids(8, 32)), setup).memory.phases["forward"].values())

    assert peak((1, 5)) == pytest.approx(peak((1,) * 6), rel=0.03)


def test_the_timeline_keeps_the_worst_moment_of_every_stretch() -> None:
    book = Ledger()
    book.begin("forward")
    alive = [torch.empty(100, dtype=torch.uint8) for _ in range(2_000)]
    for tensor in alive:
        book.count(tensor)
    spike = torch.empty(10**6, dtype=torch.uint8)
    book.count(spike)
    del spike
    book.begin("backward")
    while alive:
        alive.pop()
        del tensor
        tensor = alive[-1] if alive else torch.empty(0)
    timeline = book.record().timeline
    assert 250 < len(timeline) <= 512
    assert [phase for phase, _ in itertools.groupby(point.phase for point in timeline)] == [
        "forward",
        "backward",
    ]
    forward = [point.total for point in timeline if point.phase == "forward"]
    assert max(forward) == 10**6 + 2_000 * 100
    assert forward[:-1] == sorted(forward[:-1])
    assert max(point.total for point in timeline) == book.record().peak


def test_a_later_step_begins_with_the_optimizers_states_and_a_later_micro_batch_with_the_gradients() -> None:
    book = Ledger()
    book.begin("forward")
    activations = [torch.empty(40, dtype=torch.uint8), torch.empty(10, dtype=torch.uint8)]
    for tensor in activations:
        book.count(tensor)
    book.begin("backward")
    gradients = torch.empty(15, dtype=torch.uint8)
    del activations[1:], tensor
    book.count(gradients, "gradients")
    book.begin("optimizer")
    book.count(torch.empty(5, dtype=torch.uint8), "optimizer")
    first, later, accumulated = book.record(), book.record(states=30), book.record(30, gradients=15)
    assert (first.peak, first.peak_phase) == (60, "optimizer")
    assert later.phases["backward"] == {"activations": 40, "gradients": 15, "optimizer": 30}
    assert (later.peak, later.peak_phase) == (85, "backward")
    # Of the forward, whose worst moment is higher, all gradients are there then.
    assert accumulated.phases["forward"] == {"activations": 50, "gradients": 15, "optimizer": 30}
    assert (accumulated.peak, max(point.total for point in accumulated.timeline)) == (95, 95)


class Moves(nn.Module):
    """Its weight lies in other memory after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.clone()
        return x + (x * self.scale) @ self.weight


def stacked_memory(kind: type[nn.Module], stands: tuple[int, ...], stack: type[Stack] = Stack) -> Memory:
    """Return the memory of a step of a stack of layers of one kind; each stands for so many."""
    model = stack(stands)
    model.layers = nn.ModuleList(kind() for _ in stands)
    for layer, count in zip(model.layers, stands, strict=True):
        setattr(layer, STANDS_FOR, count)
    return traced_memory(model, ids(8, 32))


def test_a_weight_that_moves_in_the_forward_stays_a_weight_and_takes_nothing_off_the_activations() -> None:
    whole, folded = (stacked_memory(Moves, stands) for stands in ((1,) * 12, (1, 11)))
    for phase in ("forward", "backward"):
        assert folded.phases[phase]["weights"] == whole.phases["load"]["weights"]
        assert sum(folded.phases[phase].values()) == pytest.approx(
            sum(whole.phases[phase].values()), rel=0.01
        )


def test_what_a_layer_passes_on_counts_as_often_as_a_layer_keeps_its_input() -> None:
    """With the layers' inputs kept (checkpointing) and not: the last layer's output is no layer's input."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 2 * self.scale  # the backward needs neither

    class Kept(Residual):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    for kind in (Residual, Kept):
        folded, whole = (
            stacked_memory(kind, stands).phases["backward"]["activations"] for stands in ((1, 11), (1,) * 12)
        )
        assert folded == whole


def test_what_layers_keep_of_a_forward_without_gradients_counts_for_every_layer() -> None:
    """Such as copies of weights, which a forward for KTO's estimate of the divergence is the first to need."""

    class Copies(Moves):
        copy: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.copy is None:
                self.copy = self.weight.detach().clone()
            return x + (x * self.scale) @ self.copy

    class Twice(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                first = super().forward(ids)
            return super().forward(ids) - first

    whole, folded = (stacked_memory(Copies, stands, Twice) for stands in ((1,) * 4, (1, 3)))
    assert whole.phases["optimizer"]["activations"] >= 4 * 4 * WIDTH**2
    for phase in PHASES:
        expected, actual = (memory.phases[phase]["activations"] for memory in (whole, folded))
        assert actual == pytest.approx(expected, rel=0.02), phase


@few("checkpointing", [False, True], True)
def test_int8_layers_fold_to_what_they_are_and_lose_no_weight(checkpointing: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    policy = resolve_precision(config, dtype="bfloat16", quantization="int8", device="h100")
    tokens, lora = torch.ones(2, 32, dtype=torch.long), lora_config(r=4, target_modules=["q_proj"])

    def trace(fold: bool) -> Memory:
        model = weightless_model(config, policy, lora=lora, fold=fold, use_cache=False).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        batch = {"input_ids": tokens, "labels": tokens}
        return check(model, batch, policy=policy, device="h100", wiring=False, verify=False).memory

    whole, folded = trace(False), trace(True)
    for phase in ("forward", "backward", "optimizer"):
        assert whole.phases[phase]["weights"] == whole.phases["load"]["weights"]
        assert folded.phases[phase]["weights"] == whole.phases["load"]["weights"]
        assert sum(folded.phases[phase].values()) == pytest.approx(
            sum(whole.phases[phase].values()), rel=0.02
        )
    # 64 x 64 and 64 x 128 codes with a float32 scale a row, in three layers: no less can be a model's int8 weights.
    assert whole.phases["load"]["weights"] >= 3 * (4 * 64 * (64 + 4) + 2 * 128 * (64 + 4) + 64 * (128 + 4))


def test_the_picture_of_a_folded_model_goes_up_and_down_layer_by_layer() -> None:
    setup = Setup(device_profile("cpu"), None, False, "sgd", FP32, phases=("forward", "backward"))

    def heights(stands: tuple[int, ...]) -> list[list[int]]:
        timeline = trace_step(StepRequest(Stack(stands), ids(8, 32)), setup).memory.timeline
        return [[p.total for p in timeline if p.phase == phase] for phase in ("forward", "backward")]

    for whole, folded in zip(heights((1,) * 24), heights((1, 23)), strict=True):
        assert max(folded) == pytest.approx(max(whole), rel=0.05)
        span = max(whole) - min(whole)
        for heights_of in (whole, folded):
            jumps = [abs(after - before) for before, after in itertools.pairwise(heights_of)]
            assert max(jumps) < span / 4, "what many layers hold comes or goes at once"
