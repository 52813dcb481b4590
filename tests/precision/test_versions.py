from __future__ import annotations

import importlib.metadata
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from isotype.core.errors import PrecisionError
from isotype.precision.versions import (
    KNOWN,
    PACKAGES,
    Incompatibility,
    incompatibilities,
    installed,
    installed_requirements,
    missing,
    parse_constant,
    pip_command,
    tightest,
    toolkits,
)


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
    # 5.23 also needs torch 2.6 by the table of known pairs; only the declared one has no link.
    assert any(incompatibility.link is None for incompatibility in found) is fires


def test_demands_of_one_package_are_joined_and_names_normalised() -> None:
    found = incompatibilities(
        {"Hugging_Face.Hub": "0.1", "accelerate": "1.0"},
        {"accelerate": ["hugging-face-hub>=0.2", "hugging_face_hub>=0.3,<1"]},
    )
    assert [incompatibility.change for incompatibility in found] == ["hugging-face-hub<1,>=0.3"]


def test_what_is_installed_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (installed(), incompatibilities(installed()))

    def again(name: str) -> None:
        raise AssertionError(f"{name} is read again")

    for name in ("version", "requires", "distribution"):
        monkeypatch.setattr(importlib.metadata, name, again)
    assert (installed(), incompatibilities(installed())) == before


def test_a_package_that_is_not_installed_demands_nothing() -> None:
    assert incompatibilities({"peft": None, "torch": "2.6"}, {"peft": ["torch>=99"]}) == []


def test_unreadable_versions_and_requirements_are_said_not_raised() -> None:
    found = incompatibilities(
        {"gguf": "weird", "peft": "0.20"}, {"peft": ["torch >>> 3"], "gguf": ["peft>=1"]}
    )
    assert [(incompatibility.severity, incompatibility.fact) for incompatibility in found] == [
        ("error", "gguf weird requires peft>=1, not 0.20"),
        ("warning", "gguf says its version is 'weird', which is no version number; it was not compared"),
        ("warning", "peft 0.20 declares 'torch >>> 3', which is not a requirement; it was not compared"),
    ]


@pytest.mark.parametrize(
    ("versions", "kind", "expected"),
    [
        (
            {"transformers": "5.11.0", "torch": "2.3.1"},
            None,
            "transformers 5.11.0 needs torch>=2.4, not 2.3.1: it disables torch below",
        ),
        (
            {"transformers": "5.0.0", "peft": "0.17.1"},
            None,
            "transformers 5.0.0 needs peft>=0.18.0, not 0.17.1: it removed HybridCache, which older peft imports",
        ),
        (
            {"numpy": "2.1.0", "torch": "2.2.2"},
            None,
            "numpy 2.1.0 needs torch>=2.3, not 2.2.2: older torch was compiled against NumPy 1",
        ),
        (
            {"cuda": "13.0", "bitsandbytes": "0.47.0"},
            "cuda",
            "cuda 13.0 needs bitsandbytes>=0.48.0, not 0.47.0: older wheels hold no CUDA 13 binary",
        ),
        (
            {"bitsandbytes": "0.45.5"},
            "cpu",
            "a cpu device needs bitsandbytes>=0.46.0, not 0.45.5: older ones quantize on CUDA devices only",
        ),
        (
            {"bitsandbytes": "0.48.1"},
            "rocm",
            "a rocm device needs bitsandbytes>=0.49.0, not 0.48.1: it is the first with ROCm wheels",
        ),
        (
            {"torch": "2.2.0"},
            "cpu",
            'a cpu device needs torch>=2.3, not 2.2.0: torch.amp.GradScaler("cpu") does not exist before',
        ),
        (
            {"bitsandbytes": "0.45.0", "peft": "0.13.2"},
            None,
            "bitsandbytes 0.45.0 needs peft>=0.14.0, not 0.13.2: older peft cannot merge adapters into int8 weights",
        ),
    ],
)
def test_known_pairs(versions: dict[str, str | None], kind: str | None, expected: str) -> None:
    found = incompatibilities(versions, requires={}, kind=kind)
    assert [incompatibility.fact for incompatibility in found] == [expected]
    assert found[0].link is not None


