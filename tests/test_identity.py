"""Facts about what a model is, on directories of tiny fake files."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import platformdirs
import pytest
from builders import kv, tokens
from fake_weights import safetensors_of, shaped
from huggingface_hub import constants

from promptstore import PromptStore, filehash, identity
from promptstore.errors import ModelUnreadable
from promptstore.types import Namespace, Rank

CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "num_hidden_layers": 2}
LORA = {"rank": 8, "dropout": 0.0, "scale": 20.0}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SECOND_NS = 1_000_000_000
LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 12345\n"
)


@pytest.fixture(autouse=True)
def memory_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The memory file; after the test, nothing else was written but what it made."""
    outside = [tmp_path / "home", tmp_path / "cwd"]
    for directory in outside:
        directory.mkdir()
    monkeypatch.setenv("HOME", str(outside[0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(outside[1])
    path = platformdirs.user_cache_path() / "promptstore-files.json"
    assert path.is_relative_to(tmp_path)
    yield path
    written = {file for place in outside for file in place.rglob("*") if file.is_file()}
    assert written <= {path}
    if path.parent.exists():
        assert set(path.parent.iterdir()) <= {path}


@pytest.fixture
def n_hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose content was read for a hash, as they are read."""
    read: list[Path] = []
    plain = filehash._hash

    def hash_and_note(path: Path, tally: filehash._Tally) -> str:
        read.append(path)
        return plain(path, tally)

    monkeypatch.setattr(filehash, "_hash", hash_and_note)
    return read


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is ten seconds ahead, so that no file is young."""
    plain = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: plain() + 10 * SECOND_NS)


def make_model(path: Path, *weights: bytes, **config: Any) -> Path:
    """Write a model of one file, or of two shards and their index."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    if len(weights) == 2:
        index = {"weight_map": dict(zip("ab", SHARDS, strict=True))}
        (path / INDEX).write_text(json.dumps(index))
    names = SHARDS if len(weights) == 2 else ("model.safetensors",)
    for name, content in zip(names, weights or (b"weights",), strict=True):
        (path / name).write_bytes(safetensors_of(content))
    return path


def make_adapter(path: Path, content: bytes = b"lora", **config: Any) -> Path:
    path.mkdir()
    fields = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA}
    (path / "adapter_config.json").write_text(json.dumps(fields | config))
    (path / "adapters.safetensors").write_bytes(safetensors_of(content))
    return path


def make_snapshot(root: Path, plain: Path) -> Path:
    """Lay a plain directory out as the hub does: links to blobs named by hash."""
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for file in plain.iterdir():
        content = file.read_bytes()
        lfs = file.suffix == ".safetensors"
        name = (hashlib.sha256 if lfs else hashlib.sha1)(content).hexdigest()
        (root / "blobs" / name).write_bytes(content)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", name))
    return snapshot


def rewrite(path: Path, content: bytes) -> None:
    """Change a file in place and put its mtime back; only its ctime tells."""
    before = path.stat()
    assert before.st_size == len(content)
    path.write_bytes(content)
    while path.stat().st_ctime_ns == before.st_ctime_ns or (
        path.stat().st_mtime_ns != before.st_mtime_ns
    ):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# What is equal


def test_moved_directory_is_equal(tmp_path: Path) -> None:
    """A model that was moved and renamed is the same model."""
    model = make_model(tmp_path / "here", b"one", b"two")
    before = identity.of_model(model)
    (tmp_path / "there").mkdir()
    assert identity.of_model(model.rename(tmp_path / "there" / "other")) == before


def test_renamed_files_are_equal(tmp_path: Path) -> None:
    """The names of the weight files are not part of the identity."""
    model = make_model(tmp_path / "model")
    before = identity.of_model(model)
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    assert identity.of_model(model) == before


@pytest.mark.parametrize(
    "names",
    [
        {"_name_or_path": "someone/else", "transformers_version": "5.0.0"},
        {"text_config": {"_name_or_path": "someone/else"}},
    ],
)
def test_names_in_the_config_are_equal(tmp_path: Path, names: dict[str, Any]) -> None:
    """Fields that only name something are no part of it, at any depth."""
    nested: dict[str, Any] = {"text_config": {}} if "text_config" in names else {}
    one = make_model(tmp_path / "one", **nested)
    two = make_model(tmp_path / "two", **names)
    assert identity.of_model(one) == identity.of_model(two)


def test_order_and_layout_of_the_config_are_equal(tmp_path: Path) -> None:
    """The same JSON in another order and with other spaces is the same config."""
    model = make_model(tmp_path / "model")
    before = identity.of_model(model)
    text = json.dumps(dict(reversed(CONFIG.items())), indent=4)
    (model / "config.json").write_text(text)
    assert identity.of_model(model) == before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"]
)
def test_what_does_not_change_the_kv_is_equal(tmp_path: Path, name: str) -> None:
    """The tokenizer changes the tokens and the generation config the sampling."""
    model = make_model(tmp_path / "model")
    before = identity.of_model(model)
    (model / name).write_text('{"eos_token_id": 7}')
    assert identity.of_model(model) == before


def test_hub_snapshot_equals_a_plain_copy_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub snapshot is the model that its plain copy is, and costs no read."""
    plain = make_model(tmp_path / "plain", b"one", b"two")
    snapshot = make_snapshot(tmp_path / "models--org--name", plain)
    expected = identity.of_model(plain)

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a blob was read")

    monkeypatch.setattr(filehash, "_hash", refuse)
    monkeypatch.setattr(identity, "tensors_of", refuse)
    assert identity.of_model(snapshot) == expected


def test_only_a_blob_is_believed_by_name(tmp_path: Path, n_hashed: list[Path]) -> None:
    """Sixty-four digits mean nothing outside a link into ``blobs``."""
    name = "0" * 64
    for directory in ("blobs", "other"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / name).write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "other" / name)
    (tmp_path / "blobs" / "short").write_bytes(b"content")
    (tmp_path / "short").symlink_to(tmp_path / "blobs" / "short")
    files = [tmp_path / "link", tmp_path / "short", tmp_path / "blobs" / name]
    content = hashlib.sha256(b"content").hexdigest()
    assert [filehash.sha256_of(file) for file in files] == [content] * 3
    assert n_hashed == files


# What differs


def test_one_byte_in_place_differs(tmp_path: Path, later: None) -> None:
    """One byte is seen behind the memory, with the same size and mtime."""
    model = make_model(tmp_path / "model", b"weights")
    before = identity.of_model(model)
    assert identity.of_model(model) == before
    rewrite(model / "model.safetensors", safetensors_of(b"weighty"))
    after = identity.of_model(model)
    assert after.weights != before.weights
    assert after.config == before.config


def test_one_byte_at_once_differs(tmp_path: Path) -> None:
    """A change right after the first look is seen, whatever the clock resolves."""
    model = make_model(tmp_path / "model", b"weights")
    before = identity.of_model(model)
    (model / "model.safetensors").write_bytes(safetensors_of(b"weighty"))
    assert identity.of_model(model).weights != before.weights


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"num_hidden_layers": 1},
        {"rope_theta": None},
    ],
)
def test_config_differs(tmp_path: Path, change: dict[str, Any]) -> None:
    """Everything in the config that a model can read is part of it."""
    one = identity.of_model(make_model(tmp_path / "one"))
    two = identity.of_model(make_model(tmp_path / "two", **change))
    assert one.weights == two.weights
    assert one.config != two.config


