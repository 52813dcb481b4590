"""Check a local or hub data set, then build it in the format that a trainer takes.

Every row of JSON, JSON lines, CSV and text files is checked, and a problem names the line of the row. Parquet files,
directories of `save_to_disk` and hub data sets are checked in part: the columns, the first 1000 rows, and later rows
with empty values or faulty chats. Of streams, only the columns and the first 1000 rows are checked.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.errors import Problem, first_line
from isotype.core.names import listed, plural
from isotype.data.cells import CHATS, COLUMNS, TEXT_COLUMNS, Row, unread_line
from isotype.data.columns import (
    Survey,
    columns_problem,
    empty_rows,
    formats_of,
    misspoken_rows,
    quoted,
    survey,
)
from isotype.data.locate import PARQUET, LocalData, data_error
from isotype.data.methods import METHODS
from isotype.data.pictures import PICTURE_COLUMNS, SUFFIXES, broken, broken_rows, picture_problem, pictures_in
from isotype.data.placed import QUESTION
from isotype.data.reading import OPTIONAL_SOURCES, Reading
from isotype.data.rows import CELL_SUFFIXES, captioned, digest_or_problem, generate, read_rows, unreadable
from isotype.data.shapes import Shape, to_feature
from isotype.data.sharegpt import roles_line

if TYPE_CHECKING:
    from datasets import Dataset

SAMPLED_ROWS = 1000
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_CACHE_VERSION = "isotype-2"


@dataclass(frozen=True)
class Job:
    """Settings for reading a data set.

    Attributes:
        text_field: name of SFT's plain text column.
        wanted: names of the splits to read; the first one is the training split.
        say: function that prints a line for the user.
    """

    reading: Reading
    text_field: str
    wanted: tuple[str, ...]
    say: Callable[[str], object]

    @property
    def method(self) -> str:
        return self.reading.method


@dataclass(frozen=True)
class Prepared:
    """A checked split: its problems, or the facts from which it is built.

    Attributes:
        dataset: the data set of the split; None if the split is built from text files.
        files, digest: the text files and their digests.
        shapes: types of the columns in text files.
        reading: how rows of text files are converted.
        first: first row in the format that the trainer takes.
        notes: lines for the user.
    """

    problems: Sequence[Problem]
    dataset: Any = None
    files: tuple[Path, ...] = ()
    digest: str = ""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    reading: Reading | None = None
    first: Row | None = None
    notes: tuple[str, ...] = ()

    def build(self) -> Dataset:
        """Return the split, memory-mapped from the cache of `datasets`. The cache key contains the files' digests."""
        from datasets import Dataset

        if self.dataset is not None:
            return self.dataset
        key = f"{_CACHE_VERSION} {self.digest} {tuple(self.shapes.items())!r} {self.reading!r}"
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
            "reading": self.reading,
        }
        features = Features({name: to_feature(shape) for name, shape in self.shapes.items()})
        return {"features": features, "gen_kwargs": arguments}


def prepare(local: LocalData, split: str, job: Job, columns: Sequence[str] | None = None) -> Prepared:
    """Check one split of a local data set; `columns` are the columns to read (default: all)."""
    files = local.splits[split]
    suffixes = {path.suffix.lower() for path in files}
    kinds = suffixes - {*_JSON_SUFFIXES} | ({".jsonl"} if suffixes & {*_JSON_SUFFIXES} else set())
    if local.saved:
        return _prepare_saved(files[0], split, job, columns)
    if len(kinds) > 1:
        what = f"split '{split}' of '{local.name}' is made of {quoted(path.name for path in files)}"
        fix = "keep files of one kind, or name a single file"
        return Prepared([Problem(what, "files of one kind in a split", fix)])
    return _prepare_parquet(files, job, columns) if kinds == {PARQUET} else _prepare_text(files, job, columns)


