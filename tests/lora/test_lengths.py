"""Padding left out on GPUs by attention that takes lengths: the numbers of the padded batch in float64, and one look at the device a batch.

No GPU is needed: `tests/lora/by_lengths.py` computes the operators on a CPU.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import isotype
import isotype.lora.loss.trl_head
from isotype.lora.attention import lengths, registered
from isotype.lora.attention.registered import LENGTHS, AttentionReport, use_fast_attention, without_padding
from isotype.lora.loss.trl_head import put_head
from isotype.lora.unpadded import Sequences, current, unpadded, with_sequences
from isotype.precision.devices.profile import DeviceProfile, device_profile
from tests.lora import by_lengths
from tests.lora.test_padding import Batch, adapted, present
from tests.models import tiny_model

H100, T4 = device_profile("h100"), device_profile("t4")
BF16 = torch.bfloat16
pytestmark = pytest.mark.lacking(
    ""
    if lengths.takes_lengths()
    else f"torch {torch.__version__} has no variable-length attention with a scale"
)
TOLERANCE = 5e-5
"""As of tests/lora/test_padding.py: float32 sums in another order."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the operator, which takes float32 here, for numbers to compare."""
    by_lengths.register()
    by_lengths.calls.clear()
    monkeypatch.setattr(lengths, "HALVES", (torch.float32, *lengths.HALVES))
    return by_lengths.calls


def on_gpu(model: Any, profile: DeviceProfile = H100) -> AttentionReport:
    """What `use_fast_attention` does to a model on a GPU."""
    if "lora_attention" in vars(model):
        vars(model)["lora_attention"].undo()  # a fused model on a CPU has the CPU's
    return registered._with_lengths(model, profile, BF16, "it is on a GPU")


def padded(side: str) -> Batch:
    ids = torch.randint(3, 118, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = present(side)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-2] = labels[:, :-2].masked_fill(mask[:, :-2] != mask[:, 1:-1], -100)
    if side == "left":  # what follows padding has nothing that predicts it
        labels[:, 1:][mask[:, :-1] == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(**batch, fused_lm_head=True)
    (out.loss + out.log_probs.square().sum()).backward()
    fields = {name: out[name] for name in ("loss", "log_probs", "entropy", "label_mask", "is_top1")}
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads
    return {name: value.detach().clone().double() for name, value in {**fields, **grads}.items()}


def assert_same(result: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert result.keys() == reference.keys()
    whole = torch.stack([value.norm() for name, value in reference.items() if "lora_" in name]).norm()
    for name, value in reference.items():
        scale = value.norm() + (0.01 * whole if "lora_" in name else 0)
        assert result[name].shape == value.shape, name
        assert (result[name] - value).norm() <= TOLERANCE * scale, name


def of_float64(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    twin = copy.deepcopy(model).double()
    twin.get_base_model().set_attn_implementation("sdpa")
    put_head(twin)
    return step(twin, batch)


STEPS = [
    ("llama", "right", None),
    ("llama", "left", None),
    ("llama", "left", False),
    ("llama", "right", True),
    ("mistral", "left", None),  # a window that is shorter than the longest row
    ("gemma3", "right", None),  # layers with a window, and layers without
    *(
        pytest.param(name, side, None, marks=pytest.mark.exhaustive)
        for name in ("mistral", "gemma3", "qwen3")
        for side in ("left", "right")
    ),
]


@pytest.mark.parametrize(("name", "side", "reentrant"), STEPS)
def test_a_step_is_that_of_the_padded_batch(
    name: str, side: str, reentrant: bool | None, calls: list[Any]
) -> None:
    model, batch = adapted(tiny_model(name)).train(), padded(side)
    if reentrant is not None:
        model.enable_input_require_grads()
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
    reference = of_float64(model, batch)
    isotype.fuse(model)
    report = on_gpu(model)
    assert report.sides == {"left", "right"}
    put_head(model)
    calls.clear()
    result = step(model, batch)
    layers = model.config.num_hidden_layers
    assert len(calls) == layers * (1 if reentrant is None else 2)
    assert {(call["longest"], call["sequences"]) for call in calls} == {(12, 3)}
    windows = {call["window"] for call in calls}
    assert windows == {"llama": {(-1, 0)}, "mistral": {(7, 0)}}.get(name, windows)
    assert name != "gemma3" or len(windows) == 2
    assert not report.left
    assert_same(result, reference)


def test_packed_rows_go_by_what_the_collator_says(calls: list[Any]) -> None:
    model = adapted(tiny_model("mistral")).train()
    ids = torch.randint(3, 118, (1, 23), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(11), torch.arange(4), torch.arange(8)])[None]
    batch = {"input_ids": ids, "position_ids": places, "labels": ids.masked_fill(places == 0, -100)}
    reference = of_float64(model, batch)
    put_head(model)
    on_gpu(model)
    calls.clear()
    ends = torch.tensor([0, 11, 15, 23], dtype=torch.int32)
    said = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    result = step(model, {**batch, **said})
    assert {(call["longest"], call["window"]) for call in calls} == {(11, (7, 0))}
    assert_same(result, reference)


def test_calls_that_the_kernel_does_not_take_go_by_a_mask(calls: list[Any]) -> None:
    """Dropout is drawn in training only: no trial has seen it. Its expectation apart, nothing changes."""
    model, batch = adapted(tiny_model("mistral")).train(), padded("right")
    report = on_gpu(model)
    reference = of_float64(model, batch)
    put_head(model)
    for layer in model.get_base_model().model.layers:
        layer.self_attn.attention_dropout = 1e-12
    calls.clear()
    result = step(model, batch)
    assert not calls
    assert report.left == {"the call has dropout": 2}
    assert "2 calls left to torch's kernel: the call has dropout" in str(report)
    assert_same(result, reference)


def test_what_nobody_called_without_padding_stays_transformers(calls: list[Any]) -> None:
    model = tiny_model("mistral").eval()
    batch = {"input_ids": torch.arange(1, 25).view(2, 12), "attention_mask": present("left")[:2]}
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        wanted, tokens = (
            model(**batch).logits,
            model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0),
        )
        report = on_gpu(model)
        calls.clear()
        assert torch.equal(model(**batch).logits, wanted)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), tokens)
    assert not calls
    report.undo()
    assert model.config._attn_implementation == "sdpa"
    assert without_padding(model, batch, batch["attention_mask"].bool()) is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_of_sequences(window: int | None, causal: bool) -> None:
    mask = Sequences(torch.tensor([0, 4, 5, 9], dtype=torch.int32), 4, window).mask(9, causal=causal)
    for query in range(9):
        for key in range(9):
            owner = [0, 0, 0, 0, 1, 2, 2, 2, 2]
            seen = owner[query] == owner[key] and (not causal or key <= query)
            assert bool(mask[0, 0, query, key]) == (seen and (window is None or query - key < window))


