"""The schema of the index, as numbered SQL files that are applied in order."""

from pathlib import Path

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("m[0-9]*.sql")))
"""The migrations that this version knows. Reading them imports nothing."""
