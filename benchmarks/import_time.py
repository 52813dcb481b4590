"""What `import isotype` costs beyond `import torch`: seconds, interleaved runs in fresh interpreters.

Run: python benchmarks/import_time.py [--runs 7] [--record]. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import results

_TIME = "import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"


def seconds(modules: str) -> float:
    """Time of one import in a fresh interpreter."""
    command = [sys.executable, "-c", _TIME.format(modules=modules)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Interleave the two imports, so that a slow moment hits both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=7)
    asked = results.parsed(parser)
    runs = asked.runs
    pairs = [(seconds("torch"), seconds("torch, isotype")) for _ in range(runs)]
    extra = [both - torch for torch, both in pairs]
    result = {
        "torch_s": statistics.median(torch for torch, _ in pairs),
        "extra_s": statistics.median(extra),
        "extra_min_s": min(extra),
        "extra_max_s": max(extra),
        "runs": runs,
    }
    print(f"import torch            {result['torch_s']:.3f} s")
    print(
        f"isotype on top of it    {result['extra_s']:+.3f} s ({min(extra):+.3f} to {max(extra):+.3f}, {runs} runs)"
    )
    if asked.record:
        spread = (result["extra_min_s"], result["extra_max_s"])
        results.append(
            "import/isotype",
            {
                "torch": results.Measure(result["torch_s"], "s"),
                "extra": results.Measure(result["extra_s"], "s", spread),
                "runs": results.Measure(runs),
            },
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
