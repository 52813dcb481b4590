"""Check a local data set or a data set on the hub, and then build it in the format that a trainer accepts.

Every row is checked. A problem names the line or the row in its file. Only the first 1000 rows are checked in a
stream, and if token ids are in parquet files or data sets of `datasets`.
"""

import dataclasses
import glob
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from isotype.compat.hub import offline_if_unreachable
from isotype.core.console import with_bar
from isotype.core.errors import Problem, first_line
from isotype.core.names import listed, plural
from isotype.data.cells import CHATS, COLUMNS, TEXT_COLUMNS, Row, unread_line
from isotype.data.columns import Record, Survey, columns_problem, quoted
from isotype.data.locate import EMBEDDED, PARQUET, LocalData, data_error
from isotype.data.methods import METHODS
from isotype.data.pictures import SUFFIXES, broken, picture_problem, pictures_in
from isotype.data.placed import QUESTION
from isotype.data.reading import Reading
from isotype.data.rows import CELL_SUFFIXES, captioned, digest_or_problem, generate, read_rows, unreadable
from isotype.data.shapes import JSON, OTHER, PICTURE, Shape, shape_of_feature, to_feature
from isotype.data.sharegpt import roles_line
from isotype.data.tokens import ID_COLUMNS

SAMPLED_ROWS = 1000
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
_CACHE_VERSION = "isotype-2"


