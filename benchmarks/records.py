"""What plan.py and foreseen.py print, added to the file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import results


def keep_plan(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Add a row for each plan, step and limit, and how many of the printed commands ended well."""
    for each in parts.get("time", ()):
        units = {"seconds": "s", "cpu_seconds": "s", "gib": "GiB", "rows": "rows"}
        results.append(f"plan-time/{each['plan']}", results.measured(each, **units))
    for each in parts.get("rows", ()):
        sizes = {name: each[name] / 2**20 for name in ("foreseen", "peak")}
        ratios = {
            "error": each["foreseen"] / each["peak"] - 1,
            "ratio": each["foreseen_speed"] / each["speed"],
        }
        units = {"foreseen": "MiB", "peak": "MiB", "error": "", "ratio": "×"}
        units |= {"foreseen_speed": "tokens/s", "speed": "tokens/s"}
        results.append(f"plan-rows/{each['row']}", results.measured({**each, **sizes, **ratios}, **units))
    for each in parts.get("largest", ()):
        sizes = {name: each[name] / 2**20 for name in ("limit", "room")}
        units = {"limit": "MiB", "room": "MiB", "rows": "rows", "ran": "rows"}
        name = each["case"].replace("0 of", "rows of")
        results.append(f"plan-largest/{name}", results.measured({**each, **sizes}, **units))
    for part in ("commands", "checks"):
        if ends := parts.get(part):
            good = sum(each["status"] == 0 for each in ends)
            counts = {"good": results.Measure(good), "all": results.Measure(len(ends))}
            results.append(f"plan-{part}/all", counts)


def keep_foreseen(seed: int, ratios: Sequence[float], near: float, far: float) -> None:
    """Add a seed's set-ups: how many foreseen peaks are within two bounds of the real ones, and the ratios' ends."""
    within = {
        name: sum(abs(ratio - 1) <= bound for ratio in ratios)
        for name, bound in (("near", near), ("far", far))
    }
    measures = {name: results.Measure(count) for name, count in {"setups": len(ratios), **within}.items()}
    measures["ratio"] = results.Measure(spread=(min(ratios), max(ratios)))
    results.append(f"foreseen/{seed}", measures)
