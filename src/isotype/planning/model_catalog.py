"""Plans for models of many sizes, for a request that names no model.

Only the config.json of each model is known. Without a tokenizer, every row of a data set is assumed to have the full
length.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isotype.core.tables import table
from isotype.planning.from_request import Plan, plan_of_request
from isotype.planning.request import parse_request, parser

ENOUGH = 3
"""Planning starts with the largest model, and ends when this number of models fits."""


_CONFIGS: Any = table(__file__)
SHELF: Mapping[str, Mapping[str, Any]] = {
    name: {**_CONFIGS["shared"], **config} for name, config in _CONFIGS["models"].items()
}
"""Maps the name of a model to its config, with the largest model first."""


def names_a_model(argv: Sequence[str]) -> bool:
    """Return True if the arguments of `isotype plan` name a method, a model or a config file."""
    rest = parser().parse_known_args(list(argv))[1]
    names = {token.partition("=")[0].replace("-", "_") for token in rest if token.startswith("--")}
    return bool(rest and not rest[0].startswith("-")) or bool(names & {"__model_name_or_path", "__config"})


def plans(argv: Sequence[str]) -> Iterator[Plan]:
    """Yield plans of the models, the largest first, until `ENOUGH` models fit."""
    fitting = 0
    for name, config in SHELF.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config), encoding="utf-8")
            request, _ = parse_request([str(path), *argv])
            named = request.command.but(model_name_or_path=name)
            plan = replace(plan_of_request(replace(request, command=named, longest=False)), model=name)
        fitting += plan.chosen is not None
        yield plan
        if fitting == ENOUGH:
            return