@dataclass(frozen=True)
class Prepared:
    """A checked split: its problems, or else its first row, column types, notes and a function that builds the split.

    Attributes:
        first: first row in the format that the trainer accepts.
        shapes: type of every column; None if the type is unknown.
        make: function of (types of the columns, stream) that returns the data set. The result is a stream if `stream` is True.
    """

    problems: Sequence[Problem]
    first: Row | None = None
    shapes: Mapping[str, Shape | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    make: Callable[[Mapping[str, Shape | None], bool], Any] | None = None

    def build(self, shapes: Mapping[str, Shape | None] | None = None, *, stream: bool = False) -> Any:
        """Return the split from the cache of `datasets`, or a stream. `shapes` replaces the types of columns."""
        assert self.make is not None, self.problems
        return self.make(self.shapes if shapes is None else shapes, stream)


def prepare(local: LocalData, split: str, reading: Reading) -> Prepared:
    files = local.splits[split]
    suffixes = {path.suffix.lower() for path in files}
    kinds = suffixes - {*_JSON_SUFFIXES} | ({".jsonl"} if suffixes & {*_JSON_SUFFIXES} else set())
    if local.saved:
        return _prepare_saved(files[0], split, reading)
    if len(kinds) > 1:
        what = f"split '{split}' of '{local.name}' has the files {quoted(path.name for path in files)}"
        fix = "keep files of one kind, or name a single file"
        return Prepared([Problem(what, "files of one kind in a split", fix)])
    return _prepare_parquet(files, reading) if kinds == {PARQUET} else _prepare_text(files, reading)


def _prepare_text(files: tuple[Path, ...], reading: Reading) -> Prepared:
    digests = {path: digest_or_problem(path) for path in files}
    problems = [_in_source(path.name, wrong) for path, wrong in digests.items() if isinstance(wrong, Problem)]
    if problems:
        return Prepared(problems)
    cells = files[0].suffix.lower() in CELL_SUFFIXES

    def read(reading: Reading, names: Counter[str]) -> Iterator[Record]:
        textual = TEXT_COLUMNS | {reading.text_field}
        return ((p.name, line, row) for p in files for line, row in read_rows(p, textual, reading, names))

    names: Counter[str] = Counter()
    reading, result = _surveyed(read, names, reading, cells=cells)
    problems = result.problems()
    if result.count == 0:
        problems.append(_empty(quoted(path.name for path in files)))
    digest = " ".join(f"{path.suffix}:{digest}" for path, digest in digests.items())
    if "images" in result.shapes:  # the rows contain paths, which depend on these folders
        digest += f" {[str(path.absolute()) for path in files]} {Path.cwd()}"
    notes = _notes(listed(path.name for path in files), names, result)
    return Prepared(
        problems,
        first=result.first,
        shapes=result.shapes,
        notes=tuple(filter(None, (*notes, _documents_line(files, reading)))),
        make=partial(_generated, files, digest, reading),
    )


def _generated(
    files: Sequence[Path], digest: str, reading: Reading, shapes: Mapping[str, Shape], stream: bool
) -> Any:
    """Return the rows of text files as a data set. The key in the cache of `datasets` contains the files' digests."""
    from datasets import Dataset, Features, IterableDataset

    arguments = {
        "paths": [str(path.absolute()) for path in files],
        "textual": tuple(name for name, shape in shapes.items() if shape == "string"),
        "columns": tuple(shapes),
        "reading": reading,
    }
    features = Features({name: to_feature(shape) for name, shape in shapes.items()})
    if stream:
        return IterableDataset.from_generator(generate, features=features, gen_kwargs=arguments)
    key = f"{_CACHE_VERSION} {digest} {tuple(shapes.items())!r} {reading!r}"
    fingerprint = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return Dataset.from_generator(generate, features=features, gen_kwargs=arguments, fingerprint=fingerprint)


def _surveyed(
    read: Callable[[Reading, Counter[str]], Iterator[Record]],
    names: Counter[str],
    reading: Reading,
    word: str = "line",
    cells: bool = False,
) -> tuple[Reading, Survey]:
    """Check the rows that `read` yields, and their images. Return the fitting `Reading` and the `Survey` of the rows."""

    def results(reading: Reading, names: Counter[str], paths: dict[str, tuple[str, int]]) -> Survey:
        survey = Survey(METHODS[reading.method], reading.text_field, word, cells)
        for record in _with_pictures(read(reading, names), reading.takes_pictures, paths):
            survey.add(*record)
        return survey

    paths: dict[str, tuple[str, int]] = {}
    result = results(reading, names, paths)
    if result.pictured and result.findings:
        # Rows without images may have another format than rows with images: read all rows in the format with images.
        pictured = dataclasses.replace(reading, pictured=True)
        again = results(pictured, Counter(), {})
        if not again.findings:
            reading, result = pictured, again
    for path, problem in broken(tuple(paths)):
        result.note(*paths[path], problem)
    return reading, result


def _with_pictures(
    records: Iterable[Record], taken: bool, paths: dict[str, tuple[str, int]]
) -> Iterator[Record]:
    """Yield each record, or a problem if the row has an invalid inline image. Add paths of images to `paths`."""
    for source, line, row in records:
        problem = None
        for picture in pictures_in(row) if taken and isinstance(row, dict) else ():
            if isinstance(picture, str):
                paths.setdefault(picture, (source, line))
            elif isinstance(picture, (bytes, dict)):
                problem = problem or picture_problem(picture)
        yield source, line, problem or row


def _notes(
    source: str, names: Counter[str], result: Survey, sample: int | None = None
) -> Iterator[str | None]:
    yield roles_line(source, names, sample)
    yield unread_line(source, result.keys, sample)
    yield _captions_line(source, result.first)


def _documents_line(files: Sequence[Path], reading: Reading) -> str | None:
    """Return a line about .txt files that says how they are read, or which images lack a caption. None without .txt files."""
    texts = [path.name for path in files if path.suffix.lower() == ".txt"]
    if not texts:
        return None
    if reading.takes_pictures and captioned(files[0]):
        beside = (at for folder in {path.parent for path in files} for at in folder.iterdir())
        pictures = sorted(at for at in beside if at.suffix.lower() in SUFFIXES)
        bare = [at.name for at in pictures if not at.with_suffix(".txt").is_file()]
        return f"omitted {plural(len(bare), 'image')} without a caption: {listed(bare)}" if bare else None
    if reading.lines:
        return f"{listed(texts)}: each line is an example and gets an end token"
    return (
        f"{listed(texts)}: each file is one example, which is cut to max_length; --packing True --packing_strategy bfd_split "
        "trains on whole files, and --text_lines True trains on single lines"
    )


def _captions_line(source: str, row: Row | None) -> str | None:
    prompt = (row or {}).get("prompt")
    question = prompt[0] if isinstance(prompt, list) and prompt else None
    content = question.get("content") if isinstance(question, Mapping) else None
    if not isinstance(content, list) or content[-1] != {"type": "text", "text": QUESTION}:
        return None
    return f"{source}: captions are trained as answers to '{QUESTION}'; columns 'prompt' and 'completion' allow another question"


def _in_source(source: str, problem: Problem) -> Problem:
    return dataclasses.replace(problem, given=f"{source}: {problem.given}")


def _empty(named: str) -> Problem:
    return Problem(f"{named}: there are no examples", "at least one example", "write examples to the file")


def _prepare_parquet(files: tuple[Path, ...], reading: Reading) -> Prepared:
    import datasets

    tables = {path: _parquet_metadata(path) for path in files}
    problems = [table for table in tables.values() if isinstance(table, Problem)]
    if problems:
        return Prepared(problems)
    names = {path: table.schema.to_arrow_schema().names for path, table in tables.items()}
    first, *rest = files
    fix = "write the files with the same columns and types, or name a single file"
    expected = f"the columns of {first.name}: {quoted(names[first])}"
    unlike = [path for path in rest if {*names[path]} != {*names[first]}]
    problems = [Problem(f"{p.name}: the columns are {quoted(names[p])}", expected, fix) for p in unlike]
    if problems:
        return Prepared(problems)
    paths = [glob.escape(str(path.absolute())) for path in files]  # `load_dataset` takes paths as patterns
    try:
        dataset = datasets.load_dataset("parquet", data_files=paths, split="train")
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        what = f"{listed(path.name for path in files)}: {' '.join(str(error.__cause__ or error).split())}"
        return Prepared([Problem(what, "parquet files that can be read as one table", fix)])
    return opened(dataset, [(path.name, table.num_rows) for path, table in tables.items()], reading)


def _parquet_metadata(path: Path) -> Any:
    """Return the metadata of a parquet file, or the problem with the file."""
    import pyarrow
    import pyarrow.parquet

    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        return _in_source(path.name, unreadable(error))
    try:
        metadata = pyarrow.parquet.read_metadata(path) if head else None
    except (pyarrow.ArrowInvalid, OSError) as error:
        why = first_line(error) if head.startswith(b"PAR1") else f"it begins with {head!r}"
        fix = "write the file again with a parquet library, or rename it with the right suffix"
        return Problem(f"{path.name}: not parquet: {why}", "a parquet file", fix)
    return metadata if metadata is not None and metadata.num_rows else _empty(path.name)


def _prepare_saved(folder: Path, split: str, reading: Reading) -> Prepared:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, pyarrow.ArrowInvalid) as error:
        failure = f"split '{split}': the directory '{folder}' cannot be read: {first_line(error)}"
        expected = "a complete data set that save_to_disk wrote"
        return Prepared([Problem(failure, expected, "save the data set again with save_to_disk")])
    return opened(dataset, [(f"split '{split}'", None)], reading)