@pytest.mark.parametrize("name", ["hf_quant_config.json", "custom.py"])
def test_other_files_that_build_the_model_differ(tmp_path: Path, name: str) -> None:
    """A quantization file and the code that ``model_file`` names are part of it."""
    model = make_model(tmp_path / "model", model_file="custom.py")
    (model / "custom.py").write_text("pass")
    before = identity.of_model(model)
    (model / name).write_text('{"quantization": {}}')
    assert identity.of_model(model).config != before.config
    assert identity.of_model(model).weights == before.weights


def test_one_shard_fewer_differs(tmp_path: Path) -> None:
    """Two equal weight files are not one."""
    one = identity.of_model(make_model(tmp_path / "one", b"same"))
    two = identity.of_model(make_model(tmp_path / "two", b"same", b"same"))
    assert one.weights != two.weights


# What cannot be identified


def drop(path: Path) -> Path:
    path.unlink()
    return path


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def dangle(path: Path) -> Path:
    path.unlink()
    path.symlink_to(path.parent / "gone")
    return path


def cut(path: Path) -> Path:
    return write(path, path.read_bytes()[:-1])


def as_directory(path: Path) -> Path:
    path.unlink()
    path.mkdir()
    return path


BREAKS: dict[str, Callable[[Path], Path]] = {
    "no directory": lambda model: (model.rename(model.with_name("moved")), model)[1],
    "shard missing": lambda model: drop(model / SHARDS[1]),
    "shard empty": lambda model: write(model / SHARDS[0], b""),
    "shard dangling": lambda model: dangle(model / SHARDS[1]),
    "shard a directory": lambda model: as_directory(model / SHARDS[1]),
    "shard cut short": lambda model: cut(model / SHARDS[1]),
    "shard not downloaded": lambda model: write(model / SHARDS[1], LFS_POINTER),
    "shard no safetensors": lambda model: write(model / SHARDS[1], b"garbage"),
    "shard of lists": lambda model: write(model / SHARDS[1], b"\2" + bytes(7) + b"[]"),
    "shard of numbers": lambda model: write(
        model / SHARDS[1], b"\7" + bytes(7) + b'{"a":1}'
    ),
    "shard half there": lambda model: write(
        model / "model-00003-of-00003.safetensors.incomplete", b"half"
    ),
    "shard not in the index": lambda model: write(
        model / "model-00003-of-00003.safetensors", safetensors_of(b"three")
    ),
    "index dangling": lambda model: dangle(model / INDEX),
    "index empty": lambda model: write(model / INDEX, b""),
    "index without shards": lambda model: write(model / INDEX, b"{}"),
    "config missing": lambda model: drop(model / "config.json"),
    "config cut": lambda model: write(model / "config.json", b'{"model_type": '),
    "config a list": lambda model: write(model / "config.json", b"[]"),
    "config too deep": lambda model: write(model / "config.json", b"[" * 100_000),
    "config not text": lambda model: write(model / "config.json", b'{"a": "\xff"}'),
}


