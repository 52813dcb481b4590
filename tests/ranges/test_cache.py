"""Measurements that are kept: found again wherever the checkpoint lies, and only where it is the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import isotype
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.checkpoint.resolve import read_measurement, save_measurement
from isotype.core.errors import SaveError
from isotype.precision.ranges import Ranges
from tests.models import save_tiny, tiny_batch, tiny_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ranges"


@pytest.fixture(scope="module")
def measured(saved: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Ranges:
    """The measurement of a saved model, kept in a folder that no test reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOTYPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return isotype.measure_ranges(saved("llama"))


def files(directory: Path) -> list[str]:
    return sorted(str(each.relative_to(directory)) for each in directory.rglob("*"))


def cached(path: Path) -> Ranges | None:
    key = open_checkpoint(path).fingerprint
    assert key is not None
    return read_measurement(Ranges, key)


def test_a_measurement_is_found_again_beside_nothing_of_the_users(tmp_path: Path, cache: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    before = files(path)
    assert cached(path) is None
    ranges = isotype.measure_ranges(path)
    assert files(path) == before
    assert [each.name for each in cache.iterdir()] == [f"{ranges.key}.json"]
    moved = Path(shutil.copytree(path, tmp_path / "elsewhere" / "copy"))
    assert cached(moved) == ranges


def test_another_model_of_the_same_headers_is_another_one(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    before = open_checkpoint(path).fingerprint
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 2
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert open_checkpoint(path).fingerprint != before


def test_the_config_counts(tmp_path: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    before = open_checkpoint(path).fingerprint
    config = path / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert open_checkpoint(path).fingerprint != before


def test_a_damaged_file_counts_as_none(saved: Callable[..., Path], measured: Ranges, cache: Path) -> None:
    path = saved("llama")
    kept = cache / f"{measured.key}.json"
    kept.parent.mkdir(parents=True)
    for damage in ("", "{", '{"format": 0}', "[]", '{"format": 1}'):
        kept.write_text(damage)
        assert cached(path) is None
    again = isotype.measure_ranges(path)
    assert again.modules == measured.modules
    assert cached(path) == again


def test_a_measurement_on_the_users_batch_is_not_kept(tmp_path: Path, cache: Path) -> None:
    path = save_tiny("llama", tmp_path / "model")
    ranges = isotype.measure_ranges(path, tiny_batch("llama"))
    assert ranges.text == "the batch given"
    assert ranges.key == open_checkpoint(path).fingerprint
    assert not cache.exists()


def test_a_model_in_memory_has_no_key() -> None:
    ranges = isotype.measure_ranges(tiny_model("llama"), tiny_batch("llama"))
    assert ranges.key == ""
    with pytest.raises(ValueError, match="a model in memory has no cache key"):
        save_measurement(ranges)


def test_infinity_and_nan_are_kept(tmp_path: Path, cache: Path) -> None:
    model = tiny_model("llama", torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(2.0**127)
    model.save_pretrained(tmp_path / "model")
    ranges = isotype.measure_ranges(tmp_path / "model")
    assert ranges.by_module["model.layers.0.mlp.up_proj"].output == float("inf")
    (note,) = [each for each in ranges.notes if "not finite" in each]
    assert note.startswith("not finite in float32: aten.mm.default in model.layers.0.mlp.up_proj (")
    assert note.endswith("result infinite")
    found = cached(tmp_path / "model")
    assert found is not None
    assert found.to_json() == ranges.to_json() == Ranges.from_json(ranges.to_json()).to_json()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny("llama", tmp_path / "model")
    (tmp_path / "ranges").write_text("a file where the folder would be")
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path))
    ranges = isotype.measure_ranges(path)
    assert ranges.notes[-1].startswith(
        f"the measurement was not cached: {tmp_path}/ranges/{ranges.key}.json: "
    )
    with pytest.raises(SaveError, match="the measurement of ranges cannot be cached"):
        save_measurement(ranges)
