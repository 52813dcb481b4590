"""`--gradient_checkpointing auto`: the estimated memory decides which layers are recomputed, in a check as in its training."""

from __future__ import annotations

import io
import itertools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from isotype import resolve_precision
from isotype.checkpoint.checkpoint import open_checkpoint
from isotype.core.errors import UsageError
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING
from isotype.precision.devices import room
from isotype.precision.devices.profile import device_profile
from isotype.precision.devices.room import Room, room_of
from isotype.train import launched, training
from isotype.train.command.settings import Settings
from isotype.train.models import processing_class
from isotype.train.output.resume import RUN_FILE
from isotype.train.preflight import plan_rows, step
from isotype.train.preflight.plan import StepPlan
from isotype.train.preflight.plan_rows import training_plan
from isotype.train.preflight.step import PlannedStep
from isotype.train.preflight.step_plan import parse_options, plan_of
from isotype.train.rows.data import training_data
from isotype.train.rows.lengths import Lengths, fullest_batch, longest_possible
from isotype.train.run import Choice, NotForeseenError, choose
from tests.parsed import parse_settings
from tests.train.tiny import rows, save_chat_model, save_rows

EVERY_2ND = {**CHECKPOINTING, "every_n_layers": 2}


def step_of_twelve_layers(arguments: Mapping[str, Any] | None) -> int:
    """Return bytes: 100 of weights, 10 of each layer that is not recomputed, 1 of each other layer."""
    number = 0 if arguments is None else arguments.get("every_n_layers", 1)
    again = 0 if number == 0 else -(-12 // number)
    return 100 + 10 * (12 - again) + again


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (220, "off"),
        (219, "every 4th layer"),
        (193, "every 4th layer"),
        (192, "every 3rd layer"),
        (175, "every 2nd layer"),
        (166, "every 2nd layer"),
        (165, "every layer"),
        (50, "every layer"),
    ],
)
def test_no_more_layers_are_computed_again_than_the_room_asks_for(size: int, words: str) -> None:
    choice = choose(step_of_twelve_layers, Room(size, "half of it"))
    assert choice.words == words
    if words != "every layer":
        assert step_of_twelve_layers(choice.arguments) <= size
    assert ("still more than" in choice.reason) == (size == 50)
    assert "half of it" in choice.reason


def test_the_fewest_steps_are_traced() -> None:
    traced = []

    def foresee(arguments: Mapping[str, Any] | None) -> int:
        traced.append(arguments)
        return step_of_twelve_layers(arguments)

    choose(foresee, Room(220, ""))
    assert traced == [None]
    traced.clear()
    choose(foresee, Room(166, ""))
    assert traced == [None, CHECKPOINTING, EVERY_2ND]


def test_what_cannot_be_foreseen_is_computed_again_and_said() -> None:
    def foresee(_: object) -> int:
        raise NotForeseenError("the step could not be traced (ValueError: no)")

    choice = choose(foresee, Room(10, ""))
    assert choice.arguments == CHECKPOINTING
    assert choice.reason.endswith("is unknown: the step could not be traced (ValueError: no)")
    assert choose(foresee, Room(None, "the memory of this is not known")) == Choice(
        CHECKPOINTING, "the memory of this is not known"
    )


def test_room_is_a_part_of_what_the_device_has_or_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_memory", lambda device: 1000)
    assert room_of(device_profile("cpu")).size == 500
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert room_of(device_profile("cpu")).size == 250
    card = device_profile("h100")
    assert card.memory_bytes is not None
    assert room_of(card) == Room(int(0.85 * card.memory_bytes), room_of(card).words)
    assert room_of(replace(card, present=True, name="cuda:0")).size == 850
    assert room_of(replace(card, present=True, name="cuda:0"), all_free=True) == room_of(card)
    assert room_of(replace(card, memory_bytes=None)).size is None


