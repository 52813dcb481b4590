"""`isotype quality`: what storing each layer in 4 or 8 bits does to a model's output."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from isotype.cli.output import quiet_libraries
from isotype.compat.interrupt import interrupts_kept
from isotype.core.arguments import Parser
from isotype.core.terminal import shown
from isotype.precision.damages import MEASURED
from isotype.train.command.arguments import count_problems


def quality_parser() -> Parser:
    """The arguments of `isotype quality`."""
    parser = Parser(
        prog="isotype quality",
        description="What storing each linear layer in 4, 8 or 16 bits does to the distribution of the next token, in nats. Weights are read "
        "from disk block by block; what is measured on isotype's own texts is kept, and --quantization mixed chooses by it.",
    )
    add = parser.add_argument
    add("model", help="a checkpoint directory, a .gguf file, embedded:NAME or a hub id")
    add(
        "--data",
        default=None,
        help="a data set to measure on, as --dataset_name; by default texts of isotype's own",
    )
    add("--tokens", type=int, default=256, help="how many tokens are run (default 256)")
    add(
        "--exact",
        nargs="*",
        choices=MEASURED,
        default=["nf4"],
        help="formats of all layers together that are measured, a forward each; of the others, layers are summed up (default nf4)",
    )
    add("--device", default=None, help="where it is computed (default cpu)")
    add("--revision", default=None, help="branch, tag or commit of a hub id")
    add("--json", action="store_true", help="print JSON")
    return parser


def run(argv: Sequence[str], console: Console) -> int:
    """Run `isotype quality` and return its exit status.

    Raises:
        CheckpointError: no checkpoint there, or one that cannot be loaded.
        DataError: a data set that cannot be read.
        UsageError: a number of tokens beyond the limits, or a model without logits.
    """
    parser = quality_parser()
    options = parser.parse_args(list(argv))
    parser.refuse(count_problems({"tokens": options.tokens}))
    quiet_libraries()
    from isotype.checkpoint.damage.measure import measure_quality
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
