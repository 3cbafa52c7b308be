"""Facts about the public API: its names, its docstrings, and the README's example."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import promptstore
from promptstore import errors, localai, metrics, mlx_lm, probe
from promptstore import types as public_types

README = Path(__file__).parents[1] / "README.md"
PUBLIC = [getattr(promptstore, name) for name in promptstore.__all__]


def test_all_is_sorted_and_complete() -> None:
    """``__all__`` names what promptstore's own module offers, and nothing else."""
    names = {
        name
        for name, value in vars(promptstore).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    lazy = {"PromptStore", "n_cached"}  # they import mlx
    assert promptstore.__all__ == sorted(promptstore.__all__)
    assert set(promptstore.__all__) == names - {"Any", "TYPE_CHECKING"} | lazy
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = promptstore.nothing


def test_what_callers_meet_is_public() -> None:
    """Every error that leaves the store, and every dataclass it returns, has a name
    in promptstore itself."""
    returned = {
        name
        for name, value in vars(public_types).items()
        if inspect.isclass(value) and value.__module__ == public_types.__name__
    }
    assert returned <= set(promptstore.__all__)
    raised = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and not issubclass(value, errors.SnapshotError)
    }
    raised -= {"Path"}
    assert raised <= set(promptstore.__all__)


def test_errors_have_one_root() -> None:
    """All that promptstore raises on its own account can be caught at once."""
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, Exception):
            assert issubclass(value, promptstore.PromptStoreError)


def members(owner: Any) -> list[tuple[str, Any]]:
    """Return the public functions and properties that a class defines itself."""
    found = []
    for name, value in vars(owner).items():
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if not name.startswith("_") and isinstance(
            value, types.FunctionType | property
        ):
            found.append((f"{owner.__name__}.{name}", value))
    return found


def test_everything_public_has_a_docstring() -> None:
    """Classes, their methods, and the functions of the host say what they do."""
    things: list[tuple[str, Any]] = [(thing.__name__, thing) for thing in PUBLIC]
    hosts = [getattr(mlx_lm, name) for name in mlx_lm.__all__]
    hosts += [localai.PromptCache, localai.ThreadSafeLRUPromptCache]
    hosts += [metrics.Metrics, metrics.log_line, probe.BatchedPath, probe.batched_path]
    things += [(thing.__name__, thing) for thing in hosts]
    for thing in [*PUBLIC, *hosts]:
        if inspect.isclass(thing):
            things += members(thing)
    for name, thing in things:
        text = inspect.getdoc(thing)
        assert text, name
        assert text[0].isupper() or text[0].isdigit() or text[0] == "`", name
        first = text.split("\n\n")[0]
        assert first.rstrip().endswith((".", ":", "``.")), name


def test_arguments_are_documented() -> None:
    """What the fixed methods take is what the design says, keyword by keyword."""
    store = promptstore.PromptStore
    expected = {
        "open": "path memory_bytes disk_bytes write min_tokens verify read_only",
        "match": "namespace tokens",
        "insert": "namespace tokens cache kind label pin ttl_s",
        "flush": "timeout_s",
        "prefetch": "namespace tokens",
        "explain": "namespace tokens",
        "snapshots": "namespace",
        "pin": "id_or_label",
        "unpin": "id_or_label",
        "delete": "id_or_label",
        "evict": "to_bytes",
        "check": "",
        "repair": "findings",
        "stats": "",
        "close": "",
    }
    for name, arguments in expected.items():
        parameters = inspect.signature(getattr(store, name)).parameters
        own = [each for each in parameters if each != "self"]
        assert own[: len(arguments.split())] == arguments.split(), name
        for each in own[len(arguments.split()) :]:
            assert parameters[each].default is not inspect.Parameter.empty


def test_the_version_is_one() -> None:
    """The module and the installed distribution agree."""
    assert promptstore.__version__ == metadata.version("mlx-promptstore")


def test_the_package_is_typed() -> None:
    """Type checkers of other projects look for the marker."""
    assert (Path(promptstore.__file__).parent / "py.typed").is_file()


def test_import_is_cheap() -> None:
    """Importing promptstore imports neither mlx-lm nor sqlite-utils nor rich."""
    code = (
        "import sys, promptstore; "
        "print(*{'mlx_lm', 'transformers', 'sqlite_utils', 'rich', 'click'}"
        " & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == []


def test_the_readme_example_runs(tmp_path: Path) -> None:
    """The Python blocks of the README, one after the other, do what they show."""
    if not README.is_file():
        pytest.skip("no README yet")
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.S | re.M)
    if not blocks:
        pytest.skip("the README has no Python example")
    model = os.environ.get("PROMPTSTORE_TEST_MODEL")
    code = "\n".join(blocks)
    if "mlx_lm.load(" in code or "load(" in code:
        if not model:
            pytest.skip("PROMPTSTORE_TEST_MODEL names no model; `make test` makes one")
        code = re.sub(r'"models/[^"]*"', repr(model), code)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)
