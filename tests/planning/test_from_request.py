"""Plans of a small model: foreseen memory, choices and text."""

from __future__ import annotations

import io
import json
import re
import shlex
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import transformers
from jsonschema import Draft202012Validator
from rich.console import Console

import isotype
from isotype.cli.main import main
from isotype.core.errors import PrecisionError, UsageError
from isotype.core.names import format_bytes
from isotype.planning.from_request import Plan, plan_of_request
from isotype.planning.record import Row
from isotype.planning.request import parse_request
from isotype.planning.search import runs_alike
from isotype.planning.text import render, speed_of
from isotype.precision.devices.profile import device_profile
from isotype.records.memory import Memory
from isotype.records.request import StepRequest
from isotype.records.trace import Trace
from isotype.train.preflight.step import check_plan
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.preflight.synthetic import least_length
from tests.models import CONFIGS, tiny_config
from tests.pairwise import few
from tests.planning.conftest import by_formula, step_of
from tests.zoo.processors import save_picture_rows, save_vision_model

SCHEMA = Draft202012Validator(
    json.loads(resources.files("isotype.planning").joinpath("schema.json").read_text(encoding="utf-8"))
)


def planned(config: Path, memory: str, device: str = "rtx4090", **more: object) -> Plan:
    return isotype.plan(config, device=device, max_memory=memory, lora_r=4, **{"length": 256, **more})


# A plan foresees the memory that a check foresees


def same_as_a_check(row: Row) -> None:
    step = plan_of(*parse_options([*row.command.tokens()[1:], "--device", "rtx4090"]))
    report = check_plan(step, ("forward", "backward", "unscale", "optimizer"))
    assert report.complete
    assert report.trace.memory.peak == row.peak
    assert report.trace.setup.batch["input_ids"] == (row.rows, row.length)


def row_with_some_layers(config: Path, memory: str, number: int, ordinal: str) -> Row:
    """Return the row that fits with every `number`-th layer recomputed, of a plan for one row in nf4."""
    plan = planned(config, memory, quantization="nf4", rows=1)
    assert [(row.checkpointing, row.rows, row.fits) for row in plan.rows] == [
        ("off", 1, False),
        ("every layer", 1, True),
        (f"every {ordinal} layer", 1, True),
    ]
    command = plan.rows[-1].command.tokens()
    assert f'"every_n_layers": {number}' in command[command.index("--gradient_checkpointing_kwargs") + 1]
    return plan.rows[-1]


@pytest.mark.exhaustive
def test_a_row_with_some_layers_computed_again_is_what_a_check_of_its_command_foresees(config: Path) -> None:
    row = row_with_some_layers(config, "2.5MiB", 3, "3rd")
    same_as_a_check(row)


@few("accumulation", [1, 2], 2)
def test_check_and_plan_have_one_peak_and_one_room(accumulation: int, tmp_path: Path) -> None:
    """Full training: from the second step on, the optimizer's states are the larger part."""
    tiny_config("LlamaConfig", num_hidden_layers=1).save_pretrained(tmp_path)
    words = f"--use_peft False --dtype bfloat16 --gradient_checkpointing False --gradient_accumulation_steps {accumulation}"
    words += " --per_device_train_batch_size 4 --max_length 64 --device rtx4090"
    step = plan_of(*parse_options([str(tmp_path), *words.split()]))
    report = check_plan(step, ("forward", "backward", "unscale", "optimizer"))
    request, _ = parse_request([str(tmp_path), *words.split(), "--rows", "4"])
    (row,) = plan_of_request(request).rows
    assert (row.rows, row.accumulation) == (4, accumulation)
    assert report.memory.peak == row.peak
    assert report.trace.setup.limit.size == row.room
    assert report.memory.phases["backward"]["optimizer"] == report.memory.phases["optimizer"]["optimizer"]


@pytest.mark.exhaustive
def test_a_row_is_what_a_check_of_its_command_foresees(config: Path) -> None:
    plan = planned(config, "6MiB", quantization="nf4", rows=2, gradient_checkpointing="True")
    assert [row.checkpointing for row in plan.rows] == ["every layer"]
    same_as_a_check(plan.rows[0])


@pytest.mark.exhaustive
def test_every_row_is_what_a_check_of_its_command_foresees(config: Path) -> None:
    plan = planned(config, "6MiB")
    assert {row.storage for row in plan.rows} == {"bfloat16", "int8", "nf4"}
    assert {row.checkpointing for row in plan.rows} == {"off", "every layer"}
    for row in plan.rows:
        same_as_a_check(row)


