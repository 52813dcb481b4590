"""Writes the tables of docs/devices.md from the device profiles.

python -m tools.device_table
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from isotype.core.dtypes import COMPUTE_DTYPES, dtype_name
from isotype.precision.devices.names import records
from isotype.precision.devices.profile import DeviceProfile, _of_record

PAGE = Path(__file__).parents[1] / "docs" / "devices.md"
KINDS = {"cuda": "NVIDIA GPUs", "rocm": "AMD GPUs", "xpu": "Intel GPUs", "mps": "Apple GPUs", "cpu": "CPUs"}
_BEGIN, _END = "<!-- begin: devices -->", "<!-- end: devices -->"


def _row(profile: DeviceProfile) -> str:
    names = [profile.name, *records()[profile.name].get("aliases", ())]
    halves = [dtype for dtype in COMPUTE_DTYPES if dtype is not torch.float32 and dtype in profile.native]
    rates = {dtype: profile.peak_flops[dtype] for dtype in halves if dtype in profile.peak_flops}
    peak = rates or {d: rate for d, rate in profile.peak_flops.items() if d is torch.float32}
    cells = (
        profile.title,
        ", ".join(f"`{name}`" for name in names),
        ", ".join(map(dtype_name, halves)) or "none",
        f"{profile.memory_bytes / 2**30:.4g} GiB" if profile.memory_bytes else "",
        f"{max(peak.values()) / 1e12:,.4g}{'' if rates else ' (float32)'}" if peak else "",
        f"{profile.memory_bandwidth / 1e9:,.4g}" if profile.memory_bandwidth else "",
        re.sub(r"(https://\S+[^\s;,])", r"<\1>", profile.source),
    )
    return f"| {' | '.join(cells)} |"


def tables() -> str:
    """Return a table for each kind of device, in the order of `KINDS`; in a table, the order is that of profiles.json."""
    profiles, parts = list(map(_of_record, records())), []
    for kind, heading in KINDS.items():
        parts += [
            f"## {heading}",
            "",
            "| device | names | 16-bit dtypes in hardware | memory | peak TFLOP/s | GB/s | source |",
            "|---|---|---|---|---|---|---|",
            *(_row(profile) for profile in profiles if profile.kind == kind),
            "",
        ]
    return "\n".join(parts)


def filled(page: str) -> str:
    """Return the page with new tables between its markers."""
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}\n\n{tables()}\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
