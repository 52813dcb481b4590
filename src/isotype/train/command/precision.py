"""Reads the requested precision from a training command's arguments, and refuses contradictions."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isotype.core.arguments import wrong_size
from isotype.core.dtypes import dtype_name, parse_dtype
from isotype.core.errors import PrecisionError, Problem
from isotype.core.formats import FOUR_BITS, MIXED
from isotype.core.names import parse_size
from isotype.precision.decide import PrecisionRequest
from isotype.train.command.command import Command

FLAGS = (("fp16", "float16"), ("bf16", "bfloat16"))

Claim = tuple[str, str]
"""A pair: an argument as the user wrote it, and the dtype or format that the argument requests."""

_ONE_DTYPE = "one compute dtype, which is also the dtype of unquantized weights (--dtype sets both)"
_NO_CAST = "omit it: it would also cast the master weights, and evaluation runs in the compute dtype anyway"


def read_precision_request(command: Command) -> PrecisionRequest:
    """Return the precision that the command requests. Raise PrecisionError with all contradictions between the arguments."""
    kwargs = command.given("model_init_kwargs")
    init = kwargs if isinstance(kwargs, Mapping) else {}
    saved = _saved_quantization(init)
    dtypes, formats = [*_dtypes(command, init, saved)], [*_formats(command, saved)]
    problems = [
        *_dtype_problems(command, dtypes),
        *_format_problems(init, saved, formats),
        *_other_problems(command),
    ]
    if problems:
        raise PrecisionError("the arguments disagree about precision", problems)
    nested = command["use_bnb_nested_quant"] or saved.get("bnb_4bit_use_double_quant")
    memory = command["base_memory"]
    return PrecisionRequest(
        dtype=dtypes[0][1] if dtypes else "auto",
        quantization=formats[0][1] if formats else None,
        trainable="lora" if command["use_peft"] else "full",
        master=command.given("master_dtype"),
        double_quant=bool(nested) or None,
        quant_storage=command["bnb_4bit_quant_storage"],
        base_memory=None if memory is None else parse_size(str(memory)),
        quantized_parts=command["quantized_parts"],
    )


def _saved_quantization(init: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization in `--model_init_kwargs`, keyed by the field names of `BitsAndBytesConfig`."""
    config = init.get("quantization_config")
    flat = {key: init[key] for key in ("load_in_4bit", "load_in_8bit") if init.get(key)}
    return {**flat, **config} if isinstance(config, dict) else flat


def _dtypes(command: Command, init: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[Claim]:
    asked = command["dtype"]
    if asked not in (None, "auto"):
        yield f"--dtype {asked}", dtype_name(parse_dtype(asked))
    yield from ((f"--{flag}", name) for flag, name in FLAGS if command.given(flag))
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched in dict(FLAGS):
        yield f"mixed precision {launched} of accelerate launch", dict(FLAGS)[launched]
    for key in ("dtype", "torch_dtype"):
        if init.get(key) not in (None, "auto"):
            yield f"--model_init_kwargs {key}={init[key]}", dtype_name(parse_dtype(init[key]))
    compute = saved.get("bnb_4bit_compute_dtype")
    if compute is not None:
        what = f"--model_init_kwargs quantization_config bnb_4bit_compute_dtype={compute}"
        yield what, dtype_name(parse_dtype(compute))


def _dtype_problems(command: Command, claims: Sequence[Claim]) -> Iterator[Problem]:
    for claim, name in claims[1:]:
        first, dtype = claims[0]
        if name != dtype:
            fix = f"omit {claim} to get {dtype}, or omit {first} to get {name}"
            yield Problem(f"{first} and {claim}", _ONE_DTYPE, fix)
    for flag, name in FLAGS:
        if claims and command.given(flag) is False and claims[0][1] == name:
            fix = f"omit --{flag} False, or set another --dtype"
            yield Problem(f"{claims[0][0]} and --{flag} False", "one compute dtype", fix)


def _formats(command: Command, saved: Mapping[str, Any]) -> Iterator[Claim]:
    asked, kind = command["quantization"], command["bnb_4bit_quant_type"]
    if asked:
        yield f"--quantization {asked}", asked
    if command["load_in_8bit"]:
        yield "--load_in_8bit", "int8"
    chosen_type = "bnb_4bit_quant_type" in command
    if command["load_in_4bit"]:
        name = kind if chosen_type or asked not in FOUR_BITS else asked
        yield "--load_in_4bit" + (f" --bnb_4bit_quant_type {name}" if chosen_type else ""), name
    elif chosen_type:
        yield f"--bnb_4bit_quant_type {kind}", kind
    what = "--model_init_kwargs quantization_config"
    if saved.get("load_in_8bit"):
        yield f"{what} load_in_8bit", "int8"
    elif saved.get("load_in_4bit"):
        name = str(saved.get("bnb_4bit_quant_type", "fp4"))  # bitsandbytes' own default
        yield f"{what} load_in_4bit ({name})", name


def _format_problems(
    init: Mapping[str, Any], saved: Mapping[str, Any], claims: Sequence[Claim]
) -> Iterator[Problem]:
    config = init.get("quantization_config")
    if config and not (saved.get("load_in_8bit") or saved.get("load_in_4bit")):
        fix = "omit it, and set --quantization nf4, fp4 or int8"
        what = f"--model_init_kwargs quantization_config {config}"
        yield Problem(what, "load_in_4bit or load_in_8bit of bitsandbytes", fix)
    for claim, name in claims[1:]:
        if name != claims[0][1]:
            yield Problem(f"{claims[0][0]} and {claim}", "one quantization", "omit one of the two")


def _other_problems(command: Command) -> Iterator[Problem]:
    for flag in ("fp16_full_eval", "bf16_full_eval"):
        if command[flag]:
            yield Problem(f"--{flag}", "evaluation in the dtypes of the training", _NO_CAST)
    memory = command["base_memory"]
    if memory is not None and parse_size(str(memory)) is None:
        yield wrong_size("--base_memory", str(memory))
    if memory is not None and command["quantization"] != MIXED:
        why = "because --base_memory limits the memory of the formats that mixed chooses"
        fix = "add --quantization mixed, or omit --base_memory"
        what = f"--base_memory {memory} without --quantization mixed"
        yield Problem(what, f"--quantization mixed, {why}", fix)
