"""The data set a training command names: found, checked whole before any model is loaded, then built.

`--dataset_name` takes what `trl` takes (a hub id) and also a local file, a local directory, or `embedded:NAME`
for a data set that ships in the package. An existing path wins over a hub id, and what looks like a path is
never looked up on the hub. Nothing is executed from a data set.

JSON, JSON lines, CSV and text are read by `isotype.data.rows`, every row checked with its line number; parquet,
directories of `save_to_disk` and hub data sets by `datasets`, their columns and first 1000 rows checked. Blank
lines are skipped; a directory's splits are named by the words train, validation, test (or their usual other forms)
in its files' names, a file without such a word beside others is a split of its own name.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.errors import DataError, Problem
from isotype.core.hub import offline_if_unreachable
from isotype.core.names import listed
from isotype.data.cells import COLUMNS, TEXT_COLUMNS
from isotype.data.columns import columns_problem, quoted, survey
from isotype.data.locate import EMBEDDED, PARQUET, LocalData, data_error, find_local, splits_problems
from isotype.data.mapping import ColumnMap, parse_columns
from isotype.data.rows import CELL_SUFFIXES, digest_or_problem, generate, read_rows, unreadable
from isotype.data.shapes import Shape, to_feature

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDatasetDict

logger = logging.getLogger(__name__)

SAMPLED_ROWS = 1000

_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_CACHE_VERSION = "isotype-1"


def load_training_data(
    script_args: Any,
    dataset_args: Any,
    method: str,
    *,
    need_test: bool,
    text_field: str = "text",
    columns: str | None = None,
) -> DatasetDict | IterableDatasetDict:
    """The splits to train on and, with `need_test`, to evaluate on, under the names the arguments give them.

    Args:
        script_args: `trl.ScriptArguments` (or a subclass).
        dataset_args: `trl.DatasetMixtureConfig`, or None; its `datasets` win over `dataset_name`, as in TRL.
        method: a key of `METHODS`.
        need_test: evaluation is on.
        text_field: the name of SFT's plain text column (`SFTConfig.dataset_text_field`).
        columns: `"alpaca"`, or the trainer's names for the data set's columns (`prompt=question,completion=answer`).

    Raises:
        DataError: with every problem found, at most ten spelled out.
    """
    wanted = [script_args.dataset_train_split] + [script_args.dataset_test_split] * need_test
    job = _Job(method, text_field, tuple(dict.fromkeys(wanted)), parse_columns(columns))
    if dataset_args is not None and dataset_args.datasets:
        if script_args.dataset_name:
            logger.warning(
                "Both `datasets` and `dataset_name` are given: `datasets` is used, dataset_name '%s' is not.",
                script_args.dataset_name,
            )
        return _load_mixture(dataset_args, job)
    name = script_args.dataset_name
    if not name:
        raise DataError(
            "No training data is named",
            [
                Problem(
                    "neither --dataset_name nor `datasets` in a configuration file",
                    "a local file or directory, a hub id, or embedded:NAME",
                    "--dataset_name train.jsonl",
                )
            ],
        )
    local = find_local(name, test_split=script_args.dataset_test_split)
    if local is None:
        return _load_hub(name, script_args.dataset_config, script_args.dataset_streaming, job)
    if script_args.dataset_config:
        given = f"--dataset_config '{script_args.dataset_config}' with the local data set '{name}'"
        fix = "name the file or the folder itself in --dataset_name"
        raise data_error(name, [Problem(given, "a configuration only with a hub data set", fix)])
    return _load_local(local, script_args.dataset_streaming, job)


def training_data(settings: Any) -> DatasetDict | IterableDatasetDict:
    """The data of a training command, as its arguments name it, before rows are held back.

    Args:
        settings: of the command, see `isotype.train.settings.Settings`.

    Raises:
        DataError: as `load_training_data`.
    """
    evaluates = settings.training.eval_strategy != "no"
    return load_training_data(
        settings.script,
        settings.dataset,
        settings.method.name,
        need_test=evaluates and settings.extra.eval_split is None,
        text_field=getattr(settings.training, "dataset_text_field", "text"),
        columns=settings.extra.columns,
    )


def training_data_here(settings: Any) -> DatasetDict | IterableDatasetDict | None:
    """The data of a training command, if it lies on this machine; None where none is named or it is the hub's.

    Args:
        settings: of the command, see `isotype.train.settings.Settings`.

    Raises:
        DataError: as `load_training_data`.
    """
    script, mixture = settings.script, settings.dataset
    if (mixture is not None and mixture.datasets) or not script.dataset_name:
        return None
    if find_local(script.dataset_name, test_split=script.dataset_test_split) is None:
        return None
    return training_data(settings)


@dataclass(frozen=True)
class _Job:
    """What a data set is read for: the trainer, its text column, the splits it takes, the names it has for columns."""

    method: str
    text_field: str
    wanted: tuple[str, ...]
    mapping: ColumnMap | None = None


# ---------------------------------------------------------------------------------------------------------------
# Checking and building local data


def _load_local(local: LocalData, streaming: bool, job: _Job) -> DatasetDict | IterableDatasetDict:
    from datasets import DatasetDict, IterableDatasetDict

    problems = splits_problems(local.name, local.splits, job.wanted)
    if problems:
        raise data_error(local.name, problems)
    prepared = {split: _prepare(local, split, job) for split in job.wanted}
    problems = [problem for item in prepared.values() for problem in item.problems]
    if problems:
        raise data_error(local.name, problems)
    if streaming:
        return IterableDatasetDict({split: item.stream() for split, item in prepared.items()})
    return DatasetDict({split: item.build() for split, item in prepared.items()})


@dataclass(frozen=True)
class _Prepared:
    """One split, checked: what is wrong with it, else how to build it."""

    problems: Sequence[Problem]
    dataset: Any = None
    files: tuple[Path, ...] = ()
    digest: str = ""
    shapes: Mapping[str, Shape] = dataclasses.field(default_factory=dict)
    mapping: ColumnMap | None = None

    def build(self) -> Dataset:
        """The split in the cache of `datasets`, memory-mapped; keyed by its contents, so never stale."""
        from datasets import Dataset

        if self.dataset is not None:
            return self.dataset
        key = f"{_CACHE_VERSION} {self.digest} {tuple(self.shapes.items())!r} {self.mapping!r}"
        fingerprint = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        return Dataset.from_generator(generate, fingerprint=fingerprint, **self._arguments())

    def stream(self) -> Any:
        from datasets import IterableDataset

        if self.dataset is not None:
            return self.dataset.to_iterable_dataset()
        return IterableDataset.from_generator(generate, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        from datasets import Features

        textual = tuple(name for name, shape in self.shapes.items() if shape == "string")
        arguments = {
            "paths": [str(path.absolute()) for path in self.files],
            "textual": textual,
            "columns": tuple(self.shapes),
            "mapping": self.mapping,
        }
        features = Features({name: to_feature(shape) for name, shape in self.shapes.items()})
        return {"features": features, "gen_kwargs": arguments}


def _prepare(local: LocalData, split: str, job: _Job, columns: Sequence[str] | None = None) -> _Prepared:
    """Check one split of a local data set, of which only `columns` are taken where they are named."""
    files = local.splits[split]
    kinds = {_kind(path) for path in files}
    if local.saved:
        return _prepare_saved(files[0], split, job, columns)
    if len(kinds) > 1:
        given = f"split '{split}' of '{local.name}' is made of {quoted(path.name for path in files)}"
        return _Prepared(
            [Problem(given, "files of one kind in a split", "keep one kind, or name a single file")]
        )
    return _prepare_parquet(files, job, columns) if kinds == {PARQUET} else _prepare_text(files, job, columns)


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return ".jsonl" if suffix in _JSON_SUFFIXES else suffix


def _prepare_text(files: tuple[Path, ...], job: _Job, columns: Sequence[str] | None) -> _Prepared:
    digests = {path: digest_or_problem(path) for path in files}
    problems = [_at(path.name, problem) for path, (_, problem) in digests.items() if problem]
    if problems:
        return _Prepared(problems)
    cells = files[0].suffix.lower() in CELL_SUFFIXES
    found = survey(_records(files, job, columns), job.method, job.text_field, cells=cells)
    problems = found.problems()
    if found.count == 0:
        problems.append(_empty(quoted(path.name for path in files)))
    order = " ".join(f"{path.suffix}:{digest}" for path, (digest, _) in digests.items())
    return _Prepared(problems, files=files, digest=order, shapes=found.shapes, mapping=job.mapping)


def _records(
    files: Iterable[Path], job: _Job, columns: Sequence[str] | None
) -> Iterator[tuple[str, int, object]]:
    textual = TEXT_COLUMNS | {job.text_field}
    for path in files:
        for line, row in read_rows(path, textual, job.mapping):
            taken = row
            if columns is not None and isinstance(row, dict):
                taken = {name: row[name] for name in columns if name in row}
            yield path.name, line, taken


def _at(source: str, problem: Problem) -> Problem:
    return dataclasses.replace(problem, given=f"{source}: {problem.given}")


def _empty(named: str) -> Problem:
    return Problem(f"{named}: there are no examples", "at least one example", "write examples to it")


def _prepare_parquet(files: tuple[Path, ...], job: _Job, columns: Sequence[str] | None) -> _Prepared:
    import datasets
    import pyarrow.parquet

    problems = [problem for path in files if (problem := _parquet_problem(path))]
    if problems:
        return _Prepared(problems)
    schemas = {path: pyarrow.parquet.read_schema(path) for path in files}
    first, *rest = files
    fix = "write the files with the same columns and types, or name a single file"
    for path in rest:
        if set(schemas[path].names) != set(schemas[first].names):
            given = f"{path.name}: the columns are {quoted(schemas[path].names)}"
            expected = f"those of {first.name}: {quoted(schemas[first].names)}"
            problems.append(Problem(given, expected, fix))
    if problems:
        return _Prepared(problems)
    named = listed(path.name for path in files)
    try:
        dataset = datasets.load_dataset("parquet", data_files=_literal(files), split="train")
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        message = " ".join(str(error.__cause__ or error).split())
        return _Prepared([Problem(f"{named}: {message}", "parquet files that can be read as one table", fix)])
    return _sampled(dataset, named, job, columns)


def _parquet_problem(path: Path) -> Problem | None:
    import pyarrow
    import pyarrow.parquet

    expected = "a parquet file"
    fix = "write it again with a parquet library, or give the file its true suffix"
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        return _at(path.name, unreadable(error))
    if not head:
        return _empty(path.name)
    if not head.startswith(b"PAR1"):
        return Problem(f"{path.name}: not parquet: it begins with {head!r}", expected, fix)
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        return Problem(f"{path.name}: not parquet: {_first_line(error)}", expected, fix)
    return None if metadata.num_rows else _empty(path.name)


def _prepare_saved(folder: Path, split: str, job: _Job, columns: Sequence[str] | None) -> _Prepared:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowInvalid) as error:
        given = f"split '{split}': the directory '{folder}' cannot be read: {_first_line(error)}"
        return _Prepared(
            [Problem(given, "what save_to_disk wrote, whole", "save it again with save_to_disk")]
        )
    return _sampled(dataset, f"split '{split}'", job, columns)


def _sampled(dataset: Any, source: str, job: _Job, columns: Sequence[str] | None) -> _Prepared:
    if columns is not None:
        dataset = dataset.select_columns([name for name in columns if name in dataset.column_names])
    dataset, problems = _renamed(dataset, source, job)
    return _Prepared(problems or _sample_problems(dataset, source, job), dataset=dataset)


def _renamed(dataset: Any, source: str, job: _Job) -> tuple[Any, list[Problem]]:
    """The data set under the trainer's names, if `--columns` gives them."""
    if job.mapping is None:
        return dataset, []
    first = job.mapping.apply(next(iter(dataset), {}))
    if isinstance(first, Problem):
        return dataset, [_at(source, first)]
    read = [name for name in job.mapping.sources if name in (dataset.column_names or ())]
    return dataset.map(job.mapping.apply, remove_columns=read), []


