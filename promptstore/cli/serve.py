"""The command that runs mlx_lm.server on a store."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from promptstore.cli import last, options
from promptstore.cli.errors import Failure, describe


class _Command(click.Command):
    """A command whose help is followed by that of the server."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--help" in args or "-h" in args:
            click.echo(ctx.get_help())
            click.echo("\nOptions of mlx_lm.server, which are taken as well:\n")
            from mlx_lm import server

            main: Any = server.main
            sys.argv[:] = ["promptstore serve", "--help"]
            main()
        return super().parse_args(ctx, args)


@click.command(
    cls=_Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
)
@options.store
@options.disk_bytes
@click.option(
    "--write",
    type=click.Choice(["through", "back", "off"]),
    default="through",
    show_default=True,
    help="Write at once, or when memory evicts and at the end, or never.",
)
@click.option(
    "--min-tokens",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Shorter prompts stay in memory only.",
)
@click.option(
    "--verify",
    type=click.Choice(["first-use", "always", "off"]),
    default="first-use",
    show_default=True,
    help="When the bytes of a snapshot are compared with their checksums.",
)
@click.option(
    "--durability",
    type=click.Choice(["normal", "full"]),
    default="normal",
    show_default=True,
    help="Survive the process's death, or a power cut as well.",
)
@click.option(
    "--admission",
    type=click.Choice(["always", "second-use"]),
    default="always",
    show_default=True,
    help="Write every prompt, or those of which half was seen before.",
)
@options.min_free_bytes
@options.daily_write_bytes
@click.option("--read-only", is_flag=True, help="Change nothing on disk.")
@click.option(
    "--store-optional",
    is_flag=True,
    help="Serve from memory if the store cannot be opened.",
)
@click.option(
    "--shutdown-s",
    type=click.FloatRange(min=0),
    default=15.0,
    show_default=True,
    help="Seconds that a signal leaves for writing; a second one ends at once.",
)
@click.option(
    "--explain-last",
    is_flag=True,
    help="Tell you of the last request, by `promptstore why --last`.",
)
@click.option(
    "--check-rate",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Compare this share of the hits with a cold run, which takes its time.",
)
@click.argument("server_options", nargs=-1, type=click.UNPROCESSED)
def serve(
    root: Path,
    store_optional: bool,
    shutdown_s: float,
    explain_last: bool,
    check_rate: float,
    server_options: tuple[str, ...],
    **store: Any,
) -> None:
    """Run mlx_lm.server with its prompt caches on a store.

    All options of mlx_lm.server are taken as well. --prompt-cache-size and
    --prompt-cache-bytes bound what is kept in memory, --disk-bytes what is on disk.
    GET /metrics is for Prometheus; GET /health is 503 when no answer can be expected.
    """
    # The server configures logging itself; warnings would come twice.
    logging.getLogger("promptstore").handlers.clear()
    from promptstore.serve import Settings
    from promptstore.serve import serve as run

    key = last.make_key() if explain_last else ""
    settings = Settings(root, store_optional, shutdown_s, key, check_rate, store)
    try:
        code = run(server_options, settings)
    except Exception as error:
        if click.get_current_context().find_root().params["debug"]:
            raise
        Failure(describe(error)).show()
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and mlx's own end may abort (see `run`)


COMMANDS = (serve,)
