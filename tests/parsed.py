"""The settings of a training command, from its words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isotype.data.methods import Method
    from isotype.train.command.settings import Settings


def parse_settings(method: Method, argv: Sequence[str]) -> Settings:
    from isotype.train.command.parse import parse_command
    from isotype.train.command.settings import settings_of

    return settings_of(parse_command(method.name, argv)[0])
