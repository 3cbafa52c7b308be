"""``promptstore check`` and ``verify``: is what is stored still what was written?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from promptstore.cli import options
from promptstore.cli.bar import Bar
from promptstore.cli.errors import INTERRUPTED
from promptstore.cli.output import count, print_json

if TYPE_CHECKING:
    from promptstore import Finding

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
        print_json([asdict(finding) for finding in left])
    else:
        _print_findings(findings, left)
    ctx.exit(1 if any(finding.kind != "foreign" for finding in left) else 0)


def _print_findings(findings: Sequence[Finding], left: Sequence[Finding]) -> None:
    for finding in left:
        click.echo(f"{finding.kind} {finding.name}: {finding.message}")
    if len(left) < len(findings):
        click.echo(f"{count(len(findings) - len(left), 'finding')} repaired")
    if not findings:
        click.echo("nothing is wrong")


# ------------------------------------------------------------------------- verify


@click.command()
@options.rate
@options.max_age
@click.option("--dry-run", is_flag=True, help="Change nothing: only report damage.")
@options.as_json
@options.store
@click.pass_context
def verify(
    ctx: click.Context,
    rate: int,
    max_age: float,
    dry_run: bool,
    as_json: bool,
    root: Path,
) -> None:
    """Read every snapshot slowly, and drop those that are proven to be damaged.

    Those not verified for longest come first. What was verified is recorded: stop it
    at any time, and run it again to go on. A server may use the store meanwhile. The
    exit code is 1 if anything is damaged, or cannot be read.
    """
    store = options.open_existing(root, read_only=dry_run)
    if store is None:
        click.echo("{}" if as_json else f"no store in {root}")
        return
    run = _Run()
    with store, Bar() as bar:
        bar.phase("verifying")
        try:
            for finding in store.verify(
                max_bytes_per_s=rate,
                max_age_s=max_age,
                dry_run=dry_run,
                progress=lambda done, total: run.note(bar, done, total),
            ):
                run.findings.append(finding)
        except KeyboardInterrupt:
            run.interrupted = True
    if as_json:
        print_json(asdict(run))
    else:
        _print_run(run)
    ctx.exit(INTERRUPTED if run.interrupted else bool(run.findings))


@dataclass
class _Run:
    """What a run of ``verify`` did."""

    n_done: int = 0
    n_total: int = 0
    interrupted: bool = False
    findings: list[Finding] = field(default_factory=list)

    def note(self, bar: Bar, n_done: int, n_total: int) -> None:
        """Note how far it is, and show it."""
        self.n_done, self.n_total = n_done, n_total
        bar.update(n_done, n_total)


def _print_run(run: _Run) -> None:
    for finding in run.findings:
        click.echo(f"{finding.kind} {finding.name}: {finding.message}")
    done, total = f"{run.n_done:,}", count(run.n_total, "snapshot")
    if run.interrupted:
        click.echo(f"verified {done} of {total}; run it again to go on")
    elif not run.findings:
        click.echo(f"verified {total}; nothing is wrong")
    else:
        click.echo(f"looked at {total}; {len(run.findings):,} not as written")


COMMANDS: Sequence[click.Command] = (check, verify)
