"""Facts about the count of bytes under a directory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from promptstore.usage import Usage

YEAR_NS = 365 * 86_400 * 10**9


def is_fixed(name: str) -> bool:
    return name.endswith(".fixed")


def walk(root: Path) -> int:
    """Return the bytes of everything under *root* by looking at every file."""
    paths = [path for path in root.rglob("*") if path.is_symlink() or path.is_file()]
    return sum(path.lstat().st_size for path in paths)


def settle(folder: Path) -> None:
    """Make a directory look as if it had not been changed for long."""
    long_ago = folder.stat().st_mtime_ns - YEAR_NS
    os.utime(folder, ns=(long_ago, long_ago))


def test_nothing_is_nothing(tmp_path: Path) -> None:
    """A directory that is not there holds no bytes."""
    assert Usage(tmp_path / "none", is_fixed).nbytes() == 0


def test_links_count_as_themselves(tmp_path: Path) -> None:
    """Neither a link to a file nor one to a directory is followed."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "big").write_bytes(bytes(10_000))
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(other / "big")
    (root / "folder").symlink_to(other)
    assert Usage(root, is_fixed).nbytes() == walk(root) < 10_000


def test_a_settled_directory_of_fixed_files_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting again costs a look at the directory, not at its files."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.fixed").write_bytes(bytes(100))
    settle(folder)
    settle(tmp_path)
    usage = Usage(tmp_path, is_fixed)
    assert usage.nbytes() == 100

    monkeypatch.delattr(os, "scandir")
    assert usage.nbytes() == 100


def test_a_file_that_may_grow_is_looked_at_each_time(tmp_path: Path) -> None:
    """A foreign file beside fixed ones is counted as it is now."""
    (tmp_path / "a.fixed").write_bytes(bytes(100))
    (tmp_path / "log").write_bytes(bytes(10))
    settle(tmp_path)
    usage = Usage(tmp_path, is_fixed)
    assert usage.nbytes() == 110
    with (tmp_path / "log").open("ab") as file:
        file.write(bytes(5))
    assert usage.nbytes() == 115


def test_two_changes_within_one_tick_are_both_seen(tmp_path: Path) -> None:
    """A directory that was changed just now is read again, whatever its time says."""
    usage = Usage(tmp_path, is_fixed)
    (tmp_path / "a.fixed").write_bytes(bytes(100))
    stamp = tmp_path.stat().st_mtime_ns
    assert usage.nbytes() == 100
    (tmp_path / "b.fixed").write_bytes(bytes(100))
    os.utime(tmp_path, ns=(stamp, stamp))
    assert usage.nbytes() == 200


@pytest.mark.parametrize("seed", range(5))
def test_the_count_is_that_of_a_walk(tmp_path: Path, seed: int) -> None:
    """After any adding, removing, renaming, growing of files and directories."""
    rng = random.Random(seed)
    usage = Usage(tmp_path, is_fixed)
    folders = [tmp_path]
    for number in range(200):
        folder = rng.choice([f for f in folders if f.is_dir()])
        files = [path for path in folder.iterdir() if path.is_file()]
        match rng.randrange(5):
            case 0:
                folders.append(folder / f"d{number}")
                folders[-1].mkdir()
            case 1 if files:
                rng.choice(files).unlink()
            case 2 if files:
                path = rng.choice(files)
                path.rename(rng.choice(folders) / f"{number}{path.suffix}")
            case _:
                name = f"{number}{rng.choice(['.fixed', '.log'])}"
                (folder / name).write_bytes(bytes(rng.randrange(1000)))
        if rng.random() < 0.2:
            settle(folder)
            usage.nbytes()
        assert usage.nbytes() == walk(tmp_path)
