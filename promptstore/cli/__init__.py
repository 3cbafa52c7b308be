"""The command ``promptstore``: one file a group of commands.

Knows only the public API. What is slow to import (mlx-lm, transformers) is imported
by the commands that run a model, when they run it.
"""

from __future__ import annotations

import logging
from typing import Any

import click

from promptstore import __version__
from promptstore.cli import doctor, health, probe, prompts, serve, snapshots, why
from promptstore.cli.errors import one_line

__all__ = ["main"]


class _Group(click.Group):
    """A group whose errors, also those of its commands, are one line each."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with one_line(debug=bool(ctx.params["debug"])):
            return super().invoke(ctx)


class _Warnings(logging.Handler):
    """Prints the store's warnings like the command's errors."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        click.echo(f"promptstore: {level}: {self.format(record)}", err=True)


@click.group(
    cls=_Group,
    name="promptstore",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="promptstore")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """A persistent store for the prompt caches of MLX language models.

    Exit codes: 0 for success, 1 for a failure, 2 for wrong use.
    """
    logger = logging.getLogger("promptstore")
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings())
    if debug:
        logger.setLevel(logging.DEBUG)


_GROUPS = (prompts, snapshots, why, serve, health, doctor, probe)
for _command in (command for group in _GROUPS for command in group.COMMANDS):
    main.add_command(_command)
