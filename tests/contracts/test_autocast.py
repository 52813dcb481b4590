"""The autocast lists: against torch's documentation, and measured again."""

from __future__ import annotations

import json

import pytest
import torch
from tools.autocast_lists import AUTOCAST_KINDS, category, registered

from isotype.contracts.contract import TABLE, autocast_lists


def test_the_lists_hold_what_torch_documents_for_cuda() -> None:
    cuda = autocast_lists("cuda")
    assert {
        "matmul",
        "linear",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "conv2d",
        "scaled_dot_product_attention",
    } <= cuda.lower
    assert {"layer_norm", "exp", "pow", "rsqrt", "mse_loss", "nll_loss", "cosine_similarity"} <= cuda.float32
    assert cuda.promote == {
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
        "tensordot", "vdot",
    }  # fmt: skip
    assert {"softmax", "log_softmax", "cumsum", "cumprod", "sum", "prod", "norm"} <= cuda.float32_opt
    assert cuda.banned == {"binary_cross_entropy"}


def test_devices_differ() -> None:
    cpu, cuda = autocast_lists("cpu"), autocast_lists("cuda")
    assert "softmax" not in cpu.float32 | cpu.float32_opt
    assert "layer_norm" in cuda.float32 - cpu.float32
    assert {"cat", "stack"} <= cpu.promote - cuda.promote
    assert "binary_cross_entropy" in cpu.float32
    assert autocast_lists("rocm") == cuda


def test_an_operator_is_on_one_list_only() -> None:
    for kind in AUTOCAST_KINDS:
        lists = json.loads(TABLE.read_text(encoding="utf-8"))["lists"][kind]
        names = [name for on in lists.values() for name in on]
        assert sorted(names) == sorted(set(names))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        ValueError, match="autocast on device kind 'tpu': expected one of cpu, cuda, xpu, mps, rocm"
    ):
        autocast_lists("tpu")


WRITTEN = json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.lacking(
    ""
    if WRITTEN["torch"] == torch.__version__
    else f"the lists are torch {WRITTEN['torch']}'s, this is {torch.__version__}"
)
@pytest.mark.parametrize("kind", AUTOCAST_KINDS)
def test_the_lists_are_what_this_torch_does(kind: str) -> None:
    where = {name: on for on, names in WRITTEN["lists"][kind].items() for name in names}
    names = registered(kind)
    unknown = set(WRITTEN["unknown"].get(kind, []))
    assert {name.partition("::")[2].partition(".")[0] for name in names} == set(where)
    for name in names[::6]:
        assert category(name, kind) == (
            None if name in unknown else where[name.partition("::")[2].partition(".")[0]]
        )


def test_measuring_leaves_autocast_as_it_was() -> None:
    before = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_KINDS]
    for kind in AUTOCAST_KINDS:
        category("aten::mm", kind)
    assert before == [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_KINDS
    ]


def test_what_the_list_says_happens_on_the_cpu() -> None:
    x, w = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bfloat16)
    cpu = autocast_lists("cpu")
    assert {"mm"} <= cpu.lower
    assert {"cat"} <= cpu.promote
    assert {"mse_loss"} <= cpu.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(x, x).dtype == torch.bfloat16
        assert torch.cat([x, w]).dtype == torch.float32
        assert torch.nn.functional.mse_loss(w, w).dtype == torch.float32