def _sample_problems(dataset: Any, source: str, job: _Job) -> list[Problem]:
    """The problems of a `Dataset` or `IterableDataset`: its columns, then the values of its first rows."""
    names = dataset.column_names
    if names is None:  # an iterable data set learns its columns from its first row
        names = list(next(iter(dataset), {}))
    wrong = columns_problem(names, job.method, job.text_field) if names else None
    if wrong:
        return [_at(source, wrong)]
    # Pictures and other columns stay undecoded.
    judged = [name for name in names if name in COLUMNS or name == job.text_field]
    if not judged:
        return [_empty(source)]
    rows = islice(dataset.select_columns(judged), SAMPLED_ROWS)
    records = ((source, number, row) for number, row in enumerate(rows, 1))
    found = survey(records, job.method, job.text_field, word="row")
    return found.problems("row") or ([] if found.count else [_empty(source)])


def _literal(files: Iterable[Path]) -> list[str]:
    """Paths for `load_dataset`, which reads them as patterns."""
    return [glob.escape(str(path.absolute())) for path in files]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---------------------------------------------------------------------------------------------------------------
# The hub and mixtures


def _load_hub(name: str, config: str | None, streaming: bool, job: _Job) -> DatasetDict | IterableDatasetDict:
    import datasets

    why = ""
    try:
        with offline_if_unreachable() as why:
            loaded = datasets.load_dataset(name, name=config, streaming=streaming)
    except ConnectionError as error:
        reason = why or _first_line(error)
        given = f"'{name}' is no file or directory here, and the hub could not be reached: {reason}"
        expected = "a network connection, or data on this machine"
        fix = f"name a local file or directory (--dataset_name ./train.jsonl) or {EMBEDDED}precision_qa"
        raise data_error(name, [Problem(given, expected, fix)]) from error
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        given = f"'{name}' is no file or directory here, and the hub data set cannot be loaded: {_first_line(error)}"
        fix = "see the spelling, --dataset_config and your access to it, or name a local file"
        raise data_error(name, [Problem(given, "a hub data set of plain data files", fix)]) from error
    return _chosen(loaded, name, job)


