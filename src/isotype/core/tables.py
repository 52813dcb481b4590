"""Tables of facts and texts: JSON files in the folders of the modules that read them."""

import json
from pathlib import Path
from typing import Any


def table(module: str, name: str = "") -> Any:
    """Return the content of the JSON file `name` (default: the name of the module) in the folder of `module`, a `__file__`."""
    path = Path(module).with_name(name) if name else Path(module).with_suffix(".json")
    return json.loads(path.read_text(encoding="utf-8"))