@pytest.mark.parametrize(
    ("lengths", "limit", "packed", "completion", "longest"),
    [
        (Lengths((5, 9), 2), 100, False, 0, 10),
        (Lengths((5, 9), 2), 8, False, 0, 8),
        (Lengths((5, 9), 2), None, False, 7, 16),  # a completion follows its prompt at once
        (Lengths((5, 9), 2), 100, True, 0, 100),
        (Lengths((5, 9), 20), 100, False, 0, 100),  # a sample does not hold the longest
        (Lengths((5, 9), 20), None, False, 0, None),
        (None, 100, False, 0, 100),
        (None, None, False, 0, None),
    ],
)
def test_the_longest_row_that_can_occur(
    lengths: Lengths | None, limit: int | None, packed: bool, completion: int, longest: int | None
) -> None:
    found, why = longest_possible(lengths, limit, packed=packed, completion=completion)
    assert found == longest
    assert bool(why) == (longest is None)


def test_a_sample_bounds_rows_that_are_never_cut() -> None:
    sample = Lengths((5, 9), 20)
    assert longest_possible(sample, None, packed=False, completion=0, pictured=True) == (9, "")
    assert longest_possible(sample, 100, packed=False, completion=0, pictured=True) == (100, "")


# ------------------------------------------------------------------------------------------------ the command line


