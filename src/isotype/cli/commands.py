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
from isotype.core.arguments import Parser, did_you_mean, wrong_size
from isotype.core.errors import Problem, UsageError
from isotype.core.files import unused
from isotype.core.names import parse_size
from isotype.core.terminal import shown
from isotype.precision.devices.names import require_device

if TYPE_CHECKING:
    from rich.table import Table

    from isotype.rules import Rule

_OF_THE_PLAN = ("dtype", "quantization", "base_memory", "device")
"""Arguments that `isotype inspect` accepts only with `--plan`."""


def options_of(command: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command. Raise UsageError or PrecisionError for a value that is always invalid."""
    parser = Parser.of(command)
    options: argparse.Namespace = parser.parse_args(list(argv))
    if getattr(options, "dtype", "auto") != "auto":
        from isotype.core.dtypes import parse_dtype

        parse_dtype(options.dtype)
    if getattr(options, "device", None) is not None:
        require_device(options.device)
        if command in ("chat", "quality"):
            from isotype.precision.devices.probe import require_present

            require_present(options.device)
    if command == "inspect":
        _check_inspection(options, parser)
    elif command == "quality":
        from isotype.train.command.arguments import count_problems

        parser.refuse(count_problems({"tokens": options.tokens}))
    elif command == "chat":
        from isotype.train.chat import option_problems

        parser.refuse(option_problems(options))
    elif command == "explain" and options.code is not None:
        find_rule(options.code)
    return options


def _check_inspection(options: argparse.Namespace, parser: Parser) -> None:
    if options.program is not None:
        from isotype.checkpoint.consumers import CONSUMERS

        if options.program[0] not in CONSUMERS or len(options.program) > 2:
            what = f"--for {' '.join(options.program)}"
            expected = f"a program ({', '.join(CONSUMERS)}), and then at most one MODEL"
            raise UsageError.of("invalid arguments", what, expected, "--for vllm MODEL")
    elif not options.plan:
        if flags := [f"--{n}" for n in _OF_THE_PLAN if getattr(options, n) != parser.get_default(n)]:
            expected = "--plan, because only --plan uses these arguments"
            swap = (("inspect",), ("inspect", "--plan"))
            problem = Problem(" ".join(flags), expected, "add --plan", swap)
            raise UsageError("arguments that need --plan", [problem])
    elif options.base_memory is not None and parse_size(options.base_memory) is None:
        raise UsageError("invalid arguments", [wrong_size("--base_memory", options.base_memory)])


def inspect(argv: Sequence[str], console: Console) -> int:
    """Run `isotype inspect`: print its table, and then raise an error if the checkpoint cannot be loaded."""
    options = options_of("inspect", argv)
    if options.program is not None:
        return _inspect_for(options, console)
    if options.plan:
        return _inspect_plan(options, console)
    from isotype.checkpoint.inspect import inspect_checkpoint
    from isotype.report.inspect import inspection_json, render_inspection

    inspection = inspect_checkpoint(options.path, revision=options.revision)
    if options.json:
        print(json.dumps(inspection_json(inspection), indent=1))
    else:
        render_inspection(inspection, console)
    quiet_libraries()
    from isotype.checkpoint.checkpoint import require_loadable

    require_loadable(options.path, options.revision)
    return 0


def _inspect_for(options: argparse.Namespace, console: Console) -> int:
    quiet_libraries()
    from isotype.checkpoint.consumers import fit_of
    from isotype.report.inspect import render_fit

    fit = fit_of(options.path, *options.program)
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


def quality(argv: Sequence[str], console: Console) -> int:
    options = options_of("quality", argv)
    quiet_libraries()
    from isotype.checkpoint.damage import measure_quality
    from isotype.train.rows.measurement_rows import batch_of_data

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


def explain(argv: Sequence[str], console: Console) -> int:
    from rich.markdown import Markdown

    from isotype.rules import all_rules, page

    options = options_of("explain", argv)
    if options.code is None:
        console.print(_rule_table(all_rules()))
    else:
        console.print(Markdown(page(find_rule(options.code))))
    return 0


def find_rule(code: str) -> Rule:
    """Return the rule with this code (`IST101`, `ist101` or `101`). For an unknown code, raise UsageError."""
    from isotype.rules import all_rules

    rules = {rule.code: rule for rule in all_rules()}
    wanted = code.upper()
    wanted = f"IST{wanted}" if wanted.isdigit() else wanted
    if wanted in rules:
        return rules[wanted]
    fix = did_you_mean(wanted, rules, "isotype explain lists them", cutoff=0.5)
    if longer := [rule for rule in rules if rule.startswith(wanted) and wanted[3:]]:
        fix = f"give one of {', '.join(longer)}"
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


def doctor(argv: Sequence[str], console: Console) -> int:
    options = options_of("doctor", argv)
    from isotype.precision.devices.machine import gather_doctor_report
    from isotype.report.doctor import doctor_json, render_doctor

    report = gather_doctor_report(options.device)
    if options.json:
        print(json.dumps(doctor_json(report), indent=2))
    else:
        render_doctor(report, console)
    return 0 if report.ok else 1


def merge(argv: Sequence[str], console: Console) -> int:
    options = options_of("merge", argv)
    quiet_libraries()
    from isotype.checkpoint.merge.merge import merge_adapter
    from isotype.report.inspect import show_merge
    from isotype.train.rows.measurement_rows import rows_of_training

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


def chat(argv: Sequence[str], console: Console) -> int:
    options = options_of("chat", argv)
    quiet_libraries()
    from isotype.train.chat import chat as talk

    return talk(options, console)


def plan(argv: Sequence[str], console: Console) -> int:
    from isotype.planning.from_request import plan_of_request
    from isotype.planning.model_catalog import names_a_model
    from isotype.planning.request import parse_request
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
    from isotype.planning.model_catalog import plans
    from isotype.planning.text import render_models

    if "--json" in argv or any(token.split("=")[0] == "--html" for token in argv):
        fix = "isotype plan MODEL --json"
        raise UsageError.of("no model", "--json or --html without a model", "a model", fix)
    with interrupts_kept():
        models = list(plans(argv))
    render_models(models, console, bool({"-v", "--verbose"} & set(argv)))
    return 0 if any(model.chosen is not None for model in models) else 1
