"""What several commands print alike."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 160
_AGES = ((86_400, "d"), (3600, "h"), (60, "min"))


def print_table(table: Table) -> None:
    """Print a table, as wide as it needs where the terminal sets no width."""
    # A pipe has no width; rich would cut at 80.
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    Console(markup=False, highlight=False, width=width).print(table)


def print_json(value: object) -> None:
    """Print JSON for programs that people can read as well."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def age(seconds: float) -> str:
    """Return how long ago something was."""
    for unit_s, unit in _AGES:
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} ago"
    return "just now"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
