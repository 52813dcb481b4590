"""Reports of `isotype inspect` (a checkpoint, a load plan, an adapter in a program) and of `isotype merge`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.checkpoint.inspect import Group, Inspection, PlanInspection
from isotype.checkpoint.merge.report import ENOUGH, share
from isotype.core.dtypes import dtype_name
from isotype.core.formats import MXFP4, QUANTIZATIONS, REQUESTABLE, why_kept
from isotype.core.json_records import encoded
from isotype.core.names import format_bytes, grouped, listed, plural, stacked, starred
from isotype.report.text import chat_commands, fitting, pair_table, say, say_labelled, show_commands, table_of

if TYPE_CHECKING:
    from isotype.checkpoint.consumers import Fit
    from isotype.checkpoint.inspect import PlanGroup
    from isotype.checkpoint.merge.report import LogitsDifference, MergeReport

_NAMES_SHOWN = 4
_NUMBERS = ("count", "weights", "bytes", "share")
_PLAN_KEYS = {
    PlanInspection: "path model file_bytes loaded_bytes groups tensors=plan.tensors tied=plan.match.tied "
    "initialised=plan.match.initialised buffers=plan.match.buffers",
    TensorHeader: "name dtype=dtype_name shape file begin bytes",
}
"""The keys of a load plan in JSON (see `isotype.core.json_records.Names`)."""
_DROPPED = ("shape", "bytes", "share", "count")
"""Columns that a table of tensors omits on a narrow console, in this order."""


def render_inspection(inspection: Inspection, console: Console) -> None:
    head = f"{inspection.path}  ({inspection.format}, {inspection.kind})"
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(fitting(_group_table(inspection), console, dropped=_DROPPED))
    console.print()
    console.print(fitting(_total_table(inspection), console))
    console.print()
    rows = {"quantization": inspection.quantization or "none", "config.json": inspection.config_dtype}
    for name, text in rows.items():
        if text:
            console.print(Text.assemble((f"{name:<14}", "dim"), text), soft_wrap=True)
    for line in mismatch_lines(inspection):
        say(console, line, "yellow")


_STYLES = {"applied": "green", "refused": "red"}  # yellow for the other effects


def render_fit(fit: Fit, console: Console) -> None:
    console.print(Text(f"{fit.adapter} in {fit.consumer}, on {fit.model}", style="bold"), soft_wrap=True)
    table = table_of("module", "tensors", f"in {fit.consumer}", numbers=("tensors",))
    for use in fit.uses:
        table.add_row(
            Text(use.module), str(use.tensors), Text(use.effect, style=_STYLES.get(use.effect, "yellow"))
        )
    console.print(fitting(table, console))
    console.print()
    for (effect, why, fix), uses in grouped(fit.uses, lambda use: (use.effect, use.why, use.fix)).items():
        if effect != "applied":
            count = plural(sum(use.tensors for use in uses), "tensor")
            say(console, f"{effect}: {count}: {why}; {fix}", _STYLES.get(effect, "yellow"))
    for note in fit.notes:
        say(console, f"note: {note}", "yellow")
    if fit.ok:
        say(console, f"{fit.consumer} applies every tensor with its trained values.", "green")


def mismatch_lines(inspection: Inspection) -> list[str]:
    """Return a line for each tensor dtype that is a minority in its group, for each group in an unusual dtype, and for each note."""
    lines = [
        f"mismatched: {listed([tensor.name for tensor in tensors], _NAMES_SHOWN)} {'is' if len(tensors) == 1 else 'are'} {dtype}, "
        f"the other {group.count - len(group.mismatched)} {group.dtype}"
        for group in inspection.groups
        for dtype, tensors in grouped(group.mismatched, lambda tensor: tensor.dtype).items()
    ]
    unlike = (group for group in inspection.groups if group.unlike is not None)
    lines += [f"mismatched: {group.name} is {group.dtype} in a {group.unlike} checkpoint" for group in unlike]
    return [*lines, *(f"note: {note}" for note in inspection.notes)]


def inspection_json(inspection: Inspection) -> dict[str, Any]:
    totals = {name: getattr(inspection.whole, name) for name in ("bytes", "tensors", "values")}
    return {**asdict(inspection), **totals}


def _group_table(inspection: Inspection) -> Table:
    table = table_of("tensors", "count", "dtype", "shape", "bytes", "share", numbers=_NUMBERS)
    for group in inspection.groups:
        marked = bool(group.mismatched) or group.unlike is not None
        table.add_row(
            Text(group.name),
            str(group.count),
            Text(group.dtype + (" !" if marked else ""), style="yellow" if marked else ""),
            shapes_of(group),
            format_bytes(group.bytes),
            _share(group.bytes, inspection.whole.bytes),
        )
    return table


def _total_table(inspection: Inspection) -> Table:
    table = table_of("dtype", "tensors", "weights", "bytes", "share", numbers=("tensors", *_NUMBERS))
    whole = inspection.whole
    rows = [(total, Text(total.dtype), _share(total.bytes, whole.bytes)) for total in inspection.totals]
    if len(rows) > 1:
        rows.append((whole, Text(whole.dtype, style="bold"), "100 %"))
    for total, name, part in rows:
        table.add_row(name, f"{total.tensors:,}", f"{total.values:,}", format_bytes(total.bytes), part)
    return table


def shapes_of(group: Group | PlanGroup) -> str:
    """Format the first shape of a group of tensors, and the number of other shapes in the group."""
    first = " × ".join(map(str, group.shapes[0])) or "scalar"
    others = len(group.shapes) - 1
    return f"{first} (+{plural(others, 'other')})" if others else first


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    return "< 0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


_REMARKABLE = ("initialised", "surplus", "warning", "not quantized", "dequantized")


def render_plan(inspection: PlanInspection, console: Console) -> None:
    console.print(Text(f"{inspection.path}  ({inspection.model})", style="bold"), soft_wrap=True)
    console.print(fitting(_plan_table(inspection), console, dropped=_DROPPED))
    console.print()
    read, loaded = format_bytes(inspection.file_bytes), format_bytes(inspection.loaded_bytes)
    say(console, f"bytes    {read} in the files, {loaded} loaded")
    policy = inspection.policy
    for role in ("storage", "compute", "pinned") if policy.pinned else ("storage", "compute"):
        if reason := policy.reasons.get(role, ""):
            say(console, f"{role:<9}{reason}")
    for line in plan_lines(inspection):
        say(console, line, "yellow" if line.startswith(_REMARKABLE) else "dim")


def plan_lines(inspection: PlanInspection) -> list[str]:
    """Return a line about each exception, such as tied or missing tensors, and the policy's warnings."""
    plan = inspection.plan
    lines = ["renamed: the files use other names for all tensors"] if _all_renamed(inspection) else []
    lines += [f"tied: {name} is {other}" for name, other in plan.match.tied.items()]
    for reason, names in grouped(plan.match.initialised, plan.match.initialised.__getitem__).items():
        lines.append(f"initialised: {listed(names)}: {reason}")
    surplus = list(dict.fromkeys(starred(tensor.weight.name) for tensor in plan.match.surplus))
    if surplus:
        count = plural(len(plan.match.surplus), "tensor")
        lines.append(f"surplus: {listed(surplus)} ({count}): not in the model")
    computed = list(dict.fromkeys(starred(name) for name in plan.match.buffers))
    if computed:
        lines.append(
            f"computed: {listed(computed)}: not in the files, because the model computes these buffers"
        )
    lines += [f"stored otherwise: {line}" for line in inspection.policy.layer_lines()]
    lines += storage_lines(inspection)
    return [*lines, *(f"warning: {warning}" for warning in inspection.policy.warnings)]


