"""``promptstore why``: why no more of a request is reused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from promptstore import volatile
from promptstore.cli import last, models, options, request
from promptstore.cli.bar import Bar
from promptstore.cli.errors import Failure
from promptstore.cli.output import age, count, print_json, print_table

_ID_CHARS = 8
_VALUE_CHARS = 16
_MAX_LISTED = 5
_CONTEXT = 48
"""Tokens on both sides of the place where two prompts part."""
_SHARED_CHARS = 60
_CHARS = 66
_IMAGE = "<image>"
_MAX_ID = 1 << 31

_file = click.Path(path_type=Path, allow_dash=True)


@click.command()
@options.model
@click.option(
    "--messages",
    metavar="FILE",
    type=_file,
    help="The messages as JSON, or the whole body of a request; - for stdin.",
)
@click.option(
    "--prompt",
    metavar="FILE",
    type=_file,
    help="The prompt as text, without the chat template; - for stdin.",
)
@click.option(
    "--last",
    "is_last",
    is_flag=True,
    help="The last request of a server, run with --explain-last.",
)
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Where that server listens.",
)
@options.adapter_path
@click.option("--draft-model", help="The draft model that it is used with.")
@options.tenant
@options.as_json
@options.store
def why(
    model: str,
    messages: Path | None,
    prompt: Path | None,
    is_last: bool,
    port: int,
    adapter_path: Path | None,
    draft_model: str | None,
    tenant: str,
    as_json: bool,
    root: Path,
) -> None:
    """Say why no more of a request is reused: what is stored, and where it parts.

    The request is one of --messages, --prompt and --last, or comes from stdin. The
    weights of the model are not loaded, and nothing is changed.
    """
    if sum((messages is not None, prompt is not None, is_last)) > 1:
        raise click.UsageError("Give one of --messages, --prompt and --last.")
    with Bar() as bar:
        path = models.resolve(model)
        if is_last:
            facts = last.fetch(port)
            tokenizer = models.load_tokenizer(path)
        else:
            asked = _request(messages, prompt)
            bar.phase("identifying the model")
            draft = models.resolve(draft_model) if draft_model else None
            namespace = _identify(path, adapter_path, draft, tenant)
            tokenizer = models.load_tokenizer(path)
            facts = _explain(root, namespace, asked.tokens(tokenizer))
    for each in facts["closest"]:
        each["parting"] = _parting(tokenizer, facts["tokens"], each)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _request(messages: Path | None, prompt: Path | None) -> request.Request:
    if messages is not None:
        return request.read_messages(messages)
    if prompt is not None:
        return request.read_prompt(prompt)
    return request.read_stdin()


def _identify(path: Path, adapter: Path | None, draft: Path | None, tenant: str) -> Any:
    from promptstore import Namespace

    return Namespace.from_model(path, adapter, draft, tenant=tenant)


def _explain(root: Path, namespace: Any, tokens: list[int]) -> dict[str, Any]:
    from promptstore.facts import facts_of

    store = options.open_existing(root)
    if store is None:
        raise Failure(f"no store in {root}")
    with store:
        found = store.explain(namespace, tokens, n_closest=_MAX_LISTED)
    return facts_of(found, len(tokens)) | {"tokens": tokens}


# ------------------------------------------------------------------- where it parts


def _parting(tokenizer: Any, tokens: list[int], each: dict[str, Any]) -> dict[str, Any]:
    """Return the texts on both sides of where a stored prompt and the request part."""
    at = each["n_shared"]
    before = tokens[max(0, at - _CONTEXT) : at]
    asked = _decode(tokenizer, [*before, *tokens[at : at + _CONTEXT]])
    stored = _decode(tokenizer, [*before, *each["follows"][:_CONTEXT]])
    # Tokens part before or within a character, or a word; people read characters.
    n = volatile.n_alike(asked, stored)
    found = volatile.volatile(asked, stored)
    return {
        "position": at,
        "shared": asked[:n],
        "asked": asked[n:],
        "stored": stored[n:],
        "volatile": None if found is None else asdict(found),
    }


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of ids; images, which are negative ids, are only named."""
    runs = itertools.groupby(ids, lambda id_: 0 <= id_ < _MAX_ID)
    return "".join(
        str(tokenizer.decode(list(run))) if is_text else _IMAGE for is_text, run in runs
    )


