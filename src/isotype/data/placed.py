"""Move the images of a row into one column `images`. A part `{"type": "image"}` in a message marks the place of each
image.

The input has one of these formats:

- TRL: a column of images, and image parts in messages. Without image parts, the images come before the first
  question.
- OpenAI and axolotl: messages that contain the images.
- LLaVA, LLaMA-Factory and ms-swift: a column of images, and `<image>` in texts.
- A folder of images: a column of images, and captions as texts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from isotype.core.errors import Problem
from isotype.core.names import plural
from isotype.data.cells import CHATS, TURN_COLUMNS, Row, as_messages
from isotype.data.pictures import PICTURE_COLUMNS, pictures_in, stored

QUESTION = "Describe the picture."

PLACE: Mapping[str, Any] = {"type": "image"}
PART_KINDS = ("image", "image_url", "input_image")
PAYLOADS = ("image", "image_url", "url", "path", "base64", "source", "bytes")
CAPTIONS = ("text", "caption")
_FILE = re.compile(r"^data:image/|\.(png|jpe?g|webp|gif|bmp|tiff?)$", re.IGNORECASE)
_MARK = re.compile(r"\n?<image>\n?")
# Image tokens of certain models: a text with such a token is already written for one model.
_TOKENS = re.compile(
    r"<start_of_image>|<image_soft_token>|<\|image_?\w*\|>|<\|vision_start\|>|<IMG_CONTEXT>|\[IMG\]|<\|patch\|>"
)
_ORDER = ("prompt", "messages", "completion", "chosen", "rejected")
_ANSWERS = ("completion", "chosen", "rejected")
_FIX = 'write {"type": "image"} or <image> for each image in the column \'images\''


def with_places(row: Row, folder: Path | None, *, pictured: bool) -> Row | Problem:
    """Return the row with its images in `images` and an image part for each image, or the problem with the row.

    A row without images is returned unchanged. In a row with images, texts become messages, unless a text contains
    image tokens of a model, such as `<|image|>`.

    Args:
        folder: folder to which paths of images are relative, or None for a data set of `datasets`.
        pictured: True if a row without images gets the same format as a row with images.
    """
    pictured = pictured or not row.keys().isdisjoint(PICTURE_COLUMNS)
    if not pictured and not any(part.get("type") in PART_KINDS for part in _parts(row)):
        return row
    beside = pictures_in(row)
    spoken = _spoken(row, bool(beside))
    if isinstance(spoken, Problem):
        return spoken
    chats = {name: spoken[name] for name in _ORDER if isinstance(spoken.get(name), list)}
    if not chats:
        return _stored(spoken, beside, folder)
    places: list[Row] = []
    for name, chat in chats.items():
        before = len(places)
        chats[name] = [
            _placed(turn, bool(beside), places) if isinstance(turn, Mapping) else turn for turn in chat
        ]
        if name in _ANSWERS and len(places) > before:
            expected = "images only in prompts, because models answer with text"
            return Problem(f"column '{name}' holds an image", expected, "move the image to the prompt")
    if places:
        # If a question were plain text, TRL would add image parts before it a second time.
        chats = {name: [in_parts(turn) for turn in chat] for name, chat in chats.items()}
    elif beside:
        _insert_places(chats, len(beside))
        places = [{} for _ in beside]
    if places.count({}) != len(beside):
        what = f"{plural(places.count({}), 'place')} for an image in messages, but {plural(len(beside), 'image')}"
        return Problem(what, "as many places as images", _FIX if beside else _named_otherwise(row) or _FIX)
    waiting = iter(beside)
    return _stored({**spoken, **chats}, [inside or next(waiting) for inside in places], folder)


def _named_otherwise(row: Row) -> str:
    """Return the argument that makes a column of images `images`, or "" if the row has no such column."""
    for name, cell in row.items():
        first = cell[0] if isinstance(cell, list) and cell else cell
        if isinstance(first, str) and _FILE.search(first):
            return f"--columns images={name}"
    return ""


def _placed(turn: Mapping[str, Any], marked: bool, places: list[Row]) -> Mapping[str, Any]:
    """Return a message with an image part for each image. If `marked` is True, each `<image>` in the text also
    becomes an image part.

    The image of each part is appended to `places`. If a part has no image, {} is appended.
    """
    content = turn.get("content")
    if isinstance(content, str) and marked and "<image>" in content:
        content = _split(content)
    if not isinstance(content, list):
        return turn
    parts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in PART_KINDS:
            places.append({key: part[key] for key in PAYLOADS if part.get(key) is not None})
            part = {**{key: value for key, value in part.items() if key not in PAYLOADS}, **PLACE}
        parts.append(part)
    return {**turn, "content": parts}


def _stored(row: Row, pictures: list[Any], folder: Path | None) -> Row | Problem:
    images = [stored(picture, folder) for picture in pictures]
    if problem := next((image for image in images if isinstance(image, Problem)), None):
        return problem
    return {name: value for name, value in row.items() if name not in PICTURE_COLUMNS} | {"images": images}


def _parts(row: Row) -> Iterator[Mapping[str, Any]]:
    for name in CHATS:
        for turn in row[name] if isinstance(row.get(name), list) else ():
            content = turn.get("content") if isinstance(turn, Mapping) else None
            parts = content if isinstance(content, list) else ()
            yield from (part for part in parts if isinstance(part, Mapping))


def _split(content: str) -> list[Any]:
    parts: list[Any] = []
    for at, text in enumerate(_MARK.split(content)):
        parts += [dict(PLACE)] * bool(at)
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts


def in_parts(turn: Any) -> Any:
    """Return a user's message with its text as a list of one part. Return all other messages unchanged."""
    content = turn.get("content")
    if turn.get("role") != "user" or not isinstance(content, str):
        return turn
    return {**turn, "content": [{"type": "text", "text": content}]}


def _insert_places(chats: Row, count: int) -> None:
    """Insert `count` places for images before the first question. If a question is plain text, TRL inserts the places."""
    questions = [turn for name in _ORDER for turn in chats.get(name, ()) if turn.get("role") == "user"]
    if not questions or any(isinstance(turn["content"], str) for turn in questions):
        return
    questions[0]["content"][:0] = [dict(PLACE) for _ in range(count)]


def alike_at_start(first: Sequence[Any], second: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _spoken(row: Row, pictured: bool) -> Row | Problem:
    """Return the row as conversations, or the problem with the row. `pictured` is True if the row has images.

    Texts become messages. A caption becomes the answer to `QUESTION`. If `chosen` and `rejected` begin with the same
    messages, these messages become the prompt.
    """
    name = next((name for name in CAPTIONS if name in row), None)
    if name is not None and row.keys().isdisjoint(CHATS) and isinstance(row[name], str):
        if not pictured:
            return row
        text = _MARK.sub("", row[name], count=1) if row[name].lstrip().startswith("<image>") else row[name]
        if _MARK.search(text) or _TOKENS.search(text):
            fix = "write 'messages', or 'prompt' and 'completion'"
            return Problem(f"column '{name}' contains images", "a caption, or a conversation", fix)
        rest = {key: value for key, value in row.items() if key != name}
        question = {"role": "user", "content": [dict(PLACE), {"type": "text", "text": QUESTION}]}
        return {**rest, "prompt": [question], "completion": [{"role": "assistant", "content": text}]}
    if not any(_TOKENS.search(row[n]) for n in TURN_COLUMNS if isinstance(row.get(n), str)):
        row = as_messages(row)
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if "prompt" not in row and isinstance(chosen, list) and isinstance(rejected, list):
        same = alike_at_start(chosen, rejected)
        row = row | {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}
    return row