@pytest.mark.parametrize("break_it", BREAKS.values(), ids=BREAKS.keys())
def test_broken_model_names_the_file(
    tmp_path: Path, break_it: Callable[[Path], Path]
) -> None:
    """What cannot be read raises and names the file; nothing is a constant."""
    model = make_model(tmp_path / "model", b"one", b"two")
    culprit = break_it(model)
    with pytest.raises(ModelUnreadable, match=culprit.name) as raised:
        identity.of_model(model)
    assert raised.value.path == culprit


@pytest.mark.parametrize("name", ["gone.py", "/dev/zero", "..", "", 7, "a\0b"])
def test_code_that_is_no_file_is_refused(tmp_path: Path, name: object) -> None:
    """``model_file`` must name a file; a device is not read without end."""
    model = make_model(tmp_path / "model", model_file=name)
    with pytest.raises(ModelUnreadable):
        identity.of_model(model)


def test_directory_without_weights_is_named(tmp_path: Path) -> None:
    """Weights that mlx-lm would not load are no weights."""
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ModelUnreadable, match=r"no model\*\.safetensors") as raised:
        identity.of_model(model)
    assert raised.value.path == model


def test_shard_that_only_the_others_count_is_missed(tmp_path: Path) -> None:
    """A download that has no index yet is known by the names of what is there."""
    model = make_model(tmp_path / "model", b"one", b"two")
    (model / INDEX).unlink()
    (model / SHARDS[0]).unlink()
    with pytest.raises(
        ModelUnreadable, match=f"missing, but there is {SHARDS[1]}"
    ) as r:
        identity.of_model(model)
    assert r.value.path == model / SHARDS[0]


