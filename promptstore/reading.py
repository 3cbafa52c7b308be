"""A model's files: whatever is wrong with one is one error that names it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from promptstore.errors import ModelUnreadable

# No model reads these; transformers writes them at any depth.
_NAMES = {"_name_or_path", "transformers_version"}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise what the system or a parser has against a file as one error.

    Args:
        path: The file or directory that is being read.

    Raises:
        ModelUnreadable: In place of ``OSError``, ``ValueError`` or ``RecursionError``.
    """
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelUnreadable(path, reason) from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, less what only names things, at any depth.

    Raises:
        ModelUnreadable: It is missing, or not a JSON object.
    """
    with reading(path):
        value = json.loads(
            path.read_bytes(),
            object_hook=lambda pairs: {
                key: pairs[key] for key in pairs if key not in _NAMES
            },
        )
    if not isinstance(value, dict):
        raise ModelUnreadable(path, "not a JSON object")
    return value
