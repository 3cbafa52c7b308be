"""``promptstore ls``, ``stats``, ``rm`` and ``check``: look at and tidy the disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from promptstore.cli import options
from promptstore.cli.bar import Bar
from promptstore.cli.errors import Failure

if TYPE_CHECKING:
    from promptstore import Finding, PromptStore, SnapshotInfo

_ID_CHARS = 8
_MIN_ID_CHARS = 6
_PIPE_WIDTH = 160
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"))


def _print(table: Table) -> None:
    # A pipe has no width; rich would cut at 80.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(markup=False, highlight=False, width=width).print(table)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


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
        _print_json([asdict(info) for info in infos or []])
    elif not infos:
        click.echo(f"no snapshots in {root}")
    else:
        _print(_table(infos))


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
            _age(now_s - info.used_s),
            f"{info.hits:,}",
        )
    return table


def _model(info: SnapshotInfo) -> str:
    """Return a short name of a namespace: model, ``+`` adapter, ``@`` tenant."""
    namespace = info.namespace
    adapter = f"+{namespace.adapter[:4]}" if namespace.adapter else ""
    tenant = f"@{namespace.tenant}" if namespace.tenant else ""
    return namespace.model[:_ID_CHARS] + adapter + tenant


def _age(seconds: float) -> str:
    for unit_s, unit in _AGES:
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} ago"
    return "just now"


# -------------------------------------------------------------------------- stats


@dataclass(frozen=True)
class _Totals:
    """What a store holds; *disk_bytes* is everything under its directory."""

    store: str
    n_snapshots: int = 0
    n_namespaces: int = 0
    n_tokens: int = 0
    n_pinned: int = 0
    snapshot_bytes: int = 0
    disk_bytes: int = 0
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
        _print_json(asdict(totals))
    elif store is None:
        click.echo(f"no store in {root}")
    else:
        _print(_totals_table(totals))


def _totals(root: Path, store: PromptStore) -> _Totals:
    infos = list(store.snapshots())
    return _Totals(
        store=str(root),
        n_snapshots=len(infos),
        n_namespaces=len({info.namespace for info in infos}),
        n_tokens=sum(info.end - info.start for info in infos),
        n_pinned=sum(info.pinned for info in infos),
        snapshot_bytes=sum(info.nbytes for info in infos),
        disk_bytes=store.stats().disk_bytes,
        hits=sum(info.hits for info in infos),
    )


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
        ("hits", f"{totals.hits:,}"),
    ):
        table.add_row(name, value)
    return table


# ----------------------------------------------------------------------------- rm


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.store
@click.argument("names", metavar="ID_OR_LABEL...", nargs=-1, required=True)
def rm(yes: bool, root: Path, names: Sequence[str]) -> None:
    """Delete snapshots, pinned ones too, and what continues them.

    An id may be cut to six characters if that is unique. If more snapshots go than
    were named, the command asks first; where it cannot ask, it deletes nothing
    without --yes.
    """
    store = options.open_existing(root, read_only=False)
    if store is None:
        raise Failure(f"no store in {root}")
    with store:
        infos = {info.id: info for info in store.snapshots()}
        groups = {frozenset(_ids(name, infos.values())) for name in names}
        named = frozenset().union(*groups)
        doomed = _with_descendants(named, infos)
        n_more = len(doomed) - len(groups)
        if n_more > 0 and not yes and not _confirm(len(doomed), n_more):
            click.echo("nothing was deleted")
            return
        for id_ in named:
            if infos[id_].parent not in doomed:
                store.delete(id_)
    size = decimal(sum(infos[id_].nbytes for id_ in doomed))
    click.echo(f"deleted {_count(len(doomed), 'snapshot')}, {size}")


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


def _confirm(n_doomed: int, n_more: int) -> bool:
    """Ask whether more may go than was named.

    Raises:
        Failure: Nobody can be asked.
    """
    text = f"{_count(n_doomed, 'snapshot')} would go, {n_more:,} more than you named"
    if not _is_interactive():
        raise Failure(f"{text}; --yes deletes them all")
    return click.confirm(f"{text}. Delete them all?", err=True)


def _is_interactive() -> bool:
    return sys.stdin.isatty()


# -------------------------------------------------------------------------- check


@click.command()
@click.option("--repair", is_flag=True, help="Drop what is proven to be damaged.")
@options.as_json
@options.store
@click.pass_context
def check(ctx: click.Context, repair: bool, as_json: bool, root: Path) -> None:
    """Compare the index with the files, every byte of them.

    Without --repair nothing is changed. Files that are not the store's are reported
    but never removed. The exit code is 1 if anything of the store remains wrong.
    """
    store = options.open_existing(root, read_only=not repair)
    if store is None:
        click.echo("[]" if as_json else f"no store in {root}")
        return
    with store, Bar() as bar:
        bar.phase("checking")
        findings = store.check()
        if repair and findings:
            store.repair(findings)
        left = store.check() if repair and findings else findings
    if as_json:
        _print_json([asdict(finding) for finding in left])
    else:
        _print_findings(findings, left)
    ctx.exit(1 if any(finding.kind != "foreign" for finding in left) else 0)


def _print_findings(findings: Sequence[Finding], left: Sequence[Finding]) -> None:
    for finding in left:
        click.echo(f"{finding.kind} {finding.name}: {finding.message}")
    if len(left) < len(findings):
        click.echo(f"{_count(len(findings) - len(left), 'finding')} repaired")
    if not findings:
        click.echo("nothing is wrong")


COMMANDS: Sequence[click.Command] = (ls, stats, rm, check)
