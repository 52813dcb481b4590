"""Libraries without the functions that isotype needs are refused before weights are read; newer ones are logged."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import trl
import trl.trainer.utils
from packaging.requirements import Requirement
from packaging.version import Version
from tools.patches import entries
from transformers import Trainer

from isotype.cli.main import main
from isotype.core import VERSION
from isotype.core.errors import UsageError
from isotype.precision.versions import installed
from isotype.train import libraries
from isotype.train.libraries import LAST_TESTED, newer_than_tested, require_fitting_libraries


def later_head(model: Any, temp: float = 1.0, cast_lm_head_to_fp32: bool = False, outputs: Any = ()) -> Any:
    """A head as in a TRL that has renamed the temperature."""

    def forward() -> Any:
        return temp, cast_lm_head_to_fp32, outputs

    return forward


def test_the_installed_libraries_fit() -> None:
    require_fitting_libraries()
    assert newer_than_tested() == []


def test_a_trl_that_renames_what_is_read_is_refused_by_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl.trainer.utils, "add_fused_lm_head", later_head)
    monkeypatch.setattr(
        libraries, "version", lambda library: "1.18.0" if library == "trl" else metadata.version(library)
    )
    with pytest.raises(UsageError) as raised:
        require_fitting_libraries()
    (problem,) = raised.value.problems
    expected = r"trl 1\.18\.0 under isotype \S+: the forward of add_fused_lm_head does not store temperature"
    assert re.fullmatch(expected, problem.given)
    assert problem.fix == "pip install 'trl==1.16.*', or install a newer isotype"


@pytest.mark.parametrize("name", ["SFTTrainer", "SFTConfig", "TrlParser", "ModelConfig", "get_peft_config"])
def test_a_name_that_trl_has_no_more_is_refused_before_arguments_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    names = [each for each in dir(trl) if each != name]
    monkeypatch.setattr(type(trl), "__dir__", lambda self: names)
    assert main(["sft", "--model_name_or_path", "nowhere", "--dataset_name", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: a library lacks functions that isotype needs\n")
    assert f"  - trl {metadata.version('trl')} under isotype {VERSION}: it has no {name}\n" in error


def test_the_result_of_trls_head_is_looked_for_before_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trl.trainer.utils, "FusedCausalLMOutput")
    with pytest.raises(UsageError, match=r"trl\.trainer\.utils has no FusedCausalLMOutput"):
        require_fitting_libraries()


def test_a_trainer_that_renames_a_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Trainer, "_save_checkpoint")
    with pytest.raises(UsageError, match="Trainer has no method _save_checkpoint"):
        require_fitting_libraries()


def test_a_newer_version_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(libraries, "installed", lambda: {**installed(), "trl": "1.17.2"})
    require_fitting_libraries()
    (record,) = caplog.records
    assert re.fullmatch(
        r"trl 1\.17\.2 is newer than 1\.16, the newest version tested with isotype \S+", record.getMessage()
    )


def test_upper_bounds_are_what_was_tried() -> None:
    """pyproject.toml bounds each library of docs/compat.md below the version after the last tested one."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    listed = map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["train"]))
    bounds = {each.name: each.specifier for each in listed}
    tried = {
        entry.library: entry.last_tried for entry in sorted(entries(), key=lambda entry: entry.last_tried)
    }
    for library, last_tried in LAST_TESTED.items():
        assert tried[library] == last_tried
    for library in tried.keys() & bounds.keys():
        last = Version(tried[library])
        assert f"{last}.99" in bounds[library], library
        assert f"{last.major}.{last.minor + 1}" not in bounds[library], library
