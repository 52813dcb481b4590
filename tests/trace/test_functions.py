"""Autocast of a device that is not here, and refusals above the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as nnf
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import isotype
from isotype.contracts.contract import autocast_lists, contracts_for
from isotype.precision.devices.profile import device_profile
from isotype.trace.fake import functions
from isotype.trace.fake.functions import Functions
from isotype.trace.fake.recorder import FakeRecorder
from isotype.trace.fake.twin import fake_inputs, fake_mode
from tests.pairwise import pairwise
from tests.small import BF16, FP16, FP32

NAMES = {"cuda": "h100", "rocm": "mi300x"}


def under(kind: str, act: Callable[..., Any], autocast: torch.dtype | None, **inputs: torch.Tensor) -> Any:
    """The result of `act(**inputs)` on fakes of a device of `kind`."""
    mode = fake_mode()
    recorder = FakeRecorder(contracts_for(kind), autocast or FP32, mode)
    fakes = fake_inputs(inputs, mode)
    enabled = autocast is not None
    with (
        mode,
        recorder,
        Functions(recorder, device_profile(NAMES.get(kind, kind))),
        torch.autocast("cpu", dtype=autocast or BF16, enabled=enabled),
    ):
        return act(**fakes)


def low(shape: tuple[int, ...] = (4, 4), dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def _attention(x: torch.Tensor) -> Any:
    """Multi-head attention of one head with its weights: a function of Python's that calls many of torch's."""
    width = x.shape[-1]
    weight = x.new_ones(3 * width, width), x.new_ones(3 * width)
    given = x[:, None]
    return nnf.multi_head_attention_forward(
        given, given, given, width, 1, *weight, None, None, False, 0.0, x.new_ones(width, width), None
    )


# function of x -> (what it is given, what CUDA's autocast to bfloat16 returns), as the lists have it
CUDA: dict[str, tuple[Callable[..., Any], torch.dtype, torch.dtype]] = {
    "matmul": (lambda x: x @ x, FP32, BF16),
    "linear": (lambda x: nnf.linear(x, x), FP32, BF16),
    "mm": (lambda x: torch.mm(x, x), FP32, BF16),
    "bmm": (lambda x: torch.bmm(x[None], x[None]), FP32, BF16),
    "addmm": (lambda x: torch.addmm(x, x, x), FP32, BF16),
    "conv2d": (lambda x: nnf.conv2d(x[:, :, None], x[:, :, None, None]), FP32, BF16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), FP32, BF16),
    "prelu": (lambda x: nnf.prelu(x, x[0, :1]), FP32, BF16),
    "softmax": (lambda x: torch.softmax(x, -1), BF16, FP32),
    "softmax method": (lambda x: x.softmax(-1), BF16, FP32),
    "functional softmax": (lambda x: nnf.softmax(x, dim=-1), BF16, FP32),
    "log_softmax": (lambda x: x.log_softmax(-1), BF16, FP32),
    "softmax with a dtype": (lambda x: x.softmax(-1, dtype=BF16), BF16, BF16),
    "layer_norm": (lambda x: nnf.layer_norm(x, (4,)), BF16, FP32),
    "group_norm": (lambda x: nnf.group_norm(x[None], 2), BF16, FP32),
    "sum": (lambda x: x.sum(), BF16, FP32),
    "sum with a dtype": (lambda x: x.sum(dtype=BF16), BF16, BF16),
    "cumsum": (lambda x: x.cumsum(0), BF16, FP32),
    "prod": (lambda x: x.prod(), BF16, FP32),
    "exp": (lambda x: x.exp(), BF16, FP32),
    "log": (lambda x: x.log(), BF16, FP32),
    "pow": (lambda x: x.pow(2), BF16, FP32),
    "pow operator": (lambda x: x**2, BF16, FP32),
    "rsqrt": (lambda x: x.rsqrt(), BF16, FP32),
    "norm": (lambda x: x.norm(), BF16, FP32),
    "mse_loss": (lambda x: nnf.mse_loss(x, x), BF16, FP32),
    "cross_entropy": (lambda x: nnf.cross_entropy(x, torch.zeros(4, dtype=torch.long)), BF16, FP32),
    "cosine_similarity": (lambda x: nnf.cosine_similarity(x, x), BF16, FP32),
    "mean": (lambda x: x.mean(), BF16, BF16),
    "add": (lambda x: x + x, BF16, BF16),
    "gelu": (lambda x: nnf.gelu(x), BF16, BF16),
    "silu": (lambda x: nnf.silu(x), BF16, BF16),
    "sigmoid": (lambda x: x.sigmoid(), BF16, BF16),
    "cat of two dtypes": (lambda x: torch.cat([x, x.float()]), BF16, FP32),
    "stack of two dtypes": (lambda x: torch.stack([x, x.float()]), BF16, FP32),
    "addcmul of two dtypes": (lambda x: torch.addcmul(x, x.float(), x), BF16, FP32),
    "attention": (lambda x: _attention(x)[0], FP32, BF16),
    "cat of one dtype": (lambda x: torch.cat([x, x]), BF16, BF16),
}


@pytest.mark.parametrize("name", CUDA)
def test_dtypes_under_cuda_autocast(name: str) -> None:
    act, given, expected = CUDA[name]
    assert under("cuda", act, BF16, x=low(dtype=given)).dtype == expected


@pytest.mark.parametrize("name", CUDA)
def test_dtypes_without_autocast_are_torchs_own(name: str) -> None:
    act, given, _ = CUDA[name]
    assert under("cuda", act, None, x=low(dtype=given)).dtype == act(low(dtype=given)).dtype


def test_the_table_above_and_the_measured_lists_agree() -> None:
    lists = autocast_lists("cuda")
    assert {"mm", "bmm", "addmm", "matmul", "linear", "conv2d", "prelu"} <= lists.lower
    assert {
        "layer_norm",
        "group_norm",
        "exp",
        "log",
        "pow",
        "rsqrt",
        "mse_loss",
        "cosine_similarity",
    } <= lists.float32
    assert {"softmax", "log_softmax", "sum", "cumsum", "prod"} <= lists.float32_opt
    assert {"addcmul", "dot", "grid_sampler", "scatter_add"} <= lists.promote


@pytest.mark.parametrize("name", CUDA)
def test_dtypes_under_the_cpus_own_autocast(name: str) -> None:
    act, given, _ = CUDA[name]
    with torch.autocast("cpu", dtype=BF16):
        real = act(low(dtype=given)).dtype
    assert under("cpu", act, BF16, x=low(dtype=given)).dtype == real


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_switched_off_inside(kind: str) -> None:
    def act(x: torch.Tensor) -> list[torch.dtype]:
        outer = (x @ x).dtype
        with torch.autocast("cpu", enabled=False):
            inner = (x @ x).dtype, x.bfloat16().softmax(-1).dtype
        return [outer, *inner, (x @ x).dtype]

    assert under(kind, act, BF16, x=low(dtype=FP32)) == [BF16, FP32, BF16, BF16]


def test_autocast_of_the_other_device_switched_off_inside() -> None:
    """A model written for a GPU: `torch.autocast("cuda", enabled=False)` around what has to stay in float32."""

    def act(x: torch.Tensor) -> list[torch.dtype]:
        with torch.autocast("cuda", enabled=False):
            inner = (x @ x).dtype
        return [inner, (x @ x).dtype]

    assert under("cuda", act, BF16, x=low(dtype=FP32)) == [FP32, BF16]


def test_autocast_by_the_device_type_of_a_tensor() -> None:
    """What transformers does around rotary embeddings: the device type comes from a tensor."""

    def act(x: torch.Tensor) -> torch.dtype:
        with torch.autocast(device_type=x.device.type, enabled=False):
            return (x @ x).dtype

    assert under("cuda", act, BF16, x=low(dtype=FP32)) == FP32


def test_a_function_that_autocast_refuses_is_a_breach() -> None:
    mode = fake_mode()
    recorder = FakeRecorder(contracts_for("cuda"), BF16, mode)
    fakes = fake_inputs({"p": torch.full((4,), 0.5)}, mode)
    with mode, recorder, Functions(recorder, device_profile("t4")), torch.autocast("cpu", dtype=BF16):
        nnf.binary_cross_entropy(fakes["p"], fakes["p"])
    (broken,) = [call.breach for call in recorder.calls if call.breach is not None]
    assert "unsafe to autocast" in broken.message


def test_float64_is_left_alone() -> None:
    assert under("cuda", lambda x: x @ x, BF16, x=low(dtype=torch.float64)).dtype == torch.float64


def test_gradients_go_through_the_casts() -> None:
    """Autocast is above autograd: the gradient of a float32 weight is float32."""
    weight = nn.Parameter(torch.ones(4, 4))

    def act(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
        loss = nnf.softmax(x @ w, dim=-1).sum()
        (gradient,) = torch.autograd.grad(loss, w)
        return loss.dtype, gradient.dtype

    assert under("cuda", act, BF16, x=low(dtype=FP32), w=weight) == (FP32, FP32)


@pytest.mark.parametrize(("autocast", "given"), [(BF16, FP16), (FP16, BF16)])
def test_sixteen_bits_of_the_other_kind(autocast: torch.dtype, given: torch.dtype) -> None:
    assert under("cuda", lambda x: x @ x, autocast, x=low(dtype=given)).dtype == autocast


def test_arrays_of_tensors_without_values() -> None:
    made = under("cpu", lambda x: (x @ x).numpy(), None, x=torch.ones(2, 2))
    assert made.shape == (2, 2)
    assert str(made.dtype) == "float32"


def test_other_libraries_take_tensors_without_values_as_arrays() -> None:
    """DETR's matcher calls scipy, which makes an array of the costs."""
    arrays = under("cpu", lambda x: (numpy.asarray(x @ x), numpy.asarray(x, "f8")), None, x=torch.ones(2, 2))
    assert [(array.shape, str(array.dtype)) for array in arrays] == [((2, 2), "float32"), ((2, 2), "float64")]


