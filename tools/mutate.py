"""Damage a store at random, and see that no match raises or serves anything wrong.

    python tools/mutate.py --n 10000            # prints its seed
    python tools/mutate.py --n 1 --seed 1234    # one mutation again

Each round damages a copy of one small store of every kind of layer, asks it for every
prompt, and compares what is served bit for bit with what was stored. Round *i* of seed
*s* is round 0 of seed *s + i*.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import builders
import mlx.core as mx
import xxhash
from mlx_lm.models.cache import CacheList

from promptstore import Namespace, PromptStore

OPTIONS: Any = {"memory_bytes": 0, "min_tokens": 1}
ENDS = (70, 300, 420)
SPARE_BYTES = 16 << 20
"""What a round may take besides twice the bytes of the files."""
LIMIT_S = 60
STATUS = Path("/proc/self/status")
REPAIR_EVERY = 8


def _with_salt(make: Callable[..., Any], salt: int, **sizes: Any) -> Callable[..., Any]:
    def build(ids: list[int]) -> list[Any]:
        return list(make(len(ids), ids=[salt, *ids][: len(ids)], **sizes))

    return build


def _state(salt: int) -> Callable[[list[int]], list[Any]]:
    def build(ids: list[int]) -> list[Any]:
        layers = builders.arrays_cache(len(ids), n_layers=1)
        for layer in layers:
            layer.cache = [a + (salt + sum(ids)) % 1009 for a in layer.cache]
            mx.eval(layer.cache)
        return layers

    return build


def _hybrid(ids: list[int]) -> list[Any]:
    small: Any = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 4}
    return [CacheList(*builders.kv_of(ids, **small), *_state(6)(ids))]


SMALL: Any = {"n_kv_heads": 1, "head_dim": 4}
KINDS: dict[tuple[str, str], Callable[[list[int]], list[Any]]] = {
    ("full", "alice"): _with_salt(builders.kv, 1, **SMALL),
    ("full", "bob"): _with_salt(builders.kv, 2, **SMALL),
    ("quantized", ""): _with_salt(builders.quantized, 3, n_layers=1, n_kv_heads=1),
    ("window", ""): _with_salt(builders.rotating, 4, **SMALL),
    ("state", ""): _state(5),
    ("hybrid", ""): _hybrid,
}
"""By model and tenant, what makes the cache of a prompt. All store the same prompts, so
that whatever is mistaken for another is another in its values."""


def prompts() -> list[list[int]]:
    """Return what each namespace stores: three turns of a conversation, and a branch
    and a stranger to it. Who asks for the last three asks for all."""
    ids = builders.tokens(ENDS[-1])
    turns = [ids[:end] for end in ENDS]
    return [*turns, [*ids[:200], *builders.tokens(60, 1)], builders.tokens(90, 2)]


def make_store(root: Path) -> None:
    """Store every prompt of every kind in a new directory, under names that are the
    same each time, as rounds are."""
    rng = random.Random(0)
    names = mock.patch("secrets.token_hex", lambda n: rng.randbytes(n).hex())
    with names, PromptStore.open(root, **OPTIONS) as store:
        for (model, tenant), make in KINDS.items():
            for ids in prompts():
                store.insert(Namespace(model, tenant=tenant), ids, make(ids))
                store.flush()
        assert store.check() == []


@dataclass
class Truth:
    """What a match of so many tokens must hold, as the undamaged store serves it."""

    store: PromptStore
    known: dict[Any, list[str] | None] = field(default_factory=dict)

    def of(self, namespace: Namespace, ids: list[int]) -> list[str] | None:
        """Return the digests of all arrays, or ``None`` if no match ends there."""
        key = namespace, tuple(ids)
        if key not in self.known:
            match = self.store.match(namespace, [*ids, -1])
            whole = match.n_tokens == len(ids)
            self.known[key] = (
                builders.fingerprints(match.cache or [], len(ids)) if whole else None
            )
        return self.known[key]


# ------------------------------------------------------------------------ mutations


def _bytes_of(change: Callable[[random.Random, bytearray], None]) -> Any:
    def mutate(rng: random.Random, root: Path) -> None:
        path = rng.choice(_files(root))
        data = bytearray(path.read_bytes())
        if data:
            change(rng, data)
        path.write_bytes(data)

    return mutate


def _flip(rng: random.Random, data: bytearray) -> None:
    end = rng.choice([8, 300, 2000, len(data), len(data)])
    for _ in range(rng.choice([1, 1, 1, 8])):
        data[rng.randrange(min(end, len(data)))] ^= 1 << rng.randrange(8)


def _zero(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data)) // 4096 * 4096
    n = min(len(data) - at, 4096 * rng.choice([1, 1, 4]))
    data[at : at + n] = bytes(n)


def _cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.choice([0, 7, 8, 4095, 4096, len(data) - 1, len(data) // 2]) :]


def _cut_anywhere(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def _grow(rng: random.Random, data: bytearray) -> None:
    data += rng.choice([bytes(1), bytes(4096), rng.randbytes(100), bytes(data)])


def _shift(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    piece = data[at : at + rng.choice([1, 8, 64])]
    del data[at : at + len(piece)]
    to = rng.randrange(len(data) + 1)
    data[to:to] = piece


def _length(rng: random.Random, data: bytearray) -> None:
    n = rng.choice([0, 1, 4088, 1 << 30, 1 << 60, (1 << 64) - 1, rng.randrange(9999)])
    data[:8] = n.to_bytes(8, "little")


def _swap_rows(rng: random.Random, data: bytearray) -> None:
    start = 8 + int.from_bytes(data[:8], "little")
    n = rng.choice([16, 256, 1024])
    if start + 2 * n <= len(data):
        data[start : start + 2 * n] = (
            data[start + n : start + 2 * n] + data[start : start + n]
        )
    _rehash(data)


def _splice(rng: random.Random, root: Path) -> None:
    source, target = rng.sample(_files(root), 2)
    theirs, ours = source.read_bytes(), bytearray(target.read_bytes())
    lo = rng.randrange(len(theirs) or 1)
    piece = theirs[lo : lo + rng.choice([8, 512, 4096, len(theirs)])]
    at = rng.choice([lo, rng.randrange(len(ours) or 1)])
    ours[at : at + len(piece)] = piece
    target.write_bytes(ours)


def _swap(rng: random.Random, root: Path) -> None:
    a, b = rng.sample(_files(root), 2)
    other = a.with_suffix(".other")
    a.rename(other)
    b.rename(a)
    other.rename(b)


def _copy_over(rng: random.Random, root: Path) -> None:
    a, b = rng.sample(_files(root), 2)
    shutil.copyfile(a, b)


def _replace(rng: random.Random, root: Path) -> None:
    path = rng.choice(_files(root))
    moved = root / "moved"
    moved.unlink(missing_ok=True)
    path.rename(moved)
    kind = rng.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to(moved)
    elif kind == 3:
        path.symlink_to("nowhere")
    elif kind == 4:
        path.touch()


def _link_folder(rng: random.Random, root: Path) -> None:
    folders = [path.parent for path in _files(root)]
    folder = rng.choice([folder for folder in folders if not folder.is_symlink()])
    folder.rename(root / f"moved-{folder.name}")
    folder.symlink_to(root / f"moved-{folder.name}")


def _change_header(rng: random.Random, root: Path) -> None:
    """Let a file lie about itself, with checksums that agree."""
    path = rng.choice(_files(root))
    data = bytearray(path.read_bytes())
    try:
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        facts = json.loads(header["__metadata__"]["promptstore"])
    except (ValueError, KeyError, TypeError):
        return
    if rng.random() < 0.6:
        _change_value(rng, facts, rng.choice(list(facts)))
    else:
        _change_value(rng, header, rng.choice(list(header)))
    _put_header(data, size, header, facts)
    path.write_bytes(data)
    if rng.random() < 0.5:  # and the index believes it
        _set(root, path.stem, "checksums", _checksums(data))


def _change_value(rng: random.Random, holder: dict[str, Any], key: str) -> None:
    value = holder[key]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        return _change_value(rng, value, rng.choice(list(value)))
    if isinstance(value, str) and len(value) > 2 and rng.random() < 0.6:
        at = rng.randrange(len(value))
        holder[key] = value[:at] + rng.choice('0159[]{},:"-eF') + value[at + 1 :]
        return None
    if isinstance(value, int) and rng.random() < 0.6:
        holder[key] = value + rng.choice([-1, 1, 256, 1 << 31, 1 << 60])
        return None
    holder[key] = rng.choice(
        [None, 0, -1, 1 << 60, 1e9, "", "x" * 5000, [], [[]] * 5000, {}, "../../x"]
    )
    return None


def _put_header(data: bytearray, size: int, header: Any, facts: Any) -> None:
    text = json.dumps(facts, sort_keys=True)
    own = header.get("__metadata__")
    if isinstance(own, dict):
        own["promptstore"] = text
        own["promptstore.checksum"] = xxhash.xxh3_128_hexdigest(text.encode())
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head)) % 4096)
    data[:size] = len(head).to_bytes(8, "little") + head


def _rehash(data: bytearray) -> None:
    """Make the checksum of the first chunk in the header that of the data."""
    try:
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        facts = json.loads(header["__metadata__"]["promptstore"])
        ends = [t["data_offsets"][1] for k, t in header.items() if k[:7] == "000000."]
        chunk = data[size : size + max(ends)]
        facts["checksums"] = xxhash.xxh3_128_hexdigest(chunk) + facts["checksums"][32:]
    except (ValueError, KeyError, TypeError):
        return
    _put_header(data, size, header, facts)


def _checksums(data: bytearray) -> bytes:
    """Return what a row would have of a file, by what the file says."""
    size = 8 + int.from_bytes(data[:8], "little")
    own = xxhash.xxh3_128_digest(bytes(data[:size]))
    try:
        said = json.loads(data[8:size])["__metadata__"]["promptstore"]
        return own + bytes.fromhex(json.loads(said)["checksums"])
    except (ValueError, KeyError, TypeError):
        return own


# ----------------------------------------------------------------------- the index


def _set(root: Path, name: str, column: str, value: Any) -> None:
    with _sql(root) as db:
        db.execute(f"update snapshots set {column} = ? where name = ?", (value, name))


def _sql(root: Path) -> sqlite3.Connection:
    """Return a connection without the guards of the schema, which commits."""
    db = sqlite3.connect(root / "index.db", isolation_level=None)
    db.execute("pragma foreign_keys = off")
    db.execute("pragma ignore_check_constraints = on")
    db.execute("drop trigger if exists snapshots_are_immutable")
    return db


_COLUMNS = (
    "name", "layout", "parent", "start_token", "end_token", "first_token", "tokens",
    "extent", "end_digest", "nbytes", "checksums", "kind", "label", "expires_ns",
)  # fmt: skip


def _edit_row(rng: random.Random, root: Path) -> None:
    """Give a column of a row a value from another row, or one that is near it."""
    column = rng.choice(_COLUMNS)
    with _sql(root) as db:
        query = f"select id, {column} from snapshots order by id"
        rows = db.execute(query).fetchall()
        if len(rows) < 2:
            return
        (id_, value), (_, other) = rng.sample(rows, 2)
        value = other if rng.random() < 0.5 else _near(rng, value)
        try:
            db.execute(f"update snapshots set {column} = ? where id = ?", (value, id_))
        except (sqlite3.IntegrityError, OverflowError):
            return


def _near(rng: random.Random, value: Any) -> Any:
    if isinstance(value, int):
        return value + rng.choice([-1, 1, -value, 100, 1 << 31, 1 << 60])
    if isinstance(value, bytes) and value:
        at = rng.randrange(len(value))
        return value[:at] + bytes([rng.randrange(256)]) + value[at + 1 :]
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice('0159[]{},:"-./') + value[at + 1 :]
    return rng.choice([1, 5])


def _edit_layout(rng: random.Random, root: Path) -> None:
    """Let prompts belong to other layers, or to another namespace."""
    with _sql(root) as db:
        rows = db.execute("select id, namespace, layers from layouts").fetchall()
        (id_, _, text), (_, namespace, _) = rng.choices(rows, k=2)
        kind = rng.randrange(3)
        try:
            if kind == 0:
                db.execute(
                    "update layouts set layers = ? where id = ?",
                    (_near(rng, text), id_),
                )
            elif kind == 1:
                db.execute(
                    "update layouts set namespace = ? where id = ?", (namespace, id_)
                )
            else:
                db.execute("update snapshots set layout = ?1", (id_,))
        except sqlite3.IntegrityError:
            return


def _lose_rows(rng: random.Random, root: Path) -> None:
    table = rng.choice(["snapshots", "prefixes", "layouts"])
    key = "digest" if table == "prefixes" else "id"
    with _sql(root) as db:
        rows = db.execute(f"select {key} from {table}").fetchall()
        for (value,) in rng.sample(rows, min(len(rows), 2)):
            db.execute(f"delete from {table} where {key} = ?", (value,))


MUTATIONS: dict[str, Callable[[random.Random, Path], None]] = {
    "flip": _bytes_of(_flip),
    "zero": _bytes_of(_zero),
    "cut": _bytes_of(_cut),
    "cut anywhere": _bytes_of(_cut_anywhere),
    "grow": _bytes_of(_grow),
    "shift": _bytes_of(_shift),
    "length": _bytes_of(_length),
    "swap rows": _bytes_of(_swap_rows),
    "splice": _splice,
    "swap": _swap,
    "copy over": _copy_over,
    "replace": _replace,
    "link folder": _link_folder,
    "header": _change_header,
    "header again": _change_header,
    "row": _edit_row,
    "row again": _edit_row,
    "layout": _edit_layout,
    "lose rows": _lose_rows,
}


ALONE = "swap rows"
"""Once the index is gone as well, nothing tells such a file from a good one."""


def _files(root: Path) -> list[Path]:
    """Return the regular snapshot files, the same ones in the same order each time."""
    found = root.glob("snapshots/*/*.safetensors")
    return sorted(path for path in found if not path.is_symlink() and path.is_file())


# -------------------------------------------------------------------------- a round


class Wrong(Exception):
    """The store raised, served something wrong, or took too much memory or time."""


class TooLong(BaseException):
    """A round does not end. No handler for the store's troubles may catch it."""


