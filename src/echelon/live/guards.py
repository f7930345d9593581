"""The guards of a live engine, between a decision and its orders.

What training never saw (`monitoring.guard`) and what the backtest did not lead to expect
(`monitoring.drift`) are looked for in every bar. What they see is an entry `guard` of the journal:

    settings    what the guards do from here on; they begin afresh
    alarm       begins; by its `action` it warns, lets the engine only reduce, or halts it
    end         of an alarm of `unlike_training`; the engine's mode stays as it is

All of it follows from the journal's entries and the bundle, so `replay` comes to the same entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.config.live import LiveConfig
from echelon.monitoring.drift import QUANTITIES, TESTS, DriftTests, market_return
from echelon.monitoring.guard import STATISTICS, Alarm, RowGuard
from echelon.serving.bundle import Bundle
from echelon.serving.engine import DecisionEngine
from echelon.serving.guard_reference import mean_embedding, shared_encoder
from echelon.states import State, below_prefix, with_prefix
from echelon.types import Floats

UNLIKE, DRIFT = "unlike_training", "drift"
Body = dict[str, Any]
_QUARTER = 0.25
"""Years that an alarm of drift is shown for."""


class Guards:
    """Of one engine; off where the bundle has no reference."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.settings: Body | None = None
        self.rows: RowGuard | None = None
        self.drift: DriftTests | None = None

    def new_settings(self, config: LiveConfig) -> Body | None:
        """The entry of settings that this configuration needs now; None: they are in force."""
        if self.bundle.guards is None:
            return None
        sections = {UNLIKE: config.guard.model_dump(), DRIFT: config.drift.model_dump()}
        body = {"event": "settings", **sections}
        return None if body == self.settings else body

    def _begin(self, settings: Body) -> None:
        reference = self.bundle.guards
        assert reference is not None, "settings are of a bundle with a reference"
        self.settings = settings
        periods = reference.rows.periods_per_year
        per_year = [float(settings[name]["false_alarms_per_year"]) for name in (UNLIKE, DRIFT)]
        self.rows = RowGuard(reference.rows, len(self.bundle.symbols), per_year[0])
        self.drift = DriftTests(reference.drift, per_year[1], periods)
        self._shown_for = round(_QUARTER * periods)
        self._alarms: dict[str, int] = {}  # quantity → bars until its alarm is not shown any more
        self._equity, self._exposure, self._mode = 0.0, 0.0, ""
        self._forget()

    def _forget(self) -> None:
        """What came of the last decision's orders."""
        self._sent: dict[str, float] = {}  # order → price of the decision
        self._whole: set[str] = set()  # of these, what was filled
        self._filled = [0.0] * 5  # traded, paid, at arrival, worse than that, away from it
        self._own = True  # nobody else traded on the account

    def note(self, kind: str, body: Mapping[str, Any]) -> None:
        """Take in any entry of the journal."""
        if kind == "guard" and body["event"] == "settings":
            self._begin(dict(body))
        if self.settings is None:
            return
        if kind == "order":
            self._own &= "by" not in body
            self._sent[body["id"]] = body["price"]
        elif kind == "status" and body["state"] == "filled" and body["id"] in self._sent:
            self._whole.add(body["id"])
        elif kind == "fills":
            for fill in body["fills"]:
                self._note_fill(fill)
        elif kind in ("command", "difference"):
            self._own = False

    def _note_fill(self, fill: Mapping[str, Any]) -> None:
        shares, price, filled = fill["shares"], fill["price"], self._filled
        filled[0] += abs(shares) * price
        filled[1] += fill["commission"] + fill["stamp"] + fill["slippage"]
        arrival = self._sent.get(fill["order_id"])
        if arrival is not None:
            moved = shares * (price - arrival)
            filled[2] += abs(shares) * arrival
            filled[3] += moved
            filled[4] += abs(moved)

    def check(self, decider: DecisionEngine, decision: Mapping[str, Any], mode: str) -> list[Body]:
        """Entries that follow from a bar; after `push`, before `complete` and the bar's orders.

        decision: as the journal has it; mode: the engine's
        """
        if self.rows is None or self.drift is None or self.settings is None:
            return []
        world, row = decider.world, int(decider.row)
        last = row - 1 if row > world.kept.start else row
        shown = world.present[row] & world.rows.tradable[row]
        encoder = shared_encoder(decider.policy)
        z = None if encoder is None else encoder.last_embedding(row)
        inner = None if z is None else mean_embedding(z, shown)
        time, bodies = decision["time"], []
        if shown.any():
            alarms = self.rows.check(world.x[row], world.x[last], shown, inner)
            bodies = [self._row_body(alarm, time) for alarm in alarms]
        account = decision["account"]
        usual = self._own and self._equity > 0.0 and mode == self._mode == "running"
        if usual and account["equity"] > 0.0:
            pairs = self._pairs(account["equity"], world, last, row)
            bodies += self._drift_bodies(pairs, time)
        self._equity, self._mode = account["equity"], mode
        self._exposure = 1.0 - account["cash"] / account["equity"] if account["equity"] else 0.0
        self._forget()
        return bodies

    def _pairs(self, equity: float, world: Any, last: int, row: int) -> Floats:  # noqa: ANN401 (a world)
        """[Q,2] of the step that ends with this bar; see `drift.QUANTITIES`."""
        before = world.present[last] & world.rows.tradable[last]
        market = market_return(world.growth[last], world.growth[row], before)
        earned = equity / self._equity - 1.0
        traded, paid, base, worse, away = self._filled
        return np.array(
            [
                (earned, 1.0),
                (earned - self._exposure * market, 1.0),
                (traded / self._equity, 1.0),
                (paid, traded),
                (len(self._whole), len(self._sent)),
                (worse, base),
                (away, base),
            ]
        )

    def _row_body(self, alarm: Alarm, time: str) -> Body:
        where = ""
        if alarm.culprit is not None:
            kind, n = alarm.culprit
            names = self.bundle.features["names"] if kind == "feature" else self.bundle.symbols
            where = f", most of {kind} {names[n]}"
        value, limit = f"{alarm.value:.4g}", f"{alarm.threshold:.4g}"
        text = f"{STATISTICS[alarm.name]}: {value}, threshold {limit}{where}"
        return self._body(UNLIKE, alarm.name, time, text, on=alarm.on)

    def _drift_bodies(self, pairs: Floats, time: str) -> list[Body]:
        assert self.drift is not None, "there are settings"
        self._alarms = {name: left - 1 for name, left in self._alarms.items() if left > 1}
        passed = self.drift.step(pairs)
        bodies = []
        for k, money in passed.items():
            name, expected = TESTS[k].quantity, self.drift.expectation.expected[k]
            side = "above" if TESTS[k].sign > 0.0 else "below"
            evidence = f"evidence {money:.4g}, limit {self.drift.limit:.4g}"
            text = f"{QUANTITIES[name]}: {side} the {expected:.4g} of the backtest, {evidence}"
            bodies.append(self._body(DRIFT, name, time, text, on=True))
            self._alarms[name] = self._shown_for
        return bodies

    def _body(self, guard: str, name: str, time: str, detail: str, *, on: bool) -> Body:
        assert self.settings is not None, "nothing is said without"
        event = {"event": "alarm", "action": self.settings[guard]["action"]} if on else _END
        return {**event, "guard": guard, "name": name, "time": time, "detail": detail}

    def reading(self) -> Mapping[str, Mapping[str, float]]:
        """What the metrics show: name of a metric → label ("": none) → number."""
        if self.rows is None or self.drift is None:
            return {}
        rows, drift, names = self.rows, self.drift, self.bundle.features["names"]
        shares = rows.levels.values[: len(names)].tolist()
        statistics = dict(zip(STATISTICS, rows.statistics, strict=True))
        limits = dict(zip(STATISTICS, rows.thresholds, strict=True))
        limits = {name: limit for name, limit in limits.items() if limit < np.inf}
        evidence = dict.fromkeys(QUANTITIES, 0.0)
        for test, money in zip(TESTS, drift.evidence.tolist(), strict=True):
            evidence[test.quantity] = max(evidence[test.quantity], money)
        return {
            "guard_out_of_range_share": {"": statistics["out_of_range"]},
            "guard_feature_out_of_range_share": dict(zip(names, shares, strict=True)),
            "guard_distance": {"": statistics["distance"]},
            "guard_threshold": limits,
            "guard_alarm": {
                name: float(left > 0)
                for name, left in zip(STATISTICS, rows.left, strict=True)
                if name in limits
            },
            "drift_statistic": evidence,
            "drift_threshold": {"": drift.limit},
            "drift_alarm": {name: float(name in self._alarms) for name in QUANTITIES},
        }

    def state(self) -> tuple[State, Body]:
        """(arrays, document) of all that the next check depends on."""
        if self.rows is None or self.drift is None:
            return {}, {}
        arrays = with_prefix("rows.", self.rows.state()) | with_prefix("drift.", self.drift.state())
        facts = {
            "settings": self.settings,
            "equity": self._equity,
            "exposure": self._exposure,
            "mode": self._mode,
            "own": self._own,
            "alarms": self._alarms,
            "sent": {name: [price, name in self._whole] for name, price in self._sent.items()},
        }
        return arrays | {"filled": np.array(self._filled)}, facts

    def restore(self, arrays: Mapping[str, NDArray[Any]], facts: Body) -> None:
        """Go on from what `state` gave; of a journal without guards, stay off."""
        if not facts:
            return
        self._begin(facts["settings"])
        assert self.rows is not None and self.drift is not None, "they have begun"  # noqa: PT018
        self.rows.restore(below_prefix("rows.", arrays))
        self.drift.restore(below_prefix("drift.", arrays))
        self._equity, self._exposure = float(facts["equity"]), float(facts["exposure"])
        self._mode, self._own = str(facts["mode"]), bool(facts["own"])
        self._alarms = {str(name): int(left) for name, left in facts["alarms"].items()}
        self._sent = {name: float(price) for name, (price, _) in facts["sent"].items()}
        self._whole = {name for name, (_, whole) in facts["sent"].items() if whole}
        self._filled = np.array(arrays["filled"], dtype=np.float64).reshape(5).tolist()


_END: Body = {"event": "end"}
