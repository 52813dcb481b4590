"""Judges the set-ups of one code base; a line of JSON each. Started by benchmarks/foreign.py in the foreign environment."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
import warnings
from dataclasses import asdict

import torch

from foreign_code import language, science, training
from foreign_code.judge import Row, judge, warm_up

CASES = {**language.CASES, **science.CASES, **training.CASES}


def main() -> int:
    """Arguments: the code base's name, a pattern of set-ups, whether fixes are tried (`True`, `False`)."""
    name, pattern, fixes = sys.argv[1:4]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    warm_up()
    for case in CASES[name]():
        if not re.search(pattern, case.name):
            continue
        try:
            row = judge(name, case, fixes == "True")
        except Exception as error:  # noqa: BLE001 - a set-up that cannot be judged is a row of the table
            traceback.print_exc()
            row = Row(
                name, case.name, real=f"not judged: {type(error).__name__}: {error}"[:300], verdict=False
            )
        print("ROW " + json.dumps(asdict(row)), flush=True)
    print("END")
    return 0


if __name__ == "__main__":
    sys.exit(main())
