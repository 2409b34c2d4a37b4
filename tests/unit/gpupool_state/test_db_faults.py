"""What goes wrong with files, disks and other programs, and how it is told."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpupool_state import Database
from gpupoold.errors import Failed, Refused

pytestmark = pytest.mark.asyncio

ADD = "INSERT INTO events VALUES (?, 0, 'info', 'k', 's', ?)"
OPEN_UNPRIVILEGED = """
import asyncio, os, sys
from pathlib import Path
from gpupool_state import Database
from gpupoold.errors import Failed

if os.geteuid() == 0:  # permissions do not bind root
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)

async def main():
    try:
        db = await Database.open(Path(sys.argv[1]))
        try:
            async with db.write() as tx:
                await tx.execute("DELETE FROM events")
        finally:
            await db.close()
    except Failed as error:
        print(error)

asyncio.run(main())
"""


async def test_only_the_owner_may_read_the_file(db: Database) -> None:
    assert db.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "kind", ["below a file", "missing folder", "no place for files", "a folder itself"]
)
async def test_a_path_that_cannot_be_opened(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "gpupool.db").mkdir(parents=True)
    folder = {
        "below a file": tmp_path / "file",
        "missing folder": tmp_path / "missing",
        "no place for files": Path("/proc/self"),
        "a folder itself": tmp_path / "taken",
    }[kind]
    with pytest.raises(Failed, match=r"gpupool\.db cannot be opened") as caught:
        await Database.open(folder / "gpupool.db")
    assert "may write there" in caught.value.hint


async def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_bytes(b"these are my notes, not a database\n" * 100)
    with pytest.raises(Failed, match="is not a SQLite database"):
        await Database.open(path)
    assert path.read_bytes().startswith(b"these are my notes"), "it must be left alone"


async def test_a_database_of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(Refused, match="not a database of gpupool"):
        await Database.open(path)


async def test_a_damaged_database(path: Path) -> None:
    async with await Database.open(path) as db, db.write() as tx:
        await tx.execute_many(ADD, [(number, "x" * 500) for number in range(200)])
    with path.open("r+b") as file:
        file.seek(8 * 4096)
        file.write(os.urandom(20 * 4096))
    with pytest.raises(Failed, match="is damaged") as caught:
        await Database.open(path)
    assert "backup" in caught.value.hint


async def test_an_empty_file_becomes_a_database(path: Path) -> None:
    path.touch()
    async with await Database.open(path) as db:
        assert await db.fetch_all("SELECT * FROM models") == []


@pytest.mark.parametrize("trace", ["DB-wal", "DB.bak-12", "snapshots/a", "models/b", "files/c"])
async def test_an_emptied_database_is_no_new_one(trace: str, path: Path) -> None:
    """A registry that is lost silently is worse than one that does not open."""
    trace = trace.replace("DB", path.name)
    async with await Database.open(path):
        pass
    path.write_bytes(b"")
    left = path.parent / trace
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"x")
    with pytest.raises(Refused, match="is empty, but its folder has") as caught:
        await Database.open(path)
    assert trace.split("/")[0] in caught.value.message
    assert f"replace {path.name} by " in caught.value.hint
    assert f"move {trace.split('/')[0]} to another folder" in caught.value.hint
    assert (left.read_bytes(), path.stat().st_size) == (b"x", 0), "nothing was changed"
    left.unlink()
    async with await Database.open(path) as db:
        assert await db.fetch_all("SELECT * FROM models") == []


@pytest.mark.parametrize("keeps", [(), ("schema_migrations",)])
async def test_a_database_whose_tables_are_gone(keeps: tuple[str, ...], path: Path) -> None:
    async with await Database.open(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        rows = other.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in rows:
            if name not in keeps and not name.startswith("sqlite_"):
                other.execute(f"DROP TABLE {name}")
        if keeps:
            other.execute("DELETE FROM schema_migrations")
    path.with_name(f"{path.name}.bak-3").write_bytes(b"x")
    with pytest.raises(Refused, match="is empty, but its folder has") as caught:
        await Database.open(path)
    assert f"the backup {path.name}.bak-3" in caught.value.hint


async def test_a_database_without_its_record_of_the_schema(path: Path) -> None:
    async with await Database.open(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("DROP TABLE schema_migrations")
    with pytest.raises(Refused, match="not a database of gpupool"):
        await Database.open(path)


async def test_a_user_version_of_the_future(path: Path) -> None:
    async with await Database.open(path):
        pass
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA user_version = 99")
    with pytest.raises(Refused, match="has the user_version 99"):
        await Database.open(path)


async def test_a_lock_held_by_another_program(db: Database) -> None:
    with closing(sqlite3.connect(db.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Failed, match="locked by another program"):
            async with db.write() as tx:
                await tx.execute(ADD, (1, ""))
        assert await db.fetch_all("SELECT * FROM events") == [], "reading goes on"
        other.execute("ROLLBACK")
    async with db.write() as tx:
        await tx.execute(ADD, (1, ""))


async def test_a_full_disk(
    db: Database, fill_disk: Callable[[], Awaitable[None]], free_disk: Callable[[], Awaitable[None]]
) -> None:
    await fill_disk()
    with pytest.raises(Failed, match="no space left"):
        async with db.write() as tx:
            await tx.execute_many(ADD, [(1, ""), (2, "x" * 10_000)])
    assert await db.fetch_all("SELECT * FROM events") == []
    await free_disk()
    async with db.write() as tx:
        await tx.execute(ADD, (2, "x" * 10_000))
    assert len(await db.fetch_all("SELECT * FROM events")) == 1


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder outside pytest's own, which other users may not enter."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    folder.chmod(0o700)
    shutil.rmtree(folder)


def open_unprivileged(path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", OPEN_UNPRIVILEGED, str(path)],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


async def test_a_read_only_folder_without_a_database(shared_folder: Path) -> None:
    shared_folder.chmod(0o555)
    assert "gpupool.db cannot be opened" in open_unprivileged(shared_folder / "gpupool.db")


async def test_a_read_only_folder_with_a_database(shared_folder: Path) -> None:
    path = shared_folder / "gpupool.db"
    await (await Database.open(path)).close()
    path.chmod(0o444)
    shared_folder.chmod(0o555)
    assert "no permission to read and write" in open_unprivileged(path)


async def test_a_read_only_folder_with_a_writable_database(shared_folder: Path) -> None:
    path = shared_folder / "gpupool.db"
    await (await Database.open(path)).close()
    path.chmod(0o666)
    shared_folder.chmod(0o555)
    told = open_unprivileged(path)  # there is no room for the log beside it
    assert "cannot be opened" in told or "cannot be written" in told
    assert "folder" in told
