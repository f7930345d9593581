"""`make chaos` in short: live engines killed, logs cut, venues that fail; and its plan and checks.

The harness forks, and a test process has threads by now: it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from needed import need

from reliability import _chaos_kills, _live_facts
from reliability._chaos import Reference, Session
from reliability._chaos_wal import commit_ends
from reliability.worlds import SERVED
from scripts.services import MOTO, TANSU

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


def chaos(worlds: Path, work: Path, *words: str, fails: bool = False) -> dict[str, Any]:
    """What one session of the harness wrote, which found a fault or not."""
    pytest.importorskip("alpaca", reason="alpaca-py is in the extra `live`")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "reliability", "chaos", "--worlds", str(worlds)),
            *("--work", str(work), "--seed", "1", *words),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == int(fails), done.stdout[-8000:] + done.stderr[-4000:]
    tree: dict[str, Any] = json.loads((work / "chaos.json").read_text())
    assert (tree["failures"] > 0) == fails
    return tree


@pytest.mark.services
@pytest.mark.timeout(800)
def test_kills_cuts_and_faults_lose_nothing_and_change_no_trade(
    worlds: Path, tmp_path: Path
) -> None:
    wanted = {
        **{"kills": 100, "truncations": 200, "fresh": 15, "venue": 8},
        **{"calls": 10, "alpaca": 8, "disk": 4, "clock": 4},
    }
    words = [word for name, count in wanted.items() for word in (f"--{name}", str(count))]
    tree = chaos(worlds, tmp_path / "work", *words, "--kafka", "0")
    for name, count in wanted.items():
        assert tree["classes"][name]["events"] >= count
    assert tree["classes"]["kills"]["points_covered"] > 25
    assert tree["classes"]["kills"]["counts"]["at random moments"] > 20
    assert tree["engine_points"] > 40
    assert tree["venue_points"] > 10


@pytest.mark.services
@pytest.mark.timeout(600)
def test_a_kafka_broker_that_is_killed_loses_no_bar(worlds: Path, tmp_path: Path) -> None:
    need(TANSU, MOTO)
    tree = chaos(worlds, tmp_path / "work", "--only", "kafka", "--kafka", "4")
    assert tree["classes"]["kafka"]["events"] >= 4


@pytest.mark.services
@pytest.mark.timeout(600)
def test_a_venue_that_forgets_orders_is_found_and_kept(worlds: Path, tmp_path: Path) -> None:
    words = ("--only", "calls", "--calls", "4", "--plant")
    tree = chaos(worlds, tmp_path / "work", *words, fails=True)
    problems = [text for row in tree["rows"]["calls"] for text in row["problems"]]
    assert any(text.startswith("order at the venue") for text in problems)
    assert list((tmp_path / "work" / "failures").iterdir())


def session() -> Session:
    known = Session(Path(), Path())
    for name in SERVED:
        known.references[name] = Reference(2.0, {}, {}, {"before commit": 9, "after submit": 5})
    return known


def test_the_plan_is_that_of_its_seed_and_walks_through_all_points() -> None:
    plans = [list(islice(_chaos_kills.plan_kills(session(), seed), 60)) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    kills = [kill for case in plans[0] for kill in case.kills]
    assert {kill.point for kill in kills} == {"", "before commit", "after submit"}
    assert all(1 <= kill.nth <= 9 for kill in kills if kill.point)
    assert len([kill for kill in kills if not kill.point]) > len(kills) // 3
    assert {case.world for case in plans[0]} == set(SERVED)
    assert any(case.fresh for case in plans[0])


def test_commits_in_a_log_are_those_that_sqlite_finds(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE t(x)")
    for size in (10, 9_000, 20):
        db.execute("INSERT INTO t VALUES(?)", (b"x" * size,))
    log = (tmp_path / "a.db-wal").read_bytes()
    ends = commit_ends(log)
    assert len(ends) == 4
    assert ends[-1] == len(log)
    rng = random.Random(1)
    for length in (*ends, *(end - 1 for end in ends), *(rng.randrange(len(log)) for _ in range(9))):
        place = tmp_path / "cut.db"
        place.write_bytes((tmp_path / "a.db").read_bytes())
        place.with_name("cut.db-wal").write_bytes(log[:length])
        cut = sqlite3.connect(place)
        has_table = cut.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        rows = cut.execute("SELECT count(*) FROM t").fetchone()[0] if has_table else 0
        cut.close()
        assert has_table + rows == sum(end <= length for end in ends)
    db.close()


def facts() -> tuple[_live_facts.Facts, _live_facts.Facts]:
    fill = {"trade_id": "t", "symbol": "A", "shares": 2.0, "price": 5.0}
    fills = [{**fill, "commission": 1.0, "stamp": 0.0}]
    account = {"cash": 89.0, "positions": {"A": 2.0}, "locked": {}}
    engine = {"bars": [["1", "x"], ["2", "y"]], "orders": [["o"]], "fills": fills}
    venue = {"bars": ["1", "2"], "orders": ["o"], "fills": fills, "account": account}
    return {**engine, "accounts": [account]}, venue


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("bars", ["1", "1", "2"], "bar at the venue 1: 2 times"),
        ("bars", ["1"], "the venue saw 1 bars, the engine 2"),
        ("orders", ["o", "o"], "order at the venue o: 2 times"),
        ("orders", [], "orders: 1 never came to the venue, 0 are not ours"),
        ("fills", [], "fills: 1 here, 0 at the venue"),
        ("account", {"cash": 1.0}, "the account is not the venue's"),
    ],
)
def test_what_differs_at_the_venue_is_found(name: str, value: Any, problem: str) -> None:
    engine, venue = facts()
    assert _live_facts.paper_problems(engine, venue) == []
    assert problem in _live_facts.paper_problems(engine, {**venue, name: value})


def test_fills_that_do_not_add_up_are_found() -> None:
    engine, venue = facts()
    assert _live_facts.identity_problems(engine, 100.0, venue["account"]) == []
    assert len(_live_facts.identity_problems(engine, 101.0, venue["account"])) == 1
    twice = {**engine, "fills": engine["fills"] * 2}
    assert "fill t: 2 times" in _live_facts.identity_problems(twice, 100.0, venue["account"])
    reference = {"bars": engine["bars"], "equity": 1.0}
    assert _live_facts.differences({"bars": engine["bars"], "equity": 1.0}, reference) == []
    found = _live_facts.differences({"bars": engine["bars"][:1], "equity": 2.0}, reference)
    assert found == ["bars: 1 of 2, the first that differs is number 1", "equity: 2.0, not 1.0"]
