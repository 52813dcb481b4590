"""Describes a training step: its devices, settings, memory, FLOPs, and the lower bound of its time."""

from isotype.core.dtypes import dtype_name
from isotype.core.names import format_bytes, plural
from isotype.records.request import Setup
from isotype.records.trace import Trace
from isotype.report.check.record import Record
from isotype.report.html import format_number
from isotype.report.text import format_duration, format_flops, format_kinds, format_share


def device_words(setup: Setup) -> str:
    """Return the device of the step, with the number of devices if there are several: `"8 × NVIDIA T4"`."""
    return f"{setup.devices} × {setup.profile.title}" if setup.devices > 1 else setup.profile.title


def sharding_words(setup: Setup) -> str:
    """Describe how several devices train together, as in `"FSDP2 over 8 devices"`. Return "" for one device without FSDP."""
    if setup.devices == 1:
        return f"FSDP{setup.fsdp}" if setup.fsdp else ""
    if setup.deepspeed:
        return f"DeepSpeed on {setup.devices} devices"
    if not setup.fsdp:
        return f"DDP on {setup.devices} devices, each with all weights"
    kept = "" if setup.reshard else ", which keep gathered weights for the backward"
    return f"FSDP{setup.fsdp} over {setup.devices} devices{kept}"


def autocast_words(trace: Trace) -> str:
    """Return the autocast dtype of the step, or of a part of the step; "" without autocast."""
    if trace.setup.autocast is not None:
        return dtype_name(trace.setup.autocast)
    inside = next((call.autocast for call in trace.calls if call.autocast), None)
    return f"{dtype_name(inside)} in parts of the step" if inside else ""


def optimizer_words(setup: Setup) -> str:
    """Return the optimizers of the step, with the learning rates of their parameters."""
    rates: dict[str, set[str]] = {}
    for kind, rate in setup.updates.values() or [(setup.optimizer, setup.learning_rate)]:
        rates.setdefault(kind, set()).update(() if rate is None else (f"{rate:g}",))
    written = {kind: " or ".join(sorted(known, key=float)) for kind, known in rates.items()}
    return " and ".join(f"{kind} lr {known}" if known else kind for kind, known in written.items())


def setup_words(trace: Trace, whole: bool = True) -> str:
    """Describe the settings of the step. If `whole` is False, omit the adapted layers, and all inputs except the first."""
    setup, dtype = trace.setup, autocast_words(trace)
    autocast = f"autocast {dtype}" if dtype else ""
    scaler = "GradScaler" if setup.scaler else ""
    if whole:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in setup.batch.items())
        enabled = autocast or "no autocast", scaler or "no GradScaler"
        words = (*enabled, optimizer_words(setup), sharding_words(setup), *setup.details, shapes)
        return "   ".join(filter(None, words))
    name, shape = next(iter(setup.batch.items()), ("", ()))
    batch = f"{name} {list(shape)}" if name else ""
    if name == "input_ids" and len(shape) == 2:
        batch = f"{plural(shape[0], 'row')} of {shape[1]:,} tokens"
    details = (detail.partition(" on ")[0] for detail in setup.details)
    return ", ".join(filter(None, (batch, autocast, scaler, *details, sharding_words(setup))))


def step_words(report: Record) -> str:
    """Describe the minimum time of the step, and its peak memory if the step fits on the device. Return "" if both are unknown."""
    memory, limit, time, setup = report.memory, report.trace.setup.limit, report.time, report.trace.setup
    words = []
    if memory.peak_phase is not None and report.fits is not False:
        room = "" if limit.size is None else f" of {format_bytes(limit.size)} that a step may use"
        unsharded = ", if DeepSpeed shards and offloads nothing" if setup.deepspeed else ""
        words.append(f"peak {format_bytes(memory.peak)}{room}{_on_each(setup)}{unsharded}")
    if time is not None:
        rate = time.tokens_per_second
        tokens = "" if rate is None else f", at most {_figure(rate)} tokens/s{_on_each(setup)}"
        words.append(f"at least {format_duration(time.seconds)} a step{tokens}")
    return "; ".join(words)


def parts_words(report: Record) -> str:
    memory = report.memory
    if memory.peak_phase is None:
        return "not measured"
    return f"in {memory.peak_phase}: {format_kinds(memory.phases[memory.peak_phase], memory.peak / 100)}"


def memory_words(report: Record) -> str:
    memory, limit, devices = report.memory, report.trace.setup.limit, report.trace.setup.devices
    if memory.peak_phase is None:
        return "not measured"
    within = "" if limit.size is None else f", {'within' if report.fits else 'more than'} {limit}"
    on_each = f" on each of {devices} devices" if devices > 1 else ""
    return f"peak {format_bytes(memory.peak)} of any step{on_each}{within}, {parts_words(report)}"


def flops_words(report: Record) -> str:
    total = sum(report.flops.values())
    if not total:
        return "no matmul was traced"
    profile = report.trace.setup.profile
    shares, best = [], profile.best_dtype()
    for dtype, count in sorted(report.flops.items(), key=lambda entry: -entry[1]):
        support, slower = profile.supports(dtype), profile.slower(dtype, best) or 1.0
        remark = "" if support == "native" else f" ({support})"
        if slower >= 1.5 and 2 * count > total:
            remark = f" ({slower:.2g} times slower than {dtype_name(best)})"
        shares.append(f"{format_share(count / total)} {dtype_name(dtype)}{remark}")
    return f"{format_flops(total)} a step: {', '.join(shares)}"


def seconds_words(report: Record) -> str:
    """Describe the minimum time of the step according to the device's data sheet. Return "" if the device has no published rates."""
    time, setup = report.time, report.trace.setup
    if time is None:
        return ""
    apart = "; without communication" if setup.devices > 1 else ""
    rate = time.tokens_per_second
    tokens = "" if rate is None else f" ({_figure(rate)} tokens/s at most{_on_each(setup)})"
    return (
        f"at least {format_duration(time.seconds)} a step on {device_words(setup)}{tokens}: only matmuls, at the data sheet's rates, which no "
        f"device reaches; {format_duration(time.traced_seconds)} if all traced operators run one after another, bound by "
        f"{time.bound}{apart}"
    )


def roofline_words(report: Record) -> str:
    """Describe a step's time: matrix products, memory traffic, launches. Return "" without published rates."""
    time = report.time
    if time is None:
        return ""
    products = []
    for dtype, product in sorted(time.products.items(), key=lambda entry: -entry[1].seconds):
        other = product.emulated_in
        emulated = "" if other is None else f" (emulated in {dtype_name(other)})"
        rate = f"{format_flops(product.flops)} at {format_flops(product.flops_per_second)}/s"
        products.append(f"{dtype_name(dtype)} {rate}{emulated}")
    return (
        f"products {format_duration(time.products_seconds)} ({', '.join(products)}); memory traffic {format_duration(time.traffic_seconds)} "
        f"({_figure(time.bytes / 1e9)} GB at {_figure(time.bytes_per_second / 1e9)} GB/s); launch-bound if the host needs more "
        f"than {_figure(time.launch_seconds * 1e6)} µs per launch ({time.launches:,} launches)"
    )


def time_rows(report: Record) -> tuple[tuple[str, str], ...]:
    return ("time", seconds_words(report)), ("roofline", roofline_words(report))


def _on_each(setup: Setup) -> str:
    return " on each" if setup.devices > 1 else ""


def _figure(value: float) -> str:
    return format_number(value, 3) if value < 1000 else f"{value:,.0f}"