def test_download_that_has_just_begun_is_named(tmp_path: Path) -> None:
    """Of weights that are on their way, the half that is there is named."""
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    half = model / ".cache" / "huggingface" / "download" / "x.incomplete"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    with pytest.raises(ModelUnreadable, match="half a download") as raised:
        identity.of_model(model)
    assert raised.value.path == half


def test_error_is_not_remembered(tmp_path: Path, later: None) -> None:
    """A file that is not whole raises each time; its hash never counts as known."""
    model = make_model(tmp_path / "model")
    cut(model / "model.safetensors")
    for _ in range(2):
        with pytest.raises(ModelUnreadable, match="cut short"):
            identity.of_model(model)


def test_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_path: Path, later: None
) -> None:
    """A hash of half the old and half the new content is neither given nor kept."""
    model = make_model(tmp_path / "model", b"one", b"two")
    plain = filehash._hash

    def hash_and_replace(path: Path, tally: filehash._Tally) -> str:
        digest = plain(path, tally)
        if path.name == SHARDS[1]:
            (path.parent / "new").write_bytes(safetensors_of(b"six"))
            (path.parent / "new").replace(path)
        return digest

    monkeypatch.setattr(filehash, "_hash", hash_and_replace)
    with pytest.raises(ModelUnreadable, match="changed while it was read") as raised:
        identity.of_model(model)
    assert raised.value.path == model / SHARDS[1]
    assert not memory_path.exists()


# Adapters


def test_retrained_adapter_differs(tmp_path: Path, later: None) -> None:
    """An adapter trained again under the same path is another adapter."""
    adapter = make_adapter(tmp_path / "adapter", b"lora")
    before = identity.of_adapter(adapter)
    rewrite(adapter / "adapters.safetensors", safetensors_of(b"Lora"))
    assert identity.of_adapter(adapter) != before


@pytest.mark.parametrize(
    "change",
    [
        {"lora_parameters": LORA | {"scale": 10.0}},
        {"lora_parameters": LORA | {"rank": 4}},
        {"lora_parameters": LORA | {"keys": ["self_attn.q_proj"]}},
        {"num_layers": 1},
        {"fine_tune_type": "dora"},
    ],
)
def test_adapter_settings_differ(tmp_path: Path, change: dict[str, Any]) -> None:
    """The same adapter weights in another place or at another scale differ."""
    one = identity.of_adapter(make_adapter(tmp_path / "one"))
    assert identity.of_adapter(make_adapter(tmp_path / "two", **change)) != one


def test_adapter_paths_are_equal(tmp_path: Path) -> None:
    """Where the base, the data and the adapter lay at training is no part of it."""
    places: dict[str, Any] = dict.fromkeys(("model", "data", "adapter_path"), "/there")
    one = identity.of_adapter(make_adapter(tmp_path / "one"))
    assert identity.of_adapter(make_adapter(tmp_path / "two", **places)) == one


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json"])
def test_half_an_adapter_names_the_file(tmp_path: Path, name: str) -> None:
    """An adapter without its weights or its settings is refused."""
    adapter = make_adapter(tmp_path / "adapter")
    (adapter / name).unlink()
    with pytest.raises(ModelUnreadable, match=name) as raised:
        identity.of_adapter(adapter)
    assert raised.value.path == adapter / name


BASE = {
    "model.layers.0.self_attn.q_proj.weight": ("BF16", (8, 4)),
    "model.layers.0.mlp.up_proj.weight": ("U32", (16, 1)),
    "model.layers.0.mlp.up_proj.scales": ("BF16", (16, 2)),
    "model.layers.1.mlp.switch.weight": ("BF16", (3, 4, 4)),
    "model.embed_tokens.weight": ("BF16", (10, 4)),
}
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
EMBED, SWITCH = "model.embed_tokens", "model.layers.1.mlp.switch"


