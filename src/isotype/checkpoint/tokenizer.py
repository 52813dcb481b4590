"""Reads the tokenizer or processor of a checkpoint. The files are checked first, and no code of the checkpoint is run."""

import hashlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata as packages
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isotype.checkpoint.formats.config import BUILD_ERRORS
from isotype.checkpoint.formats.headers import CheckpointHeaders
from isotype.checkpoint.formats.json_file import AGAIN, Entry, entry_problems, read_json
from isotype.compat.hub import asking
from isotype.compat.transformers import gguf_bar_hidden, without_bars
from isotype.core.cache import default_cache_dir
from isotype.core.errors import CheckpointError, Problem, SaveError, error_line, first_line
from isotype.core.files import create_once, write_failure
from isotype.core.pretrained import TOKENIZER_FILES, code_named, pretrained

_ENDS = (".json", ".model", "_config.json")
_HEADLINE = "the tokenizer cannot be read"
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_FILE_NAME = re.compile(r"[\w.-]*[\w-]", re.ASCII)
_ENTRIES = (
    Entry("model_max_length", float | None, "a number of tokens"),
    Entry("chat_template", str | list | dict | None, "a template, or a list of templates with their names"),
    Entry("tokenizer_class|processor_class", str | None, "the name of a class"),
    Entry("auto_map", list | dict | None, "an object"),
)


def tokenizer_of(source: str | Path, revision: str | None = None, *, required: bool = False) -> Any | None:
    """Return the tokenizer or processor of a directory or hub id; None if there is none.

    Raises CheckpointError if files are damaged or need the code of the checkpoint, or if a `required` tokenizer is
    missing.
    """
    import transformers

    if isinstance(source, Path):
        if not any((source / f"tokenizer{end}").is_file() for end in _ENDS):
            if required:
                raise no_tokenizer(
                    f"{source}: no tokenizer.json, tokenizer.model or tokenizer_config.json in it"
                )
            return None
        _check_files(source)
    why = ""
    try:
        with asking(source) as why:
            at = {} if revision is None else {"revision": revision}
            tokenizer = pretrained(transformers.AutoProcessor, source, **at)
    except (OSError, *BUILD_ERRORS) as error:
        if isinstance(source, str):
            if required:
                raise no_tokenizer(f"{source}: {why or first_line(error)}") from error
            return None
        if lacking := _missing_package(str(error)):
            lacking = replace(lacking, given=f"{source}: {lacking.given}")
            raise CheckpointError(_HEADLINE, [lacking]) from error
        reason = _error_of_auto_tokenizer(source)
        # Without these files, transformers asks whether the directory has the name of a hub's model.
        absent = not any((source / name).is_file() for name in _PROCESSORS)
        if not reason and absent and re.search(r"Can't load (\w+ processor|feature extractor)", str(error)):
            what = f"{source}: neither {_PROCESSORS[0]} nor {_PROCESSORS[1]} in it"
            expected = "the processor of a model that takes images"
            fix = "copy these files from the original model of these weights"
            raise CheckpointError.of("no processor in the checkpoint", what, expected, fix) from error
        reason = reason or first_line(error)
        raise CheckpointError.of(_HEADLINE, f"{source}: {reason}", "a tokenizer", AGAIN) from error
    for file, key, reference in code_named(source, revision):
        kind = type(getattr(tokenizer, "tokenizer", tokenizer)).__name__
        cls = read_json(file).get("tokenizer_class") if key == "auto_map.AutoTokenizer" else None
        if cls is not None and not hasattr(transformers, str(cls)):
            warnings.warn(
                f"{file}: {key} names {reference}, code that isotype does not run; instead, isotype uses transformers' {kind}",
                stacklevel=2,
            )
    return tokenizer


def _missing_package(message: str) -> Problem | None:
    if find_spec("PIL") is None and re.search(r"image processor|\bPIL\b|[Pp]illow", message):
        what = "its image processor needs pillow"
        return Problem(what, "the package pillow", "pip install 'isotype[vision]'")
    if re.search(r"[Tt]orchvision", message):
        kind = re.search(r"\w+Processor", message)
        fix = "pip install torchvision; with a CPU build of torch, add --index-url https://download.pytorch.org/whl/cpu"
        name = kind.group() if kind else "its processor"
        what = f"{name} needs torchvision, because transformers has no version of it that needs only pillow"
        return Problem(what, "the package torchvision", fix)
    return None


def no_tokenizer(what: str) -> CheckpointError:
    expected = "tokenizer.json and tokenizer_config.json in the directory of the weights"
    fix = "copy these files from the original model of these weights"
    return CheckpointError.of("no tokenizer in the checkpoint", what, expected, fix)


