"""A journal that somebody else wrote: its chain holds, and it ends in one of our errors."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from engines import Served, daily

from echelon.config.live import LiveConfig
from echelon.errors import DamagedError
from echelon.live.brokers import open_broker
from echelon.live.engine import LiveEngine
from echelon.live.feeds import open_feed
from echelon.live.journal import Journal, _digest
from echelon.live.replay import replay_journal
from echelon.live.tables import export_tables, last_status

CONFIG = LiveConfig(sync=False, snapshot_every=2)


def _engine(known: Served, journal: Path, until: date | None = None) -> LiveEngine:
    bundle, store = known.bundle, known.store
    broker = open_broker("paper", bundle, journal, store, until, CONFIG)
    feed = open_feed("store", bundle, store)
    try:
        return LiveEngine.open(bundle, store, journal, feed, broker, CONFIG, until=until)
    except BaseException:
        broker.close()
        raise


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Served:
    return daily(tmp_path_factory.mktemp("forged"), bars_file, "A2C")


@pytest.fixture(scope="module")
def written(known: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three bars, with an entry of every bar behind the last snapshot. Copy it."""
    directory = tmp_path_factory.mktemp("journal")
    day = known.world.times[known.rows(6).start - 1].astype("datetime64[D]").item()
    assert isinstance(day, date)
    with _engine(known, directory / "live.db", day) as engine:
        engine.run(bars=3)
    return directory


def _forge(path: Path, kind: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the newest entry of a kind, and make the chain anew."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TRIGGER entries_stay; DROP TRIGGER entries_keep;")
        query = "SELECT seq, body FROM entries WHERE kind = ? ORDER BY seq DESC LIMIT 1"
        seq, body = db.execute(query, (kind,)).fetchone()
        changed = change(json.loads(body))
        text = changed if isinstance(changed, str) else json.dumps(changed)
        db.execute("UPDATE entries SET body = ? WHERE seq = ?", (text, seq))
        before = b""
        rows = db.execute("SELECT seq, kind, body, data FROM entries ORDER BY seq").fetchall()
        for seq, kind_of, body, data in rows:
            before = _digest(before, kind_of, body, data)
            db.execute("UPDATE entries SET hash = ? WHERE seq = ?", (before, seq))
        db.commit()


def _without(*names: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tree: {name: value for name, value in tree.items() if name not in names}


FORGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "bars without offsets": ("bars", _without("offsets", "time")),
    "bars of other arrays": ("bars", lambda tree: tree | {"arrays": [["close", "<f8", [-7]]]}),
    "bars of a type": ("bars", lambda tree: tree | {"arrays": [["close", "nothing", [3]]]}),
    "bars of text": ("bars", lambda tree: "[1, 2]"),
    "nested deeply": ("bars", lambda tree: "[" * 100_000 + "]" * 100_000),
    "decision of nobody": ("decision", _without("account", "time", "target")),
    "decision of text": ("decision", lambda tree: tree | {"account": "none", "target": "none"}),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_entry_is_a_damaged_journal(
    name: str, known: Served, written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "live.db"
    _forge(path, *FORGED[name])
    refused = 0
    for look in (
        last_status,
        lambda journal: export_tables(journal, tmp_path / "tables"),
        lambda journal: replay_journal(known.bundle, journal),
    ):
        with Journal.read(path) as journal:
            journal.verify()  # the chain holds
            try:
                look(journal)
            except DamagedError as error:
                refused += str(path) in str(error)
    assert refused >= 2
    with pytest.raises(DamagedError, match=rf"{path}.*damaged"):
        _engine(known, path)
    again = Journal.open(path, {"bundle": known.bundle.id})  # its lock was let go
    again.close()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("shown", lambda tree: tree | {"account": 1.5}),
        ("shown", _without("account", "fills", "statuses")),
        ("bars", lambda tree: tree | {"arrays": [["close", "<f8"]]}),
        ("bars", lambda tree: "null"),
    ],
)
def test_forged_entry_of_the_venue_is_a_damaged_journal(
    kind: str,
    change: Callable[[dict[str, Any]], Any],
    known: Served,
    written: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    _forge(tmp_path / "live.db.venue", kind, change)
    with (
        pytest.raises(DamagedError, match=r"live\.db\.venue.*damaged"),
        _engine(known, tmp_path / "live.db") as engine,
    ):
        engine.run(bars=1)
