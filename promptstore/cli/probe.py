"""``promptstore probe``: is what is stored worth it, and right?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from promptstore.cli import models, options, request
from promptstore.cli.bar import Bar
from promptstore.cli.errors import Failure
from promptstore.cli.output import count, print_json

if TYPE_CHECKING:
    from promptstore import Namespace, PromptStore
    from promptstore.doctor import Comparison


@click.command()
@options.model
@click.option(
    "--messages",
    metavar="FILE",
    type=click.Path(path_type=Path, allow_dash=True),
    help="A request as JSON.  [default: the prompt that was used last]",
)
@options.adapter_path
@options.tenant
@options.as_json
@options.store
def probe(
    model: str,
    messages: Path | None,
    adapter_path: Path | None,
    tenant: str,
    as_json: bool,
    root: Path,
) -> None:
    """Serve one request from what is stored, compute it cold, and compare.

    Tells by how much the next token's logits differ, and the seconds that the store
    saved or cost. Exits 1 if they differ by more than the model's own prefills do.
    Nothing is changed.
    """
    from promptstore import Namespace

    asked = request.read_messages(messages) if messages is not None else None
    with Bar() as bar:
        path = models.resolve(model)
        bar.phase("identifying the model")
        namespace = Namespace.from_model(path, adapter_path, tenant=tenant)
        store = options.open_existing(root)
        if store is None:
            raise Failure(f"no store in {root}")
        with store:
            tokens = None if asked is not None else _latest(store, namespace)
            bar.phase("loading the model")
            llm, tokenizer = models.load(path, adapter_path)
            if asked is not None:
                tokens = asked.tokens(tokenizer)
            from promptstore.doctor import compare

            found = compare(llm, store, namespace, tokens or [], bar.phase)
    _tell(found, as_json=as_json)
    if not found.is_right:
        raise Failure(
            "what is stored gives other logits; `promptstore check` the files"
        )


def _latest(store: PromptStore, namespace: Namespace) -> list[int]:
    """Return a request that goes on from the prompt that was used last.

    Raises:
        Failure: Nothing of that model is stored.
    """
    info = next(store.snapshots(namespace), None)
    if info is None:
        raise Failure("nothing of this model is stored")
    tokens = store.tokens(info.id)
    return [*tokens, tokens[0]]


def _tell(found: Comparison, *, as_json: bool) -> None:
    match, reason = found.match, found.match.reason
    if as_json:
        facts: dict[str, Any] = asdict(found)
        del facts["match"]
        more = {
            "n_reused": match.n_tokens,
            "source": match.source,
            "reason": None if reason is None else str(reason),
            "saved_s": found.saved_s,
            "is_right": found.is_right,
        }
        print_json(facts | more)
        return
    why = f" ({reason})" if reason is not None else ""
    click.echo(f"{count(found.n_tokens, 'token')}: {match.n_tokens:,} reused{why}")
    if match.n_tokens:
        word = "right" if found.is_right else "WRONG"
        click.echo(
            f"largest difference of the logits: {found.max_diff:.2g}, "
            f"tolerance {found.tolerance:.2g}: {word}"
        )
    verb = "saved" if found.saved_s >= 0 else "lost"
    click.echo(
        f"first token after {found.restored_s:.2f} s, cold {found.cold_s:.2f} s: "
        f"{abs(found.saved_s):.2f} s {verb}"
    )


COMMANDS: Sequence[click.Command] = (probe,)
