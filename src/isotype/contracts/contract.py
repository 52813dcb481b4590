"""An operator's contract says which operand dtypes it accepts on a device. Contracts were measured on real devices."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from isotype.compat.torch_device import device_type
from isotype.contracts.families import families_of, integer_refusal, transformed_sizes
from isotype.contracts.pattern import (
    CORRUPTS,
    LETTERS,
    RESULT_DTYPES,
    Spelled,
    fill,
    layout_of,
    letters_in,
    patterns_of,
)
from isotype.core.dtypes import HALVES
from isotype.core.tables import table
from isotype.precision.devices.profile import DeviceProfile, device_profile

TABLES = Path(__file__).parent / "tables"
KINDS: tuple[str, ...] = ("cpu", "cuda", "rocm", "xpu", "mps")
CPU_TABLES: tuple[str, ...] = ("cpu-avx2", "cpu-avx512", "cpu-amx")
"""Names of the tables of accepted dtypes for CPUs, by instruction set. Other devices refer to the first table."""

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})
_PRODUCTS = frozenset({"mul", "mm", "addmm"})
_NOT_IN_FLOAT8 = frozenset(
    {
        "add", "baddbmm", "bmm", "convolution", "div", "exp", "gelu", "linalg_vector_norm", "log",
        "log_softmax", "mean", "native_layer_norm", "neg", "pow", "relu", "rsqrt", "rsub", "sigmoid", "silu",
        "softmax", "sqrt", "sub", "sum", "tanh",
    }
)  # fmt: skip
_SCALED_MM = "aten._scaled_mm.default"
_MIXES_FLOAT8 = frozenset({"aten._to_copy.default", "aten.copy_.default", _SCALED_MM})
_FLOAT8_FROM = (8, 9)
NO_FLOAT8 = (
    "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
)

UNSPECIFIED = "?"
"""The table entry of an accepted call if the dtypes of its operands do not determine the dtype of its result."""

_INDEX_PUT = frozenset(
    f"aten.{name}.default" for name in ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
)
_LERP = frozenset({"aten.lerp.Tensor", "aten.lerp_.Tensor"})


def are_powers_of_two(sizes: Iterable[int]) -> bool:
    """Return True if an NVIDIA GPU has float16 Fourier transforms for these sizes."""
    return all(size & (size - 1) == 0 for size in sizes)


def is_exempt(op: str, args: Sequence[Any], kind: str = "cpu") -> bool:
    """Return True if a call runs although the contract of its operator does not allow the dtypes.

    Contracts ignore shapes and missing operands, but shapes or missing operands decide these cases:

    - cuFFT transforms float16, and complex numbers of float16, if each size is a power of two.
    - The batch norm of an NVIDIA or AMD GPU accepts running statistics of any dtype if the input is a matrix, or if
      there is no weight (`batch_norm_update_stats` in Normalization.cu).
    - `index_put` with bool masks accepts a single value of any dtype, because torch runs it as `masked_fill`.
    - `rrelu` outside of training is a leaky ReLU, which has kernels for every float dtype.
    - `lerp` accepts a 0-dim weight of any dtype (like `index_put`, measured on a CPU, torch 2.13).
    """
    if op == "aten.native_batch_norm.default":
        matrix, weight = args[:2]
        wide = torch.float32 if matrix.dtype in HALVES else matrix.dtype
        return kind in ("cuda", "rocm") and (weight is None or (matrix.dim() < 3 and weight.dtype == wide))
    if op.startswith("aten._fft_"):
        halves = (torch.float16, torch.complex32)
        return args[0].dtype in halves and are_powers_of_two(transformed_sizes(op, args))
    if op == "aten.rrelu_with_noise.default":
        return not any(args[4:5])  # a default is left out
    if op in _LERP:
        start, end, weight = args
        return bool(weight.dim() == 0 and start.dtype == end.dtype)
    if op not in _INDEX_PUT:
        return False
    _, indices, values, *_ = args
    masks = (torch.bool, torch.uint8)
    return values.numel() == 1 and all(index is None or index.dtype in masks for index in indices)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of calling an operator with operands of certain dtypes.

    Attributes:
        accepted: True if the operator runs, False if it raises.
        results: dtypes of the returned tensors. For an in-place operator, dtype of the changed tensor. It is empty if the
            operator raises, if it was not measured on this device, or if scalars, list lengths or 0-dim operands decide the
            dtype of the result. In these cases, the operator's fake kernel determines the dtypes.
        message: the device's error message if the operator raises, else "".
        assumed: True if the verdict was not measured on this device. It then follows from another device or from a rule.
    """

    accepted: bool
    results: tuple[torch.dtype, ...] = ()
    message: str = ""
    assumed: bool = False


