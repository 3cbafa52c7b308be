"""Register the numbered SQL files beside this one, in order.

The file has this name so that ``sqlite-utils migrate index.db migrations/`` finds it.
"""

from pathlib import Path

from sqlite_utils import Database, Migrations

index_migrations = Migrations("promptstore.index")


def _register(path: Path) -> None:
    sql = path.read_text(encoding="utf-8")

    def step(db: Database) -> None:
        db.executescript(sql)

    index_migrations(name=path.stem)(step)


for _path in sorted(Path(__file__).parent.glob("m[0-9]*_*.sql")):
    _register(_path)