def _chosen(loaded: Any, name: str, job: _Job) -> DatasetDict | IterableDatasetDict:
    """The wanted splits of a dictionary of data sets, checked."""
    problems = splits_problems(name, loaded, job.wanted)
    chosen = {}
    for split in () if problems else job.wanted:
        chosen[split], wrong = _renamed(loaded[split], f"split '{split}'", job)
        problems += wrong or _sample_problems(chosen[split], f"split '{split}'", job)
    if problems:
        raise data_error(name, problems)
    return type(loaded)(chosen)


def _load_mixture(dataset_args: Any, job: _Job) -> DatasetDict | IterableDatasetDict:
    """`trl.get_dataset` on a mixture whose local entries are replaced by the files they were built into."""
    import datasets
    from trl import get_dataset

    entries: list[Any] = []
    problems: list[Problem] = []
    for entry in dataset_args.datasets:
        local = None if entry.data_files or entry.data_dir else find_local(entry.path)
        if local is None:
            entries.append(entry)
            continue
        built, wrong = _local_entry(entry, local, job)
        entries.append(built)
        problems += wrong
    if problems:
        raise data_error("datasets", problems)
    if dataset_args.streaming and dataset_args.test_split_size is not None:
        given = f"--test_split_size {dataset_args.test_split_size} with a streamed mixture"
        fix = "leave --streaming or --test_split_size away"
        raise data_error("datasets", [Problem(given, "a mixture whose size is known, to be split", fix)])
    if len(job.wanted) > 1 and dataset_args.test_split_size is None:
        given, fix = (
            "evaluation is on and the mixture has no test split",
            "--test_split_size 0.1, or --eval_strategy no",
        )
        raise data_error("datasets", [Problem(given, "a share of the mixture to evaluate on", fix)])
    why = ""
    remote = any("/" in entry.path or not entry.data_files for entry in entries)
    try:
        with offline_if_unreachable() if remote else nullcontext("") as why:
            loaded = get_dataset(dataclasses.replace(dataset_args, datasets=entries))
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        named = quoted(entry.path for entry in dataset_args.datasets)
        fix = "see each entry's path, split, columns and fraction; an unreachable hub needs local files"
        given = f"the mixture of {named} cannot be built: {why or _first_line(error)}"
        raise data_error("datasets", [Problem(given, "entries that load and fit together", fix)]) from error
    return _chosen(loaded, "datasets", job)


def _local_entry(entry: Any, local: LocalData, job: _Job) -> tuple[Any, list[Problem]]:
    """A mixture entry as one over Arrow files, since TRL hands its path to `datasets.load_dataset`."""
    splits = [part.split("[")[0].strip() for part in entry.split.split("+")]
    problems = splits_problems(local.name, local.splits, splits)
    if problems:
        return entry, problems
    data_files: dict[str, list[str]] = {}
    for split in dict.fromkeys(splits):
        prepared = _prepare(local, split, job, entry.columns)
        problems += prepared.problems
        if not prepared.problems:
            cached = [Path(item["filename"]) for item in prepared.build().cache_files]
            data_files[split] = _literal(cached)
    return dataclasses.replace(entry, path="arrow", name=None, data_files=data_files), problems
