"""Incompatible versions of installed libraries, and the pip command that fixes them.

The requirements are read from the metadata of the packages, including isotype's metadata. No package is imported.
"""

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from isotype.core.errors import PrecisionError, Problem

PACKAGES: tuple[str, ...] = (
    "torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "safetensors", "datasets", "gguf",
    "huggingface-hub", "tokenizers", "numpy", "psutil",
)  # fmt: skip

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Incompatibility:
    """A conflict of versions.

    Attributes:
        packages: the packages in conflict, each as `"name version"`.
        change: the requirement to install with pip.
        severity: `"error"` if something will fail, and `"warning"` if something may fail.
    """

    packages: tuple[str, ...]
    fact: str
    change: str
    severity: Severity

    @property
    def command(self) -> str:
        return pip_command([self]) or self.change


# Package -> its extras whose requirements isotype uses; other extras (tests, docs) are ignored.
_EXTRAS: dict[str, tuple[str, ...]] = {
    "isotype": ("train",),
    "transformers": ("torch", "accelerate"),
    "trl": ("peft", "quantization"),
}
# --------------------------------------------------------------------------------------------- what is installed


# Cached: every check and policy reads all versions, which takes as long as a small trace.
@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str | None]:
    """Return the installed version of each package in `PACKAGES`; None for a missing package. No package is imported."""
    return {package: _version(package) for package in PACKAGES}


def installed_requirements() -> dict[str, list[str]]:
    """Return package -> requirement strings, from the metadata of isotype and of the installed packages in `PACKAGES`."""
    packages = filter(_version, (*PACKAGES, "isotype"))
    return {package: importlib.metadata.requires(package) or [] for package in packages}


# --------------------------------------------------------------------------------------------------- what clashes


def tightest(specifier: SpecifierSet) -> SpecifierSet:
    """Simplify a specifier by keeping only the highest `>=` and the lowest `<`. The simplified specifier allows the same versions."""
    bounds = {">=": max, "<": min}
    parts = [str(part) for part in specifier if part.operator not in bounds]
    for operator, pick in bounds.items():
        versions = [Version(part.version) for part in specifier if part.operator == operator]
        parts += [f"{operator}{pick(versions)}"] if versions else []
    return SpecifierSet(",".join(parts))


@lru_cache(maxsize=64)
def _demands(package: str, texts: tuple[str, ...]) -> tuple[dict[str, SpecifierSet], list[str]]:
    """Return (required package -> joined specifier, requirement strings that cannot be parsed)."""
    demands, unreadable = dict[str, SpecifierSet](), list[str]()
    extras = ("", *_EXTRAS.get(package, ()))
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            unreadable.append(text)
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            target = canonicalize_name(requirement.name)
            demands[target] = demands.get(target, SpecifierSet()) & requirement.specifier
    return demands, unreadable


def _declared(
    versions: Mapping[str, Version], labels: Mapping[str, str], requires: Mapping[str, Sequence[str]]
) -> Iterator[Incompatibility]:
    for package, texts in requires.items():
        owner = labels.get(canonicalize_name(package))
        if owner is None:  # the package is not installed
            continue
        demands, unreadable = _demands(package, tuple(texts))
        for text in unreadable:
            fact = f"{owner} declares {text!r}, which is not a requirement; it was not compared"
            yield Incompatibility((owner,), fact, package, "warning")
        for target, specifier in demands.items():
            version = versions.get(target)
            if version is not None and not specifier.contains(version, prereleases=True):
                change = f"{target}{tightest(specifier)}"
                fact = f"{owner} requires {change}, not {version}"
                yield Incompatibility((owner, labels[target]), fact, change, "error")


def incompatibilities(
    versions: Mapping[str, str | None], requires: Mapping[str, Sequence[str]]
) -> list[Incompatibility]:
    """Return all incompatibilities among the versions, with errors first.

    A version that is not a valid version number gives a warning, and is not compared.

    Args:
        versions: package -> version, or None if the package is not installed, as `installed` returns them.
        requires: package -> requirement strings, as `installed_requirements` returns them.
    """
    parsed, results = dict[str, Version](), list[Incompatibility]()
    labels = {"isotype": f"isotype {_version('isotype')}"}
    for package, text in versions.items():
        if text is None:
            continue
        name = canonicalize_name(package)
        labels[name] = f"{name} {text}"
        try:
            parsed[name] = Version(text)
        except InvalidVersion:
            fact = f"{name} has the version {text!r}, which is not a version number, so it was not compared"
            results.append(Incompatibility((labels[name],), fact, name, "warning"))
    declared: dict[tuple[str, ...], Incompatibility] = {}
    for incompatibility in _declared(parsed, labels, requires):
        declared.setdefault(incompatibility.packages, incompatibility)
    return sorted((*results, *declared.values()), key=lambda result: result.severity != "error")


def is_installed(package: str) -> bool:
    return _version(package) is not None


@cache
def incompatible_here() -> tuple[Incompatibility, ...]:
    return tuple(incompatibilities(installed(), installed_requirements()))


def version_problems() -> list[Problem]:
    """Return a problem for each installed library version that makes a training impossible."""
    errors = (conflict for conflict in incompatible_here() if conflict.severity == "error")
    return [Problem(" and ".join(e.packages), f"versions that fit: {e.fact}", e.command) for e in errors]


def missing(versions: Mapping[str, str | None], requires: Sequence[str] | None = None) -> list[str]:
    """Return the requirements of isotype's extra `train` that are not installed, as pip requirements.

    `requires` are isotype's requirement strings; None reads them from isotype's metadata.

    Raises:
        PrecisionError: isotype is not installed but runs from a source tree, so there is no metadata.
    """
    if requires is None:
        requires = _own_requirements()
    have = {canonicalize_name(package) for package, version in versions.items() if version is not None}
    wanted = [Requirement(text) for text in requires]
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in wanted
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": "train"})
        and not requirement.marker.evaluate({"extra": ""})
        and canonicalize_name(requirement.name) not in have
    ]


def _own_requirements() -> Sequence[str]:
    try:
        return importlib.metadata.requires("isotype") or ()
    except importlib.metadata.PackageNotFoundError:
        headline = "isotype is not installed, so its extras are unknown"
        what, fix = "isotype, imported from its source tree", "run pip install -e . in that tree"
        raise PrecisionError.of(headline, what, "an installed isotype", fix) from None


def pip_command(incompatible: Iterable[Incompatibility], absent: Iterable[str] = ()) -> str | None:
    """Return one pip command that fixes all incompatibilities and installs absent packages; None if nothing has to be done."""
    demands: dict[str, SpecifierSet] = {}
    for text in (*(incompatibility.change for incompatibility in incompatible), *absent):
        requirement = Requirement(text)
        demands[requirement.name] = demands.get(requirement.name, SpecifierSet()) & requirement.specifier
    if not demands:
        return None
    return "pip install --upgrade " + " ".join(f'"{name}{tightest(demands[name])}"' for name in demands)