def test_the_name_of_the_function_is_told_and_taken_back() -> None:
    mode, profile = fake_mode(), device_profile("cpu")  # the first call in a process calls operators
    recorder = FakeRecorder(contracts_for("cpu"), FP32, mode)
    names: list[str] = []

    class Listening(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.relu(x)
            names.append(recorder.function)
            return made

    fakes = fake_inputs({"x": low()}, mode)
    with mode, recorder, Functions(recorder, profile):
        Listening()(fakes["x"])
    assert names == [""]
    assert [call.op for call in recorder.calls] == ["aten.relu.default"]


def test_a_number_in_a_text_is_its_number() -> None:
    """Names of experts are put together so: `f"expert_{index}"`."""
    assert under("cpu", lambda: [f"expert_{index}" for index in torch.arange(2)], None) == [
        "expert_0",
        "expert_1",
    ]
    assert under("cpu", lambda x: f"{x.sum():.1f}", None, x=low()) == "1.0"  # weights decide: the stand-in


def test_the_experts_that_were_hit_are_known_by_number() -> None:
    """All of them are taken to be: the loop over them names each once."""
    assert under("cpu", lambda x: [f"{row[0]}" for row in (x.sum(1) > 0).nonzero()], None, x=low()) == [
        "0",
        "1",
        "2",
        "3",
    ]


def test_a_tensor_in_a_text_is_not() -> None:
    assert "FakeTensor" in under("cpu", lambda x: f"{x}", None, x=low())


class _Attended(nn.Module):
    """Attention whose values have `width` numbers, where queries and keys have 64."""

    def __init__(self, width: int, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.q, self.v = nn.Linear(64, 64), nn.Linear(64, width)
        self.bias = nn.Parameter(torch.zeros(1, 1, 128, 128)) if bias else None
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, v, mask = self.q(x)[:, None], self.v(x)[:, None], self.bias
        mask = None if mask is None else mask.to(q.dtype)
        return nnf.scaled_dot_product_attention(q, q, v, mask, self.dropout).sum()


@pytest.mark.parametrize(
    ("device", "arguments", "operator"),
    [
        ("a100", {"width": 32}, "efficient_attention"),
        ("h100", {"width": 32}, "cudnn_attention"),
        ("v100", {"width": 32}, "efficient_attention"),
        ("a100", {"width": 64, "dropout": 0.1}, "flash_attention_for_cpu"),
        ("mi300x", {"width": 64, "dropout": 0.1}, "flash_attention_for_cpu"),
        ("a100", {"width": 64, "bias": True}, "efficient_attention"),
        ("cpu", {"width": 64, "dropout": 0.1}, ""),
        ("cpu", {"width": 32}, ""),
    ],
)
@pytest.mark.parametrize("autocast", [True, False])
def test_attention_that_a_gpu_fuses_stores_no_scores(
    device: str, arguments: dict[str, Any], operator: str, autocast: bool
) -> None:
    """A CPU stores all scores with dropout, or with values of another size; the kernels of a GPU do not."""
    half = torch.float16 if device == "v100" else torch.bfloat16
    dtype = torch.float32 if autocast else half
    model, x = _Attended(**arguments).to(dtype), torch.zeros(1, 128, 64, dtype=dtype)
    setting = half if autocast else False
    phases = ("forward", "backward")
    report = isotype.check(
        model,
        lambda model: model(x),
        device=device,
        autocast=setting,
        phases=phases,
        scaler=False,
        verify=False,
    )
    assert report.trace.failure is None
    scores = [call for call in report.trace.calls for _, shape in call.results if shape[-2:] == (128, 128)]
    kernels = {call.op for call in report.trace.calls if "scaled_dot_product" in call.op}
    if operator:
        assert kernels == {f"aten._scaled_dot_product_{operator}{end}.default" for end in ("", "_backward")}
        assert {call.op for call in scores if "bmm" in call.op or "softmax" in call.op} == set()
    else:
        assert kernels == set()
        assert any("bmm" in call.op for call in scores)
    assert [f for f in report.findings if f.code.startswith("IST1")] == []


class _Sequences(nn.Module):
    """A layer over packed sequences of 3, 1 and 2 tokens."""

    def __init__(self, kind: type[nn.RNNBase], dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.rnn = kind(2, 2, batch_first=True, dtype=dtype)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        padded, again = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=4)
        assert padded.shape == (3, 4, 2)
        assert again.shape == lengths.shape
        return padded.sum()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_step_over_packed_sequences_is_traced_to_its_end(kind: type[nn.RNNBase]) -> None:
    batch = {"rows": torch.ones(3, 3, 2), "lengths": torch.tensor([3, 1, 2])}
    report = isotype.check(_Sequences(kind), batch, device="cpu", verify=False)
    assert report.trace.failure is None
    assert report.ok
    steps = [call for call in report.trace.calls if call.flops and call.phase == "forward"]
    assert sum(call.flops for call in steps) == 2 * 6 * 2 * 2 * 2 * (4 if kind is nn.LSTM else 3)  # of 6 rows


def test_a_layer_of_another_dtype_than_its_packed_sequences_is_found() -> None:
    batch = {"rows": torch.ones(3, 3, 2), "lengths": torch.tensor([3, 1, 2])}
    report = isotype.check(_Sequences(nn.LSTM, BF16), batch, device="cpu", verify=False)
    assert {finding.code for finding in report.errors} == {"IST101"}


@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_are_those_of_torch(batch_first: bool) -> None:
    rows, lengths = torch.arange(24.0).reshape(3, 4, 2), [4, 2, 1]
    rows = rows if batch_first else rows.transpose(0, 1)
    packed = pack_padded_sequence(rows, lengths, batch_first)
    data, sizes = functions._pack(rows, lengths, batch_first)
    assert torch.equal(data, packed.data)
    assert torch.equal(sizes, packed.batch_sizes)
    for longest in (-1, 6):
        padded = functions._pad(data, sizes.tolist(), batch_first, -1.0, longest)
        expected = pad_packed_sequence(packed, batch_first, -1.0, None if longest < 0 else longest)
        assert all(map(torch.equal, padded, expected))


class Recurrent(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.head = getattr(nn, kind)(8, 8, batch_first=True).to(dtype), nn.Linear(8, 8).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])  # type: ignore[no-any-return]


@pairwise(
    ["weights, data", "kind", "device"],
    [(BF16, FP32), (FP32, BF16), (FP32, torch.float64), (FP16, FP32)],
    ["LSTM", "GRU", "RNN"],
    ["cpu", "t4"],
)
def test_a_recurrent_layer_refuses_an_input_of_another_dtype(
    weights: torch.dtype, data: torch.dtype, kind: str, device: str
) -> None:
    model, x = Recurrent(kind, weights), torch.randn(2, 3, 8).to(data)
    with pytest.raises(ValueError, match="RNN input dtype") as raised:
        model(x)
    report = isotype.check(model, {"x": x}, device=device, verify=False)
    breach = next(report.trace.breaches())
    assert (breach.op, breach.module, breach.refusal) == (
        f"torch.{model.layer.mode.lower()}",
        "layer",
        str(raised.value),
    )
    assert report.trace.failure is None
    # A CPU without bfloat16 also lacks the kernel of an LSTM.
    errors = [finding for finding in report.errors if finding.code != "IST109"]
    assert [(finding.code, finding.cause) for finding in errors] == [
        ("IST101", "the input x is " + str(data)[6:])
    ]


@pytest.mark.parametrize("autocast", [False, BF16, FP16])
def test_a_sparse_product_under_autocast_keeps_the_order_of_its_operands(autocast: Any) -> None:
    """Autocast casts both operands. Without it, the sparse one comes first in torch's error."""
    edges, x = torch.eye(4), torch.randn(4, 4)

    def loss(model: nn.Module) -> torch.Tensor:
        products = torch.sparse.mm(edges.to_sparse(), model(x).bfloat16())
        return products.float().mean()

    report = isotype.check(
        nn.Linear(4, 4), loss, device="cpu", autocast=autocast, phases=("forward",), verify=False
    )
    refusals = [call.refusal for call in report.trace.breaches()]
    assert refusals == ([] if autocast else ["expected scalar type Float but found BFloat16"])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_backward_of_a_sparse_product_gets_the_matrix_before_autocasts_cast(dtype: torch.dtype) -> None:
    edges, x, model = torch.eye(4, dtype=dtype).to_sparse(), torch.randn(4, 4), nn.Linear(4, 4)

    def loss(model: nn.Module) -> torch.Tensor:
        return torch.sparse.mm(edges, model(x)).float().mean()

    report = isotype.check(model, loss, device="cpu", autocast=BF16)
    with torch.autocast("cpu"):
        value = loss(model)
    if dtype == BF16:
        value.backward()
        assert not report.errors
        return
    with pytest.raises(RuntimeError) as raised:
        value.backward()
    (finding,) = report.errors
    assert (finding.code, finding.phase) == ("IST105", "backward")
    assert f"the device raises: {raised.value}" in finding.notes


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("device", "refused"), [("rtx3090", True), ("cpu", False)])
def test_attention_inside_of_multi_head_attention_runs_as_on_the_device(
    device: str, refused: bool, dtype: torch.dtype
) -> None:
    """A GPU's fused kernel refuses a float32 mask of 16-bit queries, a CPU accepts it."""
    layer = nn.TransformerEncoderLayer(32, 2, 8, batch_first=True, dropout=0.0).to(dtype)
    x, mask = torch.randn(2, 4, 32).to(dtype), torch.zeros(4, 4)
    for attn_mask in (mask, mask.to(dtype), None):
        report = isotype.check(
            layer, {"src": x, "src_mask": attn_mask}, device=device, optimizer="sgd", verify=False
        )
        wrong = refused and attn_mask is mask
        assert [(finding.code, finding.cause) for finding in report.errors] == (
            [("IST104", "the input src_mask is float32")] if wrong else []
        )


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu", "mps", "cpu"])
def test_dropout_on_a_gpu_stores_a_mask_of_bytes(kind: str) -> None:
    """A CPU and Apple GPUs multiply by a mask in the dtype of the input (`is_fused_kernel_acceptable` in Dropout.cpp)."""
    x = torch.ones(4, requires_grad=True)
    fused = kind in ("cuda", "rocm", "xpu")
    calls: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
        "function": (lambda x: nnf.dropout(x, 0.5, training=True), True),
        "operator": (lambda x: torch.dropout(x, 0.5, True), True),
        "module": (lambda x: nn.Dropout(0.1)(x), True),
        "in place": (lambda x: nnf.dropout(x * 1, 0.5, inplace=True), False),
        "evaluation": (lambda x: nnf.dropout(x * 1, 0.5, training=False), False),
        "of everything": (lambda x: nnf.dropout(x, p=1.0), False),
    }
    for name, (act, drops) in calls.items():
        result = under(kind, act, None, x=x)
        by_kernel = result.grad_fn.name() == "NativeDropoutBackward0"
        assert by_kernel == (fused and drops), (name, result.grad_fn.name())