Parts = Sequence[tuple[str, int | None]]
"""(name, number of rows or None) of each file of a data set, in order."""


def from_hub(path: str, **arguments: Any) -> Any | Problem:
    """Return the result of `datasets.load_dataset`, or a problem if the function fails."""
    import datasets

    why = ""
    try:
        with offline_if_unreachable() as why:
            return datasets.load_dataset(path, **arguments)
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        failure = f"'{path}' is no file or directory on this machine, and the hub "
        if isinstance(error, ConnectionError):
            failure += f"could not be reached: {why or first_line(error)}"
            fix = f"name a local file or directory (--dataset_name ./train.jsonl) or {EMBEDDED}precision_qa"
            return Problem(failure, "a network connection, or data on this machine", fix)
        failure += f"data set cannot be loaded: {first_line(error)}"
        fix = "check the spelling, the configuration, the split and your access to the data set, or name a local file"
        return Problem(failure, "a hub data set of plain data files", fix)


def opened(dataset: Any, parts: Parts, reading: Reading) -> Prepared:
    """Check the rows of a `datasets` data set, and return the split in the format that the trainer accepts."""
    if reading.only is not None:
        dataset = dataset.select_columns([name for name in reading.only if name in dataset.column_names])
    everything = listed(name for name, _ in parts)
    first = next(iter(undecoded(dataset)), None)
    if first is None:
        return Prepared([_empty(everything)])
    converted = reading.apply(first)
    if not isinstance(converted, Problem):
        wrong = columns_problem(tuple(converted), reading.method, reading.text_field)
        if wrong:
            return Prepared([_in_source(everything, wrong)])
    known = {*COLUMNS, *reading.reads, reading.text_field}
    judged = [name for name in first if name in known] or list(first)
    plain = undecoded(dataset.select_columns(judged))
    is_stream = not hasattr(dataset, "__len__")
    sample = SAMPLED_ROWS if is_stream or not first.keys().isdisjoint(ID_COLUMNS) else None
    changed = False

    def read(reading: Reading, names: Counter[str]) -> Iterator[Record]:
        nonlocal changed
        total = len(plain) if sample is None else sample * len(parts)
        for source, number, row in with_bar(_numbered(plain, parts, sample), "checking the rows", total):
            converted = reading.apply(row, names)
            # Images that are stored as text get the type `Image`.
            changed |= converted != row or any(isinstance(picture, str) for picture in pictures_in(row))
            yield source, number, converted

    names: Counter[str] = Counter()
    reading, result = _surveyed(read, names, reading, word="row")
    features = dataset.features or dict.fromkeys(first)
    kept = [name for name in features if not changed or name not in judged]
    shapes = {name: shape_of_feature(features[name]) for name in kept}
    if changed:
        shapes |= {name: None if shape == OTHER else shape for name, shape in result.shapes.items()}
    if changed and is_stream:  # later messages may have other keys
        shapes |= {
            name: ("list", JSON) for name in CHATS & result.shapes.keys() if result.shapes[name] != "string"
        }
    method = METHODS[reading.method]
    unread = {*first} - {*judged, *method.optional} if method.loss != "policy" else set()
    result.keys.update({("row", name): result.count for name in unread})
    return Prepared(
        result.problems(),
        first=result.first,
        shapes=shapes,
        notes=tuple(filter(None, _notes(everything, names, result, sample))),
        make=partial(_retyped, dataset, parts, reading if changed else None, list(first)),
    )


