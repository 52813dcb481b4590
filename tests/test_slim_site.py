"""The folder of libraries for a machine without a network, from wheels of a few bytes: `tools/slim_site.py`."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools import slim_site
from tools.slim_site import PACKAGES, ROOT, is_kept, own_metadata, unpack, versions, wheel_of

MODELS = frozenset({"transformers/models/llama/modeling_llama.py"})


@pytest.mark.parametrize(
    "name",
    [
        "bitsandbytes/libbitsandbytes_cuda130.so",
        "bitsandbytes/libbitsandbytes_cpu.so",
        "bitsandbytes/nn/modules.py",
        "transformers/trainer.py",
        "transformers/models/__init__.py",
        "transformers/models/llama/modeling_llama.py",
        "transformers/models/opt/__init__.py",
        "transformers/models/opt/configuration_opt.py",
        "trl/trainer/sft_trainer.py",
        "trl/experimental/utils.py",
        "trl-1.0.dist-info/METADATA",
    ],
)
def test_what_is_run_is_kept(name: str) -> None:
    assert is_kept(name, "130", MODELS)


@pytest.mark.parametrize(
    "name",
    [
        "bitsandbytes/libbitsandbytes_cuda128.so",
        "bitsandbytes/libbitsandbytes_rocm72.so",
        "transformers/models/opt/modeling_opt.py",
        "transformers/models/llama/modular_llama.py",
        "trl/experimental/gold/gold_trainer.py",
        "multiprocess/tests/__init__.py",
        "trl-1.0.dist-info/RECORD",
        "trl/",
    ],
)
def test_what_is_not_run_is_left_out(name: str) -> None:
    assert not is_kept(name, "130", MODELS)


def test_versions_are_those_of_the_constraints() -> None:
    pinned = versions((ROOT / "constraints.txt").read_text())
    assert set(PACKAGES) <= set(pinned)
    assert versions("# a comment\nHuggingface_Hub==2.4.0\n")["huggingface-hub"] == "2.4.0"


def _wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def test_a_wheel_is_unpacked_without_what_is_left_out(tmp_path: Path) -> None:
    wheel = _wheel(
        tmp_path, "trl-1.16.0-py3-none-any.whl", {"trl/a.py": "a = 1\n", "trl/tests/b.py": "b = 1\n"}
    )
    assert wheel_of(tmp_path, "trl", "1.16.0") == wheel
    assert unpack(wheel, tmp_path / "site", lambda name: is_kept(name, "130", MODELS)) == 6
    assert [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "site").rglob("*.py")] == [
        "site/trl/a.py"
    ]


def test_a_wheel_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no rpds_py-1\.0-\*\.whl in "):
        wheel_of(tmp_path, "rpds-py", "1.0")


def test_the_folder_appears_whole_and_replaces_the_last(tmp_path: Path) -> None:
    pinned, wheels, out = (
        versions((ROOT / "constraints.txt").read_text()),
        tmp_path / "wheels",
        tmp_path / "site",
    )
    wheels.mkdir()
    out.mkdir()
    (out / "old.py").touch()
    for name in PACKAGES[:-1]:
        spelled = name.replace("-", "_")
        _wheel(wheels, f"{spelled}-{pinned[name]}-py3-none-any.whl", {f"{spelled}/__init__.py": "x = 1\n"})
    with pytest.raises(FileNotFoundError):
        slim_site.build(out, wheels, "3.12", "130", MODELS)
    assert (out / "old.py").is_file()
    last = PACKAGES[-1].replace("-", "_")
    _wheel(wheels, f"{last}-{pinned[PACKAGES[-1]]}-cp312-cp312-any.whl", {f"{last}/__init__.py": ""})
    sizes = slim_site.build(out, wheels, "3.12", "130", MODELS)
    assert sizes == dict.fromkeys(PACKAGES[:-1], 6) | {PACKAGES[-1]: 0}
    assert not (out / "old.py").exists()
    assert (out / "trl" / "__init__.py").is_file()


def test_isotype_has_its_metadata_there(tmp_path: Path) -> None:
    """As an installation's, which this environment has."""
    for name, text in own_metadata((ROOT / "pyproject.toml").read_text()).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (made,) = metadata.distributions(path=[str(tmp_path)])
    installed = metadata.distribution("isotype")
    assert made.version == installed.version
    assert {str(Requirement(text)) for text in made.requires or ()} == {
        str(Requirement(text)) for text in installed.requires or ()
    }
    points = [(point.group, point.name, point.value) for point in made.entry_points]
    assert points == [("pytest11", "isotype", "isotype.testing")]
