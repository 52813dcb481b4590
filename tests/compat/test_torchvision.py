"""torchvision beside a torch that its compiled operators are not made for."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_code

FAKE = """
import torch
try:
    torch.library.register_fake("torchvision::nms")(lambda dets, scores, iou_threshold: None)
    torch.library.register_fake("torchvision::qnms")(lambda dets, scores, iou_threshold: None)
except RuntimeError as error:
    raise RuntimeError(str(error)) from None
"""
"""What torchvision 0.20 to 0.29 does at import, its `_C.so` or not."""


def run(code: str, folder: Path) -> str:
    (folder / "torchvision.py").write_text(FAKE)
    at_first = f"import sys; sys.path.insert(0, {str(folder)!r}); "
    done = run_code(at_first + code)
    return done.stdout + done.stderr


def test_its_import_still_asks_for_operators_that_are_not_there(tmp_path: Path) -> None:
    assert "operator torchvision::nms does not exist" in run("import torchvision", tmp_path)


def test_it_is_importable_once_they_are_declared(tmp_path: Path) -> None:
    code = "from isotype.compat.torchvision import make_importable as m; m(); m(); import torchvision; print('sound')"
    assert run(code, tmp_path).endswith("sound\n")


def test_a_command_declares_them_before_transformers_is_imported(tmp_path: Path) -> None:
    code = (
        "from isotype.compat.torchvision import importable\n"
        "with importable():\n import transformers\n print('torchvision' in sys.modules)"
    )
    assert run(code.replace("\n", "\n"), tmp_path).endswith("True\n")
