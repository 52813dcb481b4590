"""A plan uses the cached result of `isotype quality`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from isotype.checkpoint.checkpoint import open_checkpoint, open_model
from isotype.checkpoint.resolve import save_measurement
from isotype.core.formats import MEASURED
from isotype.planning.from_request import measured_layers, totals
from isotype.precision.damages import Damages, LayerDamage


def test_what_was_measured_and_kept(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path))
    path = saved("llama")
    assert measured_layers(open_model(path)) is None
    layer = LayerDamage("model.layers.0.mlp.up_proj", 64, 64, dict.fromkeys(MEASURED, 0.5))
    key = open_checkpoint(path).fingerprint
    assert key is not None
    save_measurement(Damages("llama", key, "", "float32", "", 1, (layer, layer), {"nf4": 0.25}))
    damages = totals(measured_layers(open_model(path)))
    assert (damages["nf4"], damages["int8"], damages["float32"]) == (0.25, 1.0, 0.0)
    assert measured_layers(open_model(path / "config.json")) is None
    assert totals(None) == {}
