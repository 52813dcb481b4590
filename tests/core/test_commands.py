"""Commands as they are printed: pasted, they are the same commands."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.core.terminal import printed_command

PLAN = [
    "torchrun", "--standalone", "--nproc_per_node", "8", "-m", "isotype", "sft", "--model_name_or_path",
    "meta-llama/Meta-Llama-3-8B", "--dataset_name", "my data/it's.jsonl", "--lora_target_modules", "q_proj", "v_proj",
    "--gradient_checkpointing_kwargs", '{"every_n_layers": 2}',
]  # fmt: skip

words = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=0, max_size=40
)
commands = st.lists(st.one_of(words, st.sampled_from(PLAN)), min_size=1, max_size=20)


def arguments(command: str) -> list[str]:
    """The arguments that bash takes a pasted command for."""
    script = f"printf '%s\\0' {command}\n"
    out = subprocess.run(["bash"], input=script.encode(), stdout=subprocess.PIPE, check=True).stdout
    return out.decode().split("\0")[:-1]


@settings(max_examples=60)
@given(commands, st.one_of(st.none(), st.integers(1, 120)), st.integers(0, 8))
def test_what_is_pasted_is_what_was_given(tokens: list[str], width: int | None, indent: int) -> None:
    assert arguments(printed_command(tokens, width, indent).lstrip()) == tokens


def test_a_long_command_goes_on_at_arguments() -> None:
    assert printed_command(PLAN, 80) == "\n".join(
        [
            "torchrun --standalone --nproc_per_node 8 -m isotype sft \\",
            "    --model_name_or_path meta-llama/Meta-Llama-3-8B \\",
            "    --dataset_name 'my data/it'\"'\"'s.jsonl' \\",
            "    --lora_target_modules q_proj v_proj \\",
            "    --gradient_checkpointing_kwargs '{\"every_n_layers\": 2}'",
        ]
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 132])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = printed_command(PLAN, width, 2).splitlines()
    assert all(len(line) <= width for line in lines)
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert all(line.startswith("  ") for line in lines)


def test_what_fits_or_goes_to_a_file_is_one_line() -> None:
    text = printed_command(PLAN)
    assert "\n" not in text
    assert printed_command(PLAN, len(text)) == text
    assert "\n" in printed_command(PLAN, len(text) - 1)


def test_an_argument_that_is_longer_than_a_line_stays_whole() -> None:
    path = "/data/" + "x" * 60
    assert (
        printed_command(["isotype", "chat", "--adapter", path], 40)
        == f"isotype chat --adapter \\\n    {path}"
    )
