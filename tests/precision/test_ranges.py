from __future__ import annotations

from pathlib import Path

import pytest

from isotype.core.errors import CheckpointError
from isotype.precision.ranges import Ranges
from tests.precision.test_by_ranges import measured


def test_a_measurement_survives_its_file(tmp_path: Path) -> None:
    ranges = measured(block=104_000)
    assert Ranges.read(ranges.save(tmp_path / "ranges.json")) == ranges
    assert ranges.residual is not None
    assert ranges.residual.output == 104_000


@pytest.mark.parametrize("text", ["", "{}", '{"format": 0}', '{"format": 1}', "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "ranges.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"ranges\.json"):
        Ranges.read(tmp_path / "ranges.json")


def test_matmuls_are_what_autocast_runs_in_16_bits() -> None:
    by_op = {operator.op: operator.matmul for operator in measured().operators}
    assert by_op == {
        "aten.pow.Tensor_Scalar": False,
        "aten.bmm.default": True,
        "aten.add.Tensor": False,
        "aten.mul.Tensor": False,
    }