@pytest.mark.parametrize(
    ("device", "dtype", "config", "reason"),
    [
        ("t4", torch.float16, {}, "NVIDIA T4 has no FlashAttention in float16"),
        ("h100", torch.float32, {}, "has no FlashAttention in float32"),
        ("mi300x", BF16, {}, "variable-length attention is only for NVIDIA GPUs, but this is"),
        (
            "h100",
            BF16,
            {"attention_dropout": 0.1},
            "the model's attention has dropout (attention_dropout), but variable-length attention has none",
        ),
        ("h100", BF16, {"_attn_implementation": "eager"}, "the attention implementation is eager"),
    ],
)
def test_why_padding_is_computed(
    device: str, dtype: torch.dtype, config: dict[str, Any], reason: str
) -> None:
    model = tiny_model("llama")
    for name, value in config.items():
        setattr(model.config, name, value)
    report = registered._with_lengths(model, device_profile(device), dtype, "it is there")
    assert not report.in_use
    assert reason in str(report.padded)
    assert model.config._attn_implementation == config.get("_attn_implementation", "sdpa")


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "takes_lengths", lambda: False)
    report = registered._with_lengths(tiny_model("llama"), H100, BF16, "")
    assert (
        report.padded
        == f"torch {torch.__version__} has no variable-length attention with a scale and windows"
    )


def test_models_that_compute_otherwise_keep_their_padding(calls: list[Any]) -> None:
    """Positions in a table are for rows that begin at the left; a wrong kernel is seen by the trial."""
    assert on_gpu(adapted(tiny_model("gpt2"), fan_in_fan_out=True)).sides <= {"right"}


def test_a_kernel_that_is_wrong_is_not_taken(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(lengths, "by_lengths", lambda inputs, mask, **_: inputs[0].transpose(1, 2))
    report = on_gpu(model)
    assert (report.in_use, model.config._attn_implementation) == (False, "sdpa")
    assert report.padded == "the model's results change if rows are concatenated"


def test_a_kernel_that_fails_is_not_taken_and_says_why(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(lengths, "by_lengths", fails)
    report = on_gpu(tiny_model("llama"))
    assert report.padded == "a trial without padding failed (RuntimeError: no kernel image is available)"


def test_the_report_says_one_line(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(tiny_model("llama"))
    report = isotype.fuse(model)
    taken = dataclasses.replace(report, attention=on_gpu(model))
    assert "no padding" in taken.summary
    assert "attention by one function" not in taken.summary
    assert "padding: removed from batches of TRL's trainers if it is on the left or right of a row" in str(
        taken
    )
    assert not taken.fallbacks
    left = dataclasses.replace(
        report, attention=AttentionReport(False, "it is on cuda", padded="of the card")
    )
    assert left.fallbacks == ["padding: stays in batches: of the card"]


def test_a_gpu_is_given_the_kernel_by_fuse(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", BF16)
    monkeypatch.setattr(registered, "_why_not", lambda owners, device: "it is on cuda")
    report = use_fast_attention(model, None, H100)
    assert report.by_lengths
    assert model.config._attn_implementation == LENGTHS
    assert not use_fast_attention(tiny_model("llama", BF16), None, T4).by_lengths


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would wait for a GPU: operators by whose results Python goes on, or whose results' sizes depend on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bools = func is torch.ops.aten.index.Tensor and any(
            x is not None and x.dtype == torch.bool for x in args[1]
        )
        if bools or any(
            part in str(func)
            for part in ("nonzero.", "_local_scalar", "masked_select", "unique", "is_nonzero")
        ):
            self.waits.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_device_is_waited_for_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, reads = padded("left"), []
    actual = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or actual(self))
    labelled = batch.pop("labels") != -100
    with _Waits() as seen:
        bare = unpadded(batch, frozenset({"left", "right"}), labelled)
    assert bare is not None
    assert reads == [torch.Size([4 + 3])]
    assert not seen.waits
    assert bare.reads == labelled.sum()
    assert bare.sequences.ends.tolist() == [0, 12, 19, 30]


def test_nothing_is_said_after_a_call() -> None:
    sequences = Sequences(torch.tensor([0, 1], dtype=torch.int32), 1)
    with pytest.raises(KeyError), with_sequences(sequences):
        raise KeyError
    assert current() is None