# The search, over steps whose memory follows a formula


def test_some_layers_are_computed_again_where_no_row_fits_without_and_one_does_with_some(
    config: Path, formula: object
) -> None:
    row_with_some_layers(config, "1.63MiB", 2, "2nd")


@pytest.fixture(scope="module")
def plan(config: Path) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        shapes = by_formula(patch)
        plan = planned(config, "6MiB")
    assert 0 < len(shapes) <= 4 * len(plan.rows)  # few are traced
    return plan


def test_as_few_micro_batches_as_fit_each_as_large_as_the_others(plan: Plan) -> None:
    sizes = {(row.storage, row.checkpointing): (row.rows, row.accumulation, row.fits) for row in plan.rows}
    assert sizes == {
        ("bfloat16", "off"): (2, 4, True),
        ("bfloat16", "every layer"): (8, 1, True),
        ("int8", "off"): (4, 2, True),  # 5 rows fit, but two micro-batches of 4 are as good as 5 and 3
        ("int8", "every layer"): (8, 1, True),
        ("nf4", "off"): (4, 2, True),
        ("nf4", "every layer"): (8, 1, True),
    }
    assert all(row.spare == row.room - row.peak for row in plan.rows)


def test_rows_that_are_pinned_stay(config: Path, formula: object) -> None:
    plan = planned(config, "2.5MiB", quantization="nf4", rows=8)
    assert [(row.rows, row.length, row.fits) for row in plan.rows] == [
        (8, 256, False),
        (8, 256, False),
        (8, 192, True),
    ]


def test_the_longest_row_is_looked_for_in_steps_of_64_tokens(config: Path, formula: object) -> None:
    row = planned(config, "1.3MiB", quantization="nf4", goal="longest").chosen
    assert row is not None
    assert (row.rows, row.length, row.longest, row.checkpointing) == (1, 256, 256, "every layer")
    row = planned(config, "1.45MiB", quantization="nf4", goal="longest").chosen
    assert row is not None
    assert (row.length, row.longest_is_all) == (448, False)
    row = planned(config, "8MiB", quantization="nf4", goal="longest").chosen
    assert row is not None
    assert (row.length, row.longest_is_all) == (512, True)
    notes = planned(config, "8MiB", quantization="nf4", length=4096).notes
    assert "rows of 512 tokens instead of 4096, because the model has no more positions" in notes


def test_rows_with_pictures_are_as_long_as_their_pictures_need(tmp_path: Path, formula: object) -> None:
    """The model has 64 positions; a row needs more for its images, which are not cut."""
    save_vision_model("idefics3", tmp_path / "model")
    save_picture_rows(tmp_path / "t.jsonl")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    config.text_config.max_position_embeddings = 16
    config.save_pretrained(tmp_path / "model")
    plan = isotype.plan(tmp_path / "model", device="t4", data=str(tmp_path / "t.jsonl"), goal="longest")
    assert plan.chosen is not None
    # A check reads the data with the command's length: no row is refused.
    lengths = plan_of(*parse_options([*plan.chosen.command.tokens()[1:], "--device", "t4"])).lengths
    assert lengths is not None
    assert min(row.length for row in plan.rows) >= lengths.longest > 16
    assert "packing" not in str(plan)


def test_rows_that_are_too_long_are_said_to_be(config: Path, formula: object) -> None:
    plan = planned(config, "1.2MiB", quantization="nf4")
    assert plan.chosen is not None
    assert (plan.chosen.length, plan.chosen.rows) == (192, 1)
    assert "rows of 256 tokens do not fit; the plan uses the longest rows that fit" in str(plan)


def test_nothing_fits(config: Path, formula: object) -> None:
    plan = planned(config, "100KiB", quantization="nf4")
    assert (plan.chosen, plan.command, plan.policy) == (None, None, None)
    assert plan.devices[0].enough is None
    title, least, fix = str(plan).splitlines()[3:6]
    assert title == "NVIDIA GeForce RTX 4090: nothing fits"
    assert re.fullmatch(r"   a step needs at least \d.* MiB \(nf4\), but may use only 100 KiB", least)
    assert fix == "   try a smaller model or a larger device"  # 64 devices are not enough either
    arguments = ["plan", str(config), "--device", "t4", "--max-memory", "100KiB", "--quantization", "nf4"]
    assert main(arguments) == 1


