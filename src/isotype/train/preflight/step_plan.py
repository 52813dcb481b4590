"""Plans the step from the arguments of `isotype check`: the arguments of a training command, and a few more."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from isotype.core.arguments import Parser
from isotype.core.errors import Problem, UsageError
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING
from isotype.train.command.arguments import count_problems, number_problems
from isotype.train.command.command import Command, specs
from isotype.train.command.parse import first_words, method_of_config, parse_command
from isotype.train.command.precision import read_precision_request
from isotype.train.launched import processes
from isotype.train.preflight.plan import DEFAULT_LENGTH, Options, StepPlan

_DESCRIPTION = """\
Trace one training step on fake tensors and report what crashes, what is slow, what does not fit into memory and what
loses precision, on any device. The check needs no weights, no GPU and no data set.

  isotype check MODEL [flags]           a directory, config.json, GGUF file, embedded:NAME or hub id
  isotype check FILE.yaml [flags]       a file of settings of isotype, TRL, axolotl or LLaMA-Factory
  isotype check sft --model_name_or_path MODEL [flags]
                                        any training command, with `check` in front
  isotype check package.module:function a function that returns (model, inputs), or a dict of isotype.check's
                                        arguments

All flags of `isotype sft` (or dpo, …) work. This list has the most used training flags, and the flags that only
`isotype check` has:"""

_STATUS = """\
exit status: 0 no finding of the severity --fail-on or higher; 1 such a finding, or a step that does not fit or was not
traced to its end; 2 bad arguments"""


def parse_options(argv: Sequence[str]) -> tuple[Options, Command]:
    if "-h" in argv or "--help" in argv:
        help_parser().print_help()
        raise SystemExit(0)
    named, model, tokens = first_words(argv)
    method = named or method_of_config(tokens) or "sft"
    command, options = parse_command(
        method, tokens, add_arguments=_add_own, model=model, problems_of=_problems, prog="isotype check"
    )
    if "," in str(command["device"]):
        what, fix = f"--device {command['device']}", "isotype plan takes several devices"
        raise UsageError("several devices", [Problem(what, "one device", fix, (("check",), ("plan",)))])
    fsdp, command = without_version(command, ("0", "1", "2"))
    if METHODS[method].loss != "policy":  # a step of such a method has whole groups of completions
        sizes = {"per_device_train_batch_size": options.batch, "max_length": options.length}
        command = command.but(**{name: value for name, value in sizes.items() if value is not None})
    return Options(bare=model is not None, fsdp=fsdp, **vars(options)), command


def without_version(command: Command, versions: Collection[str]) -> tuple[int | None, Command]:
    """Return the FSDP version in `--fsdp`, and the command with TRL's value for `--fsdp` instead (`full_shard` or none).

    If the value is not in `versions`, it is TRL's own. The result is then None and the unchanged command.
    """
    if command.given("fsdp") not in versions:
        return None, command
    version = int(command["fsdp"])
    return version, command.but(fsdp="full_shard" if version == 2 else None)


def _problems(options: argparse.Namespace) -> list[Problem]:
    counts = ("batch", "length", "devices", "images")
    problems = count_problems({name: getattr(options, name) for name in counts})
    if options.image is None and options.images > 1:
        what = f"--images {options.images} without --image"
        fix = "add --image 1024x768, or leave --images out"
        problems.append(Problem(what, "the size of the images", fix))
    return problems


def function_options(argv: Sequence[str]) -> tuple[Options, str, str | None]:
    """Parse `isotype check package.module:function …` into (options, function, device). Refuse training arguments."""
    function, *rest = argv
    parser = Parser(prog="isotype check", add_help=False)
    _add_own(parser)
    parser.add_argument("--device", default=None)
    parser.add_argument("--fsdp", choices=("0", "1", "2"), default=None)
    options, unknown = parser.parse_known_args(rest)
    parser.refuse(parser.problems)
    defaults = {"batch": None, "length": None, "image": None, "images": 1}
    flags = [f"--{name}" for name, default in defaults.items() if getattr(options, name) != default]
    if flags := [*unknown, *flags]:
        headline = f"arguments that do not go with {function}"
        expected = "--device, --devices, --fsdp, --generate and the outputs"
        raise UsageError.of(headline, " ".join(flags), expected, "leave them out: the function decides them")
    device, fsdp = vars(options).pop("device"), vars(options).pop("fsdp")
    return Options(fsdp=None if fsdp is None else int(fsdp), **vars(options)), function, device


def image_size(text: str) -> tuple[int, int]:
    """Parse a text such as `1024x768` into (width, height). Raise ValueError if the text is not a size."""
    width, _, height = text.lower().replace("×", "x").partition("x")
    if min(sides := (int(width), int(height))) < 1:
        raise ValueError(text)
    return sides


def _add_own(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--batch", type=int, help="rows in a step (default: as in the training, or 1 for MODEL alone)")
    add("--length", type=int, help=f"tokens in a row (default: --max_length, or {DEFAULT_LENGTH})")
    devices = "devices that train together; each has all weights (DDP), or a share with --fsdp 2 (--fsdp full_shard)"
    add("--devices", type=int, help=devices)
    add("--image", metavar="WxH", type=image_size, help="pixels of an image in each row, such as 1024x768")
    add("--images", type=int, default=1, help="number of images in each row (default: 1)")
    add("--generate", action="store_true", help="also trace the generation of tokens")
    add("-v", "--verbose", action="store_true", help="also print what memory and time consist of")
    add("--json", action="store_true", help="print JSON")
    add("--sarif", metavar="PATH", help="write the report as SARIF, for code scanning; `-` prints SARIF")
    add("--html", type=Path, metavar="PATH", help="write the report as one HTML file")
    add("--fix", action="store_true", help="show the repaired command, or the fixes for the function's model")
    levels = ("error", "warning")
    fail_on = "exit with status 1 if a finding has this severity or a higher one (default: error)"
    add("--fail-on", choices=levels, default="error", help=fail_on)


_USED_MOST: Mapping[str, str] = {
    "dtype": "compute dtype; auto is the checkpoint's dtype, if the device supports it",
    "quantization": "storage of the frozen weights",
    "device": "a device of this machine (cpu, cuda) or a name in docs/devices.md (t4, rtx4090, h100, mi300x, …)",
    "ranges": "value ranges for float16: measure and cache those of the checkpoint, or use ranges only if already cached",
    "lora_r": "rank of the adapters",
    "lora_alpha": "alpha of the adapters; their scale is alpha / rank",
    "lora_dropout": "dropout of the adapters' inputs",
    "learning_rate": "learning rate of the optimizer",
    "optim": "transformers' name of the optimizer",
}
"""Help texts of the most used arguments of `isotype sft`. Importing TRL for all help texts would take seconds."""


def help_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isotype check",
        usage="isotype check MODEL [flags]",
        description=_DESCRIPTION,
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    known = specs("sft")
    for name, text in _USED_MOST.items():
        default = "" if known[name].default is None else f" (default: {known[name].default})"
        choices = known[name].choices if name != "optim" else ()
        parser.add_argument(f"--{name}", choices=choices or None, help=f"{text}{default}")
    fsdp = "version of FSDP that shards the run, or 0 for no FSDP"
    parser.add_argument("--fsdp", choices=("0", "1", "2"), help=fsdp)
    _add_own(parser)
    return parser


def plan_of(options: Options, command: Command) -> StepPlan:
    light = {"model_name_or_path", "per_device_train_batch_size", "max_length", *_USED_MOST}
    bare = options.bare and command.method == "sft" and command.file is None
    if bare and light.issuperset(command.values):
        if problems := list(number_problems(command.given)):
            raise UsageError("invalid arguments", problems)
        return with_pictures(_light_plan(options, command), options)
    from isotype.train.preflight.plan_rows import plan_of_training

    return with_pictures(plan_of_training(options, command), options)


def with_pictures(plan: StepPlan, options: Options) -> StepPlan:
    """Add the images of `--image` to the plan. Raise UsageError if the number of tokens in an image is unknown."""
    if options.image is None:
        return plan
    from isotype.checkpoint.opened import config_of, open_model
    from isotype.ranges.pictures import pictures_of
    from isotype.train.models import tokenizer_here

    config = config_of(open_model(plan.source, plan.revision))
    _, processor = tokenizer_here(plan.source, plan.revision)
    pictures = pictures_of(config, processor, [options.image] * options.images)
    if pictures is not None:
        return replace(plan, pictures=pictures)
    takes = getattr(config, "vision_config", None) is not None
    shown = "x".join(map(str, options.image))
    raise UsageError.of(
        "the images cannot be counted",
        f"--image {shown} for {plan.source}, {'whose processor is not on this machine' if takes else 'which takes only text'}",
        "the processor in the model's directory" if takes else "a model that takes images",
        "copy preprocessor_config.json and the tokenizer into it" if takes else "leave --image out",
    )


def _light_plan(options: Options, command: Command) -> StepPlan:
    lora = {"r": command["lora_r"], **{name: command[name] for name in ("lora_alpha", "lora_dropout")}}
    return StepPlan(
        source=str(command["model_name_or_path"]),
        method="sft",
        precision=read_precision_request(command),
        device=command["device"],
        rows=command.given("per_device_train_batch_size") or 1,
        length=command.given("max_length"),
        lora=lora,
        learning_rate=command["learning_rate"],
        ranges=command["ranges"],
        optimizer=command["optim"],
        checkpointing=CHECKPOINTING,
        auto=True,
        fsdp=options.fsdp or 0,
        devices=options.devices or processes(),
    )
