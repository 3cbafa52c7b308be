"""``promptstore precompute`` and ``promptstore ask``: the commands that run a model."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from promptstore.cli import models, options, request
from promptstore.cli.bar import Bar
from promptstore.cli.errors import Failure

if TYPE_CHECKING:
    from promptstore import Match, Namespace, PromptStore, SnapshotInfo

_ID_CHARS = 8


def _not_blank(
    _: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty", param=parameter)
    return value


# --------------------------------------------------------------------- precompute


@dataclass(frozen=True)
class _Marks:
    """What a stored prompt bears; ``pin`` is None to leave that as it is."""

    label: str | None
    pin: bool | None
    ttl_s: float | None


@click.command()
@options.model
@click.option(
    "--system-file",
    required=True,
    type=click.Path(path_type=Path),
    help="The system prompt, in UTF-8.",
)
@click.option("--label", callback=_not_blank, help="A name for the prompt.")
@click.option("--pin/--no-pin", default=None, help="Protect it from eviction.")
@click.option(
    "--ttl",
    "ttl_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Forget it after so long.",
)
@options.adapter_path
@options.tenant
@options.disk_bytes
@options.store
def precompute(
    model: str,
    system_file: Path,
    label: str | None,
    pin: bool | None,
    ttl_s: float | None,
    adapter_path: Path | None,
    tenant: str,
    disk_bytes: int,
    root: Path,
) -> None:
    """Compute the KV of a system prompt and store it.

    The chat template is applied. What is stored ends at the last token that every
    question about the prompt shares. What the store has already is not computed
    again, so a run that was interrupted goes on where it ended.
    """
    from promptstore import PromptStore, chat

    system = chat.system(_read(system_file))
    marks = _Marks(label, pin, ttl_s)
    with Bar() as bar:
        path, namespace = _identify(model, adapter_path, tenant, bar)
        # Who precomputes a short prompt means it: no least length.
        with PromptStore.open(
            root, memory_bytes=0, disk_bytes=disk_bytes, min_tokens=1
        ) as store:
            bar.phase("loading the model")
            llm, tokenizer = models.load(path, adapter_path, lazy=True)
            tokens = chat.shared_tokens(tokenizer, [system])
            prompt = _Prompt(store, namespace, llm, tokens)
            n_reused = prompt.store_with(marks, bar)
            name = prompt.name(marks)
    n_new = len(tokens) - n_reused
    line = f"stored {len(tokens)} tokens as {name}: "
    line += f"{n_reused} reused, {n_new} prefilled" if n_new else "all were there"
    click.echo(line)


@dataclass(frozen=True)
class _Prompt:
    """The tokens to precompute, the model, and the place for its KV."""

    store: PromptStore
    namespace: Namespace
    llm: Any
    tokens: list[int]

    def store_with(self, marks: _Marks, bar: Bar) -> int:
        """Make the KV durable; return how many tokens of it were stored already.

        If the prefill is interrupted, what it has done is stored, without marks.
        """
        from promptstore.mlx_lm import precompute

        bar.phase("restoring")
        match = precompute(
            self.llm,
            self.tokens,
            store=self.store,
            namespace=self.namespace,
            label=marks.label,
            pin=bool(marks.pin),
            ttl_s=marks.ttl_s,
            on_match=lambda match: bar.phase("prefill"),
            progress=bar.update,
        )
        bar.phase("writing")
        self.store.flush()
        return match.n_tokens

    def name(self, marks: _Marks) -> str:
        """Return what the stored prompt is called, once it is known to be there.

        Raises:
            Failure: It is not.
        """
        found = self.store.explain(
            self.namespace, self._request, like=self._fresh_cache()
        )
        if found.n_disk < len(self.tokens) or found.nearest is None:
            causes = ", ".join(self.store.stats().errors) or "evicted at once"
            raise Failure(f"the prompt was not stored: {causes}")
        own = self._own_snapshot(found.nearest)
        if own is not None and own.pinned and marks.pin is False:
            self.store.unpin(own.id)
        return marks.label or (own or found.nearest).id[:_ID_CHARS]

    @property
    def _request(self) -> list[int]:
        # A match leaves one token to prefill: here none of the prompt's own.
        return [*self.tokens, 0]

    def _fresh_cache(self) -> list[Any]:
        from mlx_lm.models.cache import make_prompt_cache

        cache: list[Any] = make_prompt_cache(self.llm)
        return cache

    def _own_snapshot(self, nearest: SnapshotInfo) -> SnapshotInfo | None:
        """Return the snapshot that ends with the prompt, if there is one.

        A prompt that ends inside *nearest* has one, of no rows, if it bears marks.
        """
        n_tokens = len(self.tokens)
        if nearest.end == n_tokens:
            return nearest
        for info in self.store.snapshots(self.namespace):
            if info.parent == nearest.id and info.start == info.end == n_tokens:
                return info
        return None


# ---------------------------------------------------------------------------- ask


@dataclass(frozen=True)
class _Answer:
    """What ``ask --json`` prints. *first_token_s* counts with the model loaded."""

    answer: str
    n_prompt: int
    n_reused: int
    n_prefilled: int
    source: str
    reason: str | None
    first_token_s: float

    def __str__(self) -> str:
        source = "" if self.source == "miss" else f" ({self.source})"
        line = (
            f"{self.n_prompt} tokens: {self.n_reused} reused{source}, "
            f"{self.n_prefilled} prefilled, first token {self.first_token_s:.2f} s"
        )
        return f"{line}, {self.reason}" if self.reason else line


@click.command()
@options.model
@click.option(
    "--system-file",
    type=click.Path(path_type=Path),
    help="The system prompt, in UTF-8.",
)
@options.adapter_path
@options.tenant
@click.option(
    "--max-tokens",
    default=256,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens of the answer, at most.",
)
@click.option(
    "--temp",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Temperature of the sampling.",
)
@click.option("--no-store", is_flag=True, help="Compute everything; store nothing.")
@options.as_json
@options.disk_bytes
@options.store
@click.argument("question")
def ask(
    model: str,
    system_file: Path | None,
    adapter_path: Path | None,
    tenant: str,
    max_tokens: int,
    temp: float,
    no_store: bool,
    as_json: bool,
    disk_bytes: int,
    root: Path,
    question: str,
) -> None:
    """Answer QUESTION, restoring what the store has of the prompt.

    The answer goes to stdout as it comes. One line on stderr says how much of the
    prompt was reused, and why no more. QUESTION - reads it from stdin.
    """
    from promptstore import PromptStore, chat

    messages = [] if system_file is None else [chat.system(_read(system_file))]
    messages.append(chat.user(_question(question)))
    with Bar() as bar, contextlib.ExitStack() as stack:
        home = None
        if no_store:
            path = models.resolve(model)
        else:
            path, namespace = _identify(model, adapter_path, tenant, bar)
            store = PromptStore.open(root, memory_bytes=0, disk_bytes=disk_bytes)
            stack.callback(_close, store)
            home = store, namespace
        bar.phase("loading the model")
        llm, tokenizer = models.load(path, adapter_path)
        tokens = chat.prompt_tokens(tokenizer, messages)
        run = _Run(llm, tokenizer, tokens, home, max_tokens, temp)
        answer = _answer(run, bar, quiet=as_json)
        if as_json:
            click.echo(json.dumps(asdict(answer), ensure_ascii=False))
        click.echo(str(answer), err=True)


def _answer(run: _Run, bar: Bar, *, quiet: bool) -> _Answer:
    """Generate, and print the text as it comes unless *quiet*."""
    matches: list[Match] = []
    texts: list[str] = []
    first_token_s = 0.0

    def on_match(match: Match) -> None:
        matches.append(match)
        bar.phase("prefill")

    bar.phase("restoring")
    start_s = time.perf_counter()
    # Closed at once when stdout breaks: what was computed is stored all the same.
    with contextlib.closing(run.stream(on_match, bar.update)) as responses:
        for response in responses:
            if not texts:
                first_token_s = time.perf_counter() - start_s
                bar.close()
            texts.append(response.text)
            if not quiet:
                click.echo(response.text, nl=False)
    if not quiet:
        click.echo()
    n_prompt, match = len(run.tokens), matches[0]
    return _Answer(
        answer="".join(texts),
        n_prompt=n_prompt,
        n_reused=match.n_tokens,
        n_prefilled=n_prompt - match.n_tokens,
        source=match.source,
        reason=str(match.reason) if match.reason else None,
        first_token_s=first_token_s,
    )


@dataclass(frozen=True)
class _Run:
    """One generation; without a *home* it uses no store."""

    llm: Any
    tokenizer: Any
    tokens: list[int]
    home: tuple[PromptStore, Namespace] | None
    max_tokens: int
    temp: float

    def stream(
        self, on_match: Callable[[Match], None], progress: Callable[[int, int], None]
    ) -> Generator[Any, None, None]:
        """Yield mlx-lm's responses; *on_match* is called before the prefill."""
        import mlx_lm
        from mlx_lm.sample_utils import make_sampler

        from promptstore import Match, Reason, ReasonKind
        from promptstore.mlx_lm import stream_generate

        settings: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "sampler": make_sampler(self.temp),
            "prompt_progress_callback": progress,
        }
        if self.home is not None:
            store, namespace = self.home
            yield from stream_generate(
                self.llm, self.tokenizer, self.tokens, store=store,
                namespace=namespace, on_match=on_match, **settings,
            )  # fmt: skip
            return
        on_match(Match(None, 0, "miss", Reason(ReasonKind.DISABLED)))
        yield from mlx_lm.stream_generate(
            self.llm, self.tokenizer, self.tokens, **settings
        )


def _close(store: PromptStore) -> None:
    """Close the store of an answer that was given, written or not."""
    from promptstore import WriteFailed

    with contextlib.suppress(WriteFailed):  # it has warned of the cause
        store.close()


# ---------------------------------------------------------------------- arguments


def _identify(
    model: str, adapter_path: Path | None, tenant: str, bar: Bar
) -> tuple[Path, Namespace]:
    """Return the directory of a model and the namespace of its prompts."""
    path = models.resolve(model)
    return path, models.identify(path, adapter_path, bar, tenant)


def _read(path: Path) -> str:
    """Return the text of a prompt file.

    Raises:
        Failure: It is empty or not UTF-8.
        OSError: As the system says.
    """
    return request.decode(path.read_bytes(), str(path))


def _question(argument: str) -> str:
    if argument == "-":
        return request.decode(sys.stdin.buffer.read(), "the question on stdin")
    if not argument.strip():
        raise click.BadParameter("it is empty", param_hint="QUESTION")
    return argument


COMMANDS: Sequence[click.Command] = (precompute, ask)
