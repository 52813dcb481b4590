"""The arguments of `isotype plan`."""

from __future__ import annotations

import pytest

from isotype.core.errors import UsageError
from isotype.core.names import parse_size
from isotype.planning.request import parse_request


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * 2**30),
        ("20 gib", 20 * 2**30),
        ("20G", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("1.5k", 1536),
        ("8e9", 8 * 10**9),
        ("1024", 1024),
        ("10", None),
        ("0", None),
        ("much", None),
        ("-1GiB", None),
    ],
)
def test_amounts_of_memory(text: str, size: int | None) -> None:
    assert parse_size(text) == size


def test_several_devices_however_they_are_given() -> None:
    request, _ = parse_request(["m", "--device", "t4,h100", "--device", "l4"])
    assert request.devices == ("t4", "h100", "l4")
    assert parse_request(["m"])[0].devices == ("auto",)


def test_the_command_is_the_training_command_without_the_arguments_of_the_plan() -> None:
    request, outputs = parse_request(
        ["m", "--device", "t4", "--lora_r", "8", "--goal", "best", "--json", "--max-memory", "2GiB"]
    )
    assert request.command.tokens() == ("isotype", "sft", "--model_name_or_path", "m", "--lora_r", "8")
    assert (request.goal, request.memory, outputs.json) == ("best", 2 * 2**30, True)
    assert request.step.lora.r == 8


def test_fsdp_is_a_version_as_in_a_check() -> None:
    for version, fsdp in (("2", "full_shard"), ("0", None)):
        request, _ = parse_request(["m", "--device", "t4", "--devices", "2", "--fsdp", version])
        assert request.command.given("fsdp") == fsdp


def test_rows_of_a_step_are_those_of_the_training() -> None:
    assert parse_request(["m", "--device", "t4"])[0].step_rows == 8
    assert parse_request(["m", "--device", "t4", "--devices", "4"])[0].step_rows == 32
    request, _ = parse_request(["m", "--device", "t4", "--tokens_per_step", "4096"])
    assert (request.step_rows, request.step_tokens) == (None, 4096)


def test_every_wrong_argument_is_named_at_once() -> None:
    with pytest.raises(UsageError) as error:
        parse_request(["m", "--goal", "cheapest", "--rows", "0", "--max-memory", "much"])
    for word in ("cheapest", "--rows 0", "20GiB"):
        assert word in str(error.value)


def test_a_plan_needs_a_model() -> None:
    with pytest.raises(UsageError, match="no model"):
        parse_request(["--device", "t4"])
