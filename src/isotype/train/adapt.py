"""Which parts of a model a training gives adapters."""

from __future__ import annotations

from collections.abc import Iterable

from isotype.model.parts import LANGUAGE, read_parts
from isotype.model.targets import Adapt
from isotype.train.command.settings import Settings


def parts_to_adapt(settings: Settings, columns: Iterable[str]) -> Adapt | None:
    """The parts of the model that a training gives adapters: as asked; without pictures in its rows, those that a loss depends on.

    Args:
        settings: of the training.
        columns: of its rows.
    """
    if settings.extra.adapt is not None:
        return Adapt(read_parts(settings.extra.adapt), "--adapt leaves their part out")
    if {"image", "images"} & set(columns):
        return None
    return Adapt((LANGUAGE,), "no row has a picture, so no loss depends on them")