@dataclass(frozen=True)
class TableName:
    """The file stem of a table: device kind, variant (`sm75`, `avx2` or ""), and torch's major and minor version."""

    name: str
    kind: str
    variant: str
    torch: str

    @property
    def words(self) -> str:
        """A description for a report, such as `cuda-sm75, measured with torch 2.13`."""
        return f"{self.kind}{f'-{self.variant}' if self.variant else ''}, measured with torch {self.torch}"


@dataclass(frozen=True)
class Table:
    """The measured contracts of one device, and the version of torch.

    `messages` are templates of error messages (see `isotype.contracts.pattern.Spelled`).
    `operators[overload][pattern]` contains a letter for the dtype of each result. If the operator raises an error, the
    entry is the index of the message.
    """

    torch_version: str
    messages: tuple[str, ...]
    operators: Mapping[str, Mapping[str, str | int]]


def read_table(path: Path) -> Table:
    """Return a table from a file of `isotype.contracts.measure`. A file with a `base` contains only differences from it."""
    content = json.loads(path.read_text(encoding="utf-8"))
    base = read_table(path.with_name(f"{content['base']}.json")) if "base" in content else Table("", (), {})
    start = len(base.messages)
    measured = {
        op: {key: entry + start if isinstance(entry, int) else entry for key, entry in patterns.items()}
        for op, patterns in content["operators"].items()
    }
    messages, operators = (*base.messages, *content["messages"]), {**base.operators, **measured}
    return Table(content["torch"], messages, operators)


