"""The fused forward and backward on a GPU that is not there, see `tests/fake_gpu.py`: nothing meets the CPU, nothing waits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cpus import no_compiler
from tests.fake_gpu import CASES, OFTEN, RARE
from tests.pairwise import few
from tests.processes import run_module

# torch 2.10 decomposes addmm with an out_dtype wrongly for fake tensors.
pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> dict[str, Any]:
    """All cases that are asked for, in one process of their own: the fake device replaces this machine's."""
    items = [item for item in request.session.items if item.path == request.path]
    whole = ["--whole"] * any(item.get_closest_marker("exhaustive") is not None for item in items)
    ended = run_module("tests.fake_gpu", *whole)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@few(
    "case",
    [*CASES, *(f"{case} checkpointed" for case in CASES)],
    *(case for case in CASES if case not in RARE),
    *(f"{case} checkpointed" for case in OFTEN),
)
def test_nothing_meets_the_cpu_or_waits(launches: dict[str, Any], case: str) -> None:
    assert launches[case]["faults"] == []


def test_what_lies_between_the_products_is_one_kernel_each(launches: dict[str, Any]) -> None:
    """Two layers: two norms each and the last one; queries and keys rotated forward and back; one gated product each way."""
    kernels = launches["LoRA"]["kernels"]
    expected = {"rms_norm": 5, "rms_norm_backward": 5, "gated": 2, "gated_backward": 2}
    # The model is fused on the CPU before it moves: attention rotates in one function where that CPU has compiled loops.
    expected |= {} if no_compiler() else {"rotate": 8}
    assert {name: kernels[f"isotype.gpu_{name}"] for name in expected} == expected
    assert not {name for name in kernels if "silu" in name or "rsqrt" in name}
    assert no_compiler() or not {name for name in kernels if "neg" in name}


@few("case", list(CASES), *(case for case in CASES if case not in RARE))
def test_gradients_of_adapters_are_not_rounded_on_their_way(launches: dict[str, Any], case: str) -> None:
    """Products have float32 results: nothing is copied from 16 bits into a gradient."""
    assert "aten.copy_" not in launches[case]["kernels"]


def test_constants_of_double_quantization_are_dequantized_once(launches: dict[str, Any]) -> None:
    """Seven weights in each of two layers, read forward and backward: one kernel each."""
    kernels = launches["nf4"]["kernels"]
    assert kernels["bitsandbytes.dequantize_4bit"] == 28
    assert "bitsandbytes.dequantize_blockwise" not in kernels


def test_few_rows_without_gradients_dequantize_no_weight(launches: dict[str, Any]) -> None:
    few, many = (launches[name]["kernels"] for name in ("few rows", "many rows"))
    assert (few["bitsandbytes.gemm_4bit"], few.get("bitsandbytes.dequantize_4bit")) == (14, None)
    assert (many["bitsandbytes.dequantize_4bit"], many.get("bitsandbytes.gemm_4bit")) == (14, None)


def test_adapters_of_a_group_are_rounded_by_two_kernels(launches: dict[str, Any]) -> None:
    """Four groups in each of two layers: q, k and v; o; gate and up; down. Again where the forward runs again."""
    for case, forwards in (("LoRA", 1), ("nf4", 1), ("LoRA checkpointed", 2)):
        kernels = launches[case]["kernels"]
        assert (kernels["aten._foreach_mul"], kernels["aten._foreach_copy_"]) == (8 * forwards, 8 * forwards)


def test_rows_behind_one_another_are_attention_by_lengths_alone(launches: dict[str, Any]) -> None:
    """A kernel each way in both layers, again where they are checkpointed, and no mask of all pairs is made."""
    kernels = launches["lengths"]["kernels"]
    assert (kernels["torch_attn._varlen_attn"], kernels["torch_attn._varlen_attn_backward"]) == (4, 2)
    assert not {
        name for name in kernels if "scaled_dot_product" in name or "bitwise" in name or name == "aten.le"
    }


@pytest.mark.parametrize(
    "case", ["few rows", "many rows", "few rows, DoRA", "loss", "lengths", "step values"]
)
def test_so_do_generation_the_loss_and_the_values_of_a_step(launches: dict[str, Any], case: str) -> None:
    assert launches[case]["faults"] == []


def test_chunks_of_the_loss_are_those_of_a_gpu(launches: dict[str, Any]) -> None:
    """1 GiB at 128,256 * (2 + 4 + 4) bytes a token: 5 chunks of 4,096 tokens, of two products each."""
    assert launches["loss"]["kernels"]["aten.mm"] == 10


def test_dropout_is_one_kernel_each_time(launches: dict[str, Any]) -> None:
    """Of 14 adapters: X that a mask is drawn for, X again for the gradient of A, and what comes to X through A."""
    kernels = launches["dropout"]["kernels"]
    assert (kernels["aten.native_dropout"], kernels["aten.native_dropout_backward"]) == (14, 28)
    without = launches["LoRA"]["kernels"]
    assert "aten.bernoulli_" not in kernels
    for name in ("aten.mul", "aten._to_copy", "aten._foreach_copy_"):
        assert kernels[name] == without[name]
