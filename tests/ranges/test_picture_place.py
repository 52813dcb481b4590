"""What a chat template writes for an image, whatever stands beside it."""

from __future__ import annotations

import pytest

from isotype.ranges.pictures import picture_place
from tests.zoo.processors import FAMILIES, tiny_processor

pytest.importorskip("PIL", reason="needs the package pillow")
NAMES = [name for name in FAMILIES if FAMILIES[name].pil]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("beside", [("", ""), ("<s>", "</s>"), ("\n", "<|im_end|>"), (">", "<")])
def test_a_place_is_cut_whole_from_what_stands_beside_it(name, beside):
    processor = tiny_processor(name)
    before, after = beside
    place = FAMILIES[name].place
    parts = "{% for part in m['content'] %}" + place + "{% endfor %}"
    processor.chat_template = "{% for m in messages %}" + before + parts + after + "{% endfor %}"
    assert picture_place(processor) == place