@dataclass(frozen=True, eq=False)
class Contracts:
    """The contracts of a device.

    Attributes:
        measured: the table of a device of this kind; None if no such device was measured.
        reference: a CPU table. Its verdicts are assumed for operators and dtypes that were not measured.
        others: for a CPU that was not measured, the tables of other CPUs. If one of these tables has another verdict than
            `measured`, the verdict is marked as assumed.
        capability: compute capability of an NVIDIA GPU; None if unknown.
        table: name of the table `measured`; None if there is no such table.
        unlike: a clause on how this device differs from the measured device; "" if it does not differ.
    """

    kind: str
    measured: Table | None
    reference: Table
    others: tuple[Table, ...] = ()
    capability: tuple[int, int] | None = None
    table: TableName | None = None
    unlike: str = ""
    _memo: dict[tuple[str, tuple[torch.dtype, ...]], Verdict | None] = field(default_factory=dict, repr=False)

    def judge(self, op: str, dtypes: tuple[torch.dtype, ...]) -> Verdict | None:
        """Return the verdict on a call of `op` (`aten.mm.default`) with tensor operands of these dtypes.

        `dtypes` contains the dtypes of all tensor arguments in order, also of tensors in lists. Return None if only the
        fake kernel can decide: no table or family lists the call, or all operands are integers and no rule refuses
        them.
        """
        if (op, dtypes) not in self._memo:
            self._memo[op, dtypes] = self._judge(op, dtypes)
        return self._memo[op, dtypes]

    def refusal(self, op: str, dtypes: Iterable[torch.dtype]) -> Verdict | None:
        """Return the verdict if the device refuses the call; None if the device accepts the call or nothing is known."""
        verdict = self.judge(op, tuple(dtypes))
        return None if verdict is None or verdict.accepted else verdict

    def _judge(self, op: str, dtypes: tuple[torch.dtype, ...]) -> Verdict | None:
        refused = integer_refusal(op, dtypes, self.kind)
        if refused:
            return Verdict(False, message=refused, assumed=self.kind != "cpu")
        if op == _SCALED_MM and self.kind == "cuda" and (self.capability or _FLOAT8_FROM) < _FLOAT8_FROM:
            return Verdict(False, message=NO_FLOAT8, assumed=True)
        if not _FLOAT8.isdisjoint(dtypes) and op not in _MIXES_FLOAT8:
            return _float8_verdict(op, self.kind, dtypes)
        letters = [LETTERS.get(dtype, "") for dtype in dtypes]
        if not letters or "" in letters:
            return None
        integer = next((dtype for dtype in dtypes if LETTERS[dtype] == "i"), torch.int64)
        patterns = patterns_of(layout_of(op), letters)
        verdicts = [self._judge_pattern(op, pattern, integer) for pattern in patterns]
        known = [verdict for verdict in verdicts if verdict is not None]
        rejected = next((verdict for verdict in known if not verdict.accepted), None)
        if rejected is not None or set(letters) == {"i"}:
            return rejected
        if len(known) < len(verdicts):
            return None
        if len(known) == 1:
            return known[0]
        return Verdict(True, assumed=any(verdict.assumed for verdict in known))

    def _judge_pattern(self, op: str, pattern: str, integer: torch.dtype) -> Verdict | None:
        families = families_of(op, self.kind, self.capability)
        by_capability = any(family.majors is not None for family in families)
        # A family's rule for this capability counts more than a measurement on another capability.
        if self.measured is not None and not (self.unlike and by_capability):
            verdict = _look_up(self.measured, op, pattern, integer)
            if verdict is not None:
                disputed = any(_look_up(other, op, pattern, integer) != verdict for other in self.others)
                return replace(verdict, assumed=disputed or bool(self.unlike))
        if any(family.accepts and re.match(family.accepts, pattern) for family in families):
            return Verdict(True, assumed=True)
        breaches = (family.breach(pattern, integer) for family in families)
        breach = next((message for message in breaches if message is not None), None)
        if breach is not None:
            return Verdict(False, message=breach, assumed=True)
        if "d" in pattern and not families:
            refusal = _refusal_of_doubles(self.measured or self.reference, op, pattern, integer)
            if refusal is not None or self.kind == "cpu":
                return refusal
        verdict = _look_up(self.reference, op, pattern, integer)
        accepted = verdict is not None and verdict.accepted
        if verdict is not None and not accepted and not applies_to_cpus_only(verdict.message):
            return Verdict(False, message=verdict.message, assumed=True)
        return Verdict(True, assumed=True) if families or accepted else None


# A CPU's errors about missing kernels, misread operands and CPU libraries say nothing about other devices.
_CPU_ONLY = (
    *(CORRUPTS, " not implemented for ", "CPU", "MKL", "primitive descriptor", "flash_attention"),
    "Unsupported dtype Half",  # of `torch.fft`: GPUs transform float16
)


def applies_to_cpus_only(message: str) -> bool:
    """Return True if an error occurs only on CPUs, so that other devices may accept the same dtypes."""
    return any(mark in message for mark in _CPU_ONLY)


def _look_up(table: Table, op: str, pattern: str, integer: torch.dtype) -> Verdict | None:
    entry = table.operators.get(op, {}).get(pattern)
    if entry is None:
        return None
    if isinstance(entry, int):
        return Verdict(False, message=fill(table.messages[entry], letters_in(pattern), integer))
    if entry == UNSPECIFIED:
        return Verdict(True)
    return Verdict(True, tuple(RESULT_DTYPES[letter] for letter in entry))


def contracts_of(profile: DeviceProfile) -> Contracts:
    capability, variant = None, profile.contracts.partition("-")[2]
    if profile.kind == "cuda":
        capability = profile.capability
        variant = "" if capability is None else f"sm{capability[0]}{capability[1]}"
    return _contracts(profile.kind, variant, bool(profile.unlike), capability, TABLES)


def contracts_for(kind: str) -> Contracts:
    """Return the contracts of a device kind in `KINDS` or of a CPU table (`cpu-amx`). Raise ValueError for another name."""
    if kind in CPU_TABLES:
        return _contracts("cpu", kind.partition("-")[2], False, None, TABLES)
    if kind not in KINDS:
        raise ValueError(f"device kind {kind!r}: expected one of {', '.join(KINDS)}")
    return contracts_of(device_profile(kind)) if kind == "cpu" else _contracts(kind, "", False, None, TABLES)


