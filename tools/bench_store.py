#!/usr/bin/env python3
"""Show that the store is as good as it is meant to be, as ratios of one run.

Each measure runs in a process of its own; what it compares runs there in turn, and
the figure is a median. Read ratios: times depend on the machine and on what else
runs on it. Exits with 1 if a bar is missed or a measure fails.

    python tools/bench_store.py                          # everything
    python tools/bench_store.py --only match_131072 restore_512MiB
    python tools/bench_store.py --quick                  # does it run? no bars
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common import Options, Row, in_new_process, text_of
from rich.console import Console
from rich.markup import escape
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
MEASURES = {
    "restart_first_token": "conversation.restart_first_token",
    "disk_bytes_conversation": "conversation.disk_bytes_conversation",
    "memory_index_bytes_per_token": "lookup.memory_index_bytes_per_token",
    "match_131072": "lookup.match_131072",
    "match_reason": "reasons.match_reason",
    "insert_one_token": "inserting.insert_one_token",
    "durability": "inserting.durability",
    "restore_512MiB": "restoring.restore_512mib",
    "restore_and_suffix": "restoring.restore_and_suffix",
    "identity_5GB": "identity.identity_5gb",
    "serving_restart": "serving.serving_restart",
    "serving_steady": "serving.serving_steady",
    "serving_shutdown": "serving.serving_shutdown",
}
"""By name: the function in the package ``bench``, imported only where it runs."""


def run(name: str, options: Options) -> list[Row]:
    """Return the rows of a measure. In a process of its own."""
    module, _, function = MEASURES[name].partition(".")
    measure: Callable[[Options], list[Row]]
    measure = getattr(importlib.import_module(f"bench.{module}"), function)
    return measure(options)


def rows_of(name: str, options: Options) -> list[Row]:
    """Return the rows of a measure, or one that says why there are none."""
    try:
        rows = in_new_process(run, name, options)
    except Exception as error:
        error.add_note(f"in the measure {name}")
        sys.excepthook(type(error), error, error.__traceback__)
        return [Row(name, None, "", False, note=f"failed: {error!r}")]
    if options.quick:  # figures of small sizes say nothing
        rows = [dataclasses.replace(row, bar="", ok=None) for row in rows]
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for a terminal."""
    table = Table(box=None, pad_edge=False)
    table.add_column("measure", no_wrap=True)
    table.add_column("figure", justify="right", no_wrap=True)
    table.add_column("bar", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was compared")
    verdicts = {True: "ok", False: "[bold]MISSED[/bold]", None: ""}
    for row in rows:
        table.add_row(
            row.name, figure_of(row), row.bar, verdicts[row.ok], escape(row.note)
        )
    return table


def figure_of(row: Row) -> str:
    """Return the figure of a row with its unit."""
    return "" if row.figure is None else f"{text_of(row.figure)} {row.unit}"


def default_dir() -> Path:
    """Return a directory on the disk that the repository is on."""
    temp = Path(tempfile.gettempdir())
    if os.stat(temp).st_dev == os.stat(REPOSITORY).st_dev:
        return temp
    build = REPOSITORY / "build"
    build.mkdir(exist_ok=True)
    return build


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-fp32"))
    parser.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME")
    parser.add_argument("--dir", type=Path, help="for stores; default: same disk")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes, no bars")
    parser.add_argument("--no-gate", action="store_true", help="exit 0 all the same")
    return parser.parse_args()


def main() -> int:
    """Run the measures that were asked for, print them, and judge them."""
    args = arguments()
    names = args.only or list(MEASURES)
    options = Options(args.model.absolute(), args.dir or default_dir(), args.quick)
    if (
        any(MEASURES[name].startswith("conversation.") for name in names)
        and not (options.model / "config.json").is_file()
    ):
        print(
            f"bench: {args.model} is no model directory; `make model` makes one",
            file=sys.stderr,
        )
        return 2
    notes = Console(stderr=True, highlight=False)
    rows: list[Row] = []
    for name in names:
        notes.print(f"{name} …", style="dim")
        rows += rows_of(name, options)
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 160
        console.print(table_of(rows))
    return int(not args.no_gate and any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