def _prepare_text(files: tuple[Path, ...], job: Job, columns: Sequence[str] | None) -> Prepared:
    digests = {path: digest_or_problem(path) for path in files}
    problems = [_at(path.name, wrong) for path, wrong in digests.items() if isinstance(wrong, Problem)]
    if problems:
        return Prepared(problems)
    cells = files[0].suffix.lower() in CELL_SUFFIXES
    names: Counter[str] = Counter()
    pictures: dict[str, tuple[str, int]] = {}
    records = _records(files, job, columns, names)
    if job.reading.takes_pictures:
        records = _with_pictures(records, pictures)
    result = survey(records, job.method, job.text_field, cells=cells)
    if pictures and result.findings:
        # Rows without images may differ in format from rows with images: read all in the format of the latter.
        pictured = dataclasses.replace(job, reading=dataclasses.replace(job.reading, pictured=True))
        records = _with_pictures(_records(files, pictured, columns), {})
        again = survey(records, job.method, job.text_field, cells=cells)
        if not again.findings:
            job, result = pictured, again
    for path, problem in broken(tuple(pictures)):
        result.note(*pictures[path], problem)
    problems = result.problems()
    named = quoted(path.name for path in files)
    if result.count == 0:
        problems.append(_empty(named))
    order = " ".join(f"{path.suffix}:{digest}" for path, digest in digests.items())
    if "images" in result.shapes:  # the rows contain paths, which depend on these folders
        order += f" {[str(path.absolute()) for path in files]} {Path.cwd()}"
    source = listed(path.name for path in files)
    notes = (
        roles_line(source, names),
        unread_line(source, result.keys),
        _documents_line(files, job.reading),
        _captions_line(source, result.first),
    )
    return Prepared(
        problems,
        files=files,
        digest=order,
        shapes=result.shapes,
        reading=job.reading,
        first=result.first,
        notes=tuple(filter(None, notes)),
    )


def _with_pictures(
    records: Iterable[tuple[str, int, object]], paths: dict[str, tuple[str, int]]
) -> Iterator[tuple[str, int, object]]:
    """Yield each record, or a problem if its row has an invalid inline image; add the rows' image paths to `paths`."""
    for source, line, row in records:
        for picture in pictures_in(row) if isinstance(row, dict) else ():
            if isinstance(picture, str):
                paths.setdefault(picture, (source, line))
            elif isinstance(picture, bytes) and (problem := picture_problem(picture)):
                yield source, line, problem
                break
        else:
            yield source, line, row


def _documents_line(files: Sequence[Path], reading: Reading) -> str | None:
    """Return a line that says how .txt files are read or which images have no caption; None if there is nothing to say."""
    texts = [path.name for path in files if path.suffix.lower() == ".txt"]
    if not texts:
        return None
    if reading.takes_pictures and captioned(files[0]):
        beside = (at for folder in {path.parent for path in files} for at in folder.iterdir())
        pictures = sorted(at for at in beside if at.suffix.lower() in SUFFIXES)
        bare = [at.name for at in pictures if not at.with_suffix(".txt").is_file()]
        return f"left out {plural(len(bare), 'image')} without a caption: {listed(bare)}" if bare else None
    if reading.lines:
        return f"{listed(texts)}: each line is an example, with an end token of its own"
    return (
        f"{listed(texts)}: each file is one example, which is cut to max_length; to train on whole files, give --packing True "
        "--packing_strategy bfd_split, and to train on single lines, --text_lines True"
    )


def _captions_line(source: str, row: Row | None) -> str | None:
    prompt = (row or {}).get("prompt")
    question = prompt[0] if isinstance(prompt, list) and prompt else None
    content = question.get("content") if isinstance(question, Mapping) else None
    if not isinstance(content, list) or content[-1] != {"type": "text", "text": QUESTION}:
        return None
    return f"{source}: captions are trained as answers to '{QUESTION}'; columns 'prompt' and 'completion' set another question"


def _records(
    files: Iterable[Path], job: Job, columns: Sequence[str] | None, names: Counter[str] | None = None
) -> Iterator[tuple[str, int, object]]:
    textual = TEXT_COLUMNS | {job.text_field}
    for path in files:
        for line, row in read_rows(path, textual, job.reading, names):
            if columns is not None and isinstance(row, dict):
                row = {name: row[name] for name in columns if name in row}
            yield path.name, line, row


def _at(source: str, problem: Problem) -> Problem:
    return dataclasses.replace(problem, given=f"{source}: {problem.given}")


def _empty(named: str) -> Problem:
    return Problem(f"{named}: there are no examples", "at least one example", "write examples to the file")


def _prepare_parquet(files: tuple[Path, ...], job: Job, columns: Sequence[str] | None) -> Prepared:
    import datasets
    import pyarrow.parquet

    problems = [problem for path in files if (problem := _parquet_problem(path))]
    if problems:
        return Prepared(problems)
    schemas = {path: pyarrow.parquet.read_schema(path) for path in files}
    first, *rest = files
    fix = "write the files with the same columns and types, or name a single file"
    for path in rest:
        if set(schemas[path].names) != set(schemas[first].names):
            schema = f"{path.name}: the columns are {quoted(schemas[path].names)}"
            expected = f"the columns of {first.name}: {quoted(schemas[first].names)}"
            problems.append(Problem(schema, expected, fix))
    if problems:
        return Prepared(problems)
    named = listed(path.name for path in files)
    try:
        dataset = datasets.load_dataset("parquet", data_files=literal(files), split="train")
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        message = " ".join(str(error.__cause__ or error).split())
        return Prepared([Problem(f"{named}: {message}", "parquet files that can be read as one table", fix)])
    parts = [(path.name, pyarrow.parquet.read_metadata(path).num_rows) for path in files]
    return opened(dataset, parts, job, columns)