def identify(tmp_path: Path, **tensors: tuple[str, tuple[int, ...]]) -> Namespace:
    """Identify a model of `BASE` with an adapter of these tensors."""
    model, adapter = make_model(tmp_path / "model"), make_adapter(tmp_path / "adapter")
    (model / "model.safetensors").write_bytes(shaped(BASE))
    (adapter / "adapters.safetensors").write_bytes(shaped(tensors))
    return Namespace.from_model(model, adapter)


def low_rank(name: str, n_in: int, n_out: int, rank: int = 2) -> dict[str, Any]:
    return {
        f"{name}.lora_a": ("F32", (n_in, rank)),
        f"{name}.lora_b": ("F32", (rank, n_out)),
    }


@pytest.mark.parametrize(
    "tensors",
    [
        low_rank(Q, 4, 8) | {f"{Q}.m": ("F32", (8,))},
        low_rank(UP, 8, 16),
        low_rank(EMBED, 10, 4),
        low_rank("model.layers.1.self_attn.renamed", 7, 7),
        {f"{SWITCH}.lora_a": ("F32", (6, 4)), f"{SWITCH}.lora_b": ("F32", (3, 4, 2))},
        {f"{Q}.weight": ("F32", (8, 4)), f"{UP}.weight": ("F32", (16, 8))},
    ],
    ids=["dora", "quantised", "embedding", "renamed", "experts", "full"],
)
def test_adapter_for_this_base_is_taken(
    tmp_path: Path, tensors: dict[str, Any]
) -> None:
    """Shapes that fit, or that only the model class could judge, are no error."""
    assert identify(tmp_path, **tensors).adapter


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (low_rank(Q, 8, 8), "q_proj.weight has"),
        (low_rank(Q, 4, 4), "q_proj.weight has"),
        (low_rank(UP, 8, 8), "up_proj.weight has"),
        (low_rank(UP, 7, 16), "up_proj.weight has"),
        (low_rank("model.layers.2.self_attn.q_proj", 4, 8), "this one has 2 layers"),
        ({f"{Q}.weight": ("F32", (8, 8))}, "q_proj.weight has"),
    ],
)
def test_adapter_for_another_base_is_named(
    tmp_path: Path, tensors: dict[str, Any], reason: str
) -> None:
    """An adapter whose layers or shapes this model has not is refused, each time."""
    with pytest.raises(ModelUnreadable, match=reason) as raised:
        identify(tmp_path, **tensors)
    assert raised.value.path == tmp_path / "adapter" / "adapters.safetensors"
    with pytest.raises(ModelUnreadable, match=reason):
        Namespace.from_model(tmp_path / "model", tmp_path / "adapter")


@pytest.mark.parametrize("content", [LFS_POINTER, b"garbage", b""])
def test_adapter_that_is_not_whole_is_named(tmp_path: Path, content: bytes) -> None:
    """Half an adapter is refused as half a model is."""
    adapter = make_adapter(tmp_path / "adapter")
    (adapter / "adapters.safetensors").write_bytes(content)
    with pytest.raises(ModelUnreadable, match=r"adapters\.safetensors"):
        identity.of_adapter(adapter)


# The memory of hashes


def test_second_look_reads_nothing(
    tmp_path: Path, memory_path: Path, later: None, n_hashed: list[Path]
) -> None:
    """A file is hashed once, for every path to it; the memory is the user's alone."""
    model = make_model(tmp_path / "model", b"one", b"two")
    first = identity.of_model(model)
    assert len(n_hashed) == 2
    assert identity.of_model(model.rename(tmp_path / "other")) == first
    assert len(n_hashed) == 2
    assert memory_path.stat().st_mode & 0o777 == 0o600