# ------------------------------------------------------------------------- printing


def _print(facts: dict[str, Any]) -> None:
    n_asked, n_reused = facts["n_asked"], facts["n_reused"]
    click.echo(f"{count(n_asked, 'token')}: {n_reused:,} reused. {_sentence(facts)}")
    if facts["closest"]:
        click.echo("\nThe closest stored prompts:")
        print_table(_table(facts["closest"]))
        _print_parting(facts["closest"][0], n_asked)
    for each in facts["elsewhere"][:_MAX_LISTED]:
        name = each["snapshot"]["label"] or each["snapshot"]["id"][:_ID_CHARS]
        shared = count(each["n_shared"], "token")
        click.echo(f"\nStored as {name}, sharing {shared}, but with another")
        for one in each["differs"]:
            click.echo(
                f"  {one['field']}: {_cut(one['theirs'])}, not {_cut(one['ours'])}"
            )


def _sentence(facts: dict[str, Any]) -> str:
    """Return the reason in words."""
    reason = facts["reason"]
    if reason is None:
        return "No more can be: one token must be left to compute."
    at, detail, n_shared = reason["position"], reason["detail"], reason["n_shared"]
    sentences = {
        "no-entry": "Nothing stored goes on there.",
        "diverged-at": f"What is stored goes on differently after {at:,}.",
        "identity-differs": f"What is stored has another {detail}.",
        "not-resumable": f"{n_shared:,} are the same, but there a cache of kind "
        f"{detail!r} cannot be resumed, only at {at:,}.",
        "too-short": "It is too short: one token must be left to compute.",
        "expired": f"What went on after {at:,} has expired.",
        "damaged": f"Snapshot {detail[:_ID_CHARS]} is damaged.",
        "unreadable": f"The store cannot be read: {detail}.",
        "unknown-cache-class": f"Caches of class {detail} are not stored on disk.",
        "disabled": "There is no store on disk.",
    }
    return sentences.get(reason["kind"], str(reason["text"]))


def _table(closest: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("label", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for name in ("tokens", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("parts at", "used"):
        table.add_column(name, no_wrap=True)
    now_s = time.time()
    for each in closest:
        info, found = each["snapshot"], each["parting"]["volatile"]
        is_over = info["expires_s"] is not None and info["expires_s"] <= now_s
        table.add_row(
            info["id"][:_ID_CHARS],
            info["label"] or "",
            info["kind"],
            f"{info['end']:,}",
            f"{each['n_shared']:,}",
            found["kind"] if found else "",
            age(now_s - info["used_s"]) + (", expired" if is_over else ""),
        )
    return table


def _print_parting(each: dict[str, Any], n_asked: int) -> None:
    """Print where the closest stored prompt and the request part, and what stands
    there on both sides."""
    at, parting = each["n_shared"], each["parting"]
    name = each["snapshot"]["label"] or each["snapshot"]["id"][:_ID_CHARS]
    if at == n_asked:
        click.echo(f"{name} holds all of the request.")
        return
    if not each["follows"]:
        click.echo(
            f"{name} ends after {count(at, 'token')}, where the request goes on:"
        )
    else:
        click.echo(f"{name} and the request part after {count(at, 'token')}:")
    click.echo(f"  both     {_quote(parting['shared'][-_SHARED_CHARS:])}")
    click.echo(f"  request  {_quote(parting['asked'][:_CHARS])}")
    if each["follows"]:
        click.echo(f"  stored   {_quote(parting['stored'][:_CHARS])}")
    if parting["volatile"] is not None:
        kind = parting["volatile"]["kind"]
        click.echo(
            f"It looks like a {kind}: what changes with every request belongs behind "
            "what does not."
        )


def _quote(text: str) -> str:
    """Return a text on one line, with what a terminal could act on escaped."""
    shown = (c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f"|{''.join(shown)}|"


def _cut(value: str) -> str:
    short = value[:_VALUE_CHARS] + ("…" if len(value) > _VALUE_CHARS else "")
    return _quote(short)[1:-1] or "none"


COMMANDS: Sequence[click.Command] = (why,)
