"""Builds one data set (a mixture) from the data sets under `datasets:` in a configuration file; their columns may differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.compat.hub import offline_if_unreachable
from isotype.core.errors import Problem, first_line
from isotype.data.build import Job, Prepared, literal, opened, prepare, undecoded
from isotype.data.cells import COLUMNS, TURN_COLUMNS
from isotype.data.columns import formats_of, matching, quoted
from isotype.data.locate import LocalData, data_error, find_local, splits_problems
from isotype.data.reading import Reading, column_map
from isotype.data.shapes import Shape, merge, shape_of_feature, to_feature

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

_SEED = 0
"""Fixed seed for splitting rows into training and test rows, so that a resumed run gets the same split."""


@dataclass(frozen=True)
class _Part:
    """A data set of a mixture.

    Attributes:
        splits: (name, checked split) of each split that the entry names.
        prepare: function that checks the splits again with another `Reading`.
    """

    name: str
    reading: Reading
    splits: Sequence[tuple[str, Prepared]]
    prepare: Callable[[Reading], Sequence[tuple[str, Prepared]]]

    @property
    def problems(self) -> list[Problem]:
        return [problem for _, item in self.splits for problem in item.problems]

    @property
    def row(self) -> dict[str, Any]:
        return next((item.first for _, item in self.splits if item.first is not None), {})


def load_mixture(args: Any, job: Job) -> DatasetDict | IterableDatasetDict:
    """Return the split `train` of a `trl.DatasetMixtureConfig` and, if `test_split_size` is set, the split `test`."""
    import datasets

    if args.streaming and args.test_split_size is not None:
        conflict = f"--test_split_size {args.test_split_size} with a streamed mixture"
        fix = "leave out --streaming or --test_split_size"
        raise data_error("datasets", [Problem(conflict, "a mixture of known size, which can be split", fix)])
    if len(job.wanted) > 1 and args.test_split_size is None:
        conflict = "evaluation is on and the mixture has no test split"
        fix = "--test_split_size 0.1, or --eval_strategy no"
        raise data_error("datasets", [Problem(conflict, "a share of the mixture to evaluate on", fix)])
    job = dataclasses.replace(job, reading=dataclasses.replace(job.reading, listed=True))
    parts = [_part(entry, job, args.streaming) for entry in args.datasets]
    if problems := [problem for part in parts for problem in part.problems]:
        raise data_error("datasets", problems)
    parts = _of_one_form(parts, job)
    for line in dict.fromkeys(note for part in parts for _, item in part.splits for note in item.notes):
        job.say(line)
    try:
        whole = datasets.concatenate_datasets(_shares(args, _aligned(parts, job, args.streaming)))
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        named = quoted(entry.path for entry in args.datasets)
        fix = "check each entry's path, split, columns and fraction; an unreachable hub needs local files"
        failure = f"the mixture of {named} cannot be built: {first_line(error)}"
        raise data_error("datasets", [Problem(failure, "entries that load and fit together", fix)]) from error
    if args.test_split_size is not None:
        splits = whole.train_test_split(test_size=args.test_split_size, seed=_SEED)
    else:
        splits = (datasets.IterableDatasetDict if args.streaming else datasets.DatasetDict)({"train": whole})
    problems = splits_problems("datasets", splits, job.wanted)
    if problems:
        raise data_error("datasets", problems)
    return type(splits)({name: splits[name] for name in job.wanted})


def _part(entry: Any, job: Job, streaming: bool) -> _Part:
    only = entry.columns if isinstance(entry.columns, (list, tuple)) else None
    reading = job.reading
    if entry.columns is not None:
        columns = None if only is not None else column_map(entry.columns, f"`columns` of {entry.path}")
        reading = dataclasses.replace(reading, columns=columns)
    local = None if entry.data_files or entry.data_dir else find_local(entry.path)

    def read(reading: Reading) -> list[tuple[str, Prepared]]:
        by_reading = dataclasses.replace(job, reading=reading)
        if local is not None:
            return _from_here(entry, local, by_reading, only)
        return [("", _from_hub(entry, by_reading, only, streaming))]

    return _Part(entry.path, reading, read(reading), read)


def _from_here(
    entry: Any, local: LocalData, job: Job, only: Sequence[str] | None
) -> list[tuple[str, Prepared]]:
    named = [part.strip() for part in entry.split.split("+")]
    problems = splits_problems(local.name, local.splits, [name.split("[")[0] for name in named])
    if problems:
        return [("", Prepared(problems))]
    return [(name, prepare(local, name.split("[")[0], job, only)) for name in named]


def _from_hub(entry: Any, job: Job, only: Sequence[str] | None, streaming: bool) -> Prepared:
    import datasets

    why = ""
    try:
        with offline_if_unreachable() as why:
            loaded = datasets.load_dataset(
                entry.path,
                name=entry.name,
                data_dir=entry.data_dir,
                data_files=entry.data_files,
                split=entry.split,
                streaming=streaming,
            )
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        failure = f"'{entry.path}' cannot be loaded: {why or first_line(error)}"
        fix = "check the path, name and split of the data set, or name a local file; an unreachable hub needs local files"
        return Prepared([Problem(failure, "a hub data set of plain data files", fix)])
    return opened(loaded, [(entry.path, None)], job, only)


def _of_one_form(parts: Sequence[_Part], job: Job) -> list[_Part]:
    """Convert parts of different formats to one format: texts become messages, or prompts and completions become chats."""
    formats = formats_of(job.method, job.text_field)
    forms = [matching(part.row, formats) for part in parts]
    required = [() if form is None else form.required for form in forms]
    plain = [
        any(isinstance(part.row.get(name), str) for name in names if name in TURN_COLUMNS)
        for part, names in zip(parts, required, strict=True)
    ]
    if len(set(required)) == 1 and len(set(plain)) == 1:
        return list(parts)
    if len(set(required)) == 1 and "prompt" in required[0]:
        named = quoted(part.name for part, text in zip(parts, plain, strict=True) if text)
        job.say(f"{named}: plain prompts and answers become messages, like the rest of the mixture")
        return [_again(part, chat=True) if text else part for part, text in zip(parts, plain, strict=True)]
    if job.method == "sft" and set(required) <= {("messages",), ("prompt", "completion")}:
        turned = [part.name for part, names in zip(parts, required, strict=True) if "prompt" in names]
        job.say(
            f"{quoted(turned)}: prompts and completions become conversations, like the rest of the mixture; "
            "the loss counts prompts too, unless --assistant_only_loss True is given"
        )
        return [_again(part, joined=True) for part in parts]
    held = "; ".join(
        f"'{part.name}' holds {' and '.join(map(repr, names))}{' as text' if text else ''}"
        for part, names, text in zip(parts, required, plain, strict=True)
    )
    expected = "data sets of the same format (for sft, also conversations beside prompts and completions)"
    fix = "train on the data sets one after the other, or rename an entry's columns with `columns`: {prompt: question, completion: answer}"
    raise data_error("datasets", [Problem(held, expected, fix)])


def _again(part: _Part, **changes: Any) -> _Part:
    reading = dataclasses.replace(part.reading, **changes)
    again = dataclasses.replace(part, reading=reading, splits=part.prepare(reading))
    if again.problems:
        raise data_error("datasets", again.problems)
    return again


def _aligned(parts: Sequence[_Part], job: Job, streaming: bool) -> list[Any]:
    """Return a data set for each part, such that columns of the same name have the same type in all of them."""
    import datasets

    used = None
    if job.method == "sft":  # SFT ignores other columns, whose types may differ between the parts
        used = {*COLUMNS, job.text_field, "image", "images"}
    shapes: dict[str, Shape] = {}
    for part in parts:
        for _, item in part.splits:
            for name, shape in _shapes(item).items():
                shapes[name] = shape if name not in shapes else merge(shapes[name], shape)
    built = []
    for part in parts:
        pieces = [_piece(name, item, shapes, used, streaming) for name, item in part.splits]
        built.append(pieces[0] if len(pieces) == 1 else datasets.concatenate_datasets(pieces))
    return built


def _shapes(item: Prepared) -> dict[str, Shape]:
    if item.dataset is None:
        return dict(item.shapes)
    features = item.dataset.features or {}
    known = {name: shape_of_feature(feature) for name, feature in features.items()}
    return {name: shape for name, shape in known.items() if shape is not None}


def _piece(name: str, item: Prepared, shapes: dict[str, Shape], used: set[str] | None, stream: bool) -> Any:
    import datasets

    if item.dataset is None:
        held = [*item.shapes, *({"images"} & shapes.keys() - item.shapes.keys())]  # rows of texts have none
        used_shapes = {column: shapes[column] for column in held if used is None or column in used}
        dataset = dataclasses.replace(item, shapes=used_shapes).build()
    else:
        dataset = item.dataset
        if used is not None and dataset.column_names is not None:
            dataset = dataset.select_columns([column for column in dataset.column_names if column in used])
        dataset = _cast(dataset, shapes)
    if "[" in name:
        files = literal(Path(stored["filename"]) for stored in dataset.cache_files)
        split = name.split("[")[0]
        return datasets.load_dataset("arrow", data_files={split: files}, split=name, streaming=stream)
    return dataset.to_iterable_dataset() if stream and hasattr(dataset, "to_iterable_dataset") else dataset


def _cast(dataset: Any, shapes: dict[str, Shape]) -> Any:
    import datasets

    features = dataset.features
    if features is None:
        return dataset
    stored = {name: shape_of_feature(feature) for name, feature in features.items()}
    others = (name for name, shape in stored.items() if shape is not None and shape != shapes[name])
    target = dict(features) | {name: to_feature(shapes[name]) for name in others}
    if "images" in shapes:
        target["images"] = to_feature(shapes["images"])
    if target == dict(features):
        return dataset
    pictured = {"pictured": "images" in shapes}
    return undecoded(dataset).map(_same, fn_kwargs=pictured, features=datasets.Features(target))


def _same(row: Any, pictured: bool) -> dict[str, Any]:
    # `map` does not cast a row that it gets back as the same object, so a copy is returned.
    return {"images": [], **row} if pictured else dict(row)


def _shares(args: Any, built: list[Any]) -> list[Any]:
    """Return the first rows of each data set. Their numbers have the proportions `fraction`, and no row is repeated."""
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
