"""Reads config and headers of a model on the hub, from the local cache or by range requests, and downloads models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isotype.checkpoint.formats.headers import CheckpointHeaders, find_weights, missing_shards
from isotype.checkpoint.formats.tensor import TensorHeader
from isotype.compat.hub import offline_if_unreachable
from isotype.core.errors import CheckpointError, first_line
from isotype.core.pretrained import pretrained

_OF_A_MODEL = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def hub_config(model_id: str, revision: str | None = None) -> Any:
    """Return the transformers config of a hub id. Raise CheckpointError if the config cannot be read."""
    from transformers import AutoConfig

    at = f" at revision {revision}" if revision else ""
    with _hub_errors(
        "the model cannot be read from the hub",
        f"hub id {model_id}{at}",
        "a model on the hub (or in its local cache); no local path has this name either",
    ):
        return pretrained(AutoConfig, model_id, revision=revision or "main")


@contextmanager
def _hub_errors(headline: str, what: str, expected: str) -> Iterator[None]:
    """Turn an error of the hub into a CheckpointError with these texts and the reason in the error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError, StrictDataclassError

    why = ""
    try:
        with offline_if_unreachable() as why:
            yield
    except (OSError, HTTPError, ValueError, StrictDataclassError) as error:
        fix = _WITHOUT_HUB if why or constants.is_offline_mode() else _OF_HUB
        raise CheckpointError.of(headline, f"{what}: {why or first_line(error)}", expected, fix) from error


_OF_HUB = "check the spelling; for a private or gated model, log in with `hf auth login`"
_WITHOUT_HUB = (
    "connect to the network, so that isotype can search the hub, or give a local directory; "
    "HF_HUB_OFFLINE=1 uses the local cache without a wait"
)


def local_snapshot(model_id: str, revision: str | None = None) -> Path | None:
    """Return the directory of a model in the hub's local cache, or None if the cache lacks some of its weights."""
    snapshot = _cached(model_id, revision)
    weights = find_weights(snapshot) if snapshot is not None else None
    if weights is None or weights[1] != "model" or weights[0].suffix == ".gguf":
        return None
    if weights[0].suffix == ".json" and missing_shards(weights[0]):
        return None
    return weights[0].parent


def commit_of(model_id: str, revision: str | None) -> str | None:
    """Return the commit of a revision in the hub's local cache, or None if the cache does not have the revision."""
    snapshot = _cached(model_id, revision)
    return None if snapshot is None else snapshot.name


def _cached(model_id: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model_id, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def download(model_id: str, revision: str | None) -> Path:
    """Download the missing files of a model, and return its directory in the hub's local cache."""
    from huggingface_hub import snapshot_download

    snapshot = local_snapshot(model_id, revision)
    if snapshot is not None:
        return snapshot
    with _hub_errors(
        "the model cannot be downloaded",
        f"hub id {model_id}",
        "a model on the hub, or in its local cache",
    ):
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=_OF_A_MODEL))


def remote_headers(model_id: str, revision: str | None = None) -> CheckpointHeaders | str:
    """Return headers that are read by range requests, or the reason why the hub cannot be reached."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import HTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    why = ""
    try:
        with offline_if_unreachable() as why:
            repository = get_safetensors_metadata(model_id, revision=revision)
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        what, expected = f"hub id {model_id}: {error}", "weights in safetensors"
        fix = "use a revision of the model that has safetensors, or convert the model; pickled weights are not read"
        raise CheckpointError.of("no readable safetensors on the hub", what, expected, fix) from error
    except (OSError, HTTPError) as error:
        return f"the headers on the hub could not be read ({why or error})"
    tensors = tuple(
        TensorHeader(name, info.dtype, tuple(info.shape), end - begin, Path(file))
        for file, content in repository.files_metadata.items()
        for name, info in content.tensors.items()
        for begin, end in (info.data_offsets,)
    )
    return CheckpointHeaders(Path(model_id), "safetensors", "model", tensors, {})