def _check_files(directory: Path) -> None:
    """Raise CheckpointError if a tokenizer file is not a JSON object, or if transformers rejects an entry's type."""
    problems: list[Problem] = []
    for file in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", *TOKENIZER_FILES):
        path = directory / file
        content = read_json(path) if path.is_file() else {}
        problems += entry_problems(content, _ENTRIES, path)
        templates = content.get("chat_template")
        for entry in templates if isinstance(templates, list) else ():
            name, text = (entry.get(k) if isinstance(entry, dict) else None for k in ("name", "template"))
            if not isinstance(name, str) or not isinstance(text, str):
                what = f"{path}: chat_template holds {entry!r:.60}"
                problems.append(Problem(what, "a name and a template", AGAIN))
            elif not _FILE_NAME.fullmatch(name):
                what = f"{path}: chat_template has the name {name!r}"
                expected = "letters, digits, '-', '_' and '.', because the name becomes a file name"
                problems.append(Problem(what, expected, AGAIN))
    if problems:
        raise CheckpointError(_HEADLINE, problems)


def _error_of_auto_tokenizer(source: Path) -> str:
    """Return the error that `AutoTokenizer` raises for these files, or "". `AutoProcessor` would hide this error."""
    from transformers import AutoTokenizer

    try:
        pretrained(AutoTokenizer, source)
    except Exception as error:  # noqa: BLE001 - tokenizers raises no other class; its message is passed on
        return error_line(error)
    return ""


_MIB = 1 << 20
# Part of a copy's fingerprint: increase it if `tokenizer_copy` writes something else, so that old copies are not used.
_REVISION = 2
# transformers 5.23 splits text like GPT-2 for these values of tokenizer.ggml.pre. These tokenizers isolate digits before
# the merges ("\p{N}" in llama.cpp's llama-vocab.cpp): without that step, "x\n  12" becomes other tokens than in training.
_ISOLATED_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
# transformers does not list these values either, but their tokenizers do split text like GPT-2.
_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"})


def tokenizer_copy(headers: CheckpointHeaders, cache_dir: Path | None = None) -> Path:
    """Return a directory to which `save_pretrained` has written the tokenizer and the config of a GGUF file.

    The directory is created atomically in `cache_dir` (default `$ISOTYPE_CACHE/gguf`, else `~/.cache/isotype/gguf`). The
    directory's name contains a hash of the file's size and of its first and last MiB.
    """
    path = headers.path
    root = cache_dir or default_cache_dir() / "gguf"
    target = root / f"{path.stem}-{_fingerprint(path)}-tokenizer"
    try:
        return create_once(target, lambda folder: _convert(path, headers.metadata, folder))
    except Exception as error:
        failure = write_failure(error, root)
        if failure is None:
            raise
        what, expected = f"{target}: {failure[1]}", "a writable directory on a disk with free space"
        fix = "free some space, or set ISOTYPE_CACHE to another directory"
        raise SaveError.of("the tokenizer of a GGUF file cannot be written", what, expected, fix) from error


def _fingerprint(path: Path) -> str:
    """Return a hash of the file and of the version of transformers, which decides how the file is converted."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size} {_REVISION} {packages.version('transformers')}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_MIB))
        file.seek(max(0, size - _MIB))
        digest.update(file.read(_MIB))
    return digest.hexdigest()[:16]


def _convert(path: Path, metadata: Mapping[str, object], target: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    with without_bars(), gguf_bar_hidden():
        try:
            config = pretrained(AutoConfig, path.parent, gguf_file=path.name)
            tokenizer = pretrained(AutoTokenizer, path.parent, gguf_file=path.name)
        except (ValueError, KeyError, NotImplementedError) as error:
            headline = "transformers cannot read this GGUF file"
            expected = f"an architecture that transformers reads from GGUF (this one: {metadata.get('general.architecture')})"
            fix = "use the model's safetensors checkpoint instead"
            raise CheckpointError.of(headline, f"{path}: {error}", expected, fix) from error
        _restore_omitted(tokenizer, metadata)
        config.save_pretrained(target)
        tokenizer.save_pretrained(target)


def _restore_omitted(tokenizer: Any, metadata: Mapping[str, object]) -> None:
    """Restore what transformers omits from the tokenizer of a GGUF file: splitting of digits, chat template, maximum length."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    split = metadata.get("tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    if split in _ISOLATED_DIGITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif split is not None and split not in _AS_GPT2 and isinstance(backend.pre_tokenizer, ByteLevel):
        warnings.warn(
            f"transformers has no rule for the pre-tokenizer {split!r} of this GGUF file, and splits text as GPT-2 does: "
            "some texts become other tokens than in training; use the tokenizer of the original model",
            stacklevel=2,
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(length, int):
        tokenizer.model_max_length = length
