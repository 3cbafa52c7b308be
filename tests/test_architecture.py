"""Facts about what imports what: directions are fixed, whoever is in a hurry."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import promptstore

ROOT = Path(promptstore.__file__).parent
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "failpoints": set(),
    "access": {"errors"},
    "usage": set(),
    "eviction": set(),
    "ranges": set(),
    "tokens": set(),
    "strict_json": set(),
    "layers": {"strict_json"},
    "extent": {"layers", "ranges", "strict_json"},
    "positions": set(),
    "reading": {"errors"},
    "filehash": {"errors", "reading"},
    "weights": {"errors", "reading"},
    "identity": {"errors", "filehash", "positions", "reading", "weights"},
    "parameters": {"identity", "positions"},
    "types": {"filehash", "identity", "parameters"},
    "prefix": {"tokens"},
    "radix": {"tokens"},
    "buffers": {"layers"},
    "codecs": {"buffers", "errors", "layers", "ranges"},
    "snapshot": {
        "errors", "extent", "failpoints", "layers", "ranges", "strict_json", "tokens",
        "types",
    },
    "migrations": set(),
    "index": {
        "errors", "eviction", "extent", "failpoints", "layers", "migrations", "prefix",
        "tokens", "types",
    },
    "resume": {"codecs", "layers", "ranges"},
    "plan": {"extent", "index", "layers", "ranges", "resume"},
    "restore": {
        "buffers", "codecs", "extent", "index", "layers", "plan", "ranges", "resume",
        "snapshot",
    },
    "opaque": {"codecs", "errors"},
    "capture": {
        "buffers", "codecs", "errors", "extent", "layers", "opaque", "ranges",
        "restore", "resume", "snapshot",
    },
    "delta": {
        "capture", "codecs", "errors", "extent", "index", "layers", "plan",
        "ranges", "resume", "tokens", "types",
    },
    "root": {"errors", "failpoints", "snapshot", "usage"},
    "rebuild": {
        "errors", "extent", "failpoints", "index", "layers", "prefix", "root",
        "snapshot", "tokens", "types",
    },
    "volume": {"errors", "failpoints", "index", "rebuild", "root"},
    "budget": {
        "errors", "eviction", "failpoints", "index", "rebuild", "root", "snapshot",
        "volume",
    },
    "admission": {"delta", "index", "prefix"},
    "writer": {"errors"},
    "memory": {"capture", "layers", "radix", "tokens", "types"},
    "disk": {
        "access", "admission", "budget", "delta", "errors", "extent", "failpoints",
        "index", "layers", "plan", "prefix", "rebuild", "restore", "resume", "root",
        "snapshot", "tokens", "types", "volume",
    },
    "nearby": {"codecs", "disk", "index", "resume", "tokens", "types"},
    "reasons": {"codecs", "disk", "layers", "nearby", "resume", "types"},
    "check": {"disk", "errors", "failpoints", "index", "rebuild", "snapshot", "types"},
    "scrub": {"check", "disk", "errors", "types"},
    "counters": {"errors", "types"},
    "matching": {
        "codecs", "counters", "disk", "errors", "index", "memory", "nearby", "reasons",
        "restore", "tokens", "types", "writer",
    },
    "saving": {
        "capture", "counters", "delta", "disk", "errors", "layers", "memory", "tokens",
        "types", "writer",
    },
    "store": {
        "admission", "budget", "check", "counters", "disk", "errors", "index",
        "layers", "matching", "memory", "nearby", "saving", "scrub",
        "tokens", "types", "writer",
    },
    "": {"codecs", "errors", "store", "types"},
    "metrics": {"counters", "errors", "store", "types"},
    "facts": {"types"},
    "volatile": set(),
    "probe": {"codecs"},
    "chat": {"tokens"},
    "mlx_lm": {
        "chat", "codecs", "counters", "errors", "opaque", "store", "tokens", "types",
    },
    "localai": {"counters", "mlx_lm", "opaque", "store", "types"},
    "doctor": {"codecs", "mlx_lm", "store", "types"},
    "serve": {
        "counters", "doctor", "errors", "facts", "metrics", "mlx_lm", "probe", "store",
        "tokens", "types",
    },
    "cli": {
        "", "chat", "doctor", "errors", "facts", "mlx_lm", "serve", "volatile",
    },
    "__main__": {"cli"},
}  # fmt: skip
"""For each module or package what else of promptstore it may import. The empty name
is promptstore itself, the public API. Each line needs only lines above it."""

THIRD_PARTY: dict[str, set[str]] = {
    "mlx": {
        "buffers", "codecs", "capture", "parameters", "probe", "mlx_lm", "doctor",
        "serve",
    },
    "mlx_lm": {"codecs", "probe", "mlx_lm", "doctor", "serve", "cli"},
    "numpy": {
        "buffers", "chat", "cli", "disk", "index", "mlx_lm", "prefix", "radix",
        "rebuild",
        "snapshot", "tokens",
    },
    "xxhash": {"prefix", "snapshot"},
    "sqlite3": {"index", "counters", "cli"},
    "sqlite_utils": {"index", "migrations"},
    "psutil": {"access"},
    "platformdirs": {"filehash", "store", "cli"},
    "huggingface_hub": {"identity"},
    "click": {"cli"},
    "rich": {"cli"},
    "jinja2": {"chat"},
    "prometheus_client": {"metrics"},
}  # fmt: skip
"""Who may know what is not ours: SQL is the index's, arrays are the codecs'."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield each module with the name of the line that it belongs to."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield parts[0].removesuffix("__init__") or "", ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports, anywhere in it, by its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for name in node.names:
                yield f"{node.module}.{name.name}"


