"""The parts of a model that a training gives adapters."""

from __future__ import annotations

from collections.abc import Iterable

from isotype.model.parts import LANGUAGE, read_parts
from isotype.model.targets import Adapt
from isotype.train.command.settings import Settings


def parts_to_adapt(settings: Settings, columns: Iterable[str]) -> Adapt | None:
    """Return the parts to adapt: those of `--adapt`; else the language model if no row has pictures; else None (all)."""
    if settings.extra.adapt is not None:
        return Adapt(read_parts(settings.extra.adapt), "--adapt leaves their part out")
    if {"image", "images"} & set(columns):
        return None
    return Adapt((LANGUAGE,), "no row has a picture, so no loss depends on them")