def _parquet_problem(path: Path) -> Problem | None:
    import pyarrow
    import pyarrow.parquet

    expected = "a parquet file"
    fix = "write the file again with a parquet library, or give it the right suffix"
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
        return Problem(f"{path.name}: not parquet: {first_line(error)}", expected, fix)
    return None if metadata.num_rows else _empty(path.name)


def _prepare_saved(folder: Path, split: str, job: Job, columns: Sequence[str] | None) -> Prepared:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowInvalid) as error:
        failure = f"split '{split}': the directory '{folder}' cannot be read: {first_line(error)}"
        expected = "a complete data set that save_to_disk wrote"
        return Prepared([Problem(failure, expected, "save the data set again with save_to_disk")])
    return opened(dataset, [(f"split '{split}'", None)], job, columns)


Parts = Sequence[tuple[str, int | None]]
"""(name, number of rows) of each file of a data set, in order; the number is None if it is unknown."""


def opened(dataset: Any, parts: Parts, job: Job, columns: Sequence[str] | None = None) -> Prepared:
    """Check the first rows of each part of a `datasets` data set, and return it in the format that the trainer takes."""
    if columns is not None:
        dataset = dataset.select_columns([name for name in columns if name in dataset.column_names])
    # A streamed data set may have no column names before its first row is read.
    stored = list(dataset.column_names or next(iter(dataset), {}))
    everything = listed(name for name, _ in parts)
    known = {*COLUMNS, *job.reading.reads, job.text_field}
    judged = [name for name in stored if name in known]
    if not judged:
        wrong = columns_problem(stored, job.method, job.text_field) if stored else None
        return Prepared([_at(everything, wrong) if wrong else _empty(everything)])
    names: Counter[str] = Counter()
    plain = undecoded(dataset.select_columns(judged))
    first = next(iter(plain), None)
    if first is None:
        return Prepared([_empty(everything)])
    converted = job.reading.apply(first)
    rest = [name for name in stored if name not in judged]
    if not isinstance(converted, Problem):
        wrong = columns_problem([*converted, *rest], job.method, job.text_field)
        if wrong:
            return Prepared([_at(everything, wrong)])
    reading = job.reading
    takes_pictures, has_length = reading.takes_pictures, hasattr(dataset, "__len__")
    sample, changed = _sample(plain, parts, reading, Counter() if takes_pictures else names)
    if takes_pictures:  # a single image stays as it is stored, unless the rows are written again anyway
        spelled = _spelled(dataset)
        reading = dataclasses.replace(reading, listed=reading.listed or changed or spelled)
        sample, changed = _sample(plain, parts, reading, names)
        changed |= spelled
        converted = reading.apply(first)
    if has_length:
        sample += _doubtful(plain, parts, job)
    result = survey(sample, job.method, job.text_field, word="row")
    problems = result.problems("row")
    if changed and not problems:
        dataset = _converted(undecoded(dataset), first, reading, parts, "images" in result.shapes)
    pictured = takes_pictures and has_length and {*PICTURE_COLUMNS} & {*dataset.column_names}
    if pictured and not problems:
        problems = [_in_part(parts, at, problem) for at, problem in broken_rows(dataset)]
    notes = (
        roles_line(everything, names, SAMPLED_ROWS),
        _captions_line(everything, result.first),
        unread_line(everything, _unread(result, rest, dataset, job), SAMPLED_ROWS),
    )
    return Prepared(problems, dataset=dataset, first=result.first, notes=tuple(filter(None, notes)))


def _doubtful(dataset: Any, parts: Parts, job: Job) -> Iterator[tuple[str, int, object]]:
    """Yield rows after each part's checked sample that may have an empty value or a faulty chat, up to 1,000 per part."""
    needed = {name for form in formats_of(job.method, job.text_field) for name in form.required}
    mapped = job.reading.columns
    needed |= set() if mapped is None else mapped.sources - OPTIONAL_SOURCES
    stored = {*dataset.column_names}
    targets = {} if mapped is None else {name: target for target, names in mapped.targets for name in names}
    chats = {name: targets.get(name, name) for name in stored if targets.get(name, name) in CHATS}
    rows = sorted({*empty_rows(dataset, needed & stored), *misspoken_rows(dataset, chats)})
    start = 0
    for source, count in parts:
        end = len(dataset) if count is None else start + count
        behind = (row for row in rows if start + SAMPLED_ROWS <= row < end)
        for row in islice(behind, SAMPLED_ROWS):
            yield source, row - start + 1, job.reading.apply(dataset[row])
        start = end


