"""docs/devices.md lists every device that can be named."""

from __future__ import annotations

from tools.device_table import PAGE, filled

from isotype.precision.devices.names import profile_names


def test_the_page_lists_every_device() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == filled(text), "run `python -m tools.device_table`"
    assert [name for name in profile_names() if f"`{name}`" not in text] == []