def contracts_here(device: str) -> Contracts:
    """Return this machine's contracts for a torch device type, or the CPU's contracts for a type that is not in `KINDS`."""
    kind = "rocm" if device == "cuda" and torch.version.hip else device
    if kind == "cuda" and torch.cuda.is_available():
        return contracts_of(device_profile("cuda"))
    return contracts_for(kind if kind in KINDS else "cpu")


def doubts(profile: DeviceProfile) -> list[str]:
    """Return sentences that say why a check for a device may be wrong."""
    contracts = contracts_of(profile)
    table = contracts.measured or contracts.reference
    reasons = [f"{profile.unlike}: the check uses the table {profile.contracts}"] if profile.unlike else []
    if contracts.unlike and contracts.table is not None:
        reasons.append(f"{contracts.unlike}: the check uses the table {contracts.table.name}")
    measured, here = (Version(version).base_version for version in (table.torch_version, torch.__version__))
    if measured != here:
        reasons.append(f"operators were measured with torch {measured}, and the installed torch is {here}")
    if profile.kind == "cuda" and not profile.present and (profile.capability or (8, 0)) < (7, 5):
        reasons.append(
            f"torch is a build for CUDA 12.6, because builds for CUDA 13 do not run on {profile.title}"
        )
    return reasons


def judged_by(profile: DeviceProfile) -> str:
    """Describe the source of a device's contracts for a report."""
    table = contracts_of(profile).table
    return "rules for families of operators, from PyTorch's source" if table is None else table.words


@cache
def _contracts(
    kind: str, variant: str, unlike: bool, capability: tuple[int, int] | None, folder: Path
) -> Contracts:
    """Return the contracts of a device kind. Each table in `folder` is read once per process."""
    table = nearest(tables_in(folder), kind, variant, torch.__version__)
    measured = None if table is None else read_table(folder / f"{table.name}.json")
    others = tuple(_table(name) for name in CPU_TABLES if name != f"cpu-{variant}") if unlike else ()
    another = table is not None and bool(variant) and table.variant != variant
    dotted = f"{variant[2:-1]}.{variant[-1:]}"
    why = f"no operator was measured on compute capability {dotted}" if another else ""
    return Contracts(kind, measured, _table(CPU_TABLES[0]), others, capability, table, why)


@cache
def _table(name: str) -> Table:
    return read_table(TABLES / f"{name}.json")


_SHIFTED = (str.maketrans("df", "fb"), str.maketrans("d", "b"))
"""For a pattern with float64, the letters of two measured patterns that have bfloat16 (and float32) instead of float64."""


def _refusal_of_doubles(table: Table, op: str, pattern: str, integer: torch.dtype) -> Verdict | None:
    """Return a verdict of refusal if an operator is assumed to refuse float64 together with float32; else None.

    Few operators were measured with float64. If an operator of `table` refuses bfloat16 with float32 in both orders,
    it is assumed to refuse float64 with float32. A missing bfloat16 kernel does not count as such a refusal.
    """
    if "f" not in pattern:
        return None
    message = ""
    for shift in _SHIFTED:
        entry = table.operators.get(op, {}).get(pattern.translate(shift))
        message = table.messages[entry] if isinstance(entry, int) else ""
        if not message or applies_to_cpus_only(message):
            return None
    return Verdict(False, message=fill(message, letters_in(pattern), integer), assumed=True)


def _float8_verdict(op: str, kind: str, dtypes: tuple[torch.dtype, ...]) -> Verdict | None:
    """Return a verdict of refusal if an operator is known to refuse float8 operands; else None.

    No operator promotes float8 (see `promoteTypes` in c10/core/ScalarType.cpp). CPUs multiply float8 (measured with
    torch 2.13), but other devices only copy it.
    """
    floats = list(dict.fromkeys(dtype for dtype in dtypes if dtype.is_floating_point))
    if len(floats) < 2:
        name = op.partition(".")[2].partition(".")[0].strip("_")
        refused = name in _NOT_IN_FLOAT8 or (kind != "cpu" and name in _PRODUCTS)
        says = f"\"{name}_{kind}\" not implemented for '{Spelled(floats[0]):name}'"
        return Verdict(False, message=says, assumed=True) if refused else None
    first, second = (str(dtype).removeprefix("torch.") for dtype in floats[:2])
    message = f"Promotion for Float8 Types is not supported, attempted to promote {first} and {second}"
    return Verdict(False, message=message, assumed=True)


