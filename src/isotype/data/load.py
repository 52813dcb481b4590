"""Find the data set of a training command, check it before a model is loaded, and then build it.

`--dataset_name` is a local file or directory, `embedded:NAME` for a data set of the package, or a hub id. A name is not
looked up on the hub if it is an existing path, or cannot be a hub id. No code of a data set is executed.

In a directory, the split of a file (train, validation, test or a synonym) is read from the name of the file or of its
folder. If only some file names contain a split, each of the other files becomes a split with the name of the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotype.core.errors import DataError, Problem
from isotype.data.build import Prepared, from_hub, opened, prepare
from isotype.data.cells import Row
from isotype.data.locate import data_error, find_local, splits_problems
from isotype.data.mixture import load_mixture
from isotype.data.pictures import PICTURE_COLUMNS, pictures_in
from isotype.data.reading import Reading

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

logger = logging.getLogger(__name__)


def load_training_data(
    script_args: Any,
    dataset_args: Any,
    reading: Reading,
    *,
    need_test: bool,
    say: Callable[[str], object] = logger.info,
) -> DatasetDict | IterableDatasetDict:
    """Return the training split that the arguments name. If `need_test` is True, also return the evaluation split.

    Args:
        script_args: `trl.ScriptArguments` (or a subclass).
        dataset_args: `trl.DatasetMixtureConfig` or None. As in TRL, its `datasets` replace `script_args.dataset_name`.
        say: function that prints a line about the data.

    Raises:
        DataError: the data set cannot be trained on. The error describes up to ten problems, and counts the others.
    """
    from datasets import DatasetDict, IterableDatasetDict

    named = [script_args.dataset_train_split] + [script_args.dataset_test_split] * need_test
    wanted = [*dict.fromkeys(named)]
    if dataset_args is not None and dataset_args.datasets:
        if script_args.dataset_name:
            logger.warning(
                "Both `datasets` and `dataset_name` are given: `datasets` is used, dataset_name '%s' is not.",
                script_args.dataset_name,
            )
        return load_mixture(dataset_args, reading, wanted, say)
    name = script_args.dataset_name
    if not name:
        what = "neither --dataset_name nor `datasets` in a configuration file"
        expected = "a local file or directory, a hub id, or embedded:NAME"
        raise DataError.of("No training data is named", what, expected, "--dataset_name train.jsonl")
    local = find_local(name, test_split=script_args.dataset_test_split)
    streaming, config = script_args.dataset_streaming, script_args.dataset_config
    if local is not None and config:
        flags = f"--dataset_config '{config}' with the local data set '{name}'"
        fix = "name the file or the folder itself in --dataset_name"
        raise data_error(
            name, [Problem(flags, "no --dataset_config, because it is only for data sets on the hub", fix)]
        )
    splits = local.splits if local is not None else _hub_splits(name, config, streaming)
    problems = splits_problems(name, splits, wanted)
    prepared: dict[str, Prepared] = {}
    for split in () if problems else wanted:
        if local is not None:
            prepared[split] = prepare(local, split, reading)
        else:
            prepared[split] = opened(splits[split], [(f"split '{split}'", None)], reading)
        problems += prepared[split].problems
    if problems:
        raise data_error(name, problems)
    for line in dict.fromkeys(line for item in prepared.values() for line in item.notes):
        say(line if local is not None else f"{name}, {line}")
    if local is not None and (unread := local.unread(wanted)):
        say(unread)
    kind = IterableDatasetDict if streaming else DatasetDict
    return kind({split: item.build(stream=streaming) for split, item in prepared.items()})


_BUILDERS = re.compile("arrow|audiofolder|csv|imagefolder|json|pandas|parquet|text|webdataset|xml")
"""Names of file formats. For these names, `datasets.load_dataset` reads the files of the working folder, and not the hub."""


def _hub_splits(name: str, config: str | None, streaming: bool) -> Mapping[str, Any]:
    if _BUILDERS.fullmatch(name):
        what = f"'{name}' is a format of `datasets`, so all its files below the working folder would be read"
        raise data_error(name, [Problem(what, "a file, a folder or a hub id", "--dataset_name train.jsonl")])
    loaded: Mapping[str, Any] | Problem = from_hub(name, name=config, streaming=streaming)
    if isinstance(loaded, Problem):
        raise data_error(name, [loaded])
    return loaded


_READ_BYTES = 1 << 27
"""Maximum number of bytes to read for a fingerprint. Of a larger data set, only every n-th row is read."""


def fingerprint_of_rows(rows: Any) -> str | None:
    """Return the number of rows and a hash of their content, which is the same on all machines; None for a stream."""
    if not hasattr(rows, "__len__"):
        return None
    count = len(rows)
    digest = hashlib.blake2b(str(count).encode(), digest_size=8)
    step = max(1, -(-rows.data.nbytes // _READ_BYTES))
    chosen = rows if step == 1 else rows.select(range(0, count, step))
    # In Arrow's format an image is not decoded.
    for table in chosen.with_format("arrow").iter(batch_size=1000):
        rows_of_table = table.to_pylist()
        if {*PICTURE_COLUMNS} & {*table.column_names}:
            rows_of_table = [_without_paths(row) for row in rows_of_table]
        digest.update(json.dumps(rows_of_table, sort_keys=True, default=repr).encode())
    return f"{count:,} rows, {digest.hexdigest()}"


def _without_paths(row: Row) -> Row:
    """Return the row with file names and sizes in place of images, because the paths of images differ between machines."""
    places: list[object] = []
    for picture in pictures_in(row):
        path = None if picture.get("bytes") is not None else Path(picture["path"])
        size = path.stat().st_size if path is not None and path.is_file() else None
        places.append(picture if path is None else [path.name, size])
    return {name: value for name, value in row.items() if name not in PICTURE_COLUMNS} | {"images": places}
