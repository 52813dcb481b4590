"""Write docs/combinations.md from tests/combinations.json.

python -m tools.combinations                   # the page
python -m tools.combinations --record [TEXT]   # run the pairs whose name has TEXT first (all: half an hour), and write their outcomes
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.sources import ROOT

sys.path.insert(0, str(ROOT))

from tests.combinations import AXES, PAIRS, RECORD, key, measured, recorded

PAGE = ROOT / "docs" / "combinations.md"

_HEAD = """# Which options combine

This page shows which options of a training can be combined in pairs. **✓** means that a training step with both options runs. **✗** means that isotype refuses the
pair before it loads weights; the number after ✗ is the number of the error message in the list below. `tests/test_combinations.py` trains a tiny model on a CPU with
each pair, and with the default of every other option: `sft`, LoRA, no quantization, one process, no gradient checkpointing, no packing, a dense text model, no
`torch.compile`. FSDP2 and DDP run in two processes, and `compile` uses torch's backend `eager`. Combinations of three options, and GPUs, are not tested here.

"""


def page(outcomes: Mapping[str, str]) -> str:
    """The page of the outcomes: a table of pairs, and the refusals."""
    axes = list(AXES)
    reasons: dict[str, int] = {}
    lines = []
    for number, axis in enumerate(axes[:-1]):
        columns = [(other, value) for other in axes[number + 1 :] for value in AXES[other]]
        lines += ["", f"## {axis.capitalize()}", ""]
        lines += [
            "| | " + " | ".join(value for _, value in columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for left in AXES[axis]:
            cells = []
            for _, right in columns:
                refusal = outcomes[key((left, right))]
                cells.append("✓" if not refusal else f"✗ {reasons.setdefault(refusal, len(reasons) + 1)}")
            lines.append(f"| {left} | " + " | ".join(cells) + " |")
    lines += ["", "## Refusals", ""]
    lines += [f"{number}. {refusal}" for refusal, number in reasons.items()]
    return _HEAD + "\n".join(lines).lstrip() + "\n"


def record(text: str) -> dict[str, str]:
    """Run the pairs whose name has `text`; the outcomes with those that were known before."""
    outcomes = recorded() if RECORD.is_file() else {}
    for pair in PAIRS:
        if text in key(pair):
            with tempfile.TemporaryDirectory() as folder:
                outcomes[key(pair)] = measured(pair, Path(folder))
            print(f"{key(pair)}: {outcomes[key(pair)] or 'trains'}", flush=True)
            kept = {key(each): outcomes[key(each)] for each in PAIRS if key(each) in outcomes}
            RECORD.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    return outcomes


if __name__ == "__main__":
    arguments = sys.argv[1:]
    outcomes = record("".join(arguments[1:])) if arguments[:1] == ["--record"] else recorded()
    PAGE.write_text(page(outcomes), encoding="utf-8")
