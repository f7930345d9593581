"""Names and events of a hierarchy in the reader's language."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from echelon.agents.mfpbt import (
    Decision,
    PopulationPlan,
    Range,
    conclude_trial,
    evolve,
    propose,
    reseed,
)
from echelon.config.hierarchy import RiskConfig
from echelon.population.evolution import Evolution
from echelon.report.texts import Words, catalogue
from echelon.risk.budget import BudgetVerdict, ExposureBudget
from echelon.risk.cvar import CvarGuard, CvarVerdict
from echelon.risk.drawdown import DrawdownGuard, DrawdownVerdict
from echelon.risk.events import RiskEvent, RiskKind
from echelon.risk.portfolio import HaltVerdict, PortfolioHalt, Turnover, TurnoverLimit

EN, ZH = Words("en"), Words("zh")


def risk_events() -> list[RiskEvent]:
    """An event of every rule, as the rules themselves write it."""
    each, book, value = np.ones((1, 2), dtype=bool), np.ones(1, dtype=bool), np.full((1, 2), 0.2)
    names, weights = ["expert 0", "cash"], np.full((1, 2), 0.3)
    loss = DrawdownVerdict(value, each, each, each, np.zeros(1, dtype=np.int64), book)
    tail = CvarVerdict(value, np.ones((1, 2)), each, each)
    halt = HaltVerdict(value[:, 0], book, book, book)
    share, wanted, made = (np.full(1, x) for x in (0.37, 2.0, 0.5))
    cap = BudgetVerdict(wanted / 4.0, share, share, book, book, book)
    traded = Turnover(weights, share, wanted, made, made, book)
    return [
        *DrawdownGuard(1, 2, 1, RiskConfig()).events(loss, 0, names),
        *CvarGuard((1, 2), RiskConfig()).events(tail, 0, names),
        *PortfolioHalt(1, 0.25, 20).events(halt, 0),
        *ExposureBudget(1, RiskConfig(max_drawdown=0.15), 252.0).events(cap, 0),
        *TurnoverLimit(1, 2.0, 20.0).events(traded, 0),
    ]


def decisions() -> list[Decision]:
    """Decisions of every kind that evolution makes of itself."""
    space = {"lr": Range(1e-4, 1e-2)}
    single = PopulationPlan(niches=3, per_niche=1, frequencies=(1,), space=space)
    values = [{"lr": 1e-3}] * 3
    tried = propose(single, 1, np.array([1.0, 2.0, -1e-7]), values, 0)
    assert tried is not None
    found = [tried.decision, conclude_trial(tried, 2, 5.0), conclude_trial(tried, 2, -5.0)]
    found += reseed(single, 1, np.array([1.0, 2.0, 3.0]), values, 0.1, 0.25)
    evolution = Evolution(single, values, 0, skills=np.eye(3))
    found += evolution.quarantine([1])
    niches = PopulationPlan(niches=2, per_niche=8, frequencies=(1, 2), space=space)
    for fit in (np.arange(16.0), np.arange(16.0)[::-1]):
        found += evolve(niches, 2, fit, [{"lr": 1e-3}] * 16, 0)
    return found


def test_every_event_of_risk_control_and_evolution_has_a_sentence_in_both_languages() -> None:
    events, made = risk_events(), decisions()
    assert {event.kind for event in events} == set(RiskKind) - {RiskKind.ALERT_FAILED}
    kinds = {"propose", "keep", "revert", "reseed", "exploit", "migrate", "borrow"}
    assert {decision.kind for decision in made} == kinds
    codes = [(event.kind.value, event.values) for event in events]
    for code, values in [*codes, *(decision.cause for decision in made)]:
        assert f"event_{code}" in catalogue("en")
        english, chinese = EN.event(code, values), ZH.event(code, values)
        assert not re.search("[a-z]{2}", chinese), chinese
        assert re.findall(r"\d+", chinese) == re.findall(r"\d+", english)


def test_sentence_gives_the_values_of_the_event() -> None:
    values = {"before": 0.51239, "after": math.nan}
    assert EN.event("trial_reverted", values) == "fitness 0.5124 → nan fell"
    assert ZH.event("turnover_cut", {"share": 0.37}) == "向目标仓位调整了 37%"
    assert EN.term("life", "worker_lost") == "Worker lost"


@pytest.mark.parametrize("code", ["a_new_rule", "trial_kept"])
def test_event_without_a_sentence_for_its_values_shows_code_and_values(code: str) -> None:
    assert EN.event(code, {"loss": 0.25}) == f"{code.replace('_', ' ')}, loss 0.25"
    assert ZH.term("life", "a_new_kind") == "a new kind"


def test_names_are_those_of_the_language() -> None:
    names = ("expert 12", "portfolio", "router", "Trend", "expert 1 of 2")
    assert [EN.who(name) for name in names] == [
        *("Expert 12", "Portfolio", "Router", "Trend", "expert 1 of 2"),
    ]
    assert [ZH.who(name) for name in names[:4]] == ["专家 12", "组合", "路由器", "Trend"]