def test_young_file_is_not_remembered(
    tmp_path: Path, memory_path: Path, n_hashed: list[Path]
) -> None:
    """A file that may change again within the clock's tick is hashed again."""
    file = tmp_path / "file"
    file.write_bytes(b"content")
    os.utime(file, ns=(0, 0))
    assert filehash.sha256_of(file) == filehash.sha256_of(file)
    assert n_hashed == [file, file]
    assert not memory_path.exists()


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "7", '{"a": "b"}', "[[1, 2]]", '[[[[1]], "00"]]', "[" * 100_000],
)
def test_damaged_memory_is_replaced(
    tmp_path: Path, memory_path: Path, later: None, n_hashed: list[Path], damage: str
) -> None:
    """Damage costs one hash, and the memory works again afterwards."""
    file = tmp_path / "file"
    file.write_bytes(b"content")
    memory_path.parent.mkdir(parents=True)
    memory_path.write_text(damage)
    assert filehash.sha256_of(file) == hashlib.sha256(b"content").hexdigest()
    assert filehash.sha256_of(file) == hashlib.sha256(b"content").hexdigest()
    assert n_hashed == [file]


def test_memory_that_cannot_be_written_costs_a_hash(
    tmp_path: Path, memory_path: Path, later: None, n_hashed: list[Path]
) -> None:
    """A file where the cache directory should be is no error."""
    file = tmp_path / "file"
    file.write_bytes(b"content")
    memory_path.parent.parent.mkdir(parents=True, exist_ok=True)
    memory_path.parent.write_text("in the way")
    assert filehash.sha256_of(file) == filehash.sha256_of(file)
    assert n_hashed == [file, file]
    memory_path.parent.unlink()


def test_user_without_a_home_costs_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: None, n_hashed: list[Path]
) -> None:
    """Without a cache directory nothing is remembered, and nothing fails."""

    def homeless() -> NoReturn:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(platformdirs, "user_cache_path", homeless)
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert filehash.sha256_of(file) == filehash.sha256_of(file)
    assert n_hashed == [file, file]


def test_memory_drops_the_oldest(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    later: None,
    n_hashed: list[Path],
) -> None:
    """The memory holds so many files and no more, the newest ones."""
    monkeypatch.setattr(filehash, "_MAX_REMEMBERED", 2)
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file in files:
        file.write_text(file.name)
        filehash.sha256_of(file)
    for file in (files[2], files[1], files[0]):
        filehash.sha256_of(file)
    assert n_hashed == [*files, files[0]]


# Progress


def test_progress_is_told_on_the_callers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: None
) -> None:
    """It grows up to all bytes, and is not told of where nothing is read."""
    monkeypatch.setattr(filehash, "_TICK_S", 0)
    model = make_model(tmp_path / "model", b"x" * 3_000_000, b"two")
    told: list[tuple[int, int]] = []
    threads = set()

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        threads.add(threading.get_ident())

    Namespace.from_model(model, progress=tell)
    total = sum((model / name).stat().st_size for name in SHARDS)
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert threads == {threading.get_ident()}
    told.clear()
    Namespace.from_model(model, progress=tell)
    assert told == []


def test_nobody_waits_for_the_rest_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress callback that raises, as Ctrl-C does, ends the reading."""
    monkeypatch.setattr(filehash, "_TICK_S", 0)
    monkeypatch.setattr(filehash, "BLOCK_BYTES", 1)
    tallies: list[filehash._Tally] = []
    plain = filehash._hash

    def hash_and_note(path: Path, tally: filehash._Tally) -> str:
        tallies.append(tally)
        return plain(path, tally)

    def refuse(done: int, total: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(filehash, "_hash", hash_and_note)
    model = make_model(tmp_path / "model", bytes(3_000_000))
    with pytest.raises(KeyboardInterrupt):
        identity.of_model(model, refuse)
    assert [tally.is_wanted for tally in tallies] == [False]
    assert tallies[0].n_read < 3_000_000


# Models by the hub's ids


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A hub's cache with two commits of a model, and a branch that is at the first."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    commits = {}
    for number, content in enumerate((b"old", b"new")):
        commit = str(number) * 40
        commits[commit] = make_model(repository / "snapshots" / commit, content)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return commits


def test_revision_says_where_to_look_and_no_more(hub: dict[str, Path]) -> None:
    """A hub's id and a revision are the directory that they stand for."""
    (old, first), (new, second) = hub.items()
    assert Namespace.from_model("org/name") == Namespace.from_model(first)
    assert Namespace.from_model("org/name", revision=old).model == (
        Namespace.from_model("org/name", revision="main").model
    )
    other = Namespace.from_model("org/name", revision=new)
    assert other == Namespace.from_model(second)
    assert other != Namespace.from_model(first)
    assert other.revision == ""