TABLE = TABLES / "autocast.json"

_CALLED = {
    name: called
    for called, names in table(__file__, "kernels.json")["called"].items()
    for name in names.split()
}
"""Maps a Python function to the function that it calls and that is in the autocast lists."""

_RESIZED = _CALLED["interpolate"]


@dataclass(frozen=True)
class AutocastLists:
    """The operators that autocast changes, without namespace and overload (`softmax`, `mm`, `linear`).

    Attributes:
        lower: operators whose float operands are cast to the autocast dtype.
        float32: operators whose float operands are cast to float32.
        promote: operators whose operands are cast to their widest float dtype.
        float32_opt: operators that compute and return float32 if no dtype is passed.
        banned: operators that raise an error under autocast.
    """

    lower: frozenset[str]
    float32: frozenset[str]
    promote: frozenset[str]
    float32_opt: frozenset[str]
    banned: frozenset[str]

    def treatment(self, function: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the name of the list that contains a function with these arguments: `banned`, `float32`, `promote`, `lower` or ""."""
        name = _CALLED.get(function, function)
        if name == _RESIZED and "area" in (kwargs.get("mode"), *args[3:4]):
            return ""  # `interpolate` then calls an average pool
        if name in self.float32_opt and kwargs.get("dtype") is None:
            return "float32"
        lists = ("banned", "float32", "promote", "lower")
        return next((kind for kind in lists if name in getattr(self, kind)), "")


@cache
def autocast_lists(kind: str) -> AutocastLists:
    """Return the autocast lists of a device kind (ROCm uses CUDA's). Raise ValueError for an unknown kind."""
    lists = json.loads(TABLE.read_text(encoding="utf-8"))["lists"]
    name = device_type(kind)
    if name not in lists:
        raise ValueError(f"autocast on device kind {kind!r}: expected one of {', '.join([*lists, 'rocm'])}")
    return AutocastLists(**{key: frozenset(operators) for key, operators in lists[name].items()})


_NAME = re.compile(
    r"(?P<kind>cpu|cuda|rocm|xpu|mps)(?:-(?P<variant>(?!torch)[a-z0-9]+))?(?:-torch(?P<torch>\d+\.\d+))?"
)
_FAR = 100


def table_name(kind: str, capability: tuple[int, int] | None, torch_version: str) -> str:
    """Return the name of a new table: `cuda-sm75-torch2.13`."""
    variant = f"-sm{capability[0]}{capability[1]}" if capability is not None else ""
    return f"{kind}{variant}-torch{_minor(torch_version)}"


def tables_in(folder: Path) -> tuple[TableName, ...]:
    names = []
    for path in sorted(folder.glob("*.json")):
        parts = _NAME.fullmatch(path.stem)
        if parts is not None:
            version = parts["torch"] or _minor(json.loads(path.read_text(encoding="utf-8"))["torch"])
            names.append(TableName(path.stem, parts["kind"], parts["variant"] or "", version))
    return tuple(names)


def nearest(tables: Sequence[TableName], kind: str, variant: str, torch_version: str) -> TableName | None:
    """Return the table to use for a device; None if no device of its kind was measured."""
    version = Version(torch_version)

    def distance(table: TableName) -> tuple[float, int, str]:
        measured = Version(table.torch)
        versions = _FAR * abs(measured.major - version.major) + abs(measured.minor - version.minor)
        return _variant_distance(table.variant, variant), versions, table.name

    return min((table for table in tables if table.kind == kind), key=distance, default=None)


def _variant_distance(measured: str, variant: str) -> float:
    """Return the distance of two variants. The major number counts most. If two variants are equally near, the older variant is nearer."""
    if measured == variant:
        return 0
    if not (measured.startswith("sm") and variant.startswith("sm")):
        return _FAR
    (major, minor), (wanted, within) = ((int(name[2:-1]), int(name[-1])) for name in (measured, variant))
    newer = 0.5 if (major, minor) > (wanted, within) else 0
    return 10 * abs(major - wanted) + abs(minor - within) + newer


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