def _numbered(dataset: Any, parts: Parts, sample: int | None) -> Iterator[Record]:
    """Yield (part, row number, row) for the first `sample` rows of each part. If `sample` is None, yield all rows."""
    start = 0
    for source, count in parts:
        rows = dataset if count is None else dataset.select(range(start, start + count))
        start += count or 0
        for number, row in enumerate(islice(rows, sample), 1):
            yield source, number, row


def _retyped(
    dataset: Any,
    parts: Parts,
    reading: Reading | None,
    names: Sequence[str],
    shapes: Mapping[str, Shape | None],
    stream: bool,
) -> Any:
    """Return a data set whose columns have the types `shapes`. Rows are rewritten only if values or Arrow types change.

    Args:
        reading: the conversion of rows; None if no row changes.
        names: the columns of the data set (a stream may not know its columns).
    """
    from datasets import Features

    stored, target, fits = dataset.features, None, True
    if stored is not None:
        known = {name: shape_of_feature(kind) for name, kind in stored.items()}
        kinds = {
            name: stored[name] if shape is None or shape == known.get(name) else to_feature(shape)
            for name, shape in shapes.items()
        }
        if "images" in shapes:
            kinds["images"] = to_feature(("list", PICTURE))
        target = Features(kinds)
        fits = target.type == Features({name: stored[name] for name in shapes if name in stored}).type
    if reading is not None or not fits:
        applied = partial(_convert, reading=reading, parts=tuple(parts), columns=tuple(shapes))
        gone = [name for name in names if name not in shapes]
        dataset = undecoded(dataset).map(applied, with_indices=True, remove_columns=gone, features=target)
    elif target is not None:
        dataset = _with_features(dataset.select_columns(list(shapes)), target)
    return dataset.to_iterable_dataset() if stream and hasattr(dataset, "__len__") else dataset


def _convert(row: Row, index: int, reading: Reading | None, parts: Parts, columns: Sequence[str]) -> Row:
    converted = dict(row) if reading is None else reading.apply(dict(row))
    if isinstance(converted, Problem):
        raise data_error(", ".join(name for name, _ in parts), [_in_part(parts, index, converted)])
    kept = {name: value for name, value in converted.items() if name in columns}
    return {"images": [], **kept} if "images" in columns else kept


def _in_part(parts: Parts, index: int, problem: Problem) -> Problem:
    for source, count in parts:
        if count is None or index < count:
            return _in_source(f"{source}, row {index + 1}", problem)
        index -= count
    raise AssertionError(index)


def undecoded(dataset: Any) -> Any:
    """Return the data set with undecoded images (`{"bytes", "path"}`). If its types are unknown, return it unchanged."""
    import datasets

    def plain(kind: Any) -> Any:
        if isinstance(kind, datasets.Image):
            return dataclasses.replace(kind, decode=False)
        return datasets.List(plain(kind.feature)) if isinstance(kind, datasets.List) else kind

    if dataset.features is None:
        return dataset
    features = datasets.Features({name: plain(kind) for name, kind in dataset.features.items()})
    return _with_features(dataset, features)


def _with_features(dataset: Any, features: Any) -> Any:
    """Return the data set with `features` as types of its columns. The Arrow types must stay the same."""
    if features == dataset.features:
        return dataset
    if not hasattr(dataset, "__len__"):
        return dataset.cast(features)
    view = dataset.with_format(None)  # with_format copies the data set; a cast would write every row again
    view.info.features = features
    return view