def _unread(result: Survey, rest: Sequence[str], dataset: Any, job: Job) -> Counter[tuple[str, str]]:
    """Count the unused columns in all rows, and the unused keys of messages in the checked rows."""
    method = METHODS[job.method]
    unread = () if method.loss == "policy" else (name for name in rest if name not in method.optional)
    columns = {name for where, name in result.keys if where == "row"}.union(unread)
    count = len(dataset) if hasattr(dataset, "__len__") else result.count
    rows = Counter({("row", name): count for name in columns})
    return rows + Counter({key: n for key, n in result.keys.items() if key[0] != "row"})


def _sample(
    dataset: Any, parts: Parts, reading: Reading, names: Counter[str]
) -> tuple[list[tuple[str, int, object]], bool]:
    """Return the first rows of all parts as (source, row number, converted row), and True if a conversion changed a row."""
    sample: list[tuple[str, int, object]] = []
    changed = False
    start = 0
    for source, count in parts:
        rows = dataset
        if count is not None:
            rows = dataset.select(range(start, start + min(count, SAMPLED_ROWS)))
            start += count
        for number, row in enumerate(islice(rows, SAMPLED_ROWS), 1):
            converted = reading.apply(row, names)
            changed |= converted != row
            sample.append((source, number, converted))
    return sample, changed


def _converted(dataset: Any, first: Row, reading: Reading, parts: Parts, pictured: bool) -> Any:
    """Return the data set with converted rows. Chats are stored as JSON, because messages may have different keys."""
    import datasets

    converted = reading.apply(first)
    assert isinstance(converted, dict)
    if pictured:
        converted.setdefault("images", [])
    features = None
    if dataset.features is not None and any(name in CHATS for name in converted):
        features = {n: kind for n, kind in dataset.features.items() if n in converted or n not in first}
        for name, value in converted.items():
            if name == "images" and pictured:
                features[name] = datasets.List(datasets.Image(mode="RGB"))
            elif isinstance(value, list) and name in CHATS:
                features[name] = datasets.List(datasets.Json())
            elif name not in features:
                features[name] = datasets.Value("string")
        features = datasets.Features(features)
    return dataset.map(
        partial(_applied, reading=reading, parts=tuple(parts), pictured=pictured),
        with_indices=True,
        remove_columns=[name for name in first if name not in converted],
        features=features,
    )


def _applied(row: Row, index: int, reading: Reading, parts: Parts, pictured: bool) -> Row:
    converted = reading.apply(dict(row))
    if isinstance(converted, Problem):
        raise data_error(", ".join(name for name, _ in parts), [_in_part(parts, index, converted)])
    return {"images": [], **converted} if pictured else converted


def _in_part(parts: Parts, index: int, problem: Problem) -> Problem:
    for source, count in parts:
        if count is None or index < count:
            return _at(f"{source}, row {index + 1}", problem)
        index -= count
    raise AssertionError(index)


def _spelled(dataset: Any) -> bool:
    """Return True if the data set stores its images as text (such as paths), not in the column type `Image`."""
    import datasets

    kinds = [dataset.features.get(name) for name in PICTURE_COLUMNS] if dataset.features is not None else []
    items = [getattr(kind, "feature", kind) for kind in kinds if kind is not None]
    return any(not isinstance(item, datasets.Image) for item in items)


def undecoded(dataset: Any) -> Any:
    """Return the data set with undecoded images, `{"bytes", "path"}`, or unchanged if its types are unknown."""
    import datasets

    def plain(kind: Any) -> Any:
        if isinstance(kind, datasets.Image):
            return dataclasses.replace(kind, decode=False)
        return datasets.List(plain(kind.feature)) if isinstance(kind, datasets.List) else kind

    if dataset.features is None:
        return dataset
    features = datasets.Features({name: plain(kind) for name, kind in dataset.features.items()})
    if features == dataset.features:
        return dataset
    if not hasattr(dataset, "__len__"):
        return dataset.cast(features)
    view = dataset.with_format(None)  # with_format copies the data set; a cast would write every row again
    view.info.features = features
    return view


def literal(files: Iterable[Path]) -> list[str]:
    """Return absolute paths with escaped wildcards, because `load_dataset` interprets paths as patterns."""
    return [glob.escape(str(path.absolute())) for path in files]
