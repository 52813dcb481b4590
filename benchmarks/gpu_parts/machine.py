"""Part 0: the device, the versions, and whether every library can be imported."""

from __future__ import annotations

import importlib
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from .commands import Options
from .runner import Row

NEEDED = (
    "numpy", "safetensors", "tokenizers", "transformers", "accelerate", "peft", "pyarrow", "datasets", "trl", "bitsandbytes", "gguf",
    "psutil", "rich", "jinja2", "isotype",
)  # fmt: skip
"""What isotype's commands import."""
USEFUL = (
    "triton",
    "liger_kernel",
    "pytest",
    "xdist",
    "hypothesis",
    "jsonschema",
    "pandas",
    "dill",
    "multiprocess",
)
"""What a peer, a kernel or the tests import."""


class ImportsError(Exception):
    """Libraries that isotype's commands need cannot be imported."""


def limits(options: Options) -> dict[str, float]:
    """Job -> seconds."""
    return {"device": 60.0, "imports": 180.0}


def run(options: Options, name: str) -> Iterator[Row]:
    """The results of a job."""
    yield from _JOBS[name](options)


def _device(options: Options) -> Iterator[Row]:
    row: dict[str, Any] = {
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    text = f"Python {row['python']}, torch {torch.__version__}"
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        row |= {"name": properties.name, "bytes": properties.total_memory}
        row |= {"capability": list(torch.cuda.get_device_capability(0)), "count": torch.cuda.device_count()}
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {text}"
    yield {**row, "text": text}
    program = shutil.which("nvidia-smi")
    if program is None:
        yield {"text": "nvidia-smi: not here"}
        return
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    yield {"nvidia-smi": done.stdout, "text": f"nvidia-smi: exit status {done.returncode}"}
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    yield {"packages": dict(sorted(versions.items()))}


def _imports(options: Options) -> Iterator[Row]:
    missing = []
    for name in (*NEEDED, *USEFUL):
        began = time.perf_counter()
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - what an import raises is what is asked for
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            kind = "failed" if name in NEEDED else "missing"
            yield {"import": name, kind: reason, "text": f"{name}: {reason}"}
            missing += [name] if name in NEEDED else []
            continue
        seconds = time.perf_counter() - began
        version = _version(name)
        yield {
            "import": name,
            "version": version,
            "file": getattr(module, "__file__", None),
            "seconds": round(seconds, 2),
            "text": f"{name} {version or ''} ({seconds:.1f} s)",
        }
    if missing:
        raise ImportsError(f"cannot be imported: {', '.join(missing)}")


def _version(module: str) -> str | None:
    names = metadata.packages_distributions().get(module, [module])
    try:
        return metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return None


_JOBS: dict[str, Callable[[Options], Iterator[Row]]] = {"device": _device, "imports": _imports}
