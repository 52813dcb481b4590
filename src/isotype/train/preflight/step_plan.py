"""Plans the step from the arguments of `isotype check`: those of a training command, and a few more."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from isotype.core.arguments import COMMANDS, Parser, add_arguments, wrong_choice
from isotype.core.errors import Problem, UsageError
from isotype.data.methods import METHODS
from isotype.model.recompute import CHECKPOINTING
from isotype.train.command.arguments import count_problems, number_problems
from isotype.train.command.command import Command, specs
from isotype.train.command.parse import first_words, method_of_config, parse_command
from isotype.train.command.precision import read_precision_request
from isotype.train.launched import processes
from isotype.train.preflight.plan import Options, StepPlan

_add_options = partial(add_arguments, command="check")


def parse_options(argv: Sequence[str]) -> tuple[Options, Command]:
    if "-h" in argv or "--help" in argv:
        help_parser().print_help()
        raise SystemExit(0)
    named, model, tokens = first_words(argv)
    method = named or method_of_config(tokens) or "sft"
    command, options = parse_command(
        method, tokens, add_arguments=_add_options, model=model, problems_of=_problems, prog="isotype check"
    )
    if "," in str(command["device"]):
        what, fix = f"--device {command['device']}", "isotype plan accepts several devices"
        raise UsageError("several devices", [Problem(what, "one device", fix, (("check",), ("plan",)))])
    fsdp, command = without_version(command, ("0", "1", "2"))
    if METHODS[method].loss != "policy":  # a step of such a method has whole groups of completions
        sizes = {"per_device_train_batch_size": options.batch, "max_length": options.length}
        command = command.but(**{name: value for name, value in sizes.items() if value is not None})
    return Options(bare=model is not None, fsdp=fsdp, **vars(options)), command


def without_version(command: Command, versions: Collection[str]) -> tuple[int | None, Command]:
    """Return (FSDP version, command with TRL's `--fsdp`) if `--fsdp` is a number; else (None, command).

    Raises:
        UsageError: the number is not in `versions`.
    """
    number = str(command.given("fsdp"))
    if not number.isdecimal():
        return None, command
    if number not in versions:
        raise UsageError("invalid arguments", [wrong_choice(f"--fsdp {number}", number, versions)])
    version = int(command["fsdp"])
    return version, command.but(fsdp="full_shard" if version == 2 else None)


def _problems(options: argparse.Namespace) -> list[Problem]:
    counts = ("batch", "length", "devices", "images")
    problems = count_problems({name: getattr(options, name) for name in counts})
    if options.image is None and options.images > 1:
        what = f"--images {options.images} without --image"
        fix = "add --image 1024x768, or omit --images"
        problems.append(Problem(what, "the size of the images", fix))
    return problems


def function_options(argv: Sequence[str]) -> tuple[Options, str, str | None]:
    """Parse `isotype check package.module:function …` into (options, function, device). Refuse training arguments."""
    function, *rest = argv
    parser = Parser(prog="isotype check", add_help=False)
    _add_options(parser)
    parser.add_argument("--device", default=None)
    parser.add_argument("--fsdp", choices=("0", "1", "2"), default=None)
    options, unknown = parser.parse_known_args(rest)
    parser.refuse(parser.problems)
    defaults = {"batch": None, "length": None, "image": None, "images": 1}
    flags = [f"--{name}" for name, default in defaults.items() if getattr(options, name) != default]
    if flags := [*unknown, *flags]:
        headline = f"arguments that cannot be combined with {function}"
        expected = "only --device, --devices, --fsdp, --generate and arguments of the output"
        raise UsageError.of(
            headline, " ".join(flags), expected, "omit them, because the function decides them"
        )
    device, fsdp = vars(options).pop("device"), vars(options).pop("fsdp")
    return Options(fsdp=None if fsdp is None else int(fsdp), **vars(options)), function, device


_USED_MOST: Mapping[str, str] = COMMANDS["check"]["training"]
"""Help texts of the most used arguments of `isotype sft`. They are copied, because importing TRL for its help texts would take seconds."""


def help_parser() -> Parser:
    parser = Parser.described("check")
    known = specs("sft")
    for name, text in _USED_MOST.items():
        default = "" if known[name].default is None else f" (default: {known[name].default})"
        choices = known[name].choices if name != "optim" else ()
        parser.add_argument(f"--{name}", choices=choices or None, help=f"{text}{default}")
    fsdp = "version of FSDP that shards the run, or 0 for no FSDP"
    parser.add_argument("--fsdp", choices=("0", "1", "2"), help=fsdp)
    _add_options(parser)
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
    from isotype.checkpoint.checkpoint import open_model
    from isotype.ranges.pictures import pictures_of
    from isotype.train.models import tokenizer_here

    config = open_model(plan.source, plan.revision).model_config
    _, processor = tokenizer_here(plan.source, plan.revision)
    pictures = pictures_of(config, processor, [options.image] * options.images)
    if pictures is not None:
        return replace(plan, pictures=pictures)
    takes = getattr(config, "vision_config", None) is not None
    shown = "x".join(map(str, options.image))
    raise UsageError.of(
        "the number of tokens in an image is unknown",
        f"--image {shown} for {plan.source}, {'whose processor is not on this machine' if takes else 'which takes only text'}",
        "the processor in the model's directory" if takes else "a model that accepts images",
        "copy preprocessor_config.json and the tokenizer there" if takes else "omit --image",
    )


def _light_plan(options: Options, command: Command) -> StepPlan:
    from peft import LoraConfig

    return StepPlan(
        source=str(command["model_name_or_path"]),
        method="sft",
        precision=read_precision_request(command),
        device=command["device"],
        rows=command.given("per_device_train_batch_size") or 1,
        length=command.given("max_length"),
        lora=LoraConfig(
            r=command["lora_r"],
            lora_alpha=command["lora_alpha"],
            lora_dropout=command["lora_dropout"],
            target_modules="all-linear",
            task_type=command["lora_task_type"],
        ),
        learning_rate=command["learning_rate"],
        ranges=command["ranges"],
        optimizer=command["optim"],
        checkpointing=CHECKPOINTING,
        auto=True,
        fsdp=options.fsdp or 0,
        devices=options.devices or processes(),
    )
