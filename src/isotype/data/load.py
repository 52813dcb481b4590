"""Find the data set of a training command, check it before a model is loaded, then build it.

`--dataset_name` is a local file or directory, `embedded:NAME` for a data set of the package, or a hub id. A name that
exists as a path, or can only be a path, is not looked up on the hub. No code of a data set is executed.

In a directory, a file belongs to the split (train, validation, test or a synonym) that its name or its folder's name
contains. If some file names contain a split, each of the other files becomes a split of its own with the file's name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from isotype.compat.hub import offline_if_unreachable
from isotype.core.errors import DataError, Problem, first_line
from isotype.data.build import Job, Prepared, opened, prepare
from isotype.data.locate import EMBEDDED, LocalData, data_error, find_local, splits_problems
from isotype.data.mixture import load_mixture
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
    text_field: str = "text",
    say: Callable[[str], object] = logger.info,
) -> DatasetDict | IterableDatasetDict:
    """Return the training split that the arguments name and, if `need_test` is True, the evaluation split.

    Args:
        script_args: `trl.ScriptArguments` (or a subclass).
        dataset_args: `trl.DatasetMixtureConfig` or None. If `dataset_args.datasets` is set, `dataset_name` is not used, as in TRL.
        text_field: name of SFT's plain text column (`SFTConfig.dataset_text_field`).
        say: function that prints a line about the data for the user.

    Raises:
        DataError: the data set cannot be trained on. The error describes up to ten problems and counts the others.
    """
    wanted = [script_args.dataset_train_split] + [script_args.dataset_test_split] * need_test
    job = Job(reading, text_field, tuple(dict.fromkeys(wanted)), say)
    if dataset_args is not None and dataset_args.datasets:
        if script_args.dataset_name:
            logger.warning(
                "Both `datasets` and `dataset_name` are given: `datasets` is used, dataset_name '%s' is not.",
                script_args.dataset_name,
            )
        return load_mixture(dataset_args, job)
    name = script_args.dataset_name
    if not name:
        what = "neither --dataset_name nor `datasets` in a configuration file"
        expected = "a local file or directory, a hub id, or embedded:NAME"
        raise DataError.of("No training data is named", what, expected, "--dataset_name train.jsonl")
    local = find_local(name, test_split=script_args.dataset_test_split)
    if local is None:
        return _load_hub(name, script_args.dataset_config, script_args.dataset_streaming, job)
    if script_args.dataset_config:
        flags = f"--dataset_config '{script_args.dataset_config}' with the local data set '{name}'"
        fix = "name the file or the folder itself in --dataset_name"
        raise data_error(name, [Problem(flags, "no configuration name, which only hub data sets have", fix)])
    return _load_local(local, script_args.dataset_streaming, job)


def _load_local(local: LocalData, streaming: bool, job: Job) -> DatasetDict | IterableDatasetDict:
    from datasets import DatasetDict, IterableDatasetDict

    prepared = _checked(local.name, local.splits, job, lambda split: prepare(local, split, job))
    if line := local.unread(job.wanted):
        job.say(line)
    if streaming:
        return IterableDatasetDict({split: item.stream() for split, item in prepared.items()})
    return DatasetDict({split: item.build() for split, item in prepared.items()})


_BUILDERS = re.compile("arrow|audiofolder|csv|imagefolder|json|pandas|parquet|text|webdataset|xml")
"""Names that `datasets.load_dataset` does not look up on the hub: it reads files in the working folder instead."""


def _load_hub(name: str, config: str | None, streaming: bool, job: Job) -> DatasetDict | IterableDatasetDict:
    import datasets

    if _BUILDERS.fullmatch(name):
        what = f"'{name}' is a format of `datasets`: every such file below the working folder would be read"
        raise data_error(name, [Problem(what, "a file, a folder or a hub id", "--dataset_name train.jsonl")])
    why = ""
    try:
        with offline_if_unreachable() as why:
            loaded = datasets.load_dataset(name, name=config, streaming=streaming)
    except ConnectionError as error:
        reason = why or first_line(error)
        failure = f"'{name}' is no file or directory here, and the hub could not be reached: {reason}"
        expected = "a network connection, or data on this machine"
        fix = f"name a local file or directory (--dataset_name ./train.jsonl) or {EMBEDDED}precision_qa"
        raise data_error(name, [Problem(failure, expected, fix)]) from error
    except (datasets.exceptions.DatasetsError, ValueError, RuntimeError, OSError) as error:
        failure = f"'{name}' is no file or directory here, and the hub data set cannot be loaded: {first_line(error)}"
        fix = "check the spelling, --dataset_config and your access to the data set, or name a local file"
        raise data_error(name, [Problem(failure, "a hub data set of plain data files", fix)]) from error
    prepared = _checked(
        name, loaded, job, lambda split: opened(loaded[split], [(f"split '{split}'", None)], job), f"{name}, "
    )
    return type(loaded)({split: item.dataset for split, item in prepared.items()})


def _checked(
    name: str, splits: Iterable[str], job: Job, check: Callable[[str], Prepared], prefix: str = ""
) -> dict[str, Prepared]:
    """Check the wanted splits, print their notes and return them; raise DataError if one is missing or has problems."""
    problems = splits_problems(name, splits, job.wanted)
    prepared = {} if problems else {split: check(split) for split in job.wanted}
    problems += [problem for item in prepared.values() for problem in item.problems]
    if problems:
        raise data_error(name, problems)
    for line in dict.fromkeys(line for item in prepared.values() for line in item.notes):
        job.say(prefix + line)
    return prepared
