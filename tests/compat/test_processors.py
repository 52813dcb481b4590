"""transformers' processors still need `isotype.compat.transformers.replaced_parts`."""

from __future__ import annotations

import pytest

from isotype.compat.transformers import replaced_parts
from tests.zoo.processors import picture, tiny_processor

pytest.importorskip("PIL", reason="needs the package pillow")
BATCH = {"text": ["w1", "<image> w2"], "images": [[], [picture(40, 40)]]}


def test_idefics3_makes_a_tensor_of_positions() -> None:
    processor = tiny_processor("idefics3")
    with pytest.raises(ValueError, match="text_replacement_offsets"):
        processor(**BATCH, padding=True, return_tensors="pt", return_text_replacement_offsets=True)
    with replaced_parts(processor) as parts:
        processor(**BATCH, padding=True, return_tensors="pt")
    assert [[part["span"] for part in text] for text in parts] == [[], [(0, 7)]]
    assert "get_text_with_replacements" not in vars(processor)