def test_the_text_begins_with_what_fits_and_its_command(plan: Plan) -> None:
    text = str(plan)
    answer, command = text.splitlines()[3:5]
    row = plan.chosen
    assert row is not None
    fits = f"{row.storage} fits, {format_bytes(row.peak)} of 6.00 MiB, {speed_of(row)} tokens/s"
    assert answer == f"NVIDIA GeForce RTX 4090: {fits}"
    assert command == plan.command
    assert plan.command is not None
    assert not shlex.split(plan.command)[3].endswith("config.json")  # the folder of the weights
    assert max(len(line) for line in text.splitlines() if "GiB" in line or "MiB" in line) <= 100
    assert re.search(r"memory     peak in \w+: ", text)


@pytest.mark.parametrize("width", [60, 72, 80, 100, 132])
@pytest.mark.parametrize("whole", [False, True])
def test_no_cell_of_the_table_is_cut(plan: Plan, width: int, whole: bool) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    render(plan, console, whole)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(len(line) for line in text.splitlines() if "/model" not in line) <= width
    head = next(line for line in text.splitlines() if " checkpointing " in line).split()
    for name in ("storage", "rows", "peak", "fits", *(["tokens/s"] if width >= 80 and not whole else [])):
        assert name in head
    assert ("memory     peak in " in text) is whole
    command = text[text.index("    isotype sft ") :].partition("\n\n")[0].rstrip()
    assert shlex.join(shlex.split(command.replace("\\\n", ""))) == plan.command


def test_several_devices_have_a_row_and_a_command_each(config: Path, formula: object) -> None:
    plan = planned(config, "6MiB", device="rtx4090,l4,t4", quantization="nf4")
    lines = str(plan).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("device "))
    assert [line.split()[0] for line in lines[at + 1 : at + 4]] == ["rtx4090", "l4", "t4"]
    assert [line for line in lines if line.startswith("isotype sft ")] == [
        shlex.join(device.chosen.command.tokens()) for device in plan.devices if device.chosen is not None
    ]
    rows = {device.name: device.chosen for device in plan.devices}
    assert rows["rtx4090"] is not None
    assert rows["l4"] is not None
    # Both devices run the same operators at different rates.
    assert rows["rtx4090"].peak == rows["l4"].peak
    assert rows["rtx4090"].time != rows["l4"].time
    assert rows["t4"] is not None
    assert rows["t4"].compute == "float16"
    assert any("float16" in note for device in plan.devices if device.name == "t4" for note in device.notes)


def test_several_of_a_device_hold_all_or_share(config: Path, formula: object) -> None:
    plan = planned(config, "6MiB", devices=2, quantization="nf4")
    assert {row.sharding for row in plan.rows} == {"DDP", "FSDP2"}
    for row in plan.rows:
        assert row.command.tokens()[:5] == ("torchrun", "--standalone", "--nproc_per_node", "2", "-m")
        assert ("--fsdp" in row.command.tokens()) is (row.sharding == "FSDP2")


def test_json_keeps_to_its_schema(plan: Plan) -> None:
    content = json.loads(plan.to_json())
    SCHEMA.validate(content)
    Draft202012Validator.check_schema(SCHEMA.schema)
    device = content["devices"][0]
    assert shlex.split(device["rows"][device["chosen"]]["command"]) == list(
        plan.chosen.command.tokens() if plan.chosen else ()
    )


