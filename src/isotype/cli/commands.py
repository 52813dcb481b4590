"""The commands `isotype inspect`, `quality`, `explain`, `doctor`, `merge`, `chat` and `plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.compat.interrupt import interrupts_kept
from isotype.core.arguments import Parser, did_you_mean
from isotype.core.errors import Problem, UsageError
from isotype.core.files import unused
from isotype.core.formats import ASKED, MIXED, QUANTIZATIONS
from isotype.core.names import parse_size
from isotype.core.terminal import shown

if TYPE_CHECKING:
    from rich.table import Table

    from isotype.rules import Rule

_OF_THE_PLAN = {"dtype": "auto", "quantization": None, "base_memory": None, "device": "auto"}
"""Arguments that `isotype inspect` takes only with `--plan`, and their defaults."""


def inspect_parser() -> Parser:
    parser = Parser(
        prog="isotype inspect",
        description="List dtypes, shapes, bytes and quantization of a checkpoint. The same tensor of all layers is one row. "
        "Only file headers are read.",
    )
    add = parser.add_argument
    add("path", help="a directory, .safetensors, .safetensors.index.json or .gguf file, or a hub id")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--plan", action="store_true", help="show how isotype would load each tensor, and why")
    dtype = "with --plan: compute dtype; auto: the checkpoint's dtype, if the device supports it"
    add("--dtype", default="auto", help=dtype)
    quantization = "with --plan: storage of the frozen weights; mixed: a format for each layer, chosen from the results of isotype quality"
    add("--quantization", choices=(*ASKED, MIXED), help=quantization)
    add("--base_memory", help="with --plan --quantization mixed: maximum memory of the weights, such as 6GiB")
    device = "with --plan: a device or a device profile; auto: the best device of this machine"
    add("--device", default="auto", help=device)
    fit = "for an adapter: show which of its tensors PROGRAM (peft, vllm or llama.cpp) applies to MODEL (default: its base model)"
    add("--for", nargs="+", dest="program", metavar=("PROGRAM", "MODEL"), help=fit)
    add("--json", action="store_true", help="print JSON")
    return parser


def inspect(argv: Sequence[str], console: Console) -> int:
    """Print the table of `isotype inspect`; then raise an error if the checkpoint cannot be loaded."""
    options = inspect_parser().parse_args(list(argv))
    if options.program is not None:
        return _inspect_for(options, console)
    if options.plan:
        return _inspect_plan(options, console)
    if flags := [f"--{name}" for name, default in _OF_THE_PLAN.items() if getattr(options, name) != default]:
        expected = "--plan, because only a plan uses these arguments"
        swap = (("inspect",), ("inspect", "--plan"))
        problem = Problem(" ".join(flags), expected, "add --plan", swap)
        raise UsageError("arguments that need --plan", [problem])
    from isotype.checkpoint.inspect import inspect_checkpoint
    from isotype.report.inspect import inspection_json, render_inspection

    inspection = inspect_checkpoint(options.path, revision=options.revision)
    if options.json:
        print(json.dumps(inspection_json(inspection), indent=1))
    else:
        render_inspection(inspection, console)
    quiet_libraries()
    from isotype.checkpoint.opened import require_loadable

    require_loadable(options.path, options.revision)
    return 0


def _inspect_for(options: argparse.Namespace, console: Console) -> int:
    quiet_libraries()
    from isotype.checkpoint.consumers import CONSUMERS, fit_of
    from isotype.report.inspect import render_fit

    program, *models = options.program
    if program not in CONSUMERS or len(models) > 1:
        what = f"--for {' '.join(options.program)}"
        expected = f"one of {', '.join(CONSUMERS)}, then at most one MODEL"
        raise UsageError.of("invalid arguments", what, expected, "--for vllm MODEL")
    fit = fit_of(options.path, program, *models)
    if options.json:
        print(json.dumps({**asdict(fit), "ok": fit.ok}, indent=1))
    else:
        render_fit(fit, console)
    return 0 if fit.ok else 1


def _inspect_plan(options: argparse.Namespace, console: Console) -> int:
    quiet_libraries()
    from isotype.checkpoint.inspect import inspect_plan
    from isotype.report.inspect import plan_json, render_plan

    memory = None if options.base_memory is None else parse_size(options.base_memory)
    if options.base_memory is not None and memory is None:
        what = f"--base_memory {options.base_memory}"
        raise UsageError.of("invalid arguments", what, "an amount of memory", "write it like 6GiB")
    inspection = inspect_plan(
        options.path,
        dtype=options.dtype,
        quantization=options.quantization,
        device=options.device,
        base_memory=memory,
        revision=options.revision,
    )
    if options.json:
        print(json.dumps(plan_json(inspection), indent=1))
    else:
        render_plan(inspection, console)
    return 0


def quality_parser() -> Parser:
    from isotype.precision.damages import MEASURED

    parser = Parser(
        prog="isotype quality",
        description="Measure how storing each linear layer in 4, 8 or 16 bits changes the distribution of the next token, in nats. Weights are "
        "read from disk block by block. Results on isotype's own texts are cached, and --quantization mixed uses the cached results.",
    )
    add = parser.add_argument
    add("model", help="a checkpoint directory, a .gguf file, embedded:NAME or a hub id")
    add("--data", help="a data set to measure on, as in --dataset_name; default: isotype's own texts")
    add("--tokens", type=int, default=256, help="number of tokens to measure on (default 256)")
    exact = "formats to measure once more with all layers in the format (default nf4); for other formats, the results of the layers are added up"
    add("--exact", nargs="*", choices=MEASURED, default=["nf4"], help=exact)
    add("--device", help="device to compute on (default cpu)")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--json", action="store_true", help="print JSON")
    return parser


def quality(argv: Sequence[str], console: Console) -> int:
    from isotype.train.command.arguments import count_problems

    parser = quality_parser()
    options = parser.parse_args(list(argv))
    parser.refuse(count_problems({"tokens": options.tokens}))
    quiet_libraries()
    from isotype.checkpoint.damage import measure_quality
    from isotype.train.rows.measured import batch_of_data

    with interrupts_kept():
        data = None
        if options.data is not None:
            data = batch_of_data(options.model, options.data, options.tokens, options.revision)
        damages = measure_quality(
            options.model,
            data,
            tokens=options.tokens,
            exact=options.exact,
            device=options.device,
            revision=options.revision,
        )
    console.file.write(shown(damages.to_json() if options.json else str(damages)) + "\n")
    return 0


def explain_parser() -> Parser:
    parser = Parser(prog="isotype explain", description="Explain a finding of `isotype check` and its fixes.")
    parser.add_argument("code", nargs="?", help="a code such as IST101; without a code, all codes are listed")
    return parser


def explain(argv: Sequence[str], console: Console) -> int:
    from rich.markdown import Markdown

    from isotype.rules import all_rules, page

    options = explain_parser().parse_args(list(argv))
    if options.code is None:
        console.print(_rule_table(all_rules()))
    else:
        console.print(Markdown(page(find_rule(options.code))))
    return 0


def find_rule(code: str) -> Rule:
    """Return the rule with this code (`IST101`, `ist101` or `101`), or raise UsageError with similar codes."""
    from isotype.rules import all_rules

    rules = {rule.code: rule for rule in all_rules()}
    wanted = code.upper()
    wanted = f"IST{wanted}" if wanted.isdigit() else wanted
    if wanted in rules:
        return rules[wanted]
    fix = did_you_mean(wanted, rules, "isotype explain lists them", cutoff=0.5)
    raise UsageError.of("unknown code", code, "the code of a rule", fix)


def _rule_table(rules: Sequence[Rule]) -> Table:
    from rich.text import Text

    from isotype.report.text import table_of
    from isotype.rules import by_family

    table = table_of("code", "what it finds", folded=("what it finds",))
    for _, about, family in by_family(rules):
        table.add_row("", Text(about, style="dim italic"))
        for rule in family:
            table.add_row(Text(rule.code, style="bold"), Text(rule.title))
    return table


def doctor_parser() -> Parser:
    parser = Parser(
        prog="isotype doctor",
        description="Show which dtypes this machine runs, the measured speed of each dtype, and library versions that are "
        "incompatible with one another.",
    )
    device = "a device of this machine (cpu, cuda:1) or a device profile (t4, h100; docs/devices.md has all)"
    parser.add_argument("--device", default="auto", help=device)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.stray = lambda value: "--device"
    return parser


def doctor(argv: Sequence[str], console: Console) -> int:
    options = doctor_parser().parse_args(argv)
    from isotype.precision.devices.machine import gather_doctor_report
    from isotype.report.doctor import doctor_json, render_doctor

    report = gather_doctor_report(options.device)
    if options.json:
        print(json.dumps(doctor_json(report), indent=2))
    else:
        render_doctor(report, console)
    return 0 if report.ok else 1


def merge_parser() -> Parser:
    from isotype.core.dtypes import GGUF_TYPES

    parser = Parser(prog="isotype merge", description="Merge an adapter into its base model.")
    parser.add_argument("adapter", type=Path, help="directory of the adapter")
    output = "directory for the merged model, or a GGUF file NAME.gguf (in 16 bits without --gguf)"
    parser.add_argument("-o", "--output", type=Path, required=True, help=output)
    base = "the 16-bit original of a quantized base model; the adapter is merged into the original"
    parser.add_argument("--base", help=base)
    dtype = "dtype of the merged weights; auto: the compute dtype in which the adapter was trained"
    parser.add_argument("--dtype", default="auto", help=dtype)
    stored = parser.add_mutually_exclusive_group()
    quantization = "store the merged model in this format of bitsandbytes"
    stored.add_argument("--quantization", choices=QUANTIZATIONS, help=quantization)
    gguf = "write a GGUF file of this type, for llama.cpp and programs built on it; q6_k and the types listed after q6_k need llama.cpp's llama-quantize"
    stored.add_argument("--gguf", choices=GGUF_TYPES, help=gguf)
    revision = (
        "branch, tag or commit of the base model on the hub; default: the revision that the adapter names"
    )
    parser.add_argument("--model_revision", help=revision)
    return parser


def merge(argv: Sequence[str], console: Console) -> int:
    options = merge_parser().parse_args(argv)
    quiet_libraries()
    from isotype.checkpoint.merge.merge import merge_adapter
    from isotype.report.inspect import show_merge
    from isotype.train.rows.measured import rows_of_training

    with interrupts_kept(), console.status(f"merging {options.adapter} …"):
        rows, why_not = rows_of_training(options.adapter)
        report = merge_adapter(
            options.adapter,
            options.output,
            base=options.base,
            dtype=options.dtype,
            revision=options.model_revision,
            stored=options.gguf or options.quantization,
            rows=rows,
        )
    if why_not is not None:
        report = replace(report, notes=(*report.notes, why_not))
    base = {"--base": options.base, "--model_revision": options.model_revision}
    flags = (word for name, value in base.items() if value is not None for word in (name, value))
    gguf_file = str(unused(Path(f"{options.output}.gguf")))
    show_merge(console, report, ("isotype", "merge", str(options.adapter), "-o", gguf_file, *flags))
    return 0


def chat_parser() -> Parser:
    parser = Parser(prog="isotype chat", description="Talk to a model or an adapter.")
    parser.stray = lambda value: "--ask"
    add = parser.add_argument
    add("model", help="directory of a model or an adapter, a hub id, or embedded:smollm2")
    add("--ask", action="append", metavar="QUESTION", help="ask this question and exit; may be repeated")
    image = "an image for the first question, if the model takes images; may be repeated"
    add("--image", action="append", metavar="FILE", help=image)
    add("--system", metavar="TEXT", help="a system message before the conversation")
    add("--dtype", default="auto", help="compute dtype")
    add("--quantization", choices=ASKED, help="storage format of the weights")
    add("--device", default="auto", help="device to run on")
    revision = "branch, tag or commit of a model on the hub; for an adapter, of its base model"
    add("--model_revision", help=revision)
    tokens = "maximum tokens of an answer; default: 200, or the rest of the model's context if that is less"
    add("--max_new_tokens", type=int, help=tokens)
    add("--temperature", type=float, default=0.0, help="sampling temperature; 0 (default): greedy decoding")
    return parser


def chat(argv: Sequence[str], console: Console) -> int:
    options = chat_parser().parse_args(argv)
    quiet_libraries()
    from isotype.train.chat import chat as talk

    return talk(options, console)


def plan(argv: Sequence[str], console: Console) -> int:
    from isotype.planning.from_request import plan_of_request
    from isotype.planning.request import parse_request
    from isotype.planning.shelf import names_a_model
    from isotype.planning.text import render

    quiet_libraries()
    if argv and not names_a_model(argv) and not {"-h", "--help"} & set(argv):
        return _run_without_model(argv, console)
    with interrupts_kept():
        request, outputs = parse_request(argv)
        planned = plan_of_request(request)
    if outputs.html is not None:
        planned.to_html(outputs.html)
    if outputs.json:
        print(planned.to_json(), end="")
    else:
        render(planned, console, outputs.verbose)
    return 0 if planned.chosen is not None else 1


def _run_without_model(argv: Sequence[str], console: Console) -> int:
    from isotype.planning.shelf import plans
    from isotype.planning.text import render_models

    if "--json" in argv or any(token.split("=")[0] == "--html" for token in argv):
        fix = "isotype plan MODEL --json"
        raise UsageError.of("no model", "--json or --html without a model", "a model", fix)
    with interrupts_kept():
        models = list(plans(argv))
    render_models(models, console, bool({"-v", "--verbose"} & set(argv)))
    return 0 if any(model.chosen is not None for model in models) else 1
