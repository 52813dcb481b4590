"""Fixes for arguments that TRL refuses."""

from __future__ import annotations

import pytest

from isotype.core.errors import UsageError
from isotype.data.methods import METHODS
from isotype.train.command.settings import fix_of_message
from isotype.train.validate import check_settings
from tests.parsed import parse_settings

MODEL = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl", "--use_cpu", "True"]


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--load_best_model_at_end", "True"], "omit --load_best_model_at_end"),
        (["--dataloader_prefetch_factor", "2"], "omit --dataloader_prefetch_factor"),
        (["--lr_scheduler_type", "reduce_lr_on_plateau"], "omit --lr_scheduler_type"),
    ],
)
def test_what_is_to_be_left_out_has_been_tried(arguments: list[str], fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(METHODS["sft"], [*MODEL, *arguments])
    (problem,) = caught.value.problems
    assert problem.fix == fix
    parse_settings(METHODS["sft"], MODEL)


@pytest.mark.parametrize(
    ("rows", "group", "fix"),
    [
        ("4", "3", "--num_generations 2 or --per_device_train_batch_size 6"),
        ("2", "3", "--num_generations 2 or --per_device_train_batch_size 3"),
    ],
)
def test_groups_that_fill_no_batch_get_values_that_were_tried(rows: str, group: str, fix: str) -> None:
    """The fix was `omit --num_generations`, which TRL refuses as well."""
    argv = [*MODEL, "--per_device_train_batch_size", rows, "--num_generations", group]
    with pytest.raises(UsageError) as caught:
        parse_settings(METHODS["grpo"], argv)
    (problem,) = caught.value.problems
    assert problem.fix == fix
    for words in fix.split(" or "):
        parse_settings(METHODS["grpo"], [*argv, *words.split()])


def test_a_schedule_says_what_it_takes() -> None:
    settings = parse_settings(METHODS["sft"], [*MODEL, "--lr_scheduler_type", "cosine_with_min_lr"])
    with pytest.raises(UsageError) as caught:
        check_settings(settings)
    (problem,) = caught.value.problems
    assert "--lr_scheduler_kwargs of num_cycles, min_lr, " in problem.fix
    assert problem.fix.endswith("or --lr_scheduler_type linear")


def test_by_the_names_in_a_message() -> None:
    message = "When `padding_free=True` without packing, `max_length` is not enforced."
    values = {"padding_free": True, "packing": False, "max_length": 1024, "beta": 0.1}
    assert fix_of_message(message, {"padding_free"}, values, "isotype sft") == (
        "omit --padding_free, or change --max_length (now 1024)"
    )
    message = "Packing needs a collator without padding."
    assert (
        fix_of_message(message, {"packing", "max_steps"}, {"packing": True, "max_steps": 1}, "isotype sft")
        == "omit --packing"
    )
    message = "Actual (not effective) batch size must be > 1."
    asked = {"per_device_train_batch_size": 1, "max_steps": 1}
    assert fix_of_message(message, asked, asked, "isotype kto") == "omit --per_device_train_batch_size"
    assert fix_of_message("No.", {"beta"}, values, "isotype sft") == (
        "omit one of --beta; isotype sft --help-all lists all arguments"
    )
