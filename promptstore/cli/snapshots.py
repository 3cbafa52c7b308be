"""``promptstore ls``, ``stats`` and ``rm``: look at what is stored, and delete it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.filesize import decimal
from rich.table import Table

from promptstore.cli import options
from promptstore.cli.errors import Failure
from promptstore.cli.output import age, count, print_json, print_table

if TYPE_CHECKING:
    from promptstore import PromptStore, SnapshotInfo

_ID_CHARS = 8
_MIN_ID_CHARS = 6


# ----------------------------------------------------------------------------- ls


@click.command()
@options.as_json
@options.store
def ls(as_json: bool, root: Path) -> None:
    """List the snapshots, the most recently used first.

    A snapshot holds the tokens that it adds (new) to the prompt that it continues.
    """
    infos = _infos(root)
    if as_json:
        print_json([asdict(info) for info in infos or []])
    elif not infos:
        click.echo(f"no snapshots in {root}")
    else:
        print_table(_table(infos))


def _infos(root: Path) -> list[SnapshotInfo] | None:
    """Return what is on disk, or None if there is no store."""
    store = options.open_existing(root)
    if store is None:
        return None
    with store:
        return list(store.snapshots())


def _table(infos: Iterable[SnapshotInfo]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("label", overflow="fold")
    table.add_column("model", no_wrap=True)
    for name in ("tokens", "new", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "pin", "used"):
        table.add_column(name, no_wrap=True)
    table.add_column("hits", justify="right", no_wrap=True)
    now_s = time.time()
    for info in infos:
        table.add_row(
            info.id[:_ID_CHARS],
            info.label or "",
            _model(info),
            f"{info.end:,}",
            f"{info.end - info.start:,}",
            decimal(info.nbytes),
            info.kind,
            "pin" if info.pinned else "",
            age(now_s - info.used_s),
            f"{info.hits:,}",
        )
    return table


def _model(info: SnapshotInfo) -> str:
    """Return a short name of a namespace: model, ``+`` adapter, ``@`` tenant."""
    namespace = info.namespace
    adapter = f"+{namespace.adapter[:4]}" if namespace.adapter else ""
    tenant = f"@{namespace.tenant}" if namespace.tenant else ""
    return namespace.model[:_ID_CHARS] + adapter + tenant


# -------------------------------------------------------------------------- stats


@dataclass(frozen=True)
class _Totals:
    """What a store holds; *disk_bytes* is everything under its directory.

    Bytes written are those of today, and of today and the 29 days before it (UTC).
    """

    store: str
    n_snapshots: int = 0
    n_namespaces: int = 0
    n_tokens: int = 0
    n_pinned: int = 0
    snapshot_bytes: int = 0
    disk_bytes: int = 0
    written_today_bytes: int = 0
    written_30_days_bytes: int = 0
    hits: int = 0


@click.command()
@options.as_json
@options.store
def stats(as_json: bool, root: Path) -> None:
    """Say what the store holds."""
    store = options.open_existing(root)
    totals = _Totals(str(root))
    if store is not None:
        with store:
            totals = _totals(root, store)
    if as_json:
        print_json(asdict(totals))
    elif store is None:
        click.echo(f"no store in {root}")
    else:
        print_table(_totals_table(totals))


def _totals(root: Path, store: PromptStore) -> _Totals:
    infos, figures = list(store.snapshots()), store.stats()
    today, month = _written(figures.written_by_day, datetime.now(UTC).date())
    return _Totals(
        store=str(root),
        n_snapshots=len(infos),
        n_namespaces=len({info.namespace for info in infos}),
        n_tokens=sum(info.end - info.start for info in infos),
        n_pinned=sum(info.pinned for info in infos),
        snapshot_bytes=sum(info.nbytes for info in infos),
        disk_bytes=figures.disk_bytes,
        written_today_bytes=today,
        written_30_days_bytes=month,
        hits=sum(info.hits for info in infos),
    )


def _written(bytes_by_day: Mapping[str, int], today: date) -> tuple[int, int]:
    """Return the bytes of *today*, and of it and the 29 days before."""
    first = today - timedelta(days=29)
    recent = {
        day: nbytes
        for day, nbytes in bytes_by_day.items()
        if first <= date.fromisoformat(day) <= today
    }
    return recent.get(today.isoformat(), 0), sum(recent.values())


def _totals_table(totals: _Totals) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in (
        ("store", totals.store),
        ("snapshots", f"{totals.n_snapshots:,}"),
        ("pinned", f"{totals.n_pinned:,}"),
        ("namespaces", f"{totals.n_namespaces:,}"),
        ("tokens", f"{totals.n_tokens:,}"),
        ("size of snapshots", decimal(totals.snapshot_bytes)),
        ("size of everything", decimal(totals.disk_bytes)),
        ("written today", decimal(totals.written_today_bytes)),
        ("written in 30 days", decimal(totals.written_30_days_bytes)),
        ("hits", f"{totals.hits:,}"),
    ):
        table.add_row(name, value)
    return table


# ----------------------------------------------------------------------------- rm


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--tenant",
    help="Delete all prompts of this tenant instead; '' is whoever names none.",
)
@options.store
@click.argument("names", metavar="[ID_OR_LABEL]...", nargs=-1)
def rm(yes: bool, tenant: str | None, root: Path, names: Sequence[str]) -> None:
    """Delete snapshots, pinned ones too, and what continues them.

    An id may be cut to six characters if that is unique. If more snapshots go than
    were named, the command asks first; where it cannot ask, it deletes nothing
    without --yes. Nothing of what was deleted is left in the index.
    """
    if bool(names) == (tenant is not None):
        raise click.UsageError("Name snapshots, or a --tenant.")
    store = options.open_existing(root, read_only=False)
    if store is None:
        raise Failure(f"no store in {root}")
    with store:
        infos = {info.id: info for info in store.snapshots()}
        if tenant is None:
            doomed = _delete(store, infos, names, yes=yes)
        else:
            doomed = _delete_tenant(store, infos, tenant, yes=yes)
    if doomed is None:
        click.echo("nothing was deleted")
        return
    size = decimal(sum(infos[id_].nbytes for id_ in doomed))
    click.echo(f"deleted {count(len(doomed), 'snapshot')}, {size}")


def _delete(
    store: PromptStore,
    infos: Mapping[str, SnapshotInfo],
    names: Sequence[str],
    *,
    yes: bool,
) -> set[str] | None:
    """Delete what is named, and what continues it; return the ids, or None for a no."""
    groups = {frozenset(_ids(name, infos.values())) for name in names}
    named = frozenset().union(*groups)
    doomed = _with_descendants(named, infos)
    n_more = len(doomed) - len(groups)
    text = f"{count(len(doomed), 'snapshot')} would go, {n_more:,} more than you named"
    if n_more > 0 and not yes and not _confirm(text):
        return None
    for id_ in named:
        if infos[id_].parent not in doomed:
            store.delete(id_)
    return doomed


def _delete_tenant(
    store: PromptStore, infos: Mapping[str, SnapshotInfo], tenant: str, *, yes: bool
) -> set[str] | None:
    """Delete all of a tenant; return the ids, or None for a no."""
    doomed = {id_ for id_, info in infos.items() if info.namespace.tenant == tenant}
    whose = f"of tenant {tenant!r}" if tenant else "of no tenant"
    text = f"{count(len(doomed), 'snapshot')} {whose} would go"
    if doomed and not yes and not _confirm(text):
        return None
    store.delete_tenant(tenant)
    return doomed


def _ids(name: str, infos: Iterable[SnapshotInfo]) -> set[str]:
    """Return the snapshots that bear a label, or the one of an id or its beginning.

    Raises:
        UnknownSnapshot: There is none.
        Failure: Several ids begin so.
    """
    from promptstore import UnknownSnapshot

    infos = list(infos)
    labelled = {info.id for info in infos if info.label == name}
    if labelled:
        return labelled
    found = {info.id for info in infos if info.id.startswith(name)}
    if not found or len(name) < _MIN_ID_CHARS:
        raise UnknownSnapshot(name)
    if len(found) > 1:
        raise Failure(f"{len(found)} ids begin with {name!r}")
    return found


def _with_descendants(
    ids: Iterable[str], infos: Mapping[str, SnapshotInfo]
) -> set[str]:
    """Return *ids* and all that continue them."""
    children: dict[str | None, list[str]] = {}
    for info in infos.values():
        children.setdefault(info.parent, []).append(info.id)
    found: set[str] = set()
    stack = list(ids)
    while stack:
        id_ = stack.pop()
        found.add(id_)
        stack += children.get(id_, [])
    return found


def _confirm(text: str) -> bool:
    """Ask whether so much may go.

    Raises:
        Failure: Nobody can be asked.
    """
    if not _is_interactive():
        raise Failure(f"{text}; --yes deletes them all")
    return click.confirm(f"{text}. Delete them all?", err=True)


def _is_interactive() -> bool:
    return sys.stdin.isatty()


COMMANDS: Sequence[click.Command] = (ls, stats, rm)
