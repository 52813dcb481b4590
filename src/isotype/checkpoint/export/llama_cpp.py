"""Types of GGUF that only llama.cpp itself writes: its `llama-quantize` is run where it is installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from isotype.checkpoint.formats.headers import read_headers
from isotype.core.dtypes import LLAMA_CPP_TYPES
from isotype.core.errors import SaveError, UsageError

PROGRAM = "llama-quantize"


def require_program(kind: str, adapter: Path, output: Path) -> None:
    """Whether `kind` can be written here.

    Raises:
        UsageError: it takes llama.cpp's program, which is not on the PATH.
    """
    if kind not in LLAMA_CPP_TYPES or shutil.which(PROGRAM):
        return
    final = output if output.suffix == ".gguf" else output / f"model-{kind}.gguf"
    dense = final.with_name(f"{final.stem}-f32.gguf")
    commands = (
        ("isotype", "merge", str(adapter), "-o", str(dense), "--gguf", "f32"),
        (PROGRAM, str(dense), str(final), kind.upper()),
    )
    raise UsageError.of(
        f"{kind} is written by llama.cpp alone",
        f"--gguf {kind}, and no {PROGRAM} on the PATH",
        f"{PROGRAM} of https://github.com/ggml-org/llama.cpp, or a type that is written without it (--gguf q8_0, q4_0)",
        f"put it on the PATH; or, where it is: {' && '.join(map(shlex.join, commands))}",
    )


def quantize(dense: Path, output: Path, kind: str) -> list[str]:
    """Let `llama-quantize` store a dense GGUF file in `kind`, and say which types it took.

    Args:
        dense: a GGUF file.
        output: the file to write.
        kind: one of `isotype.core.dtypes.LLAMA_CPP_TYPES`.

    Raises:
        SaveError: the program failed; what it wrote last is in the message.
    """
    command = [shutil.which(PROGRAM) or PROGRAM, str(dense), str(output), kind.upper()]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode or not output.is_file():
        lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
        failure = f"{shlex.join(command)}: exit status {result.returncode}; {' / '.join(lines[-3:])}"
        fix = "look at its message; --gguf f32 writes the file that it was given"
        raise SaveError.of(f"{PROGRAM} has failed", failure, "exit status 0", fix)
    counts = Counter(tensor.dtype_name.lower() for tensor in read_headers(output).tensors)
    types = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    return [f"{kind} is a mixture of {PROGRAM}'s: {types}"]