@pytest.mark.parametrize(
    ("versions", "kind"),
    [
        ({"transformers": "4.57.0", "peft": "0.17.1", "torch": "2.3.0"}, None),
        ({"bitsandbytes": "0.45.5"}, "cuda"),
        ({"bitsandbytes": "0.45.5"}, None),
        ({"cuda": "12.6", "bitsandbytes": "0.45.0"}, "cuda"),
        ({"transformers": "5.23.0", "peft": None, "torch": "2.6.0"}, None),
        ({"numpy": "1.26.4", "torch": "2.2.2"}, "cuda"),
    ],
)
def test_known_pairs_stay_silent(versions: dict[str, str | None], kind: str | None) -> None:
    assert incompatibilities(versions, requires={}, kind=kind) == []


def test_every_known_pair_is_well_formed_and_reachable() -> None:
    silent = []
    for pair in KNOWN:
        needs = Requirement(pair.needs)
        assert pair.link.startswith("https://")
        low = {needs.name: "0.0.1"}
        if pair.when:
            when = Requirement(pair.when)
            low[when.name] = next(iter(when.specifier)).version
        changes = {each.change for each in incompatibilities(low, requires={}, kind=pair.kind)}
        silent += [] if pair.needs in changes else [pair]
    assert silent == []


_ANY_VERSION = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.from_regex(r"[0-9]{1,2}\.[0-9]{1,2}(\.[0-9])?(rc1|\.dev0|\+cu130)?", fullmatch=True),
)


@settings(deadline=None)
@given(
    versions=st.dictionaries(st.sampled_from((*PACKAGES, "cuda", "rocm", "isotype")), _ANY_VERSION),
    kind=st.sampled_from((None, "cpu", "cuda", "rocm", "xpu", "mps")),
)
def test_no_combination_raises(versions: dict[str, str | None], kind: str | None) -> None:
    found = incompatibilities(versions, _REAL_REQUIREMENTS, kind)
    assert all(incompatibility.fact and incompatibility.packages for incompatibility in found)
    severities = [incompatibility.severity for incompatibility in found]
    assert severities == sorted(severities)  # "error" sorts before "warning"
    missing(versions)
    command = pip_command(found)
    assert (command is None) is (not found)


_REAL_REQUIREMENTS = installed_requirements(installed())


def test_requirements_of_the_installed_packages_include_runtime_minimums() -> None:
    from transformers.integrations.peft import MIN_PEFT_VERSION
    from transformers.utils.import_utils import BITSANDBYTES_MIN_VERSION

    declared = _REAL_REQUIREMENTS["transformers"]
    assert f"peft>={MIN_PEFT_VERSION}" in declared
    assert f"bitsandbytes>={BITSANDBYTES_MIN_VERSION}" in declared
    assert "isotype" in _REAL_REQUIREMENTS
    other = installed_requirements({"transformers": "4.0.0"})
    assert "transformers" not in other  # its metadata is not at hand


def test_this_environment_has_no_conflict() -> None:
    versions = installed()
    assert incompatibilities({**versions, **toolkits()}, kind="cpu") == []


def test_parse_constant() -> None:
    source = 'A = 1\nMIN: str = "1.2"\n    INDENTED = "9"\nOTHER_MIN = "3"\n'
    assert parse_constant(source, "MIN") == "1.2"
    assert parse_constant(source, "INDENTED") is None
    assert parse_constant(source, "A") is None


def test_missing_extra() -> None:
    requires = ["torch>=2.6", 'peft>=0.19; extra == "train"', 'trl; extra == "train"', 'ruff; extra == "dev"']
    assert missing({"torch": "2.13", "peft": None}, requires=requires) == ["peft>=0.19", "trl"]
    assert missing({"peft": "0.1", "trl": "1"}, requires=requires) == []
    assert missing({}, extra="dev", requires=requires) == ["ruff"]


def test_missing_without_installed_isotype(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    with pytest.raises(PrecisionError) as caught:
        missing({})
    assert str(caught.value) == (
        "isotype is not installed, so its extras are unknown\n"
        "  - isotype, imported from its source tree\n"
        "    expected  an installed isotype\n"
        "    fix       run pip install -e . in that tree"
    )


@settings(deadline=None)
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
        {"a": "1", "b": "1", "torch": "1"}, {"a": ["torch>=2.4"], "b": ["torch>=2.6,<3"]}, kind=None
    )
    assert pip_command(found, ["gguf>=0.17"]) == 'pip install --upgrade "torch<3,>=2.6" "gguf>=0.17"'
    assert pip_command([]) is None
