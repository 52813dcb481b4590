"""Keys and values repeated for GPUs without a fused kernel for grouped heads: the numbers of transformers' `sdpa`, in calls that such a kernel takes."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import nn

import isotype
from isotype.lora.attention import registered
from isotype.lora.attention.registered import REPEATED, AttentionReport, use_fast_attention
from isotype.precision.devices.attention import RELEASE
from isotype.precision.devices.profile import DeviceProfile, device_profile
from isotype.preflight.run import run
from isotype.records.request import StepRequest
from tests.models import CONFIGS, quiet, tiny_batch, tiny_model

T4, A100 = device_profile("t4"), device_profile("a100-40gb")
before_torch_2_14 = pytest.mark.lacking(
    "the memory-efficient kernel takes grouped heads" if RELEASE >= (2, 14) else ""
)


def repeated(model: Any) -> Any:
    registered._put(model, REPEATED, AttentionReport(in_use=True))
    return model


def calls_of(monkeypatch: pytest.MonkeyPatch, model: Any, batch: Any) -> tuple[Any, list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    theirs = nn.functional.scaled_dot_product_attention

    def noted(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        calls.append({"heads": (query.shape[1], key.shape[1], value.shape[1]), **kwargs})
        return theirs(query, key, value, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", noted)
        return model(**batch), calls


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_numbers_and_gradients_are_those_of_sdpa(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tiny_model(name, torch.float64)
    ours = repeated(copy.deepcopy(theirs))
    batch = tiny_batch(name)
    if padded:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -5:] = 0
    expected = theirs(**batch)
    result, calls = calls_of(monkeypatch, ours, batch)
    assert calls
    assert all(len(set(call["heads"])) == 1 and not call.get("enable_gqa") for call in calls)
    # torch's kernels sum in their own order; both are in float64
    torch.testing.assert_close(result.logits, expected.logits, rtol=1e-10, atol=1e-10)
    for made in (result, expected):
        made.loss.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-10)


def test_generation_goes_on_as_transformers_has_it() -> None:
    theirs = tiny_model("llama").eval()
    ours = repeated(copy.deepcopy(theirs))
    ids = torch.arange(1, 9)[None]
    asked = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **asked), theirs.generate(ids, **asked))


def blank(name: str, dtype: torch.dtype) -> Any:
    import transformers

    with torch.device("meta"), quiet():
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
        config = peft.LoraConfig(r=4, target_modules="all-linear")
        return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


@pytest.mark.parametrize(
    ("profile", "dtype", "is_repeated", "slow"),
    [
        pytest.param(T4, torch.float16, True, None, marks=before_torch_2_14),
        pytest.param(A100, torch.float32, True, None, marks=before_torch_2_14),
        (A100, torch.bfloat16, False, None),
        (T4, torch.bfloat16, False, "no fused kernel for bfloat16"),
    ],
    ids=["t4-fp16", "a100-fp32", "a100-bf16", "t4-bf16"],
)
def test_where_heads_are_repeated(
    profile: DeviceProfile, dtype: torch.dtype, is_repeated: bool, slow: str | None
) -> None:
    model = blank("llama", dtype)
    report = isotype.fuse(model, device=profile)
    implementation = model.get_base_model().config._attn_implementation
    assert (report.attention.repeated == profile.title) == is_repeated
    assert implementation == (REPEATED if is_repeated else "sdpa")
    assert (slow or "keys and values") in "\n".join([report.summary, *report.fallbacks]) or not (
        slow or is_repeated
    )
    if is_repeated:
        assert f"{profile.title} has no fused kernel for grouped heads" in str(report)
    isotype.unfuse(model)
    assert model.get_base_model().config._attn_implementation == "sdpa"


def test_heads_that_are_not_grouped_stay() -> None:
    with torch.device("meta"):
        report = use_fast_attention(tiny_model_without_groups(), "cuda", T4)
    assert (report.in_use, report.repeated) == (False, None)


def tiny_model_without_groups() -> Any:
    import transformers

    config = CONFIGS["llama"]()
    config.num_key_value_heads = config.num_attention_heads
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)


@pytest.mark.parametrize(
    ("device", "dtype", "fused", "scores"),
    [
        pytest.param(
            "t4",
            torch.float16,
            False,
            "grouped heads in float16; with fused layers",
            marks=before_torch_2_14,
        ),
        ("t4", torch.float16, True, None),
        ("t4", torch.bfloat16, True, "this call's heads in bfloat16"),
        ("a100-40gb", torch.float16, False, None),
    ],
    ids=["t4", "t4 fused", "t4 bf16", "a100"],
)
def test_a_check_counts_what_attention_does_there(
    device: str, dtype: torch.dtype, fused: bool, scores: str | None
) -> None:
    """Scores of S x S in float32 where plain operators compute them, twice at the peak: what is saved, and its gradient."""
    length, rows, heads = 512, 2, 4
    model = blank("llama", dtype)
    if fused:
        isotype.fuse(model, device=device_profile(device))
    report = checked(model, device, rows, length, ("forward", "backward"))
    bytes_of_scores = rows * heads * length * length * 4
    notes = [note for note in report.trace.notes if "scores" in note]
    if scores is None:
        assert not notes
        assert report.memory.peak < 2 * bytes_of_scores
    else:
        assert scores in notes[0]
        assert notes[0].startswith("8.00 MiB of scores")
        # Both layers keep theirs, and one has its gradient.
        assert report.memory.peak > 3 * bytes_of_scores


@before_torch_2_14
def test_repeated_keys_and_values_are_counted() -> None:
    """Of a fused layer without flash: two tensors of the queries' heads in the place of the keys' own, kept for the backward."""
    peaks = {}
    for device in ("t4", "a100-40gb"):
        model = blank("llama", torch.float16)
        isotype.fuse(model, device=device_profile(device))
        peaks[device] = checked(model, device, 1, 64, ("forward",)).memory.peak
    layers, tokens, width = 2, 64, 64
    assert peaks["t4"] - peaks["a100-40gb"] == layers * 2 * tokens * width * 2


def checked(model: Any, device: str, rows: int, length: int, phases: tuple[str, ...]) -> Any:
    ids = torch.zeros(rows, length, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids}
    report = run(
        StepRequest(model, inputs, device=device, autocast=False, phases=phases, wiring=False), verify=False
    )
    assert report.trace.failure is None
    return report
