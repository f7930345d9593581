"""A journal run again: whether what was decided live follows from what was seen.

1. Decisions: bars and accounts of the journal through a fresh engine give every decision again,
   whatever the broker was, and every entry of the guards. What a venue did cannot be computed, what
   was decided of it can.
2. The whole of it: `run_backtest` of the bundle's policy over the journal's bars, for which nothing
   but the journal and the bundle is needed. With a paper venue, decisions, fills and equity equal
   it bit for bit, up to the first order that the risk gate or an operator touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from echelon.backtest.policy import Policy
from echelon.backtest.run import Backtest, run_backtest
from echelon.envs.world import World
from echelon.errors import DataError
from echelon.files import blaming
from echelon.live.brokers import account_of
from echelon.live.engine import LiveState, holdable
from echelon.live.guards import Guards
from echelon.live.journal import Journal, decode_bars
from echelon.serving.bundle import Bundle
from echelon.serving.decision import Decision
from echelon.serving.engine import DecisionEngine
from echelon.serving.replay import compare_decisions
from echelon.serving.state_file import decode_state
from echelon.states import below_prefix

_REMEDY = "Run `echelon live journal verify`."


class JournalReplay(NamedTuple):
    """What running a journal again showed.

    backtest: of the same bars; None: fewer than two. compared: bars of it that were compared,
        none of a broker whose fills cannot be computed
    world, span, policy: what the backtest is of
    touched: first bar whose orders were changed by risk gate or operator; differences: none: equal
    """

    decisions: tuple[Decision, ...]
    backtest: Backtest | None
    compared: int
    orders: int
    touched: str | None
    differences: tuple[str, ...]
    world: World
    span: range
    policy: Policy


def replay_journal(bundle: Bundle, journal: Journal) -> JournalReplay:
    """Run a journal again, twice; see the module's text."""
    if journal.about()["bundle"] != bundle.id:
        raise DataError(f"{journal.path}: the journal of another bundle than {bundle.path}.")
    differences: list[str] = []
    decisions: list[Decision] = []
    bars, account, first, touched, orders = None, None, 0, None, 0
    state, guards, due = LiveState(), Guards(bundle), list[dict[str, Any]]()
    if journal.last("decision") is None:
        raise DataError(
            f"{journal.path}: nothing was decided yet. Run `echelon live run` until a bar has come."
        )
    with blaming(journal.path, _REMEDY):
        again, rows = _engine(bundle, journal), _engine(bundle, journal, keep_all=True)
        for entry in journal.entries():
            kind, body = entry.kind, entry.body
            if kind == "guard" and body["event"] != "settings":
                if not due or due.pop(0) != body:
                    differences.append(f"{body['time']}: another entry of the guards than computed")
            elif kind == "bars":
                differences += [
                    f"{lost['time']}: an entry of the guards is missing" for lost in due
                ]
                due.clear()
                bars = decode_bars(body, entry.data or b"")
            elif kind == "account":
                account = account_of(body)
            elif kind == "decision":
                assert bars is not None, "bars come before their decision"
                row = rows.observe(bars)
                first = first if decisions else row
                assert account is not None, "an account comes before its decision"
                decision = again.push(bars, holdable(account))
                due += guards.check(again, body, state.mode)
                again.complete()
                decisions.append(decision)
                if decision.to_dict() != body:
                    differences.append(f"{body['time']}: another decision than in the journal")
            elif kind == "order":
                orders += 1
                touched = touched or (body["bar"] if "by" in body else None)
            elif kind == "stopped":
                touched = touched or body["bar"]
            state.apply(kind, body)
            guards.note(kind, body)
        differences += [f"{lost['time']}: an entry of the guards is missing" for lost in due]
    backtest, compared = None, 0
    # The policy of an engine knows what the router saw before the journal's first bar.
    policy, span = rows.policy, range(first, first + len(decisions))
    if (hierarchy := rows.hierarchy) is not None:
        hierarchy.keep_record = True
    if len(decisions) > 1:
        backtest = run_backtest(policy, rows.world, span, bundle.config)
    if backtest is not None and journal.about()["broker"] == "paper":
        compared = len(decisions)
        if touched is not None:
            compared = sum(str(decision.time) <= touched for decision in decisions)
        with blaming(journal.path, _REMEDY):
            fills = _fills_by_bar(journal)
        differences += compare_decisions(decisions[:compared], backtest, fills)
    return JournalReplay(
        *(tuple(decisions), backtest, compared, orders, touched, tuple(differences)),
        *(rows.world, span, policy),
    )


def _fills_by_bar(journal: Journal) -> dict[str, dict[str, tuple[float, float]]]:
    """Time of a bar set → symbol → (shares, price) of the fills written down with it."""
    every: dict[str, dict[str, tuple[float, float]]] = {}
    time = ""
    for entry in journal.entries(kinds=("fills", "bars")):
        if entry.kind == "bars":
            time = entry.body["time"]
            every[time] = {}
        else:
            for fill in entry.body["fills"]:
                every[time][fill["symbol"]] = fill["shares"], fill["price"]
    return every


def _engine(bundle: Bundle, journal: Journal, *, keep_all: bool = False) -> DecisionEngine:
    """The engine as it was before the journal's first bar."""
    first = journal.last_snapshot(first=True)
    if first is None:
        raise DataError(f"{journal.path}: holds no snapshot, so no engine has started by it yet.")
    parts, facts = decode_state(first[1], journal.path, _REMEDY)
    n_bars = sum(1 for _ in journal.entries(kinds=("decision",))) if keep_all else 0
    below = below_prefix("engine.", parts)
    lookback = n_bars + len(below["world.rows.times"]) if keep_all else 0
    return DecisionEngine.from_state(
        bundle, below, facts["engine"], journal.path, lookback=lookback
    )
