"""From the start of a server on a store to its bounded end."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import server

from promptstore.errors import StoreUnavailable, WriteFailed
from promptstore.metrics import Metrics
from promptstore.mlx_lm.lru import NO_LIMIT
from promptstore.serve import upstream
from promptstore.serve.cache import ServedCache
from promptstore.serve.generator import Generator
from promptstore.serve.handler import Handler
from promptstore.serve.last import LastRequest
from promptstore.serve.provider import Provider
from promptstore.serve.shutdown import Shutdown
from promptstore.store import PromptStore

_log = logging.getLogger("promptstore")


@dataclass(frozen=True)
class Settings:
    """How the server uses its store.

    Args:
        root: The store's directory; ``None`` for the default one.
        optional: Whether to serve without a disk if the store cannot be opened.
        shutdown_s: How long ending may take.
        last_key: The key to the last request, explained; without one none is kept.
        check_rate: Which share of the hits to compare with a cold run.
        store: Further arguments of `PromptStore.open`.
    """

    root: Path | None = None
    optional: bool = False
    shutdown_s: float = 15.0
    last_key: str = ""
    check_rate: float = 0.0
    store: dict[str, Any] = field(default_factory=dict)


def serve(argv: Sequence[str], settings: Settings) -> int:
    """Run mlx_lm.server on a store until a signal ends it.

    Args:
        argv: The options of mlx_lm.server.
        settings: How it uses its store.

    Returns:
        The exit code: 0, or 1 if something was not written. End the process with
        `os._exit`: the generation thread may still run, and mlx's own end aborts some
        processes of which a thread has used mlx.

    Raises:
        ServerMoved: mlx-lm's server is not the one that this version knows.
        StoreUnavailable: The store cannot be opened, and is not optional.
        OSError: The address cannot be had.
    """
    upstream.require()
    shutdown = Shutdown(settings.shutdown_s)
    shutdown.install()
    codes: list[int] = []

    def run(host: str, port: int, model_provider: Provider) -> None:
        codes.append(_run(host, port, model_provider, settings, shutdown))

    main: Any = server.main
    sys.argv[:] = ["promptstore serve", *argv]
    with (
        upstream.replaced(run=run, ModelProvider=Provider),
        contextlib.suppress(KeyboardInterrupt),  # before there was anything to end
    ):
        main()
    return max(codes, default=0)


def _run(
    host: str, port: int, provider: Provider, settings: Settings, shutdown: Shutdown
) -> int:
    """Stand in for ``mlx_lm.server.run``; return the exit code."""
    args = provider.cli_args
    max_bytes = args.prompt_cache_bytes
    if max_bytes is None:
        max_bytes = NO_LIMIT
    store = _open(settings, max_bytes)
    metrics = Metrics(store)
    cache = ServedCache(
        provider,
        store,
        metrics,
        max_size=args.prompt_cache_size,
        max_bytes=max_bytes,
        last=LastRequest(settings.last_key) if settings.last_key else None,
        # Ranks that draw differently would wait for each other for ever.
        check_rate=settings.check_rate if mx.distributed.init().size() == 1 else 0.0,
    )
    shutdown.hold()  # until there is a block that ends the thread
    generator = Generator(provider, cache, metrics)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            shutdown.release()
            if mx.distributed.init().rank() == 0:
                server._run_http_server(host, port, generator, handler_class=Handler)
            else:  # rank 0 shares what it is asked
                generator.stand_by()
    finally:
        has_ended = generator.stop(shutdown.left_s() / 2)
        if not has_ended:
            _log.error("the generation thread did not end in time: what it has is lost")
        code = max(_close(store, shutdown), not has_ended)
    return code


def _open(settings: Settings, memory_bytes: int) -> PromptStore:
    options = settings.store
    if mx.distributed.init().size() > 1:
        # Ranks that find different prefixes on their disks would wait for ever.
        _log.warning("several ranks: prompts are kept in memory only")
        options = options | {"disk_bytes": 0}
    try:
        return PromptStore.open(settings.root, memory_bytes=memory_bytes, **options)
    except StoreUnavailable as error:
        if not settings.optional:
            raise
        _log.warning("serving without a store on disk: %s", error)
        return PromptStore.open(memory_bytes=memory_bytes, disk_bytes=0)


def _close(store: PromptStore, shutdown: Shutdown) -> int:
    """Write what is queued, as far as there is time, and account for the rest."""
    code = 0
    try:
        store.flush(shutdown.left_s())
    except TimeoutError:
        stats = store.stats()
        _log.error(
            "not written in time: %d prompts, %.0f MB",
            stats.n_pending,
            stats.pending_bytes / 1e6,
        )
        code = 1
    except WriteFailed as error:
        _log.error("not everything was written: %s", error)
        code = 1
    stats = store.stats()
    _log.info(
        "the store holds %d snapshots, %.0f MB; %.0f MB were written",
        stats.n_snapshots,
        stats.disk_bytes / 1e6,
        stats.bytes_written / 1e6,
    )
    with contextlib.suppress(TimeoutError, WriteFailed):  # told above
        store.close(shutdown.left_s())
    return code
