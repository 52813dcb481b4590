from __future__ import annotations

import importlib.metadata
import sys
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from isotype.core.errors import PrecisionError
from isotype.precision.versions import (
    PACKAGES,
    Incompatibility,
    incompatibilities,
    incompatible_here,
    installed,
    installed_requirements,
    missing,
    pip_command,
    tightest,
)
from tests.refusals import refused


def test_installed_imports_nothing() -> None:
    before = set(sys.modules)
    found = installed()
    assert tuple(found) == PACKAGES
    assert found["torch"] == importlib.metadata.version("torch")
    assert not {"trl", "peft", "bitsandbytes"} & (set(sys.modules) - before)


def test_declared_requirement_that_fails() -> None:
    found = incompatibilities(
        {"peft": "0.15.0", "transformers": "5.23.0"}, {"transformers": ["peft>=0.20.0"]}
    )
    assert found == [
        Incompatibility(
            ("transformers 5.23.0", "peft 0.15.0"),
            "transformers 5.23.0 requires peft>=0.20.0, not 0.15.0",
            "peft>=0.20.0",
            "error",
        )
    ]


@pytest.mark.parametrize(
    ("requirement", "fires"),
    [
        ("torch>=2.6", True),
        ('torch>=2.6; extra == "torch"', True),  # the extra that isotype uses
        ('torch>=2.6; extra == "dev"', False),  # an extra that binds nobody
        ('torch>=2.6; python_version < "3"', False),
        ("torch (>=2.6)", True),
        ("torch", False),
        ("torch<3,>=2.0", False),
        ("peft>=1", False),  # not installed
    ],
)
def test_markers_and_extras(requirement: str, fires: bool) -> None:
    found = incompatibilities(
        {"transformers": "5.23.0", "torch": "2.5.0+cpu", "peft": None}, {"transformers": [requirement]}
    )
    assert bool(found) is fires


def test_demands_of_one_package_are_joined_and_names_normalised() -> None:
    found = incompatibilities(
        {"Hugging_Face.Hub": "0.1", "accelerate": "1.0"},
        {"accelerate": ["hugging-face-hub>=0.2", "hugging_face_hub>=0.3,<1"]},
    )
    assert [incompatibility.change for incompatibility in found] == ["hugging-face-hub<1,>=0.3"]


def test_what_is_installed_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (installed(), incompatible_here())

    def again(name: str) -> None:
        raise AssertionError(f"{name} is read again")

    for name in ("version", "requires", "distribution"):
        monkeypatch.setattr(importlib.metadata, name, again)
    assert (installed(), incompatible_here()) == before


def test_a_package_that_is_not_installed_demands_nothing() -> None:
    assert incompatibilities({"peft": None, "torch": "2.6"}, {"peft": ["torch>=99"]}) == []


def test_unreadable_versions_and_requirements_are_said_not_raised() -> None:
    found = incompatibilities(
        {"gguf": "weird", "peft": "0.20"}, {"peft": ["torch >>> 3"], "gguf": ["peft>=1"]}
    )
    assert [(incompatibility.severity, incompatibility.fact) for incompatibility in found] == [
        ("error", "gguf weird requires peft>=1, not 0.20"),
        ("warning", "gguf has the version 'weird', which is not a version number, so it was not compared"),
        ("warning", "peft 0.20 declares 'torch >>> 3', which is not a requirement; it was not compared"),
    ]


_ANY_VERSION = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.from_regex(r"[0-9]{1,2}\.[0-9]{1,2}(\.[0-9])?(rc1|\.dev0|\+cu130)?", fullmatch=True),
)


@given(
    versions=st.dictionaries(st.sampled_from((*PACKAGES, "isotype")), _ANY_VERSION),
)
def test_no_combination_raises(versions: dict[str, str | None]) -> None:
    found = incompatibilities(versions, _REAL_REQUIREMENTS)
    assert all(incompatibility.fact and incompatibility.packages for incompatibility in found)
    severities = [incompatibility.severity for incompatibility in found]
    assert severities == sorted(severities)  # "error" sorts before "warning"
    missing(versions)
    command = pip_command(found)
    assert (command is None) is (not found)


_REAL_REQUIREMENTS = installed_requirements()


def test_requirements_of_the_installed_packages() -> None:
    assert any(line.startswith("tokenizers") for line in _REAL_REQUIREMENTS["transformers"])


@pytest.mark.parametrize(
    ("module", "constant", "package"),
    [
        ("transformers.utils.import_utils", "ACCELERATE_MIN_VERSION", "accelerate"),
        ("transformers.utils.import_utils", "BITSANDBYTES_MIN_VERSION", "bitsandbytes"),
        ("transformers.utils.import_utils", "GGUF_MIN_VERSION", "gguf"),
        ("transformers.integrations.peft", "MIN_PEFT_VERSION", "peft"),
    ],
)
def test_what_transformers_checks_at_run_time_is_within_our_bounds(
    module: str, constant: str, package: str
) -> None:
    least = getattr(import_module(module), constant)
    below = f"{Version(least).major}.{max(0, Version(least).minor - 1)}"
    ours = {"isotype": _REAL_REQUIREMENTS["isotype"]}
    facts = [one.fact for one in incompatibilities({package: below, "isotype": installed_version()}, ours)]
    assert any(f"requires {package}" in fact and f"not {below}" in fact for fact in facts)


def installed_version() -> str:
    return importlib.metadata.version("isotype")


def test_this_environment_has_no_conflict() -> None:
    assert incompatible_here() == ()


def test_missing_extra() -> None:
    requires = ["torch>=2.6", 'peft>=0.19; extra == "train"', 'trl; extra == "train"', 'ruff; extra == "dev"']
    assert missing({"torch": "2.13", "peft": None}, requires=requires) == ["peft>=0.19", "trl"]
    assert missing({"peft": "0.1", "trl": "1"}, requires=requires) == []


def test_missing_without_installed_isotype(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert refused(PrecisionError, missing, {}) == (
        "isotype is not installed, so its extras are unknown\n"
        "  - isotype, imported from its source tree\n"
        "    expected  an installed isotype\n"
        "    fix       run pip install -e . in that tree"
    )


@given(
    st.lists(
        st.tuples(st.sampled_from([">=", "<", "!=", "<="]), st.integers(0, 9), st.integers(0, 9)), max_size=6
    ),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_tightest_admits_the_same_versions(parts: list[tuple[str, int, int]], major: int, minor: int) -> None:
    full = SpecifierSet(",".join(f"{operator}{a}.{b}" for operator, a, b in parts))
    version = Version(f"{major}.{minor}")
    assert tightest(full).contains(version) == full.contains(version)
    operators = [part.operator for part in tightest(full)]
    assert operators.count(">=") <= 1
    assert operators.count("<") <= 1


def test_pip_command_joins_demands() -> None:
    found = incompatibilities(
        {"a": "1", "b": "1", "torch": "1"}, {"a": ["torch>=2.4"], "b": ["torch>=2.6,<3"]}
    )
    assert pip_command(found, ["gguf>=0.17"]) == 'pip install --upgrade "torch<3,>=2.6" "gguf>=0.17"'
    assert pip_command([]) is None