def test_the_page_shows_every_row(plan: Plan, tmp_path: Path) -> None:
    page = plan.to_html(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("<circle") == sum(row.fits for row in plan.rows)
    assert page.count("<tr ") == len(plan.rows)
    assert 'class="point best chosen"' in page or 'class="point chosen"' in page
    assert "Peak memory of a step (across) against tokens per second (up)." in page


def test_damages_that_somebody_has_measured(config: Path, formula: object) -> None:
    plan = planned(config, "6MiB", damages={"nf4": 0.35}, quantization="nf4")
    assert {row.damage for row in plan.rows} == {0.35}
    assert "0.35" in str(plan)


def test_what_cannot_be_asked(config: Path) -> None:
    with pytest.raises(UsageError, match="unknown goal"):
        isotype.plan(config, "t4", goal="cheapest")
    with pytest.raises(UsageError, match="--max-memory"):
        isotype.plan(config, "cpu-avx2")
    with pytest.raises(PrecisionError, match="unknown device"):
        isotype.plan(config, "rtx1")
    assert main(["plan", str(config), "--device", ""]) == 2


# Nothing fits


def test_the_fewest_of_a_device_that_hold_the_step_are_enough(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(request: StepRequest) -> Trace:
        trace = step_of(request)
        kinds = trace.memory.phases["forward"]
        parts = {kind: size // trace.setup.devices for kind, size in kinds.items()}
        return replace(trace, memory=Memory({"forward": parts}))

    by_formula(monkeypatch)
    monkeypatch.setattr("isotype.train.preflight.step.trace_of", shared)
    plan = planned(config, "300KiB", quantization="nf4")  # a step of 64 tokens takes 1088 KiB of one device
    assert plan.chosen is None
    assert plan.devices[0].enough == 8
    assert "a larger device, or 8 of this one (--devices 8)" in str(plan)


@pytest.mark.exhaustive
def test_so_many_of_a_device_are_enough_as_a_plan_for_them_says(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    config.num_hidden_layers, config.intermediate_size = 16, 2048
    config.save_pretrained(tmp_path)
    int8 = {"quantization": "int8", "gradient_checkpointing": True, "per_device_train_batch_size": 1}
    plan = isotype.plan(tmp_path, device="rtx4090", max_memory="20MiB", **int8)
    enough = plan.devices[0].enough
    assert plan.chosen is None
    assert enough is not None
    assert f"a larger device, or {enough} of this one (--devices {enough})" in str(plan)
    many = isotype.plan(tmp_path, device="rtx4090", max_memory="20MiB", devices=enough, **int8)
    assert many.chosen is not None


def test_no_row_that_is_tried_is_too_short_for_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formula: list[tuple[int, ...]]
) -> None:
    """Without a requested length, rows of 64 tokens were tried and refused like a requested length."""
    monkeypatch.setattr("isotype.planning.from_request._devices_needed", lambda *_: None)
    config = CONFIGS["gemma3-vision"]()
    config.mm_tokens_per_image = 100
    config.vision_config.image_size = 160
    config.text_config.max_position_embeddings = 256
    config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = 1
    config.text_config.layer_types = ["full_attention"]
    config.save_pretrained(tmp_path)
    settings = {"quantization": "nf4", "gradient_checkpointing": True}
    plan = isotype.plan(tmp_path, device="rtx4090", max_memory="1MiB", **settings)
    assert plan.chosen is None
    assert [(row.longest, row.checkpointing) for row in plan.rows] == [(0, "every layer")]
    assert least_length(config) == 102
    assert min(length for _, length in formula) >= 102


def test_a_refused_storage_is_an_error_where_it_is_the_only_one(config: Path) -> None:
    """The plan printed only a headline, `no quantization: 1 conflict in the requested precision`."""
    with pytest.raises(PrecisionError, match="quantization mxfp4, but"):
        planned(config, "1GiB", quantization="mxfp4")
    plan = planned(config, "1GiB", device="t4,h100", quantization="mxfp4")
    devices = ["NVIDIA T4", "NVIDIA H100 SXM 80 GB"]
    assert [text.partition(":")[0] for text in plan.refused] == [f"mxfp4 on {device}" for device in devices]
    assert all("converts no weights to it" in text for text in plan.refused)


def test_a_length_that_training_rows_are_cut_to_is_kept(config: Path, formula: object) -> None:
    """The goal replaced `--max_length` by the longest length that fits."""
    settings = {
        "device": "rtx4090",
        "max_memory": "8MiB",
        "lora_r": 4,
        "quantization": "nf4",
        "goal": "longest",
    }
    row = isotype.plan(config, max_length=128, **settings).chosen
    assert row is not None
    assert (row.length, row.command["max_length"]) == (128, 128)


def test_devices_share_traces_only_if_the_same_operators_run_on_them() -> None:
    v100, t4, a100, l4, h100 = (
        runs_alike(device_profile(name)) for name in ("v100", "t4", "a100", "l4", "h100")
    )
    assert len({v100, t4, a100, l4, h100}) == 5  # products, FP8 and attention by cuDNN
    assert runs_alike(device_profile("rtx4090")) == l4
    assert runs_alike(device_profile("rtx3090")) == a100
