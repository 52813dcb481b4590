"""Which of several tables judges a device, and what is said where none was measured on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isotype.contracts import contract
from isotype.contracts.contract import (
    TABLES,
    contracts_for,
    contracts_of,
    doubts,
    judged_by,
    nearest,
    table_name,
    tables_in,
)
from isotype.contracts.measure import write_json
from isotype.precision.devices.profile import device_profile

B, F, H = torch.bfloat16, torch.float32, torch.float16
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"


def names(*stems: str, folder: Path) -> Path:
    for stem in stems:
        table: dict[str, Any] = {
            "device": stem.partition("-")[0],
            "name": stem,
            "torch": "2.13.0",
            "date": "",
        }
        table |= {
            "messages": ["{0} != {1}"],
            "operators": {"aten.mm.default": {"bb": "b", "fb": 0}, EFFICIENT: {"bbb": "b"}},
        }
        write_json(folder / f"{stem}.json", table)
    return folder


@pytest.mark.parametrize(
    ("variant", "version", "name"),
    [
        ("sm75", "2.13.0+cu130", "cuda-sm75-torch2.13"),
        (
            "sm75",
            "2.11.0",
            "cuda-sm75-torch2.12",
        ),  # the same card by another torch, before another card by this one
        ("sm70", "2.13.0", "cuda-sm75-torch2.13"),
        ("sm86", "2.13.0", "cuda-sm89-torch2.13"),
        ("sm89", "2.13.0", "cuda-sm89-torch2.13"),
        ("sm120", "2.13.0", "cuda-sm90-torch2.13"),
        ("", "2.13.0", "cuda-sm75-torch2.13"),
    ],
)
def test_the_nearest_table(variant: str, version: str, name: str, tmp_path: Path) -> None:
    stems = (
        "cuda-sm75-torch2.12",
        "cuda-sm75-torch2.13",
        "cuda-sm80-torch2.13",
        "cuda-sm89-torch2.13",
        "cuda-sm90-torch2.13",
    )
    tables = tables_in(names(*stems, "cpu-avx2", "xpu-torch2.13", folder=tmp_path))
    assert len(tables) == 7
    found = nearest(tables, "cuda", variant, version)
    assert found is not None
    assert found.name == name
    assert nearest(tables, "mps", "", version) is None
    (tmp_path / "examples.json").write_text("{}")
    assert tables_in(tmp_path) == tables


def test_the_shipped_tables_are_named_by_the_scheme() -> None:
    shipped = tables_in(TABLES)
    assert {"cpu-avx2", "cpu-avx512", "cpu-amx"} <= {table.name for table in shipped}
    assert all(table.torch for table in shipped)
    for release, table in (
        ("2.13.0+cpu", "cpu-avx2"),
        ("2.14.1", "cpu-avx2"),
        ("2.15.0", "cpu-avx2-torch2.15"),
    ):
        chosen = nearest(shipped, "cpu", "avx2", release)
        assert chosen is not None
        assert chosen.name == table
    assert table_name("cuda", (7, 5), "2.13.0+cu130") == "cuda-sm75-torch2.13"
    assert table_name("cpu", None, "2.13.0") == "cpu-torch2.13"


def test_a_card_that_nobody_has_measured_is_judged_by_the_nearest_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names("cuda-sm90-torch2.13", folder=tmp_path)
    reference = contracts_for("cpu").reference
    monkeypatch.setattr(contract, "TABLES", tmp_path)
    monkeypatch.setattr(contract, "_table", lambda _name: reference)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    t4, h100 = device_profile("t4"), device_profile("h100")
    measured, assumed = (contracts_of(card).judge("aten.mm.default", (F, B)) for card in (h100, t4))
    assert measured is not None
    assert assumed == replace(measured, assumed=True)
    assert doubts(h100) == []
    assert doubts(t4) == [
        "no operator was measured on compute capability 7.5: the check uses the table cuda-sm90-torch2.13"
    ]
    assert judged_by(t4) == judged_by(h100) == "cuda-sm90, measured with torch 2.13"
    # An H100's word on bfloat16 attention is none on a T4, of which the kernels are known.
    refused, taken = (contracts_of(card).judge(EFFICIENT, (B, B, B)) for card in (t4, h100))
    assert refused is not None
    assert not refused.accepted
    assert taken is not None
    assert (taken.accepted, taken.assumed) == (True, False)


def test_what_judges_a_device_without_a_table() -> None:
    assert judged_by(device_profile("mi300x")) == "rules for families of operators, from PyTorch's source"
    assert judged_by(device_profile("cpu-amx")) == "cpu-amx, measured with torch 2.13"