def test_revision_never_stands_for_content(hub: dict[str, Path], later: None) -> None:
    """Files that change under a commit's name are another model."""
    commit, path = next(iter(hub.items()))
    before = Namespace.from_model("org/name", revision=commit)
    rewrite(path / "model.safetensors", safetensors_of(b"odd"))
    assert Namespace.from_model("org/name", revision=commit) != before


@pytest.mark.parametrize(
    ("name", "revision"),
    [("org/none", None), ("org/name", "2" * 40), ("/no/such/path", None), ("", None)],
)
def test_model_that_is_not_here_is_not_fetched(
    hub: dict[str, Path], name: str, revision: str | None
) -> None:
    """What was not downloaded is an error; nothing asks the hub."""
    with pytest.raises(ModelUnreadable):
        Namespace.from_model(name, revision=revision)


def test_directory_has_no_revision(tmp_path: Path) -> None:
    """As in mlx-lm, a revision is ignored where the model is a directory."""
    model = make_model(tmp_path / "model")
    assert Namespace.from_model(model, revision="x") == Namespace.from_model(model)


# Ranks


def test_ranks_differ(tmp_path: Path) -> None:
    """Each rank of a tensor- or pipeline-parallel run has a namespace of its own."""
    model = make_model(tmp_path / "model")
    ranks = [
        None,
        *(Rank(tensor=(index, 2)) for index in range(2)),
        *(Rank(tensor=(index, 4)) for index in range(2)),
        *(Rank(pipeline=(index, 2)) for index in range(2)),
        *(Rank(pipeline=(1, 3), layers=layers) for layers in ((1, 2), (2, 3))),
        Rank(tensor=(1, 2), pipeline=(1, 2)),
    ]
    spaces = [Namespace.from_model(model, rank=rank) for rank in ranks]
    assert len({space.digest for space in spaces}) == len(ranks)
    assert {space.model for space in spaces} == {spaces[0].model}


def test_the_only_rank_is_the_whole_model(tmp_path: Path) -> None:
    """A run on one machine has the KV that a run without ranks has."""
    model = make_model(tmp_path / "model")
    alone = Namespace.from_model(model, rank=Rank((0, 1), (0, 1), (0, 2)))
    assert alone == Namespace.from_model(model)


def test_ranks_do_not_meet_on_disk(store: PromptStore) -> None:
    """What one rank stored is another's miss, and its own hit."""
    ranks = [Namespace("m", rank=str(Rank((index, 2)))) for index in range(2)]
    store.insert(ranks[0], tokens(100), kv(100))
    store.flush()
    matches = [store.match(rank, [*tokens(100), 1]) for rank in ranks]
    assert [match.n_tokens for match in matches] == [100, 0]


