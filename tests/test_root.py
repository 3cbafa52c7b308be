"""Facts about the directory of a store: what is ours in it, and what never is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from builders import kv, tokens

from promptstore import Namespace, PromptStore, StoreUnavailable, snapshot
from promptstore.budget import Limits
from promptstore.disk import DiskTier
from promptstore.root import Root

NAME = "0123456789abcdef" * 2


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path / "store")
    root.make()
    return root


def put(path: Path, data: bytes = b"precious") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


FOREIGN = [
    "README",
    f"{NAME}.safetensors",
    "index.db.bak",
    "models/model.safetensors",
    "snapshots/model.safetensors",
    f"snapshots/{NAME}.safetensors",
    f"snapshots/ff/{NAME}.safetensors",
    f"snapshots/01/x/{NAME}.safetensors",
    f"snapshots/01/{NAME}",
    f"snapshots/01/{NAME}.safetensors.bak",
    f"snapshots/01/{NAME}.txt",
    f"snapshots/01/{NAME.upper()}.safetensors",
    f"snapshots/01/{NAME[:-1]}.safetensors",
    f"snapshots/01/{NAME}0.safetensors",
    f"snapshots/01/{NAME[:-1]}g.safetensors",
    f"snapshots/01/{NAME[:-1]}\n.safetensors",
    f"snapshots/01/{NAME}\n.safetensors",
    "snapshots/01/01.safetensors",
    "snapshots/mo/model-00001-of-00002.safetensors",
    "snapshots/no/notes.tmp",
    f"Snapshots/01/{NAME}.safetensors",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_what_has_another_name_or_place_is_not_ours(root: Root, name: str) -> None:
    """Ours are 32 hexadecimal digits, in the directory of the first two."""
    assert not root.is_ours(put(root.path / name))


@pytest.mark.parametrize("suffix", [".safetensors", ".tmp"])
def test_what_has_the_place_and_name_of_a_snapshot_is_ours(
    root: Root, suffix: str
) -> None:
    """Finished or being made."""
    path = put(root.path_of(NAME).with_suffix(suffix))
    assert path.parent == root.path / "snapshots" / "01"
    assert root.is_ours(path)
    assert root.is_final(path) == (suffix == ".safetensors")


def test_a_link_is_never_ours(root: Root, tmp_path: Path) -> None:
    """Wherever it leads to, and whatever its name."""
    path = root.path_of(NAME)
    path.parent.mkdir()
    path.symlink_to(put(tmp_path / "elsewhere"))
    assert not root.is_ours(path)


def test_foreign_files_are_never_removed(tmp_path: Path) -> None:
    """Neither a sweep nor eviction touches what is not ours; orphans of ours go."""
    disk = DiskTier(tmp_path / "store", Limits(1 << 30), verify="off", read_only=False)
    root = disk.root
    foreign = [put(root.path / name) for name in FOREIGN]
    link = root.path_of("01" * 16)
    link.symlink_to(put(tmp_path / "elsewhere"))
    directory = root.path_of("02" * 16)
    directory.mkdir(parents=True)
    ours = [put(root.path_of(f"{n:032x}")) for n in range(3)]
    ours.append(put(root.path_of("f" * 32).with_suffix(".tmp")))
    disk.budget.sweep()
    assert [path for path in ours if path.exists()] == []
    assert all(path.read_bytes() == b"precious" for path in foreign)
    assert link.is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    assert directory.is_dir()
    disk.evict(0)
    disk.budget.sweep()
    assert all(path.read_bytes() == b"precious" for path in foreign)
    disk.close()


def test_a_sweep_spares_what_has_a_row_or_a_maker(tmp_path: Path) -> None:
    """Neither a stored snapshot nor one that is being made is an orphan."""
    space, ids = Namespace("m"), tokens(300)
    with PromptStore.open(tmp_path / "store") as store:
        store.insert(space, ids, kv(300))
        store.flush()
    disk = DiskTier(tmp_path / "store", Limits(1 << 30), verify="off", read_only=False)
    (stored,) = disk.index.names()
    with disk.root.new_file(NAME) as (_, publish):
        disk.budget.sweep()
        assert disk.root.path_of(NAME).with_suffix(".tmp").exists()
        publish()
        disk.budget.sweep()
        assert disk.root.path_of(NAME).exists()
    assert disk.root.path_of(stored).exists()
    disk.budget.sweep()
    assert not disk.root.path_of(NAME).exists()
    assert disk.root.path_of(stored).exists()
    disk.close()


# --------------------------------------------------------------------- new files


def test_a_new_file_has_its_name_once_it_is_published(root: Root) -> None:
    """Until then it has another one, and is its owner's alone."""
    with root.new_file(NAME) as (fd, publish):
        os.write(fd, b"rows")
        temporary = root.path_of(NAME).with_suffix(".tmp")
        assert not root.path_of(NAME).exists()
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        publish()
        assert not temporary.exists()
        assert not snapshot.is_abandoned(root.path_of(NAME))
    assert root.path_of(NAME).read_bytes() == b"rows"
    assert stat.S_IMODE(root.path_of(NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE(root.path_of(NAME).parent.stat().st_mode) == 0o700
    assert snapshot.is_abandoned(root.path_of(NAME))


@pytest.mark.parametrize("how", ["error", "no name"])
def test_a_new_file_without_its_name_is_removed(root: Root, how: str) -> None:
    """An error, or an end without a name, leaves nothing."""
    try:
        with root.new_file(NAME) as (fd, _):
            os.write(fd, b"rows")
            if how == "error":
                raise OSError(errno.ENOSPC, "no space left")
    except OSError:
        assert how == "error"
    assert root.files() == []


def test_a_new_file_never_overwrites(root: Root) -> None:
    """A file that somebody else is making under that name is left to them."""
    with root.new_file(NAME) as (fd, publish):
        os.write(fd, b"rows")
        publish()
        temporary = put(root.path_of(NAME).with_suffix(".tmp"))
        with pytest.raises(FileExistsError), root.new_file(NAME):
            pass
    assert root.path_of(NAME).read_bytes() == b"rows"
    assert not temporary.exists() or temporary.read_bytes() == b"precious"


def test_unlink_removes_what_is_there(root: Root) -> None:
    """A file that is gone already is no error."""
    put(root.path_of(NAME))
    root.unlink(NAME)
    root.unlink(NAME)
    assert root.files() == []


# ------------------------------------------------------------------ the directory


def test_everything_under_the_root_counts(root: Root) -> None:
    """Foreign files, index and lock count as well; what a link leads to does not."""
    before = root.nbytes()
    put(root.path / "a" / "b" / "c", bytes(1000))
    put(root.index, bytes(500))
    put(root.lock, bytes(1))
    put(root.path_of(NAME), bytes(70))
    assert root.nbytes() - before == 1571
    listed = {path.name for path in root.files()}
    assert listed == {"c", f"{NAME}.safetensors"}
    big = put(root.path.parent / "big", bytes(100_000))
    (root.path / "link").symlink_to(big)
    (root.path / "loop").symlink_to(root.path)
    assert root.nbytes() - before < 10_000


def test_a_root_that_cannot_be_used_names_itself(tmp_path: Path) -> None:
    """The error's path is the directory that was asked for, not a file in it."""
    file = put(tmp_path / "file")
    for path in (file, file / "below"):
        with pytest.raises(StoreUnavailable) as caught:
            Root(path).make()
        assert caught.value.path == path
    store = tmp_path / "store"
    put(store / "index.db", b"no database" * 100)
    for read_only in (False, True):
        with pytest.raises(StoreUnavailable) as caught:
            PromptStore.open(store, read_only=read_only)
        assert caught.value.path == store
    with pytest.raises(StoreUnavailable) as caught:
        PromptStore.open(tmp_path / "nothing", read_only=True)
    assert caught.value.path == tmp_path / "nothing"
    assert not (tmp_path / "nothing").exists()
