"""Facts about the directories that may be a store."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from builders import kv_of, tokens

from promptstore import Namespace, PromptStore, StoreUnavailable, access

NS = Namespace("access")


def mounted(monkeypatch: pytest.MonkeyPatch, *mounts: tuple[Path, str]) -> None:
    """Have the system say that these file systems are mounted, besides its root."""
    rows = [
        SimpleNamespace(mountpoint=str(point), fstype=name)
        for point, name in [(Path("/"), "ext4"), *mounts]
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: rows)


@pytest.mark.parametrize(
    "name", ["nfs", "nfs4", "cifs", "smbfs", "9p", "virtiofs", "fuse", "fuse.sshfs"]
)
def test_a_network_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With its name and the next step; nothing is made there (Q08)."""
    mounted(monkeypatch, (tmp_path.resolve(), name))
    with pytest.raises(StoreUnavailable, match=f"{name} file system.*allow_network"):
        PromptStore.open(tmp_path / "new" / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_network_file_system_is_used_if_the_caller_insists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """allow_network=True is the caller's word that no other process uses it."""
    mounted(monkeypatch, (tmp_path.resolve(), "nfs4"))
    with PromptStore.open(tmp_path / "store", allow_network=True) as store:
        assert store.check() == []


@pytest.mark.parametrize("name", ["ext4", "xfs", "apfs", "overlay", "fuseblk", "tmpfs"])
def test_a_local_file_system_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also one under a network mount, and one that lies over one."""
    inner = tmp_path.resolve() / "inner"
    outer = (tmp_path.resolve(), "nfs4")
    mounted(monkeypatch, outer, (inner, "nfs4"), (inner, name))
    PromptStore.open(inner / "store").close()


def test_the_nearest_mount_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one whose name merely begins alike, and links are followed."""
    place = tmp_path.resolve() / "data"
    place.mkdir()
    (tmp_path / "link").symlink_to(place)
    mounted(monkeypatch, (place, "cifs"), (tmp_path.resolve() / "dat", "nfs"))
    assert access.file_system(place / "x") == "cifs"
    assert access.file_system(tmp_path / "link" / "x") == "cifs"
    assert access.file_system(tmp_path / "database") == "ext4"


@pytest.mark.parametrize("read_only", [False, True])
def test_a_root_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    """Who owns the directory can read and change what is in it."""
    PromptStore.open(tmp_path / "store").close()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StoreUnavailable, match=f"belongs to user {user}, not to you"):
        PromptStore.open(tmp_path / "store", read_only=read_only)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_can_read_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """0700 for directories, 0600 for files, while the store is open too (K13)."""
    before = os.umask(umask)
    try:
        store = PromptStore.open(tmp_path / "store")
        ids = tokens(100)
        store.insert(NS, ids, kv_of(ids))
        store.flush()
    finally:
        os.umask(before)
    modes = {path: mode(path) for path in tmp_path.rglob("*")}
    assert {path.name for path in modes} >= {"store", "index.db-wal", "store.lock"}
    for path, bits in modes.items():
        assert bits == (0o700 if path.is_dir() else 0o600), path
    store.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("holds", ["nothing", "a store"])
def test_a_root_that_others_could_read_is_closed_to_them(
    tmp_path: Path, holds: str
) -> None:
    """An empty directory and an older store are made private."""
    root = tmp_path / "root"
    root.mkdir()
    if holds == "a store":
        PromptStore.open(root).close()
    root.chmod(0o755)
    PromptStore.open(root).close()
    assert mode(root) == 0o700


def test_a_directory_of_other_things_keeps_its_mode(tmp_path: Path) -> None:
    """It may be anything of the user's; what the store makes in it is private."""
    (tmp_path / "letter").write_text("dear")
    tmp_path.chmod(0o755)
    PromptStore.open(tmp_path).close()
    assert (mode(tmp_path), mode(tmp_path / "snapshots")) == (0o755, 0o700)


def test_a_root_behind_a_link_is_used(tmp_path: Path) -> None:
    """Caches are often moved to another disk."""
    real: Any = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    with PromptStore.open(tmp_path / "link") as store:
        ids = tokens(100)
        store.insert(NS, ids, kv_of(ids))
    assert (real / "index.db").is_file()