def _give_up(*_: object) -> None:
    raise TooLong


@dataclass
class Report:
    """What all rounds found."""

    n_rounds: int = 0
    n_matches: int = 0
    n_tokens: int = 0
    peak_bytes: int = 0
    slowest_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


def run(pristine: Path, scratch: Path, seed: int, n: int, report: Report) -> None:
    """Damage a copy of a store *n* times.

    Raises:
        Wrong: It did not hold.
    """
    signal.signal(signal.SIGALRM, _give_up)
    known = shutil.copytree(pristine, scratch / "known")
    with PromptStore.open(known, **OPTIONS) as store:
        truth = Truth(store)
        for number in range(seed, seed + n):
            root = shutil.copytree(pristine, scratch / "damaged")
            start = time.monotonic()
            signal.alarm(LIMIT_S)
            try:
                _round(random.Random(number), root, truth, report)
            except (Exception, TooLong) as error:
                raise Wrong(f"--seed {number} --n 1: {error!r}") from error
            finally:
                signal.alarm(0)
            report.n_rounds += 1
            report.slowest_s = max(report.slowest_s, time.monotonic() - start)
            shutil.rmtree(root)


def _round(rng: random.Random, root: Path, truth: Truth, report: Report) -> None:
    names = rng.choices(list(MUTATIONS), k=rng.choice([1, 1, 2, 3]))
    names = [ALONE] if ALONE in names else names
    is_open = rng.random() < 0.3
    report.reasons.update(names)
    files_bytes = sum(path.stat().st_size for path in _files(root))

    def damage() -> None:
        for name in names:
            MUTATIONS[name](rng, root)

    if not is_open:
        damage()
    with PromptStore.open(root, **OPTIONS) as store:
        if is_open:
            _ask_all(store, truth, report)
            damage()
        before = _peak_bytes(reset=True)
        _ask_all(store, truth, report)
        if rng.randrange(REPAIR_EVERY) == 0:
            _repair(rng, store, truth, report)
        peak = _peak_bytes() - before
        report.peak_bytes = max(report.peak_bytes, peak)
        if peak > 2 * files_bytes + SPARE_BYTES:
            raise Wrong(f"{names}: took {peak} bytes for files of {files_bytes}")


