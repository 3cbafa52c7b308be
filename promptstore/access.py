"""Which directories may be used as a store: one's own, on a disk of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from promptstore.errors import StoreUnavailable

_NETWORK = frozenset({
    "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "glusterfs",
    "gpfs", "lustre", "macfuse", "ncpfs", "nfs", "nfs4", "ocfs2", "osxfuse", "prl_fs",
    "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "webdav",
})  # fmt: skip


def require_own(path: Path) -> None:
    """Raise if the directory belongs to somebody else, who could read along.

    Raises:
        StoreUnavailable: It does, or it cannot be looked at.
    """
    try:
        owner, user = path.stat().st_uid, os.geteuid()
    except FileNotFoundError:
        return
    except OSError as error:
        reason = f"cannot be used as a store: {error.strerror}"
        raise StoreUnavailable(path, reason) from error
    if owner != user:
        reason = f"belongs to user {owner}, not to you ({user}); use one of your own"
        raise StoreUnavailable(path, reason)


def require_local(path: Path) -> None:
    """Raise if the directory is on a network file system, or one in user space.

    SQLite's locks and its shared memory do not work there.

    Raises:
        StoreUnavailable: It is.
    """
    try:
        name = file_system(path)
    except OSError as error:
        reason = f"its file system cannot be told: {error.strerror}"
        raise StoreUnavailable(path, reason) from error
    if name in _NETWORK or name == "fuse" or name.startswith("fuse."):
        reason = (
            f"is on a {name} file system, where SQLite's locks do not work; use a "
            "local disk, or allow_network=True if only one process ever uses it"
        )
        raise StoreUnavailable(path, reason)


def file_system(path: Path) -> str:
    """Return the type of the file system that a path is or would be on, as the system
    names it; empty if it cannot be told."""
    import psutil  # takes a while, and only opening needs it

    place = path.resolve()
    best, name = 0, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        depth = len(point.parts)
        # The later of two at one place is the one that is seen.
        if depth >= best and place.is_relative_to(point):
            best, name = depth, mount.fstype.lower()
    return name
