"""Which installed libraries do not fit each other, and which one to change.

Two sources: what the packages themselves declare (their metadata, and the minimum versions that some check only at
run time), and `KNOWN`, pairs that no metadata shows, each with a public link. Nothing here imports the packages.
Everything works on a mapping of versions, so any combination can be asked about.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from isotype.core.errors import PrecisionError, Problem

PACKAGES: tuple[str, ...] = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "bitsandbytes",
    "safetensors",
    "datasets",
    "gguf",
    "huggingface-hub",
    "tokenizers",
    "numpy",
    "psutil",
)
"""The packages whose versions are looked at."""

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Incompatibility:
    """Two versions that do not work together.

    Attributes:
        packages: those concerned, each as `"name version"`.
        fact: what is wrong.
        change: what to install, as a pip requirement.
        severity: `"error"` when something will fail, `"warning"` when it may.
        link: a public page that shows it, or None where the packages' own metadata does.
    """

    packages: tuple[str, ...]
    fact: str
    change: str
    severity: Severity
    link: str | None = None

    @property
    def command(self) -> str:
        """What makes the change."""
        return pip_command([self]) or self.change


@dataclass(frozen=True)
class KnownPair:
    """A dependency that metadata does not show.

    Attributes:
        when: requirement on a package, or on a toolkit that torch was built for (`"cuda>=13"`); None for any.
        needs: requirement that must hold then.
        because: the reason, as a clause.
        link: a public page that shows it.
        kind: device kind this concerns (`"cpu"`, `"rocm"`, …), or None for all.
        severity: of a violation.
    """

    when: str | None
    needs: str
    because: str
    link: str
    kind: str | None = None
    severity: Severity = "error"


_BNB_DOCS = "https://huggingface.co/docs/bitsandbytes"
_BNB_GIT = "https://github.com/bitsandbytes-foundation/bitsandbytes"
_PYPI = "https://pypi.org/project"

# Of several rows for one pair of packages the first that is violated speaks: strictest first.
KNOWN: tuple[KnownPair, ...] = (
    KnownPair("transformers>=5.23", "torch>=2.6", "it disables torch below", f"{_PYPI}/transformers/5.23.0/"),
    KnownPair("transformers>=5.10", "torch>=2.4", "it disables torch below", f"{_PYPI}/transformers/5.10.0/"),
    KnownPair("transformers>=5", "torch>=2.2", "it disables torch below", f"{_PYPI}/transformers/5.0.0/"),
    KnownPair(
        "transformers>=5",
        "peft>=0.18.0",
        "it removed HybridCache, which older peft imports",
        "https://github.com/huggingface/transformers/pull/41889",
    ),
    KnownPair(
        "transformers>=5",
        "bitsandbytes>=0.46.1",
        "it refuses to quantize with an older one",
        f"{_PYPI}/transformers/5.0.0/",
    ),
    KnownPair(
        "transformers>=5",
        "accelerate>=1.1.0",
        "its Trainer refuses an older one",
        f"{_PYPI}/transformers/5.0.0/",
    ),
    KnownPair("transformers>=5", "gguf>=0.10.0", "it refuses an older one", f"{_PYPI}/transformers/5.0.0/"),
    KnownPair(
        "bitsandbytes>=0.45",
        "peft>=0.14.0",
        "older peft cannot merge adapters into int8 weights",
        f"{_BNB_GIT}/blob/main/CHANGELOG.md#0450",
        severity="warning",
    ),
    KnownPair(
        "numpy>=2",
        "torch>=2.3",
        "older torch was compiled against NumPy 1",
        "https://github.com/pytorch/pytorch/issues/107302",
    ),
    KnownPair(
        "cuda>=13",
        "bitsandbytes>=0.48.0",
        "older wheels hold no CUDA 13 binary",
        f"{_BNB_DOCS}/v0.48.1/installation",
    ),
    KnownPair(
        "cuda>=12.9",
        "bitsandbytes>=0.46.1",
        "older wheels hold no CUDA 12.9 binary",
        f"{_BNB_GIT}/issues/1688",
    ),
    KnownPair(
        "cuda>=12.8",
        "bitsandbytes>=0.45.3",
        "older wheels hold no CUDA 12.8 binary",
        "https://github.com/lllyasviel/stable-diffusion-webui-forge/pull/2712",
    ),
    KnownPair(
        None,
        "bitsandbytes>=0.46.0",
        "older ones quantize on CUDA devices only",
        f"{_BNB_DOCS}/v0.46.0/installation",
        kind="cpu",
    ),
    KnownPair(
        None,
        "bitsandbytes>=0.48.0",
        "it is the first with wheels for Intel GPUs",
        f"{_BNB_GIT}/pull/1770",
        kind="xpu",
    ),
    KnownPair(
        None,
        "bitsandbytes>=0.49.0",
        "it is the first with ROCm wheels",
        f"{_BNB_DOCS}/v0.49.0/installation",
        kind="rocm",
    ),
    KnownPair(
        None,
        "bitsandbytes>=0.49.0",
        "it is the first with macOS wheels",
        f"{_BNB_DOCS}/v0.49.0/installation",
        kind="mps",
    ),
    KnownPair(
        None,
        "torch>=2.3",
        'torch.amp.GradScaler("cpu") does not exist before',
        "https://github.com/pytorch/pytorch/pull/109993",
        kind="cpu",
    ),
)

# Extras that declare what isotype uses of a package; their other extras (tests, docs) bind nobody.
_EXTRAS: dict[str, tuple[str, ...]] = {
    "isotype": ("train",),
    "transformers": ("torch", "accelerate"),
    "trl": ("peft", "quantization"),
}
# Minimum versions that a package checks only when it gets there: (package, its file, constant, of which package).
_RUNTIME_MINIMUMS: tuple[tuple[str, str, str, str], ...] = (
    ("transformers", "transformers/utils/import_utils.py", "ACCELERATE_MIN_VERSION", "accelerate"),
    ("transformers", "transformers/utils/import_utils.py", "BITSANDBYTES_MIN_VERSION", "bitsandbytes"),
    ("transformers", "transformers/utils/import_utils.py", "GGUF_MIN_VERSION", "gguf"),
    ("transformers", "transformers/integrations/peft.py", "MIN_PEFT_VERSION", "peft"),
)


# --------------------------------------------------------------------------------------------- what is installed


# Every check and every policy asks what is installed; to read it takes as long as a small trace, and while a process runs
# it does not change.
@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str | None]:
    """The installed version of each of `PACKAGES`, None where it is missing; nothing is imported."""
    return {package: _version(package) for package in PACKAGES}


def toolkits() -> dict[str, str]:
    """The GPU toolkit this torch was built for: `{"cuda": "13.0"}`, `{"rocm": "7.1"}`, or nothing."""
    found = {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    return {name: version for name, version in found.items() if version}


def parse_constant(source: str, name: str) -> str | None:
    """The string assigned to `name` at the left margin of Python source, or None."""
    match = re.search(rf"""^{re.escape(name)}\s*(?::\s*\w+\s*)?=\s*["']([^"']+)["']""", source, re.MULTILINE)
    return match and match.group(1)


def _runtime_minimums(package: str) -> Iterator[str]:
    distribution = importlib.metadata.distribution(package)
    for owner, file, constant, target in _RUNTIME_MINIMUMS:
        path = Path(str(distribution.locate_file(file)))
        if owner != package or not path.is_file():
            continue
        minimum = parse_constant(path.read_text(encoding="utf-8"), constant)
        if minimum is not None:
            yield f"{target}>={minimum}"


def installed_requirements(versions: Mapping[str, str | None]) -> dict[str, list[str]]:
    """What the installed packages require, as requirement strings: metadata and run-time minimums.

    Only for packages whose version in `versions` is the installed one (metadata of others is not at hand), and
    for isotype itself.
    """
    asked = {**versions, "isotype": _version("isotype")}
    here = [package for package, version in asked.items() if version and version == _version(package)]
    return {package: list(_required(package)) for package in here}


@cache
def _required(package: str) -> tuple[str, ...]:
    return (*(importlib.metadata.requires(package) or ()), *_runtime_minimums(package))


# --------------------------------------------------------------------------------------------------- what clashes


def _applies(requirement: Requirement, package: str) -> bool:
    """Whether the markers hold here, with the extras of `package` that isotype uses."""
    marker = requirement.marker
    return marker is None or any(
        marker.evaluate({"extra": extra}) for extra in ("", *_EXTRAS.get(package, ()))
    )


def tightest(specifier: SpecifierSet) -> SpecifierSet:
    """The same set of versions with only the highest `>=` and the lowest `<` of each kind left."""
    bounds = {">=": max, "<": min}
    kept = [str(part) for part in specifier if part.operator not in bounds]
    for operator, pick in bounds.items():
        versions = [Version(part.version) for part in specifier if part.operator == operator]
        kept += [f"{operator}{pick(versions)}"] if versions else []
    return SpecifierSet(",".join(kept))


def _holds(specifier: SpecifierSet, version: Version) -> bool:
    return specifier.contains(version, prereleases=True)


@lru_cache(maxsize=64)
def _demands(package: str, texts: tuple[str, ...]) -> tuple[dict[str, SpecifierSet], list[str]]:
    """What `package` demands of each other package, all its lines joined; and the lines that cannot be read."""
    demands, unreadable = dict[str, SpecifierSet](), list[str]()
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            unreadable.append(text)
            continue
        if _applies(requirement, package):
            target = canonicalize_name(requirement.name)
            demands[target] = demands.get(target, SpecifierSet()) & requirement.specifier
    return demands, unreadable


def _declared(
    versions: Mapping[str, Version], labels: Mapping[str, str], requires: Mapping[str, Sequence[str]]
) -> Iterator[Incompatibility]:
    for package, texts in requires.items():
        owner = labels.get(canonicalize_name(package))
        if owner is None:  # not installed, so it demands nothing
            continue
        demands, unreadable = _demands(package, tuple(texts))
        for text in unreadable:
            fact = f"{owner} declares {text!r}, which is not a requirement; it was not compared"
            yield Incompatibility((owner,), fact, package, "warning")
        for target, specifier in demands.items():
            version = versions.get(target)
            if version is not None and not _holds(specifier, version):
                change = f"{target}{tightest(specifier)}"
                fact = f"{owner} requires {change}, not {version}"
                yield Incompatibility((owner, labels[target]), fact, change, "error")


def _known(
    versions: Mapping[str, Version], labels: Mapping[str, str], kind: str | None
) -> Iterator[Incompatibility]:
    for pair in KNOWN:
        needs, when = Requirement(pair.needs), Requirement(pair.when) if pair.when else None
        version = versions.get(needs.name)
        if version is None or _holds(needs.specifier, version) or pair.kind not in (None, kind):
            continue
        if when is None:
            subject, packages = f"a {pair.kind} device needs", [labels[needs.name]]
        elif when.name in versions and _holds(when.specifier, versions[when.name]):
            subject, packages = f"{labels[when.name]} needs", [labels[when.name], labels[needs.name]]
        else:
            continue
        fact = f"{subject} {pair.needs}, not {version}: {pair.because}"
        yield Incompatibility(tuple(packages), fact, pair.needs, pair.severity, pair.link)


def incompatibilities(
    versions: Mapping[str, str | None],
    requires: Mapping[str, Sequence[str]] | None = None,
    kind: str | None = None,
) -> list[Incompatibility]:
    """Everything in a set of versions that does not fit together; empty when all is well.

    Args:
        versions: package -> version, None where it is not installed (as `installed()` returns); `"cuda"` and
            `"rocm"` may name the toolkit that torch was built for (as `toolkits()` returns).
        requires: package -> requirement strings that it declares; by default those of the installed packages.
        kind: device kind to train on (`"cpu"`, `"cuda"`, `"rocm"`, `"xpu"`, `"mps"`); None leaves out what
            concerns one kind only.

    Returns:
        Errors first. A version that is not a version number is reported as a warning and not compared.
    """
    if requires is None:
        requires = installed_requirements(versions)
    parsed, found = dict[str, Version](), list[Incompatibility]()
    labels = {"isotype": f"isotype {_version('isotype')}"}
    for package, text in versions.items():
        if text is None:
            continue
        name = canonicalize_name(package)
        labels[name] = f"{name} {text}"
        try:
            parsed[name] = Version(text)
        except InvalidVersion:
            fact = f"{name} says its version is {text!r}, which is no version number; it was not compared"
            found.append(Incompatibility((labels[name],), fact, name, "warning"))
    seen = set[tuple[str, ...]]()
    for incompatibility in (*_declared(parsed, labels, requires), *_known(parsed, labels, kind)):
        if incompatibility.packages not in seen:
            found.append(incompatibility)
        seen.add(incompatibility.packages)
    return sorted(found, key=lambda incompatibility: incompatibility.severity != "error")


def is_installed(package: str) -> bool:
    """Whether a package is installed, whatever its version."""
    return _version(package) is not None


@cache
def incompatible_here(kind: str) -> tuple[Incompatibility, ...]:
    """What of the libraries installed here does not fit together, for training on a device kind."""
    return tuple(incompatibilities({**installed(), **toolkits()}, kind=kind))


def missing(
    versions: Mapping[str, str | None], extra: str = "train", requires: Sequence[str] | None = None
) -> list[str]:
    """The requirements of an extra of isotype whose package is not installed, as pip requirements.

    Args:
        versions: package -> version or None; a package not in it counts as not installed.
        extra: name of the extra.
        requires: what isotype declares; by default its own metadata.

    Raises:
        PrecisionError: isotype runs from source without being installed, so that it declares nothing.
    """
    if requires is None:
        requires = _own_requirements()
    have = {canonicalize_name(package) for package, version in versions.items() if version is not None}
    wanted = [Requirement(text) for text in requires]
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in wanted
        if requirement.marker is not None
        and requirement.marker.evaluate({"extra": extra})
        and not requirement.marker.evaluate({"extra": ""})
        and canonicalize_name(requirement.name) not in have
    ]


def _own_requirements() -> Sequence[str]:
    try:
        return importlib.metadata.requires("isotype") or ()
    except importlib.metadata.PackageNotFoundError:
        problem = Problem(
            "isotype, imported from its source tree",
            "an installed isotype",
            "run pip install -e . in that tree",
        )
        raise PrecisionError("isotype is not installed, so its extras are unknown", [problem]) from None


def pip_command(found: Iterable[Incompatibility], absent: Iterable[str] = ()) -> str | None:
    """One pip command that makes every change, with several demands on one package joined; None for no change."""
    demands: dict[str, SpecifierSet] = {}
    for text in (*(incompatibility.change for incompatibility in found), *absent):
        requirement = Requirement(text)
        demands[requirement.name] = demands.get(requirement.name, SpecifierSet()) & requirement.specifier
    if not demands:
        return None
    return "pip install --upgrade " + " ".join(f'"{name}{tightest(demands[name])}"' for name in demands)
