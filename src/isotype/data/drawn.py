"""The data set `embedded:shapes`: drawn images of shapes, with questions about their colour, form or number.

An image has nine cells, and one to four of them contain a shape. All shapes in an image have the same form and
colour. One sixth of the combinations of number, colour and form is only in the test split. The images are the same on
every machine, because the seed is fixed, shapes are drawn in whole pixels, and no font is used.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy

from isotype.core.cache import default_cache_dir
from isotype.core.errors import DataError
from isotype.core.files import create_once
from isotype.data.pictures import NEEDS_PILLOW

NAME = "shapes"
CELL = 16
SIDE = 3 * CELL
NUMBERS = ("one", "two", "three", "four")
FORMS = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
    "purple": (150, 60, 180),
    "black": (30, 30, 30),
}
_ROWS = {"train": 480, "test": 48}
_VERSION = 1


@dataclass(frozen=True)
class Content:
    number: int
    colour: str
    form: str

    @property
    def words(self) -> str:
        """The content of an image as text: `three red circles`."""
        return f"{NUMBERS[self.number - 1]} {self.colour} {self.forms}"

    @property
    def forms(self) -> str:
        return self.form + "s" * (self.number > 1)


CONTENTS = tuple(Content(n, colour, form) for n in range(1, 5) for colour in COLOURS for form in FORMS)
# One sixth of all contents, and of the contents with a certain number, colour or form.
HELD_BACK = frozenset(
    Content(number, colour, FORMS[(at // 2 + number) % 3])
    for number in range(1, 5)
    for at, colour in enumerate(COLOURS)
    if at % 2 == number % 2
)


def draw(content: Content, rng: random.Random) -> Any:
    """Return an image as uint8 pixels [SIDE, SIDE, 3]. The generator `rng` determines the positions and sizes of the shapes."""
    pixels = numpy.full((SIDE, SIDE, 3), rng.randrange(225, 256), numpy.uint8)
    for cell in rng.sample(range(9), content.number):
        y, x = numpy.mgrid[0:SIDE, 0:SIDE] + 0.5
        dx = x - CELL * (cell % 3 + 0.5) - rng.uniform(-1, 1)
        dy = y - CELL * (cell // 3 + 0.5) - rng.uniform(-1, 1)
        radius = rng.uniform(5, 7)
        inside = {
            "circle": dx * dx + dy * dy < radius * radius,
            "square": numpy.maximum(abs(dx), abs(dy)) < 0.88 * radius,
            "triangle": (dy < 0.8 * radius) & (dy > -radius) & (abs(dx) < 0.55 * (dy + radius)),
        }[content.form]
        pixels[inside] = COLOURS[content.colour]
    return pixels


def questions(content: Content) -> list[tuple[str, str]]:
    are, which = "are", f"{content.forms.capitalize()}."
    if content.number == 1:
        are, which = "is", f"A {content.form}."
    return [
        ("What colour is it?", f"{content.colour.capitalize()}."),
        ("How many shapes are there?", f"{NUMBERS[content.number - 1].capitalize()}."),
        ("Which shape is it?", which),
        ("What do you see?", f"There {are} {content.words}."),
    ]


def rows(split: str) -> Iterator[tuple[Content, Any, str, str]]:
    """Yield a split's rows as (content, pixels, question, answer). Each call yields the same rows."""
    rng = random.Random(f"{NAME} {_VERSION} {split}")
    contents = [content for content in CONTENTS if (content in HELD_BACK) == (split == "test")]
    for at in range(_ROWS[split]):
        content = rng.choice(contents)
        yield content, draw(content, rng), *questions(content)[at % 4]


def shapes_folder() -> Path:
    """Return the folder of the data set. The first call draws the images. It raises DataError if pillow is missing."""
    return create_once(default_cache_dir() / f"{NAME}-{_VERSION}", _write_splits)


def _write_splits(folder: Path) -> None:
    if find_spec("PIL") is None:
        raise DataError(f"The data set 'embedded:{NAME}' cannot be drawn", [NEEDS_PILLOW])
    from PIL import Image

    for split in _ROWS:
        (folder / split).mkdir()
        with (folder / split / "metadata.jsonl").open("w", encoding="utf-8") as file:
            for at, (_, pixels, question, answer) in enumerate(rows(split)):
                name = f"{at:03}.png"
                Image.fromarray(pixels).save(folder / split / name)
                row = {"file_name": name, "prompt": question, "completion": answer}
                file.write(json.dumps(row) + "\n")
