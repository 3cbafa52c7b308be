"""Errors of the command: one line on stderr and an exit code.

0 for success, 1 for a failure, 2 for wrong use, 130 for an interrupt.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import textwrap
from collections.abc import Iterator
from typing import IO, Any

import click

from promptstore.errors import PromptStoreError

_MAX_CHARS = 500
INTERRUPTED = 130
_EXPECTED = (PromptStoreError, OSError, ValueError, sqlite3.Error)


class Failure(click.ClickException):
    """What went wrong, in one line."""

    def __init__(self, message: str) -> None:
        # What mlx-lm lacks in a damaged model may fill pages.
        super().__init__(textwrap.shorten(message, _MAX_CHARS, placeholder=" …"))

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        text = f"promptstore: error: {self.format_message()}"
        click.echo(text, file=file, err=file is None)


class WrongUse(Failure):
    """What is wrong with the command line, in one line."""

    exit_code = 2


@contextlib.contextmanager
def one_line(*, debug: bool = False) -> Iterator[None]:
    """Raise whatever is raised inside as a `Failure`, and an interrupt as an exit.

    Args:
        debug: Let errors travel, so that Python shows their traceback.
    """
    try:
        yield
    except (KeyboardInterrupt, click.Abort):
        raise click.exceptions.Exit(INTERRUPTED) from None
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise WrongUse(_usage(error)) from error
    except click.exceptions.Exit:
        raise
    except click.ClickException as error:
        if debug and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
    except Exception as error:
        if debug or getattr(error, "errno", None) == errno.EPIPE:
            raise  # a reader that has gone is click's to handle
        raise Failure(describe(error)) from error


def describe(error: Exception) -> str:
    """Return what a user needs to know of an error."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, _EXPECTED) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}; --debug shows where"


def _usage(error: click.UsageError) -> str:
    message = error.format_message()
    if error.ctx is None:
        return message
    return f"{message.rstrip('.')}. Try '{error.ctx.command_path} --help'."