@pytest.mark.parametrize(
    "answers",
    [
        [(9,), (3,), (4,), (4,)],
        [(40,), (40,), (39,), (39,), (38,), (3,)],  # batches of almost equal rows keep their padding
        [(60,), (31,), (30,), (30,), (29,)],
        [(9, 3), (4, 8), (20, 2), (19, 18), (5, 5)],
        [(100, 1), (40, 40), (40, 39), (39, 39)],
        [(7,)],
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("limit", [15, 1000])
def test_no_batch_computes_more_tokens_than_the_fullest(
    answers: list[tuple[int, ...]], rows: int, limit: int
) -> None:
    def computed(batch: Sequence[tuple[int, ...]]) -> int:
        lengths = [min(n + 1, limit) for row in batch for n in row]
        padded = len(lengths) * max(lengths)
        return sum(lengths) if sum(lengths) <= 0.95 * padded else padded

    lengths = Lengths(tuple(map(max, answers)), len(answers), answers=tuple(answers))
    fullest = fullest_batch(lengths, limit, rows)
    every = itertools.combinations(answers, min(rows, len(answers)))
    most = max(map(computed, every))
    assert len(fullest) == rows
    tokens = sum(map(sum, fullest))
    assert most <= tokens
    assert rows > len(answers) or tokens <= most / 0.95
    assert fullest_batch(replace(lengths, rows=len(answers) + 1), limit, rows) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["sft", "dpo", "kto"])
def test_a_step_is_of_as_many_tokens_as_the_training_leaves(model: Path, tmp_path: Path, method: str) -> None:
    text = ["word " * n for n in (40, 5, 5, 5)]
    columns = {
        "sft": [{"text": one} for one in text],
        "kto": [{"prompt": "a", "completion": one, "label": one != text[1]} for one in text],
        "dpo": [{"prompt": "a", "chosen": one, "rejected": "b"} for one in text],
    }
    data = save_rows(tmp_path / "train.jsonl", columns[method])
    plan = plan_of(*parse_options([method, *arguments(model, data), "--per_device_train_batch_size", "4"]))
    checkpoint = open_checkpoint(model)
    policy = resolve_precision(str(model), device="cpu", dtype="float32")
    padded, bare = (PlannedStep(plan, checkpoint.model_config, policy, by_tokens=by) for by in (False, True))
    assert (
        bare.traced(None, 4, plan.length).memory.peak < 0.8 * padded.traced(None, 4, plan.length).memory.peak
    )
    assert [len(list(step.padding(plan.length))) for step in (padded, bare)] == [0, 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "Tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save_rows(tmp_path / "train.jsonl", rows("sft"))


def arguments(model: Path, data: Path, *more: object) -> list[str]:
    given = ["--model_name_or_path", model, "--dataset_name", data, "--device", "cpu", "--dtype", "float32"]
    return [str(each) for each in (*given, *more)]


@pytest.mark.parametrize(
    ("given", "auto", "on"),
    [
        ([], True, True),
        (["--gradient_checkpointing", "auto"], True, True),
        pytest.param(["--activation_checkpointing", "auto"], True, True, marks=pytest.mark.newest),
        (["--gradient_checkpointing", "false"], False, False),
        (["--gradient_checkpointing"], False, True),
        pytest.param(["--activation_checkpointing", "false"], False, False, marks=pytest.mark.newest),
        (["--gradient_checkpointing_kwargs", '{"use_reentrant": true}'], False, True),
        (["--config"], True, True),
    ],
)
def test_auto_is_the_default_and_every_other_word_is_as_asked(
    model: Path, data: Path, tmp_path: Path, given: list[str], auto: bool, on: bool
) -> None:
    if given == ["--config"]:
        (tmp_path / "run.yaml").write_text("gradient_checkpointing: auto\n")
        given = ["--config", str(tmp_path / "run.yaml")]
    settings = parse_settings(METHODS["sft"], arguments(model, data, *given))
    assert settings.auto_checkpointing == auto
    assert settings.training.gradient_checkpointing is on
    assert getattr(settings.training, "activation_checkpointing", on) is on  # 5.23's name for it


def test_a_word_that_is_none_is_refused(model: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="gradient_checkpointing"):
        parse_settings(METHODS["sft"], arguments(model, data, "--gradient_checkpointing", "sometimes"))


def of_check(model: Path, data: Path) -> StepPlan:
    return plan_of(*parse_options(["sft", *arguments(model, data)]))


def of_training(settings: Settings) -> StepPlan:
    tokenizer = processing_class(settings.model.model_name_or_path)
    return training_plan(settings, tokenizer, training_data(settings, lambda _: None))


def test_a_check_is_of_the_step_that_its_training_chooses_by(model: Path, data: Path) -> None:
    check, planned = (
        of_check(model, data),
        of_training(parse_settings(METHODS["sft"], arguments(model, data))),
    )
    assert check.auto
    assert check.longest is not None
    assert check.length is not None
    assert check.longest == check.length  # one peak for one step
    made_by = {each.name for each in fields(StepPlan) if each.compare} - {
        "length",
        "data",
        "data_rows",
        "notes",
        "lora",
    }
    assert {name: getattr(check, name) for name in made_by} == {
        name: getattr(planned, name) for name in made_by
    }
    assert check.lora.to_dict() == planned.lora.to_dict()


def test_a_check_takes_the_choice_and_leaves_the_plan_as_it_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[int] = []

    def choice(foresee: Callable[[Any], int], room: Room) -> Choice:
        peaks.extend([foresee(CHECKPOINTING), foresee(EVERY_2ND)])
        return Choice(EVERY_2ND, "it suffices")

    monkeypatch.setattr(step, "choose", choice)
    plan = of_check(save_chat_model(tmp_path / "model", layers=3), data)
    trace = step.check_plan(plan, ("forward", "backward")).trace
    assert "gradient checkpointing every 2nd layer (auto): it suffices" in trace.notes
    assert peaks[0] < trace.memory.peak <= peaks[1]
    # PEFT writes the modules of one folded model into a config that an adapter is made by.
    assert plan.lora.target_modules == "all-linear"


def test_a_check_says_what_the_other_choice_takes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it says nothing of a step of a few MiB, which asks no question of memory."""
    monkeypatch.setattr(step, "_PART_OF_ROOM", 0.0)
    plan = plan_of(*parse_options([str(model), "--device", "l4", "--dtype", "bfloat16"]))
    notes = step.check_plan(plan, ("forward", "backward")).trace.notes
    (note,) = [note for note in notes if note.startswith("gradient checkpointing")]
    assert re.search(
        r"off \(auto\): .*; with every layer recomputed: [\d.]+ [KM]iB, [\d.]+ [mµ]s at least", note
    ), note


def run(model: Path, data: Path, out: Path, *more: object) -> tuple[training.Outcome, str]:
    text = io.StringIO()
    argv = arguments(model, data, "--output_dir", out, "--max_steps", 2, "--save_steps", 1, *more)
    return training.run(parse_settings(METHODS["sft"], argv), Console(file=text, width=200)), text.getvalue()


def test_a_run_says_what_it_chose_and_goes_on_with_it(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isotype.train.callback.before_first_step", lambda *_: None)
    on: list[bool] = []
    runs: list[Any] = []
    began = training._train

    def train(run: Any, console: Console) -> training.Outcome:
        outcome = began(run, console)
        runs.append(run)
        on.append(any(getattr(part, "gradient_checkpointing", False) for part in run.trainer.model.modules()))
        return outcome

    monkeypatch.setattr(training, "_train", train)
    outcome, text = run(model, data, tmp_path / "out")
    assert on == [False]
    row = next(row for row in outcome.record.policy if row.role == "checkpointing")
    assert row.dtype == "off"
    assert "at the step's peak, within half of the " in row.reason
    assert f"checkpointing             {row.dtype}" in text
    saved = json.loads((tmp_path / "out" / "checkpoint-1" / RUN_FILE).read_text())
    assert saved["gradient_checkpointing"] is None
    # What the run has begun with stays, whatever memory is free when it goes on.
    monkeypatch.setattr(step, "room_of", lambda _: Room(0, "nothing"))
    outcome, text = run(
        model, data, tmp_path / "out", "--resume_from_checkpoint", tmp_path / "out" / "checkpoint-1"
    )
    assert on == [False, False]
    assert "as in checkpoint-1" in text
    anew = plan_rows.choice_of_run(replace(runs[1], resume=None), processing_class(str(model)), None)
    assert anew.words == "every layer"


# ------------------------------------------------------------------------------------------------ several processes


class Processes:
    """Two processes as two threads: `broadcast_object_list` passes on the list of the first."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.sent: list[Any] = []
        self.barrier = threading.Barrier(2, timeout=20)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return 2

    def get_rank(self) -> int:
        rank: int = self.here.rank
        return rank

    def broadcast_object_list(self, box: list[Any], src: int) -> None:
        if self.get_rank() == src:
            self.sent = list(box)
        self.barrier.wait()
        box[:] = self.sent

    def both(self, compute: Callable[[int], Any]) -> list[Any]:
        """Return the result of each process; an exception is returned as a value."""
        results: list[Any] = [None, None]

        def process(rank: int) -> None:
            self.here.rank = rank
            try:
                results[rank] = compute(rank)
            except UsageError as error:
                results[rank] = error

        threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    two = Processes()
    monkeypatch.setattr(launched, "distributed", two)
    return two


def test_the_first_process_computes_and_all_have_it(processes: Processes) -> None:
    computed: list[int] = []

    def compute(rank: int) -> int:
        def own() -> int:
            computed.append(rank)
            return 10 + rank

        return launched.from_rank_0(own)

    assert processes.both(compute) == [10, 10]
    assert computed == [0]


def test_what_the_first_process_raises_all_raise(processes: Processes) -> None:
    def compute(rank: int) -> int:
        def own() -> int:
            raise UsageError(f"no, says {rank}")

        return launched.from_rank_0(own)

    assert [error.headline for error in processes.both(compute)] == ["no, says 0", "no, says 0"]


def test_processes_take_one_choice(
    model: Path, data: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_settings(METHODS["sft"], arguments(model, data))
    choices = [Choice(None, "there is room here"), Choice(CHECKPOINTING, "there is none here")]
    monkeypatch.setattr(plan_rows, "training_plan", lambda *_: None)
    planned = SimpleNamespace(choice=lambda: choices[processes.get_rank()])
    monkeypatch.setattr(plan_rows, "PlannedStep", lambda *_, **__: planned)
    checkpoint = SimpleNamespace(model_config=object())
    run: Any = SimpleNamespace(settings=settings, resume=None, data=None, checkpoint=checkpoint, policy=None)
    taken = processes.both(lambda _: plan_rows.choice_of_run(run, None, None))
    assert taken == [choices[0], choices[0]]