def _peak_bytes(*, reset: bool = False) -> int:
    """Return the most memory that was resident; on Linux, since it was last reset."""
    if not STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        STATUS.with_name("clear_refs").write_text("5")
    (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _ask_all(store: PromptStore, truth: Truth, report: Report) -> None:
    for model, tenant in KINDS:
        for ids in prompts()[2:]:
            _ask(store, Namespace(model, tenant=tenant), ids, truth, report)


def _ask(
    store: PromptStore,
    namespace: Namespace,
    ids: list[int],
    truth: Truth,
    report: Report,
) -> int:
    match = store.match(namespace, [*ids, -1])
    report.n_matches += 1
    report.n_tokens += match.n_tokens
    if match.cache is not None:
        served = builders.fingerprints(match.cache, match.n_tokens)
        if served != truth.of(namespace, ids[: match.n_tokens]):
            raise Wrong(f"{namespace}: other arrays at {match.n_tokens} of {len(ids)}")
    return match.n_tokens


def _repair(
    rng: random.Random, store: PromptStore, truth: Truth, report: Report
) -> None:
    """Repair leaves a sound store, which serves what is stored in it again."""
    store.repair(store.check())
    left = [finding for finding in store.check() if finding.kind != "foreign"]
    if left:
        raise Wrong(f"repair left {left}")
    (model, tenant), make = rng.choice(list(KINDS.items()))
    namespace, ids = Namespace(model, tenant=tenant), rng.choice(prompts())
    store.insert(namespace, ids, make(ids))
    store.flush()
    n_tokens = _ask(store, namespace, ids, truth, report)
    # Another version's file, with a row that knows it, keeps its place.
    if n_tokens != len(ids) and not store.stats().errors.get("SnapshotUnsupported"):
        raise Wrong(f"{namespace}: only {n_tokens} of {len(ids)} after it was stored")
    _ask_all(store, truth, report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=10_000, help="rounds")
    parser.add_argument("--seed", type=int, help="default: at random")
    return parser.parse_args()


def main() -> int:
    """Damage, ask, and say what came of it."""
    args = _arguments()
    seed = random.randrange(10**9) if args.seed is None else args.seed
    print(f"mutate: --seed {seed} --n {args.n}", flush=True)
    logging.disable(logging.WARNING)
    report = Report()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="promptstore-mutate-") as scratch:
        make_store(Path(scratch) / "pristine")
        try:
            run(Path(scratch) / "pristine", Path(scratch), seed, args.n, report)
        except Wrong as error:
            print(f"mutate: WRONG after {report.n_rounds} rounds: {error}")
            raise
    print(
        f"mutate: {report.n_rounds} rounds, {report.n_matches} matches of "
        f"{report.n_tokens} tokens, none wrong, none raised; at most "
        f"{report.peak_bytes / 2**20:.1f} MiB, {report.slowest_s:.1f} s a round; "
        f"{time.monotonic() - start:.0f} s"
    )
    for name, n in sorted(report.reasons.items()):
        print(f"  {n:6} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