def storage_lines(inspection: PlanInspection) -> list[str]:
    """Return lines about 3-D weights that are not quantized, and about mxfp4 weights that are dequantized."""
    lines = []
    policy, tensors = inspection.policy, inspection.plan.tensors
    wide = [tensor for tensor in tensors if len(tensor.shape) == 3 and tensor.storage not in REQUESTABLE]
    if policy.storage in QUANTIZATIONS and wide:
        stays = f"stay in {listed(sorted({tensor.storage for tensor in wide}))}"
        lines.append(
            f"not quantized: {plural(len(wide), stacked(tensor.name for tensor in wide))} {stays}: "
            f"{why_kept(((tensor.name, tensor.shape) for tensor in wide), policy.storage)}"
        )
    floats = [tensor for tensor in tensors if tensor.stored == MXFP4 and hasattr(torch, tensor.storage)]
    if floats:
        read = format_bytes(sum(tensor.bytes for tensor in floats))
        loaded = sum(math.prod(tensor.shape) * getattr(torch, tensor.storage).itemsize for tensor in floats)
        lines.append(
            f"dequantized: {plural(len(floats), 'tensor')} of {MXFP4}, {read} in the files, {format_bytes(loaded)} "
            f"loaded in {listed(sorted({tensor.storage for tensor in floats}))} (--quantization {MXFP4} keeps {MXFP4})"
        )
    return lines


def plan_json(inspection: PlanInspection) -> dict[str, Any]:
    surplus = [tensor.weight.name for tensor in inspection.plan.match.surplus]
    return {**encoded(inspection, _PLAN_KEYS), "policy": inspection.policy.summary(), "surplus": surplus}


