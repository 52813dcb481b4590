"""`isotype ARGUMENTS` as one of several processes, without the check before the first step; its id is in the file FOLDER/RANK.

usage: torchrun --standalone --nproc_per_node N -m tests.distributed.one_rank FOLDER ARGUMENTS
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from isotype.__main__ import start
from isotype.train import callback


def main(folder: str, *arguments: str) -> None:
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    callback.before_first_step = lambda *_: None  # type: ignore[assignment]
    sys.argv = ["isotype", *arguments]
    sys.exit(start())


if __name__ == "__main__":
    main(*sys.argv[1:])