def line_of(imported: str) -> str:
    """Return the line of ALLOWED that an import of promptstore belongs to."""
    name = imported.split(".")[1] if "." in imported else ""
    return name if name in ALLOWED else ""


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    """Every import of the package: who, and what."""
    return [(name, each) for name, tree in modules() for each in imports(tree)]


def test_the_table_has_a_direction() -> None:
    """Each line needs only lines above it, so that there are no cycles."""
    above: set[str] = set()
    for name, needed in ALLOWED.items():
        assert needed <= above, name
        above.add(name)


def test_every_module_has_its_line() -> None:
    """A new module states what it may import before it does."""
    assert {name for name, _ in modules()} <= ALLOWED.keys()


def test_imports_go_one_way(found: list[tuple[str, str]]) -> None:
    """Also inside functions and for types only: nothing imports what it may not."""
    wrong = {
        (name, imported)
        for name, imported in found
        if imported.split(".")[0] == "promptstore"
        and line_of(imported) not in ALLOWED[name] | {name}
    }
    assert wrong == set()


def test_the_table_allows_no_more_than_there_is(found: list[tuple[str, str]]) -> None:
    """What nobody imports any more is struck off the table."""
    used: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for name, imported in found:
        if imported.split(".")[0] == "promptstore":
            used[name].add(line_of(imported))
    rules = {"cli"}  # the command may use all of the public API
    for name in ALLOWED.keys() - rules:
        assert ALLOWED[name] <= used[name] | {name}, name


def test_only_the_store_knows_both_tiers() -> None:
    """Memory does not know the disk, nor the disk memory; the store joins them."""
    both = {name for name, needed in ALLOWED.items() if {"memory", "disk"} <= needed}
    assert both == {"matching", "saving", "store"}
    assert "memory" not in ALLOWED["disk"]
    assert "disk" not in ALLOWED["memory"]


def test_tools_are_where_they_belong(found: list[tuple[str, str]]) -> None:
    """SQL, arrays, hashes and terminals are known to those whose business they are."""
    wrong = {
        (name, imported)
        for name, imported in found
        if name not in THIRD_PARTY.get(imported.split(".")[0], {name})
    }
    assert wrong == set()


def test_no_module_imports_mlx_lm_to_be_imported() -> None:
    """mlx-lm takes seconds to import: only those with a model do so at once."""
    eager = set()
    for name, tree in modules():
        top = ast.Module([node for node in tree.body if not _is_function(node)], [])
        if any(each.split(".")[0] == "mlx_lm" for each in imports(top)):
            eager.add(name)
    assert eager == {"doctor", "mlx_lm", "probe", "serve"}


def _is_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def test_every_package_is_packaged() -> None:
    """A folder that pyproject.toml does not list is not in the wheel."""
    if not PYPROJECT.is_file():
        pytest.skip("no checkout")
    settings = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]
    folders = {
        ".".join(("promptstore", *path.parent.relative_to(ROOT).parts))
        for path in ROOT.rglob("__init__.py")
    }
    assert folders <= set(settings["packages"])
