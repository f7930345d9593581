"""What a hierarchy leaves behind, made up: records of a run, and the history of a population."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from echelon.agents.mfpbt import Life
from echelon.population.attribution import RealBook
from echelon.population.record import CommandRecord, PopulationEvent, PopulationHistory, Round
from echelon.risk.events import RiskEvent, RiskKind

NAMES = ("Trend", "Reversal", "Defensive", "Breakout", "Carry")


def names_of(experts: int) -> tuple[str, ...]:
    return tuple(NAMES[k % 5] + (f" {k // 5 + 1}" if k >= 5 else "") for k in range(experts))


def weekdays(n: int, first: str = "2019-01-02") -> np.ndarray:
    every = np.datetime64(first) + np.arange(2 * n)
    return every[np.is_busday(every)][:n].astype("datetime64[us]")


def make_record(
    bars: int = 1250,
    experts: int = 5,
    assets: int = 8,
    seed: int = 0,
    times: np.ndarray | None = None,
) -> CommandRecord:
    """Experts that are good at different times, under a router that often sees whose time it is."""
    rng = np.random.default_rng(seed)
    names = names_of(experts)
    regime = np.cumsum(rng.random(bars) < 0.015) % experts
    drift = np.where(np.arange(experts) == regime[:, None], 0.0022, -0.0004)
    common = rng.normal(0.0002, 0.006, bars)
    returns = drift + common[:, None] + rng.normal(0.0, 0.008, (bars, experts))
    own_values = 1e6 * np.concatenate([np.ones((1, experts)), np.cumprod(1.0 + returns, axis=0)])
    in_charge = np.empty(bars, dtype=np.int64)
    decided = np.arange(bars) % 5 == 0
    for s in range(bars):
        if s and not decided[s]:
            in_charge[s] = in_charge[s - 1]
        else:
            in_charge[s] = regime[s] if rng.random() < 0.8 else rng.integers(experts + 1)
    allowed = np.ones((bars, experts), dtype=bool)
    allowed[bars // 2 : bars // 2 + 25, 1 % experts] = False
    mix = rng.dirichlet(np.full(assets, 0.5), size=experts)
    target = np.stack([rng.dirichlet(8.0 * m + 0.05, size=bars) for m in mix], axis=1)
    return CommandRecord(
        experts=names,
        times=weekdays(bars) if times is None else times,
        in_charge=in_charge,
        decided=decided,
        allowed=allowed,
        target=0.95 * target,
        own_values=own_values,
        own_costs=np.abs(rng.normal(0.0, 0.0004, (bars, experts))),
        events=make_events(bars, names),
    )


def make_events(bars: int, names: tuple[str, ...]) -> tuple[RiskEvent, ...]:
    """A little of everything, and turnover cut as often as they may happen."""
    at = bars // 2
    masked = names[1 % len(names)]
    cuts = [
        RiskEvent(s, RiskKind.TURNOVER_CUT, "portfolio", 0.31, 0.3, 0, {"share": 0.9})
        for s in range(3, bars // 3, 5)
    ]
    others = [
        RiskEvent(at, RiskKind.MASKED, masked, 0.162, 0.15),
        RiskEvent(at, RiskKind.FORCED, masked, 0.162, 0.15),
        RiskEvent(at + 25, RiskKind.RELEASED, masked, 0.08, 0.10),
        RiskEvent(2 * bars // 3, RiskKind.HALVED, names[0], 0.056, 0.05, 0, {"factor": 0.5}),
        RiskEvent(2 * bars // 3 + 9, RiskKind.RESTORED, names[0], 0.044, 0.05),
        RiskEvent(bars - bars // 8, RiskKind.HALTED, "portfolio", 0.26, 0.25),
        RiskEvent(bars, RiskKind.RESUMED, "portfolio", math.nan, 0.25),
    ]
    return tuple(replace(e, time=min(e.time, bars)) for e in (*cuts, *others))


def make_book(record: CommandRecord, seed: int = 1) -> RealBook:
    """A real book that follows the expert in charge, not quite, and pays for it."""
    rng = np.random.default_rng(seed)
    bars = record.bars
    gross = np.concatenate([record.own_returns + record.own_costs, np.zeros((bars, 1))], axis=1)
    chosen = gross[np.arange(bars), record.in_charge] + rng.normal(0.0, 0.001, bars)
    paid = np.abs(rng.normal(0.0, [[0.0004], [0.0001], [0.0003]], (3, bars)))
    paid[:, ::7] = 0.0  # bars without a trade
    values = np.empty(bars + 1)
    values[0] = 1e6
    for s in range(bars):
        values[s + 1] = values[s] * (1.0 + chosen[s] - paid[:, s].sum())
    return RealBook(values, *(paid * values[:-1]))


def make_history(experts: int = 5, per_niche: int = 1, rounds: int = 200) -> PopulationHistory:
    """A population that nearly collapses once and is re-seeded; its members evolve every 20th."""
    rng = np.random.default_rng(5)
    names = names_of(experts)
    members = experts * per_niche
    lives = [
        Life(m, m, m // per_niche, 0, "founder", None, None, {"lr": 1e-3}) for m in range(members)
    ]
    living = list(range(members))
    for r in range(20, rounds + 1, 20):
        before = list(living)
        for m in rng.permutation(members)[: max(1, members // 4)]:
            niche = int(m) // per_niche
            mate = niche * per_niche + int(rng.integers(per_niche))
            kinds = ("exploit", "migrate") if per_niche > 1 else ("propose", "keep", "revert")
            kind = str(rng.choice([*kinds, "borrow", "reseed"]))
            parent = None if kind == "reseed" else before[mate]
            lender = before[int(rng.integers(members))] if kind == "borrow" else None
            living[m] = len(lives)
            lives.append(Life(len(lives), int(m), niche, r, kind, parent, lender, {"lr": 1e-3}))
    t = np.arange(1, rounds + 1)
    mapd = 0.42 - 0.19 * np.exp(-(((t - 90) / 25.0) ** 2)) + rng.normal(0, 0.008, rounds)
    history = tuple(
        Round(
            round=int(r),
            step=int(r) * 1000 * experts,
            mapd=float(mapd[r - 1]),
            volume=float(mapd[r - 1] ** 2),
            usage_entropy=math.log(experts) * (0.85 - 0.3 * math.exp(-r / 40)),
            fitness=tuple(
                math.nan if r < 5 else float(v)
                for v in 1.5 * (1 - np.exp(-r / (40 + 15 * np.arange(experts)))) - 0.3
            ),
            hyperparameters=tuple({"lr": 1e-3, "gamma": 0.97} for _ in names),
        )
        for r in t
    )
    alike = {"mapd": 0.23, "threshold": 0.25}
    events = (PopulationEvent(100, 500_000, "reseed", names[-1], "experts_alike", alike),)
    return PopulationHistory(names, rng.normal(size=(experts, 10)), tuple(lives), history, events)
