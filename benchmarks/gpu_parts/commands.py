"""What a job starts itself: in the job's process group, so that it is killed with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """What the call asks for; the same in every job.

    Attributes:
        device: `cuda` or `cpu`.
        out: folder of the results, small and few.
        work: folder of models, checkpoints, caches and logs.
        small: toy shapes and short samples: to see that everything runs.
        layers: of the model of Llama-3-8B's shape.
    """

    device: str
    out: str
    work: str
    small: bool = False
    layers: int = 32

    @property
    def scratch(self) -> Path:
        """The work folder."""
        return Path(self.work)


class CommandError(Exception):
    """A command ended with another status than zero."""


def call(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, judges: bool = False
) -> str:
    """What a command prints.

    Args:
        command: its arguments.
        environment: variables beside this process's own.
        judges: its exit status is a judgement and no failure, where it has printed anything.

    Raises:
        CommandError: it failed, with the end of what it wrote.
    """
    variables = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, check=False)
    if done.returncode and not (judges and done.stdout.strip()):
        end = (done.stderr.strip() or done.stdout.strip())[-2500:]
        why = [line for line in end.splitlines() if "rror" in line] or end.splitlines() or ["nothing printed"]
        raise CommandError(
            f"{' '.join(command[1:4])} … ended with {done.returncode}: {why[-1].strip()}\n{end}"
        )
    sys.stderr.write(done.stderr[-2500:])
    return done.stdout


def isotype(*arguments: str) -> list[str]:
    """The command line of an isotype command."""
    return [sys.executable, "-m", "isotype", *arguments]


def sharded(*arguments: str) -> list[str]:
    """As `isotype`, by a launcher: one process is enough for NCCL to start, and for FSDP2 to gather and reduce on the device."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    return [*launcher, "-m", "isotype", *arguments]


def last_json(text: str) -> dict[str, Any]:
    """The last line of JSON in a text.

    Raises:
        CommandError: there is none.
    """
    import json

    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise CommandError(f"no line of JSON in what was printed: {text[-1000:]}")
    row: dict[str, Any] = json.loads(lines[-1])
    return row
