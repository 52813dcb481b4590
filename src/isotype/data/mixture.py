"""Builds one data set (a mixture) from the entries under `datasets:` in a configuration file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isotype.core.errors import Problem, first_line
from isotype.data.build import Prepared, from_hub, opened, prepare, undecoded
from isotype.data.cells import COLUMNS, TURN_COLUMNS
from isotype.data.columns import formats_of, matching, quoted
from isotype.data.locate import data_error, find_local, splits_problems
from isotype.data.reading import Reading, parse_columns
from isotype.data.shapes import NULL, Shape, merge

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

_SEED = 0
"""Fixed seed for splitting rows into training and test rows, so that a resumed run gets the same split."""


@dataclass(frozen=True)
class _Part:
    """An entry of a mixture. The field `splits` contains (name, checked split) for each split of the entry."""

    entry: Any
    splits: Sequence[tuple[str, Prepared]]

    @property
    def name(self) -> str:
        return str(self.entry.path)

    @property
    def row(self) -> dict[str, Any]:
        return next((item.first for _, item in self.splits if item.first is not None), {})


def load_mixture(
    args: Any, reading: Reading, wanted: Sequence[str], say: Callable[[str], object]
) -> DatasetDict | IterableDatasetDict:
    """Return the split `train` of a `trl.DatasetMixtureConfig` and, if `test_split_size` is set, the split `test`."""
    import datasets

    if args.streaming and args.test_split_size is not None:
        conflict = f"--test_split_size {args.test_split_size} with a streamed mixture"
        fix = "omit --streaming or --test_split_size"
        raise data_error("datasets", [Problem(conflict, "a mixture of known size, which can be split", fix)])
    if len(wanted) > 1 and args.test_split_size is None:
        conflict = "evaluation is on and the mixture has no test split"
        fix = "--test_split_size 0.1, or --eval_strategy no"
        raise data_error("datasets", [Problem(conflict, "a share of the mixture to evaluate on", fix)])
    parts = _valid([_part(entry, reading, args.streaming) for entry in args.datasets])
    parts = _valid(_of_one_form(parts, reading, args.streaming, say))
    for line in dict.fromkeys(note for part in parts for _, item in part.splits for note in item.notes):
        say(line)
    try:
        whole = datasets.concatenate_datasets(_shares(args, _aligned(parts, reading, args.streaming)))
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        named = quoted(entry.path for entry in args.datasets)
        fix = "check the path, split, columns and fraction of each entry; without the hub, name local files"
        failure = f"the mixture of {named} cannot be built: {first_line(error)}"
        raise data_error("datasets", [Problem(failure, "entries that can be joined", fix)]) from error
    if args.test_split_size is not None:
        splits = whole.train_test_split(test_size=args.test_split_size, seed=_SEED)
    else:
        splits = (datasets.IterableDatasetDict if args.streaming else datasets.DatasetDict)({"train": whole})
    problems = splits_problems("datasets", splits, wanted)
    if problems:
        raise data_error("datasets", problems)
    return type(splits)({name: splits[name] for name in wanted})


def _part(entry: Any, reading: Reading, streaming: bool) -> _Part:
    if isinstance(entry.columns, (list, tuple)):
        reading = replace(reading, columns=None, only=tuple(entry.columns))
    elif entry.columns is not None:
        reading = replace(reading, columns=parse_columns(entry.columns, f"`columns` of {entry.path}"))
    local = None if entry.data_files or entry.data_dir else find_local(entry.path)
    if local is None:
        files = {"data_dir": entry.data_dir, "data_files": entry.data_files}
        loaded = from_hub(entry.path, name=entry.name, split=entry.split, streaming=streaming, **files)
        failed = isinstance(loaded, Problem)
        return _Part(
            entry, [("", Prepared([loaded]) if failed else opened(loaded, [(entry.path, None)], reading))]
        )
    named = [part.strip() for part in entry.split.split("+")]
    problems = splits_problems(local.name, local.splits, [name.split("[")[0] for name in named])
    if problems:
        return _Part(entry, [("", Prepared(problems))])
    return _Part(entry, [(name, prepare(local, name.split("[")[0], reading)) for name in named])


def _valid(parts: list[_Part]) -> list[_Part]:
    if problems := [problem for part in parts for _, item in part.splits for problem in item.problems]:
        raise data_error("datasets", problems)
    return parts


def _of_one_form(
    parts: list[_Part], reading: Reading, streaming: bool, say: Callable[[str], object]
) -> list[_Part]:
    """Convert parts of different formats to the same format. Texts become messages, or prompts with completions become chats."""
    formats = formats_of(reading.method, reading.text_field)
    forms: list[tuple[_Part, tuple[str, ...], bool]] = []
    for part in parts:
        form = matching(part.row, formats)
        names = () if form is None else form.required
        plain = any(isinstance(part.row.get(name), str) for name in names if name in TURN_COLUMNS)
        forms.append((part, names, plain))
    kinds = {names for _, names, _ in forms}
    if len({(names, plain) for _, names, plain in forms}) == 1:
        return parts
    if len(kinds) == 1 and "prompt" in forms[0][1]:
        named = quoted(part.name for part, _, plain in forms if plain)
        say(f"{named}: plain prompts and answers become messages, like the rest of the mixture")
        spoken = replace(reading, chat=True)
        return [_part(part.entry, spoken, streaming) if plain else part for part, _, plain in forms]
    if reading.method == "sft" and kinds <= {("messages",), ("prompt", "completion")}:
        turned = [part.name for part, names, _ in forms if "prompt" in names]
        say(
            f"{quoted(turned)}: prompts and completions become conversations, like the rest of the mixture; "
            "the loss includes prompts, unless --assistant_only_loss True is given"
        )
        return [_part(part.entry, replace(reading, joined=True), streaming) for part in parts]
    formats_of_parts = "; ".join(
        f"'{part.name}' holds {' and '.join(map(repr, names))}{' as text' if plain else ''}"
        for part, names, plain in forms
    )
    expected = "data sets of the same format (sft can also mix conversations with prompts and completions)"
    fix = "train on one data set after the other, or rename the columns of an entry with `columns`: {prompt: question, completion: answer}"
    raise data_error("datasets", [Problem(formats_of_parts, expected, fix)])


def _aligned(parts: Sequence[_Part], reading: Reading, streaming: bool) -> list[Any]:
    """Return a data set for each part. Columns with the same name have the same type in all data sets."""
    import datasets

    used = None
    if reading.method == "sft":  # SFT ignores other columns, whose types may differ between the parts
        used = {*COLUMNS, reading.text_field, "image", "images"}
    shapes: dict[str, Shape] = {}
    for item in (item for part in parts for _, item in part.splits):
        for name, shape in item.shapes.items():
            if shape is not None:
                shapes[name] = merge(shapes.get(name, NULL), shape)
    built = []
    for part in parts:
        pieces = [_piece(name, item, shapes, used, streaming) for name, item in part.splits]
        whole = pieces[0] if len(pieces) == 1 else datasets.concatenate_datasets(pieces)
        built.append(_typed(whole) if streaming else whole)
    return built


def _typed(stream: Any) -> Any:
    """Return the stream with rows that `datasets` converts to the column types, even after `concatenate_datasets`.

    A concatenation of streams converts all rows if the first stream does, and else no row (`is_typed` in
    https://github.com/huggingface/datasets/blob/5.2.0/src/datasets/iterable_dataset.py). Without this conversion,
    messages would stay JSON texts.
    """
    return stream if stream.features is None else undecoded(stream).map(dict, features=stream.features)


def _piece(name: str, item: Prepared, shapes: dict[str, Shape], used: set[str] | None, stream: bool) -> Any:
    from datasets import ReadInstruction

    # A part without images gets an empty column of images.
    kinds: dict[str, Shape | None] = dict.fromkeys({"images"} & shapes.keys(), NULL)
    kinds |= item.shapes
    kept = {column: shape for column, shape in kinds.items() if used is None or column in used}
    dataset = item.build({column: shape and shapes[column] for column, shape in kept.items()})
    if "[" in name:
        rows = ReadInstruction.from_spec(name).to_absolute({name.split("[")[0]: len(dataset)})[0]
        dataset = dataset.select(range(rows.from_, rows.to))
    return dataset.to_iterable_dataset() if stream and hasattr(dataset, "__len__") else dataset


def _shares(args: Any, built: list[Any]) -> list[Any]:
    """Return the first rows of each data set. Their numbers are proportional to the `fraction` of each entry."""
    fractions = [entry.fraction for entry in args.datasets]
    if all(fraction is None for fraction in fractions):
        return built
    if any(fraction is None for fraction in fractions):
        raise ValueError("`fraction` must be set for either all datasets in the mixture or none of them.")
    if args.streaming:
        raise ValueError("Using a dataset `fraction` is not supported with streaming datasets.")
    if not all(fraction >= 0 for fraction in fractions) or not sum(fractions):
        raise ValueError("No `fraction` may be negative, and at least one must be above 0.")
    weights = [fraction / sum(fractions) for fraction in fractions]
    total = min(len(rows) / weight for rows, weight in zip(built, weights, strict=True) if weight > 0)
    return [rows.select(range(round(weight * total))) for rows, weight in zip(built, weights, strict=True)]