def _plan_table(inspection: PlanInspection) -> Table:
    heads = ("tensors", "count", "stored", "loaded", "conversion", "shape", "bytes")
    table = table_of(*heads, numbers=_NUMBERS, folded=("conversion",))
    renamed = _all_renamed(inspection)
    for group in inspection.groups:
        changed = group.stored != group.storage
        table.add_row(
            Text(group.name),
            str(group.count),
            Text(group.stored),
            Text(group.storage + (" (pinned)" if group.pinned else ""), style="bold" if changed else ""),
            Text(_how_words(group, renamed)),
            shapes_of(group),
            format_bytes(group.bytes),
        )
    return table


def _all_renamed(inspection: PlanInspection) -> bool:
    """Return True if all tensors have other names in the files than in the model. The report then has only one line about the names."""
    return all(group.how.startswith("renamed") for group in inspection.groups)


def _how_words(group: PlanGroup, renamed: bool) -> str:
    how = (group.how.removeprefix("renamed").removeprefix(", ") or "as stored") if renamed else group.how
    many = group.sources // group.count
    return f"{how} (of {many})" if many > 1 and how != "as stored" else how


def show_merge(console: Console, report: MergeReport, export: Sequence[str] = ()) -> None:
    """Print the result of a merge, and the next commands. `export`: command that writes a GGUF file, without the file's format."""
    console.print(fitting(pair_table(_rows(report)), console), highlight=False, markup=False)
    say_labelled(console, "note", "dim", report.notes)
    say_labelled(console, "warning", "yellow", report.warnings)
    if report.answers:
        pictures = report.logits is not None and report.logits.pictured > 0
        show_commands(console, chat_commands(report.model or report.output, pictures=pictures))
    if report.exportable and export:
        form = shlex.split("" if report.cheapest is None else report.cheapest.arguments)
        # If the smallest format is a float dtype, 8 bits were tried and keep too few digits.
        wide = form[1].replace("float", "f") if form[:1] == ["--dtype"] else "q8_0"
        chosen = form if "--gguf" in form else ("--gguf", wide)
        description = "write a GGUF file for llama.cpp and programs built on it"
        show_commands(console, {description: (*export, *chosen)})


def _weight_share(error: float) -> str:
    return f"{100 * error:.2f} % of" if error < 1 else f"{error:,.1f} ×"


def _rows(report: MergeReport) -> list[tuple[str, str]]:
    dequantized = f" (dequantized from {report.storage})" if report.storage in REQUESTABLE else ""
    rows = [
        ("adapter", str(report.adapter)),
        ("base", f"{report.base}{dequantized}"),
        ("dtype", f"{dtype_name(report.dtype)} ({report.dtype_reason})"),
        *([] if report.stored is None else [("stored as", report.stored)]),
        ("merged", f"{plural(len(report.weights), 'weight')}, {report.entries:,} entries changed"),
    ]
    if report.worst is not None:
        most = _weight_share(report.worst.relative_error).removesuffix(" of")
        lost = f"{_weight_share(report.median_error)} a weight's update (median)"
        rows.append(("lost to rounding", f"{lost}, {most} in {report.worst.name}"))
    if report.weights and report.vanished is not None:
        what = f"have the base model's {'quantized codes' if report.coded else 'values'} ({100 * report.vanished_share:.2f} %)"
        rows.append(("unchanged", f"{report.vanished:,} of these entries {what} after rounding"))
    if report.logits is not None:
        rows += _kept(report.logits)
    if report.cheapest is not None:
        rows.append(("smallest", f"format that keeps {share(ENOUGH)} of what was learned: {report.cheapest}"))
    return [*rows, ("output", f"{report.output} ({format_bytes(report.bytes)})")]


def _kept(logits: LogitsDifference) -> Iterator[tuple[str, str]]:
    behind = f", {logits.pictured} of them after an image" if logits.pictured else ""
    texts = f"{logits.source or 'texts of isotype'} ({logits.tokens:,} tokens{behind})"
    if logits.kept is not None:
        formula = "1 - KL(trained || merged) / KL(trained || base)"
        yield "kept", f"{share(logits.kept)} of what was learned: {formula}, on {texts}"
    apart, base_apart = f"{logits.max_abs:.3g} (KL {logits.mean_kl:.3g} nats)", f"{logits.base_kl:.3g} nats"
    yield (
        "logits",
        f"differ from the logits of the trained model by at most {apart}; the logits of the base model differ by KL {base_apart}",
    )
    if logits.losses is not None:
        base, trained, merged = logits.losses
        fall = "" if logits.fall is None else f" ({share(logits.fall)} of the reduction)"
        yield "loss", f"base {base:.4f}, trained {trained:.4f}, merged {merged:.4f}{fall}"
