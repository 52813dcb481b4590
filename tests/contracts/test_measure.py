"""Measuring: the shipped table against this machine, and what happens to calls that fail."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.sweep_operators import trimmed
from hypothesis import given
from hypothesis import strategies as st

from isotype.contracts.contract import (
    CPU_TABLES,
    TABLES,
    Contracts,
    Table,
    Verdict,
    contracts_for,
    contracts_of,
    read_table,
    tables_in,
)
from isotype.contracts.example import NotAnExampleError, decode, encode, is_float, tensors_in
from isotype.contracts.measure import (
    EXAMPLES,
    combinations,
    difference,
    measure,
    measure_operator,
    write_json,
)
from isotype.contracts.pattern import CORRUPTS, fill, layout_of, letters_in
from isotype.precision.devices.cpu import this_cpu, this_onednn
from isotype.precision.devices.profile import cpu_profile, device_profile
from tests.cpus import MACHINE, seeing
from tests.processes import Ended, run_code, run_module

with seeing(MACHINE):
    HERE = cpu_profile(this_cpu(), None, this_onednn())
TABLE = contracts_of(HERE).measured
assert TABLE is not None
WHOLE = read_table(TABLES / f"{CPU_TABLES[0]}.json")
RELEASES = [table.name for table in tables_in(TABLES) if table.kind == "cpu" and table.name not in CPU_TABLES]
RECORDED: dict[str, list[Any]] = json.loads(EXAMPLES.read_text(encoding="utf-8"))
CPU = torch.device("cpu")

# The operators that carry a training step, and every twelfth of the others.
CORE = [
    "aten.mm.default", "aten.addmm.default", "aten.addmm_.default", "aten.bmm.default", "aten.baddbmm.default",
    "aten.index_put_.default", "aten.index_put.default", "aten.index_add_.default", "aten.index_add.default",
    "aten.index_copy_.default", "aten.scatter_add_.default", "aten.scatter_.src", "aten.masked_scatter_.default",
    "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten.native_group_norm.default",
    "aten.convolution.default", "aten.convolution_backward.default", "aten.embedding.default",
    "aten.embedding_dense_backward.default", "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "aten.cat.default", "aten.stack.default",
    "aten._softmax.default", "aten._log_softmax_backward_data.default", "aten.nll_loss_forward.default",
    "aten.copy_.default", "aten.lerp_.Scalar", "aten.addcdiv_.default", "aten._foreach_addcdiv_.ScalarList",
    "aten._foreach_lerp_.Scalar", "aten._fused_adamw_.default", "aten._amp_update_scale_.default",
    "aten._amp_foreach_non_finite_check_and_unscale_.default", "aten.mkldnn_rnn_layer.default",
    "aten.gelu_backward.default",
]  # fmt: skip
SAMPLE = sorted({*CORE, *sorted(TABLE.operators)[::12]})


NOT_COMPARED = (
    f"the table is torch {TABLE.torch_version}'s, this is {torch.__version__}"
    if torch.__version__ != TABLE.torch_version
    else HERE.unlike
)


@pytest.mark.real_cpu
@pytest.mark.lacking(NOT_COMPARED)
@pytest.mark.parametrize("op", SAMPLE)
def test_the_table_is_what_this_machine_does(op: str) -> None:
    if op.startswith("bitsandbytes"):
        pytest.importorskip("bitsandbytes")
    measured = measure_operator(op, RECORDED[op], CPU)["patterns"]
    written = {
        pattern: entry if isinstance(entry, str) else [fill(TABLE.messages[entry], letters_in(pattern))]
        for pattern, entry in TABLE.operators[op].items()
    }
    assert measured == written


def test_every_example_is_in_the_table_or_named_as_broken() -> None:
    written = json.loads((TABLES / "cpu-avx2.json").read_text(encoding="utf-8"))
    assert set(RECORDED) == set(WHOLE.operators) | set(written["broken"]) | set(written["died"])
    assert written["died"] == {}
    assert set(written["broken"]) <= set(WHOLE.operators), "an operator of which no example runs"


@pytest.mark.parametrize("name", CPU_TABLES)
def test_the_recorded_dtypes_of_an_example_are_accepted(name: str) -> None:
    broken = json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8"))["broken"]
    contracts = contracts_for(name)
    for op, examples in RECORDED.items():
        for example in examples:
            verdict = contracts.judge(
                op, tuple(getattr(torch, tensor["t"]) for tensor in tensors_in(example))
            )
            assert op in broken or verdict is None or verdict.accepted, op


@pytest.mark.parametrize("name", [*CPU_TABLES[1:], *RELEASES])
def test_a_table_that_lists_differences_lists_nothing_else(name: str, tmp_path: Path) -> None:
    written, whole = (
        json.loads((TABLES / f"{name}.json").read_text(encoding="utf-8")),
        read_table(TABLES / f"{name}.json"),
    )
    base, same_torch = written["base"], name in CPU_TABLES
    assert base == CPU_TABLES[0] if same_torch else name.startswith(f"{base}-torch")
    assert set(written["operators"]) < set(whole.operators) == set(WHOLE.operators)
    assert (whole.torch_version == WHOLE.torch_version) == same_torch
    measured = {**written, "messages": list(whole.messages), "operators": whole.operators}
    made = difference(measured, base, same_torch=same_torch)
    assert (made["operators"], made["messages"]) == (written["operators"], written["messages"])
    for other in CPU_TABLES:
        write_json(tmp_path / f"{other}.json", json.loads((TABLES / f"{other}.json").read_text()))
    write_json(tmp_path / f"{name}.json", made)
    assert read_table(tmp_path / f"{name}.json") == whole


def test_a_difference_to_another_torchs_table_is_refused() -> None:
    table = {"torch": "1.0.0", "operators": WHOLE.operators, "messages": list(WHOLE.messages)}
    with pytest.raises(ValueError, match="measured with torch 2"):
        difference(table, CPU_TABLES[0])


def test_the_table_of_this_machine_is_that_of_its_instruction_set(any_cpu: str) -> None:
    contracts = contracts_for("cpu")
    assert contracts is contracts_of(device_profile("cpu")) is contracts_for(any_cpu)
    assert contracts.table is not None
    assert contracts.table.variant == any_cpu.partition("-")[2]
    assert contracts.measured == read_table(TABLES / f"{contracts.table.name}.json")


def test_the_tables_stay_small() -> None:
    assert all(file.stat().st_size < 600_000 for file in TABLES.glob("*.json"))


@given(st.text("fbh", min_size=1, max_size=8))
def test_combinations(recorded: str) -> None:
    found = combinations(recorded, doubles=False)
    assert found[0] == recorded
    assert len(found) == len(set(found))
    assert {letter * len(recorded) for letter in "fbh"} <= set(found)
    assert all(len(each) == len(recorded) and set(each) <= set("fbh") for each in found)
    if len(recorded) <= 4:
        assert len(found) == 3 ** len(recorded)


@pytest.mark.real_cpu
def test_in_place_operators_return_the_operand_they_changed() -> None:
    measured = measure_operator(
        "aten.copy_.default", [[[encode(torch.ones(2)), encode(torch.ones(2))], {}]], CPU
    )
    assert measured["patterns"]["bf"] == "b"
    assert measured["broken"] == []


@pytest.mark.real_cpu
def test_examples_that_disagree_leave_the_result_open_or_the_pattern_out() -> None:
    x = encode(torch.ones(2, 2))
    kinds = [[[x], {"dtype": {"dtype": "float32"}}], [[x], {}]]
    assert set(measure_operator("aten.sum.default", kinds, CPU)["patterns"].values()) == {"?"}
    values, mask = encode(torch.ones(1)), encode(torch.tensor([True, False]))
    fills = [[encode(torch.ones(2)), [mask], values], {}]
    puts = [[encode(torch.ones(2)), [encode(torch.tensor([0]))], values], {}]
    assert measure_operator("aten.index_put_.default", [fills], CPU)["patterns"]["fib"] == "f"
    assert isinstance(measure_operator("aten.index_put_.default", [puts], CPU)["patterns"]["fib"], list)
    assert "fib" not in measure_operator("aten.index_put_.default", [fills, puts], CPU)["patterns"]


@pytest.mark.real_cpu
def test_an_example_this_device_cannot_run_is_named() -> None:
    wrong = [[encode(torch.ones(2, 3)), encode(torch.ones(2, 3))], {}]
    measured = measure_operator("aten.mm.default", [wrong], CPU)
    assert measured["patterns"] == {}
    assert "cannot be multiplied" in measured["broken"][0]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A table of four operators, one of which kills the process that calls it."""
    folder = tmp_path_factory.mktemp("fatal")
    (folder / "fatal.py").write_text(
        "import os, torch\n"
        "library = torch.library.Library('fatal', 'DEF')\n"
        "library.define('kill(Tensor x) -> Tensor')\n"
        "library.define('spare(Tensor x) -> Tensor')\n"
        "library.impl('spare', lambda x: x + 1, 'CPU')\n"
        f"library.impl('kill', lambda x: os.kill(os.getpid(), {int(signal.SIGKILL)}), 'CPU')\n",
        encoding="utf-8",
    )
    call = [[encode(torch.ones(2))], {}]
    calls = {op: [call] for op in ("aten.neg.default", "fatal.kill.default", "fatal.spare.default")}
    code = """if True:
        import runpy, sys
        kept = runpy.run_path(sys.argv.pop(1))
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    """

    def forked(command: list[Any], check: bool) -> Ended:
        """A child process that has imported torch before, and these operators."""
        assert command[:2] == [sys.executable, "-m"]
        return run_code(code, folder / "fatal.py", *command[2:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", forked)
        return measure({**calls, "aten.mm.default": RECORDED["aten.mm.default"]}, "cpu")


UNIFORM = {"b": "b", "f": "f", "h": "h"}
PRODUCTS = {**WHOLE.operators["aten.mm.default"], **dict.fromkeys(["bf", "bh", "fb", "fh", "hb", "hf"], 0)}


def test_an_operator_that_kills_its_process_is_named_and_the_others_are_measured(
    measured: dict[str, Any],
) -> None:
    assert measured["operators"].keys() == {"aten.neg.default", "fatal.spare.default", "aten.mm.default"}
    assert measured["operators"]["aten.neg.default"] == UNIFORM
    assert measured["operators"]["fatal.spare.default"] == UNIFORM
    assert measured["died"] == {"fatal.kill.default": "its process ended with status -9"}


def test_the_command_measures(tmp_path: Path) -> None:
    """As a program, which ends where its last line calls it."""
    name = "aten.mm.default"
    examples, table = tmp_path / "examples.json", tmp_path / "table.json"
    examples.write_text(json.dumps({name: json.loads(EXAMPLES.read_text(encoding="utf-8"))[name]}))
    ended = run_module("isotype.contracts.measure", "--examples", examples, "-o", table)
    assert ended.returncode == 0, ended.stderr[-1000:]
    assert list(json.loads(table.read_text(encoding="utf-8"))["operators"]) == [name]


def test_a_table_is_written_in_one_piece_and_read_back(measured: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    write_json(path, measured)
    table = read_table(path)
    assert json.loads(path.read_text(encoding="utf-8"))["limits"].keys() <= {
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_MAX_CPU_ISA",
    }
    assert table.torch_version == torch.__version__
    assert table.operators["aten.mm.default"] == PRODUCTS
    assert table.messages == ("expected m1 and m2 to have the same dtype, but got: {0} != {1}",)
    assert [file.name for file in tmp_path.iterdir()] == ["cpu.json"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(True),
        torch.tensor([], dtype=torch.int32),
        torch.full((3, 2), 7, dtype=torch.uint8),
        torch.arange(6).reshape(2, 3).t(),
    ],
)
def test_integers_come_back_as_they_were(tensor: torch.Tensor) -> None:
    (made,), _ = decode(json.loads(json.dumps([[encode(tensor)], {}])), [], CPU)
    assert made.dtype == tensor.dtype
    assert torch.equal(made, tensor)
    assert made.stride() == tensor.stride()


def test_floats_come_back_in_the_dtype_asked_for_and_the_same_each_time() -> None:
    call = [encode([torch.ones(2, 3).t(), [torch.ones(())], float("-inf"), torch.float16]), {}]
    assert sum(map(is_float, tensors_in(call))) == 2
    dtypes = [torch.bfloat16, torch.float16]
    (made, (inner,), least, dtype), _ = decode(call, dtypes, CPU)
    again = decode(call, dtypes, CPU)[0][0]
    assert (made.dtype, inner.dtype, dtype, least) == (
        torch.bfloat16,
        torch.float16,
        torch.float16,
        -float("inf"),
    )
    assert made.stride() == (1, 3)
    assert torch.equal(made, again)
    assert ((made > 0) & (made < 1)).all()


def test_what_no_example_can_hold_is_refused() -> None:
    with pytest.raises(NotAnExampleError, match="Generator in a call"):
        encode([torch.Generator()])
    with pytest.raises(NotAnExampleError, match="an integer tensor of 5000 elements in a call"):
        encode(torch.arange(5000))


def test_lists_are_cut_to_what_a_pattern_needs() -> None:
    three = [encode(torch.ones(1))] * 5
    assert len(trimmed([[three], {}], layout_of("aten.cat.default"))[0][0]) == 3
    cut, _ = trimmed([[three, [0.5] * 5], {}], layout_of("aten._foreach_mul_.ScalarList"))
    assert (len(cut[0]), cut[1]) == (1, [0.5])
    assert trimmed([[[1, 2, 3]], {}], layout_of("aten.permute.default")) == [[[1, 2, 3]], {}]


@pytest.fixture(scope="module")
def careless() -> Iterator[torch.library.Library]:
    """An operator that checks no dtype: it reads its second operand's bytes as float32, as a kernel that is given a pointer."""
    library = torch.library.Library("careless", "DEF")
    library.define("scale(Tensor x, Tensor factor) -> Tensor")
    library.define("scale.out(Tensor x, Tensor factor, Tensor(a!) out) -> ()")
    library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))

    def as_float32(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        misread = factor.contiguous().view(torch.uint8)[: 4 * (factor.nbytes // 4)].view(torch.float32)
        return (x.float() * misread[0]).to(x.dtype)

    library.impl("scale", as_float32, "CPU")

    def write_into(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(as_float32(x, factor))

    library.impl("scale.out", write_into, "CPU")
    library.impl("noise", torch.rand_like, "CPU")
    yield library
    library._destroy()


@pytest.mark.real_cpu
def test_wrong_values_are_recorded_though_nothing_is_raised(
    careless: torch.library.Library, tmp_path: Path
) -> None:
    x, factor = encode(torch.ones(8)), encode(torch.ones(8))
    measured = measure_operator("careless.scale.default", [[[x, factor], {}]], CPU)["patterns"]
    right = {"ff": "f", "bf": "b", "hf": "h"}
    assert measured == {**{a + b: [CORRUPTS] for a in "fbh" for b in "bh"}, **right}
    written = measure_operator("careless.scale.out", [[[x, factor, x], {}]], CPU)["patterns"]
    assert {key for key, entry in written.items() if entry == [CORRUPTS]} == {
        a + b + c for a in "fbh" for b in "bh" for c in "fbh"
    }
    # In a table it is a message like others, and what it is judged by is an error.
    numbered = {key: 0 if isinstance(entry, list) else entry for key, entry in measured.items()}
    table = Table("", (CORRUPTS,), {"careless.scale.default": numbered})
    verdict = Contracts("cpu", table, table).judge("careless.scale.default", (torch.float32, torch.bfloat16))
    assert verdict == Verdict(False, (), CORRUPTS)


@pytest.mark.real_cpu
def test_random_and_unwritten_results_are_compared_with_nothing(careless: torch.library.Library) -> None:
    x = encode(torch.ones(64))
    for op in ("careless.noise.default", "aten.empty_like.default", "aten.bernoulli.default"):
        measured = measure_operator(op, [[[x], {}]], CPU)["patterns"]
        assert [CORRUPTS] not in measured.values(), op


def test_bitsandbytes_reads_scales_of_another_dtype_as_float32() -> None:
    """Its CPU kernels, as measured; its CUDA kernels, by their source."""
    flat, table = torch.uint8, "bitsandbytes.dequantize_blockwise.default"
    for kind, assumed in (("cpu-avx2", False), ("cuda", True)):
        contracts = contracts_for(kind)
        assert contracts.judge(table, (flat, torch.bfloat16, torch.float32)) == Verdict(
            False, (), CORRUPTS, assumed
        )
        sound = contracts.judge(table, (flat, torch.float32, torch.float32))
        assert sound is not None
        assert sound.accepted
    judge = contracts_for("cuda").judge
    for op, dtypes in (
        ("bitsandbytes.dequantize_4bit.default", (flat, torch.bfloat16)),
        ("bitsandbytes.dequantize_4bit.out", (flat, torch.float16, torch.bfloat16)),
        ("bitsandbytes.gemv_4bit.default", (torch.bfloat16, flat, torch.bfloat16, torch.float32)),
        ("bitsandbytes.gemm_4bit.default", (torch.bfloat16, flat, torch.bfloat16)),
    ):
        verdict = judge(op, dtypes)
        assert verdict is not None
        assert verdict.message == CORRUPTS
        as_it_should = tuple(
            torch.float32 if at == (1 if "dequantize" in op else 2) else dtype
            for at, dtype in enumerate(dtypes)
        )
        sound = judge(op, as_it_should)
        assert sound is None or sound.accepted
