"""Builds a folder of the libraries that a GPU machine without a network lacks, small enough to be carried along: `site/`.

python -m tools.slim_site [--out site] [--python 3.12] [--cuda 130] [--wheels build/wheels]

pip downloads wheels for the target (Linux x86-64, any Python) in the versions of `constraints.txt`; of each, what is run there is unpacked:
bitsandbytes with one CUDA build and the CPU's, transformers with the models that the zoo of tests builds. torch, Triton, numpy, safetensors,
tokenizers, accelerate, pyarrow, pandas and pytest are taken to be there. isotype itself is run from its sources, the folder holds its
metadata. On the other machine: `PYTHONPATH=site:src python benchmarks/gpu.py`. Prints what each library takes.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 40 * 2**20
"""Bytes that the folder may take."""

PACKAGES = (
    "transformers", "trl", "peft", "datasets", "bitsandbytes", "liger-kernel", "dill", "multiprocess", "gguf", "rich",
    "jsonschema", "jsonschema-specifications", "referencing", "rpds-py",
)  # fmt: skip
_BESIDES = {"liger-kernel": "0.8.5"}
"""Versions of what the suite does without."""
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
_LEFT_OUT = (
    "*/tests/*", "*/test/*", "*.dist-info/RECORD", "*.dist-info/licenses/*", "*.dist-info/sboms/*", "transformers/cli/*",
    "transformers/exporters/*", "trl/experimental/*/*", "liger_kernel/megatron/*", "liger_kernel/ops/backends/_ascend/*",
)  # fmt: skip
_MODELS = "transformers/models/"


def versions(constraints: str) -> dict[str, str]:
    """Package -> version of the lines `name==version`."""
    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", constraints, re.MULTILINE)
    return _BESIDES | {name.lower().replace("_", "-"): version for name, version in pinned}


def download(folder: Path, python: str, pinned: dict[str, str]) -> None:
    """Fetch the wheels into a folder.

    Raises:
        subprocess.CalledProcessError: pip found no wheel for the target.
    """
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
    wanted = [f"{name}=={pinned[name]}" for name in PACKAGES]
    subprocess.run([*command, "--dest", str(folder), *wanted], check=True)


def wheel_of(folder: Path, name: str, version: str) -> Path:
    """The wheel of a package in a folder; a file's name spells `-` as `_`.

    Raises:
        FileNotFoundError: there is none.
    """
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    wheels = sorted(folder.glob(pattern))
    if not wheels:
        raise FileNotFoundError(f"no {pattern} in {folder}")
    return wheels[0]


def is_kept(name: str, cuda: str, models: frozenset[str]) -> bool:
    """Whether a file of a wheel belongs into the folder.

    Args:
        name: its path in the wheel.
        cuda: toolkit of the one CUDA build of bitsandbytes, `130`.
        models: files below `transformers/models` that are imported.
    """
    if name.endswith("/") or any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_OUT):
        return False
    if name.startswith("bitsandbytes/") and name.endswith(".so"):
        return name.endswith(("_cpu.so", f"_cuda{cuda}.so"))
    if name.startswith(_MODELS):
        file = name.rpartition("/")[2]
        return name in models or file == "__init__.py" or file.startswith("configuration_")
    return True


def unpack(wheel: Path, out: Path, keep: Callable[[str], bool]) -> int:
    """Unpack the files of a wheel that are kept; returns their bytes."""
    size = 0
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if keep(entry.filename):
                archive.extract(entry, out)
                size += entry.file_size
    return size


def own_metadata(pyproject: str) -> dict[str, str]:
    """isotype's metadata, as an installation has it: file below the folder -> content."""
    project = tomllib.loads(pyproject)["project"]
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {project['version']}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        for requirement in requirements:
            name, _, marker = requirement.partition(";")
            condition = f"({marker.strip()}) and " if marker else ""
            lines.append(f'Requires-Dist: {name.strip()}; {condition}extra == "{extra}"')
    points: list[str] = []
    for group, entries in project["entry-points"].items():
        points += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    folder = f"{project['name']}-{project['version']}.dist-info"
    return {
        f"{folder}/METADATA": "\n".join(lines) + "\n",
        f"{folder}/entry_points.txt": "\n".join(points) + "\n",
    }


def models_of_zoo() -> frozenset[str]:
    """Files below `transformers/models` that building the zoo imports, as a wheel names them; of the transformers installed here."""
    import torch
    import transformers
    from tests.zoo import ARCHITECTURES

    transformers.logging.set_verbosity_error()
    for architecture in ARCHITECTURES.values():
        architecture.build(torch.bfloat16)
        architecture.batch(dtype=torch.bfloat16)
    for name in (
        "LlamaTokenizerFast",
        "AutoTokenizer",
        "AutoProcessor",
        "AutoModelForSequenceClassification",
    ):
        getattr(transformers, name)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    root = Path(transformers.__file__).parents[1]
    paths = [Path(file) for file in files if file]
    names = {path.relative_to(root).as_posix() for path in paths if path.is_relative_to(root)}
    return frozenset(name for name in names if name.startswith(_MODELS))


def _models_apart(version: str) -> frozenset[str]:
    """`models_of_zoo` of a process of its own, in which nothing else is imported."""
    code = (
        "import json, transformers; from tools.slim_site import models_of_zoo;"
        "print(json.dumps([transformers.__version__, sorted(models_of_zoo())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    installed, files = json.loads(done.stdout.splitlines()[-1])
    if installed != version:
        raise SystemExit(
            f"transformers {installed} is installed, constraints.txt names {version}: the models of one may not be in the other"
        )
    return frozenset(files)


def build(out: Path, wheels: Path, python: str, cuda: str, models: frozenset[str]) -> dict[str, int]:
    """Build the folder from wheels that are there; returns library -> bytes.

    Raises:
        FileNotFoundError: a wheel is missing.
    """
    pinned = versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    scratch = out.with_name(out.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    sizes = {
        name: unpack(wheel_of(wheels, name, pinned[name]), scratch, lambda file: is_kept(file, cuda, models))
        for name in PACKAGES
    }
    for name, text in own_metadata((ROOT / "pyproject.toml").read_text(encoding="utf-8")).items():
        path = scratch / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    scratch.rename(out)
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "build" / "wheels", help="where downloads are kept"
    )
    parser.add_argument("--python", default="3.12", help="of the other machine")
    parser.add_argument("--cuda", default="130", help="toolkit of torch there, without a dot")
    options = parser.parse_args(arguments)
    pinned = versions((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    options.wheels.mkdir(parents=True, exist_ok=True)
    download(options.wheels, options.python, pinned)
    models = _models_apart(pinned["transformers"])
    sizes = build(options.out, options.wheels, options.python, options.cuda, models)
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{name:<28} {pinned[name]:<10} {size / 2**20:>6.2f} MiB")
    total = sum(sizes.values())
    print(
        f"{options.out}: {total / 2**20:.1f} MiB, at most {LIMIT / 2**20:.0f}; PYTHONPATH={options.out.name}:src"
    )
    return int(total > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
