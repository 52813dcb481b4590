"""What `isotype check` of a checkpoint on disk costs more than a check of its config alone.

The checkpoint is compared with the model, tensor by tensor, from headers. The same command runs on both by turns, each
time in a fresh interpreter: a Llama of 1.1 billion parameters in bfloat16 (one file), and `embedded:smollm2`, a GGUF
file, where it is installed. *more* is the median of the differences of a pair of runs.

Run: python benchmarks/check_local.py [--runs 5] [--keep DIR]. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from load import prepared


def config_only(checkpoint: str, directory: Path) -> Path:
    """A directory with the config of a checkpoint, and nothing else."""
    from isotype.checkpoint.checkpoint import open_model

    open_model(checkpoint).model_config.save_pretrained(directory)
    return directory


def check(path: str) -> tuple[float, float]:
    """(seconds, seconds of processor time) of a check."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "isotype", "check", path, "--device", "a100", "--dtype", "bfloat16"]
    subprocess.run(command, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Check by turns and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="where the checkpoint is, or is written to")
    options = parser.parse_args()
    results = {}
    print(f"{'':<6} {'config':>8} {'CPU':>6} {'weights':>8} {'CPU':>6} {'more':>7} {'CPU':>6}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("llama", "gguf"):
            weights = prepared(name, options.keep or Path(scratch), small=False)
            alone = str(config_only(weights, Path(scratch) / f"{name}-config"))
            pairs = [(check(alone), check(weights)) for _ in range(options.runs + 1)][1:]
            found = {
                "config": [statistics.median(pair[0][clock] for pair in pairs) for clock in (0, 1)],
                "weights": [statistics.median(pair[1][clock] for pair in pairs) for clock in (0, 1)],
                "more": [statistics.median(b[clock] - a[clock] for a, b in pairs) for clock in (0, 1)],
            }
            results[name] = {**found, "pairs": pairs}
            cells = [f"{found[key][0]:>8.2f} {found[key][1]:>6.2f}" for key in found]
            print(f"{name:<6} {' '.join(cells)}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
