"""What engines and venues left behind: what must hold after a kill, and equal the reference's."""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
_ORDER = ("id", "bar", "symbol", "side", "shares", "price", "wanted", "spend")


def engine_facts(path: Path) -> Facts:
    """Of an engine's journal, whose chain is verified; JSON.

    Bars with the digest of their numbers, decisions, orders and fills whole, and what is held at
    each bar. How often the engine asked, and what it was answered on the way, is left out.
    """
    from echelon.live.journal import Journal

    facts: Facts = {
        name: [] for name in ("bars", "decisions", "orders", "fills", "accounts", "stopped")
    }
    facts |= {"refused": [], "halts": [], "statuses": {}, "offsets": {}}
    with Journal.read(path) as journal:
        journal.verify()
        for entry in journal.entries():
            kind, body = entry.kind, entry.body
            if kind == "bars":
                digest = hashlib.sha256(entry.data or b"").hexdigest()[:16]
                facts["bars"].append([body["time"], digest])
                facts["offsets"] = body["offsets"]
            elif kind == "decision":
                facts["decisions"].append(body)
            elif kind == "account":
                facts["accounts"].append(body)
            elif kind == "order":
                facts["orders"].append([body[name] for name in _ORDER])
            elif kind == "fills":
                facts["fills"] += body["fills"]
            elif kind == "stopped":
                facts["stopped"].append([body["id"], body["code"]])
            elif kind == "refused":
                facts["refused"].append([body[k] for k in ("source", "offset", "time", "reason")])
            elif kind == "halt":
                facts["halts"].append(body["reason"])
            elif kind == "status":
                facts["statuses"][body["id"]] = body["state"], body["filled"]
    facts["equity"] = facts["decisions"][-1]["account"]["equity"] if facts["decisions"] else None
    return facts


def venue_facts(path: Path) -> Facts:
    """Of a paper venue's journal, whose chain is verified."""
    from echelon.live.journal import Journal

    facts: Facts = {"bars": [], "orders": [], "fills": [], "states": {}, "account": None}
    with Journal.read(path) as journal:
        journal.verify()
        for entry in journal.entries():
            body = entry.body
            if entry.kind == "bars":
                facts["bars"].append(body["time"])
            elif entry.kind == "orders":
                facts["orders"] += [order["id"] for order in body["orders"]]
            elif entry.kind == "shown":
                facts["fills"] += body["fills"]
                facts["account"] = body["account"]
            for status in body.get("statuses", ()):
                facts["states"][status["id"]] = status["state"]
    return facts


def chain_problems(path: Path) -> list[str]:
    """What is broken in a journal that a killed process left; one that never began is whole."""
    from echelon.errors import EchelonError
    from echelon.live.journal import Journal

    if not path.exists() or not _has_entries(path):
        return []
    try:
        with Journal.read(path) as journal:
            journal.verify()
    except EchelonError as error:
        return [f"{path.name}: {error}"]
    return []


def _has_entries(path: Path) -> bool:
    with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True) as db:
        known = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'entries'").fetchone()
        some = known[0] and db.execute("SELECT count(*) FROM entries").fetchone()[0]
    db.close()
    return bool(some)


def differences(facts: Facts, reference: Facts, *, but: Sequence[str] = ()) -> list[str]:
    """Where the facts are not the undisturbed run's; `but`: names that may differ."""
    problems = []
    for name in reference.keys() - {"statuses", *but}:
        here, there = facts[name], reference[name]
        if here == there:
            continue
        detail = f"{str(here)[:80]}, not {str(there)[:80]}"
        if isinstance(here, list):
            at = next(
                (k for k, (a, b) in enumerate(zip(here, there, strict=False)) if a != b),
                min(len(here), len(there)),
            )
            detail = f"{len(here)} of {len(there)}, the first that differs is number {at}"
        problems.append(f"{name}: {detail}")
    return sorted(problems)


def repeated(names: Sequence[Any], what: str) -> list[str]:
    """What is there more than once."""
    counts = Counter(names)
    return [f"{what} {name}: {count} times" for name, count in counts.items() if count > 1]


def paper_problems(engine: Facts, venue: Facts) -> list[str]:
    """Each bar, order and fill exactly once on both sides, and the same at the end."""
    times = [time for time, _ in engine["bars"]]
    sent = [order[0] for order in engine["orders"]]
    problems = repeated(times, "bar") + repeated(venue["bars"], "bar at the venue")
    problems += repeated(sent, "order") + repeated(venue["orders"], "order at the venue")
    problems += repeated([fill["trade_id"] for fill in engine["fills"]], "fill")
    if times != venue["bars"]:
        problems.append(f"the venue saw {len(venue['bars'])} bars, the engine {len(times)}")
    if sorted(sent) != sorted(venue["orders"]):
        lost, more = set(sent) - set(venue["orders"]), set(venue["orders"]) - set(sent)
        problems.append(f"orders: {len(lost)} never came to the venue, {len(more)} are not ours")
    if engine["fills"] != venue["fills"]:
        problems.append(f"fills: {len(engine['fills'])} here, {len(venue['fills'])} at the venue")
    if engine["accounts"] and engine["accounts"][-1] != venue["account"]:
        problems.append("the account is not the venue's")
    return problems


def identity_problems(
    engine: Facts, cash: float, venue: Mapping[str, Any], tolerance: float = 1e-6
) -> list[str]:
    """Whether the fills written down add up to what the venue holds; cash: at the beginning."""
    problems = repeated([fill["trade_id"] for fill in engine["fills"]], "fill")
    held: Counter[str] = Counter()
    for fill in engine["fills"]:
        cash -= fill["shares"] * fill["price"] + fill["commission"] + fill["stamp"]
        held[fill["symbol"]] += fill["shares"]
    if abs(cash - venue["cash"]) > tolerance * max(1.0, abs(cash)):
        problems.append(f"cash by the fills is {cash:.6f}, at the venue {venue['cash']:.6f}")
    for symbol in held.keys() | venue["positions"].keys():
        here, there = held[symbol], venue["positions"].get(symbol, 0.0)
        if abs(here - there) > tolerance * max(1.0, abs(here)):
            problems.append(f"{symbol} by the fills is {here:g}, at the venue {there:g}")
    return problems