@pytest.mark.parametrize(
    "wrong",
    [{"tensor": (2, 2)}, {"tensor": (-1, 2)}, {"pipeline": (0, 0)}, {"layers": (2, 2)}],
)
def test_rank_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """An index is one of its group's."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Rank(**wrong)


def test_rank_that_lacks_files_of_the_others_is_refused(tmp_path: Path) -> None:
    """What a rank computes depends on all weights: some of them say nothing."""
    model = make_model(tmp_path / "model", b"one", b"two")
    (model / SHARDS[0]).unlink()
    with pytest.raises(ModelUnreadable, match=SHARDS[0]):
        Namespace.from_model(model, rank=Rank(pipeline=(0, 2)))


# Namespaces


def test_every_part_makes_another_namespace(tmp_path: Path) -> None:
    """Weights, config, adapter, draft (on, off, other) and tenant tell them apart."""
    model = make_model(tmp_path / "model")
    other = make_model(tmp_path / "other", b"others")
    rope = make_model(tmp_path / "rope", rope_theta=1.0)
    adapter = make_adapter(tmp_path / "adapter")
    spaces = [
        Namespace.from_model(model),
        Namespace.from_model(other),
        Namespace.from_model(rope),
        Namespace.from_model(model, adapter),
        Namespace.from_model(model, draft_path=model),
        Namespace.from_model(model, draft_path=other),
        Namespace.from_model(model, draft_path=rope),
        Namespace.from_model(model, tenant="a"),
        Namespace.from_model(model, tenant="b"),
    ]
    assert len({space.digest for space in spaces}) == len(spaces)
    assert Namespace.from_model(str(model), str(adapter)) == spaces[3]


def test_quantised_models_differ(tmp_path: Path) -> None:
    """A model and what is left of it with 8 and with 4 bits are three models."""
    models = [make_model(tmp_path / "base", b"16 bits each")]
    for bits, content in ((8, b"8 each"), (4, b"4ea")):
        settings = {"group_size": 64, "bits": bits}
        models.append(make_model(tmp_path / str(bits), content, quantization=settings))
    assert len({Namespace.from_model(model).digest for model in models}) == 3


def test_renamed_repository_is_equal(tmp_path: Path) -> None:
    """A repository of another name and commit with the same files is the same model."""
    plain = make_model(tmp_path / "plain", b"one", b"two")
    one = make_snapshot(tmp_path / "models--org--name", plain)
    two = make_snapshot(tmp_path / "models--other--new-name", plain)
    two = two.rename(two.with_name("4567ef01"))
    assert Namespace.from_model(one) == Namespace.from_model(two)


def test_other_machine_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither inodes and times nor what this user's memory knows is part of it."""
    here = make_model(tmp_path / "here", b"one", b"two")
    adapter = make_adapter(tmp_path / "adapter")
    before = Namespace.from_model(here, adapter, here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache" / "there"))
    there = shutil.copytree(here, tmp_path / "there")
    for file in there.iterdir():
        os.utime(file, ns=(0, 0))
    copied = shutil.copytree(adapter, tmp_path / "copied")
    assert Namespace.from_model(there, copied, there) == before


def test_fields_never_run_together() -> None:
    """The same characters in other fields are another namespace."""
    parts = ["", "a", "b", "|", 'a", "b', "a|b", "b|c", "\0", "a\0b", "é"]
    triples = [
        Namespace(model, revision, tenant=tenant).digest
        for model, revision, tenant in itertools.product(parts[1:], parts, parts)
    ]
    assert len(set(triples)) == len(triples)
    assert all(len(digest) == 16 for digest in triples)


def test_digests_are_equal_in_every_process(tmp_path: Path) -> None:
    """Digests are of content alone: not of the process, its seed or the machine."""
    model = make_model(tmp_path / "model", b"one", b"two")
    code = (
        "import sys; from promptstore.types import Namespace as N;"
        "print(N('m', 'r', 'c', 'a', 'd', 't').digest.hex());"
        "print(N.from_model(sys.argv[1]).digest.hex())"
    )
    golden = ["d11880687d141cd38f5d8fb49f403c15", "7617de5af741dbd3d65b20d7b4a754e4"]
    for seed in ("0", "1"):
        environ = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(model)]
        done = subprocess.run(
            command, env=environ, check=True, capture_output=True, text=True
        )
        assert done.stdout.split() == golden
