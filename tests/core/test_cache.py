"""Where what can be made again is kept, and that commands run where nothing can be kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import isotype.cli.main as command_line
from isotype.cli.main import main
from isotype.core import cache
from isotype.core.cache import LIBRARIES, default_cache_dir, prepare_library_caches

VARIABLES = ("ISOTYPE_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "HF_MODULES_CACHE")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.setenv(name, "restored when the test ends, if it is set meanwhile")
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(cache, "_temporary", lambda: tmp_path / "temporary")
    return home


def test_the_folder_that_the_environment_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert default_cache_dir() == home / ".cache" / "isotype"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "isotype"
    monkeypatch.setenv("ISOTYPE_CACHE", "~/mine")
    assert default_cache_dir() == home / "mine"
    prepare_library_caches()
    assert "HF_HOME" not in os.environ
    assert not list(home.iterdir())  # asking leaves nothing
    assert not caplog.messages


# A folder that cannot be made whoever asks: permissions do not stop root.
NOWHERE = {
    "a file": lambda tmp_path: tmp_path / "file" / "below",
    "proc": lambda tmp_path: Path("/proc/none/below"),
}


@pytest.mark.parametrize("variable", ["ISOTYPE_CACHE", "XDG_CACHE_HOME", "HOME"])
@pytest.mark.parametrize("where", NOWHERE)
def test_a_folder_that_cannot_be_made(
    variable: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, str(NOWHERE[where](tmp_path)))
    assert default_cache_dir() == default_cache_dir() == tmp_path / "temporary"
    (line,) = caplog.messages
    assert line.startswith(f"nothing can be stored in {NOWHERE[where](tmp_path)}")
    assert line.endswith(
        f": {tmp_path}/temporary is used until this process ends; set ISOTYPE_CACHE to a folder that can be written"
    )


def test_nobodys_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nobody(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert default_cache_dir() == tmp_path / "temporary"
    assert caplog.messages[0].startswith(
        "nothing can be stored in ~/.cache/isotype (Could not determine home"
    )


def test_libraries_keep_their_files_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file" / "hub"))
    prepare_library_caches()
    assert os.environ["HF_HOME"] == str(tmp_path / "temporary" / "huggingface")
    (line,) = caplog.messages
    assert line.startswith(f"nothing can be stored in {tmp_path}/file/hub (Not a directory): downloads of")


def test_models_of_a_folder_that_can_only_be_read_are_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_MODULES_CACHE", "chosen")
    monkeypatch.setattr(cache, "why_unusable", lambda folder: "Read-only file system")
    prepare_library_caches()
    assert os.environ["HF_HOME"] == str(tmp_path)
    assert os.environ["HF_DATASETS_CACHE"] == str(tmp_path / "temporary" / "huggingface" / "datasets")
    assert os.environ["HF_MODULES_CACHE"] == "chosen"
    assert "data sets are stored in" in caplog.messages[0]


@pytest.mark.parametrize(("command", "prepared"), [("merge", True), ("check", True), ("explain", False)])
def test_commands_prepare_the_libraries(
    command: str, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(command_line, "prepare_library_caches", lambda: seen.append("prepared"))
    monkeypatch.setattr(command_line, "_handler", lambda name: lambda rest, console: seen.append(name) or 0)
    assert main([command]) == 0
    assert seen == ["prepared", command] if prepared else [command]


def test_libraries_find_the_temporary_folder_which_goes_at_the_end(tmp_path: Path) -> None:
    """In a process of its own: libraries read their folders when they are imported."""
    code = """if True:
        from pathlib import Path
        from isotype.core.cache import LIBRARIES, default_cache_dir, prepare_library_caches
        prepare_library_caches()
        from huggingface_hub import constants
        Path(constants.HF_HUB_CACHE, "models").mkdir(parents=True)
        (default_cache_dir() / "kept").write_text("")
    """
    (tmp_path / "tmp").mkdir()
    surroundings = {**os.environ, "HOME": "/proc/none", "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=surroundings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(" (")[0] for line in done.stderr.splitlines()] == [
        "nothing can be stored in /proc/none/.cache/huggingface",
        "nothing can be stored in /proc/none/.cache/isotype",
    ]
    assert [each.name for each in (tmp_path / "tmp").iterdir()] == [f"isotype-libraries-{os.geteuid()}"]


def test_libraries_outlive_a_temporary_cache(tmp_path: Path) -> None:
    """Each of two processes makes and removes a cache of its own; what the first compiled is there for the second."""
    program = (
        "from isotype.core.cache import LIBRARIES, default_cache_dir\n"
        "folder = default_cache_dir() / LIBRARIES\n"
        "print(folder, *(file.name for file in folder.iterdir()))\n"
        "(folder / 'a.so').touch()"
    )
    surroundings = {**os.environ, "ISOTYPE_CACHE": "/proc/none", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    first, second = (
        subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    )
    assert len(first) == 1
    assert second[1:] == ["a.so"]
    assert first[0] != second[0]
    (kept,) = (each for each in tmp_path.iterdir() if each.name.startswith("isotype-libraries-"))
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700


def test_a_link_of_others_is_no_folder_for_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "temporary", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (tmp_path / f"isotype-libraries-{os.geteuid()}").symlink_to(elsewhere)
    cache._keep_libraries(folder)
    assert not (folder / LIBRARIES).exists()
