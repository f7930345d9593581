"""The proving ground: markets with known answers, one list of parts, one certificate.

    planted   how much of the exact filter's Sharpe ratio does the agent capture (`planted_proof`)?
    regime    can what is hidden from an agent be found from returns (`regime_proof`)?
    null      how often does the pipeline claim an edge where there is none (`null`)?
    leaky     is a feature refused that knows tomorrow, and does it show (`leaky`)?
    costly    does the agent trade what is worth its costs, and nothing else (`planted_proof`)?

1. `plan` lists the parts of the markets asked for: trainings and all the rest.
2. `prove` runs them, so many at a time, skipping those that have a finding already, then counts
   the claims on the trend market, which need its agents, and writes the certificate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from echelon.config import Config, to_yaml
from echelon.config.algorithms import ALGORITHMS
from echelon.files import write_atomic
from echelon.proving.certificate import Certificate, MarketResult
from echelon.proving.leaky import LeakyAgentPart, LeakyCheckPart, assess_leaky
from echelon.proving.null import NullAgentPart, NullCheapPart, PowerPart, assess_null
from echelon.proving.parts import Done, Part, clear_proof, identity_of, proof_facts, run_all
from echelon.proving.planted import PLANTED
from echelon.proving.planted_proof import (
    COSTLY_MARKET,
    FEES,
    CostlyPart,
    PlantedPart,
    assess_costly,
    assess_planted,
)
from echelon.proving.regime import RegimeMarket
from echelon.proving.regime_proof import (
    FLAT,
    ReferencesPart,
    RegimeAgentPart,
    RegimeFlatPart,
    RegimeHierarchyPart,
    assess_regime,
    flat_config,
    with_hierarchy,
)
from echelon.proving.sizes import FULL, Sizes, at_pace
from echelon.proving.trial import proof_config, with_steps

MarketName = Literal["planted", "regime", "null", "leaky", "costly"]
PROOF_MARKETS: tuple[MarketName, ...] = ("planted", "regime", "null", "leaky", "costly")

OUTCOME = ("certificate.json", "certificate.html", "certificate.zh.html")
"""What stays of a proof; one that restarts must not leave the old one's."""


@dataclass(frozen=True)
class ProofPlan:
    """The parts of each market, by its name; `null` also needs the trend's agents."""

    parts: dict[MarketName, list[Part]]
    trend: list[PlantedPart]

    @property
    def first(self) -> list[Part]:
        """What needs nothing else: the longest first, so that no core waits at the end."""
        every = {part.key: part for part in chain(self.trend, *self.parts.values())}
        return sorted(every.values(), key=lambda part: -part.steps)


def plan(config: Config, markets: Sequence[MarketName], sizes: Sizes) -> ProofPlan:
    """The parts of the markets asked for."""
    config = at_pace(config, sizes)
    agent = proof_config(config)
    planted = _planted_parts(agent, sizes) if "planted" in markets else []
    trend = [part for part in planted if part.market.signal == "trend"]
    if "null" in markets and not trend:
        trend = _planted_parts(agent, replace(sizes, signals=("trend",)))
    makers: dict[MarketName, Callable[[], Sequence[Part]]] = {
        "planted": lambda: planted,
        "regime": lambda: _regime(agent, sizes),
        "null": lambda: _null(config, agent, sizes),
        "leaky": lambda: _leaky(config, sizes),
        "costly": lambda: _costly(agent, sizes),
    }
    return ProofPlan(
        {name: list(makers[name]()) for name in PROOF_MARKETS if name in markets}, trend
    )


def _planted_parts(agent: Config, sizes: Sizes) -> list[PlantedPart]:
    config = with_steps(agent, sizes.planted_steps, sizes.validations)
    # Experts are held to the same bar on every signal; of the flat agent the trend alone is asked.
    all_seeds, flat = sizes.planted_seeds, ALGORITHMS[agent.train.algo].family == "flat"
    fewer = min(all_seeds, sizes.other_seeds) if flat else all_seeds
    seeds = {name: all_seeds if name == "trend" else fewer for name in sizes.signals}
    return [
        PlantedPart(
            config,
            PLANTED[signal](n_bars=sizes.n_bars),
            agent.seed + k,
            sizes.n_draws,
            references=k == 0,
            claim_draws=sizes.claim_draws if signal == "trend" else 0,
            claim_bars=sizes.null_market.windows.test if signal == "trend" else 0,
            own=sizes.own_draws,
        )
        for signal, count in seeds.items()
        for k in range(count)
    ]


def _regime(agent: Config, sizes: Sizes) -> list[Part]:
    market = RegimeMarket(n_bars=sizes.regime_bars)
    references = ReferencesPart(agent, market, sizes.regime_pairs)
    if ALGORITHMS[agent.train.algo].family == "hierarchy":
        return [references, *_hierarchies(agent, market, sizes)]
    config = with_steps(agent, sizes.regime_steps, 4)
    agents = [
        RegimeAgentPart(config, market, sizes.regime_pairs, agent.seed + k, shown)
        for k in range(sizes.regime_seeds)
        for shown in (False, True)
    ]
    return [references, *agents]


def _hierarchies(agent: Config, market: RegimeMarket, sizes: Sizes) -> list[Part]:
    """Hierarchies, and flat agents for as many steps on the same draws."""
    config, draws = with_steps(agent, sizes.hierarchy_steps), sizes.hierarchy_draws
    parts: list[Part] = []
    for seed in range(agent.seed, agent.seed + sizes.hierarchy_seeds):
        parts.append(RegimeHierarchyPart(config, market, draws, seed))
        parts += [
            RegimeFlatPart(flat_config(config, algo), market, draws, seed, algo, shown)
            for algo in FLAT
            for shown in (False, True)
            if sizes.hierarchy_flat
        ]
    return parts


def _null(config: Config, agent: Config, sizes: Sizes) -> list[Part]:
    whole = with_steps(config, sizes.null_steps)
    market, agents = sizes.null_market, sizes.null_agents
    cheap = range(agents, sizes.null_draws)
    return [
        *(NullAgentPart(whole, market, draw) for draw in range(agents)),
        *(
            NullCheapPart(agent, market, tuple(cheap[k : k + sizes.chunk]))
            for k in range(0, len(cheap), sizes.chunk)
        ),
    ]


def _leaky(config: Config, sizes: Sizes) -> list[Part]:
    briefly = with_steps(config, sizes.leaky_steps, 3)
    agents = [
        LeakyAgentPart(briefly, config.seed + k, peeks)
        for k in range(sizes.leaky_seeds)
        for peeks in (True, False)
    ]
    return [LeakyCheckPart(briefly), *agents]


def _costly(agent: Config, sizes: Sizes) -> list[Part]:
    return [
        CostlyPart(
            with_steps(agent, steps, sizes.validations or 8),
            replace(COSTLY_MARKET, n_bars=sizes.n_bars),
            fee,
            agent.seed + k,
            sizes.n_draws,
            min(sizes.costly_valid_bars, sizes.n_bars),
            references=k == 0,
            own=sizes.own_draws,
        )
        for k in range(sizes.costly_seeds)
        for fee, steps in zip(FEES, sizes.costly_steps, strict=True)
    ]


def prove(
    config: Config,
    directory: Path,
    *,
    markets: Sequence[MarketName] = PROOF_MARKETS,
    sizes: Sizes = FULL,
    workers: int = 1,
    command: str = "",
    overwrite: bool = False,
    on_report: Callable[[Part, object], None] = lambda _part, _message: None,
) -> Certificate:
    """Run the markets asked for and write certificate.json into `directory`.

    Raises `Stopped` after Ctrl-C; the same call goes on where it stopped.
    overwrite: first remove what an earlier proof left there
    """
    began = time.perf_counter()
    if overwrite:
        clear_proof(directory, OUTCOME)
    planned = plan(config, markets, sizes)
    done = run_all(planned.first, directory, workers=workers, on_report=on_report)
    if "null" in markets:
        power = _power(planned.trend, sizes)
        done |= run_all([power], directory, workers=workers, on_report=on_report)
    results = [_assess(name, planned, done, sizes) for name in planned.parts]
    made = proof_facts(config, command, done.values()) | {"seconds": time.perf_counter() - began}
    made |= {"sizes": sizes.adjustable} | ({"pace": sizes.pace._asdict()} if sizes.pace else {})
    certificate = Certificate(sizes.mode, tuple(results), made)
    write_atomic(directory / "config.yaml", to_yaml(config))
    certificate.write(directory)
    return certificate


def _power(trend: Sequence[PlantedPart], sizes: Sizes) -> PowerPart:
    return PowerPart(
        trend[0].config,
        trend[0].market,
        tuple(part.key for part in trend),
        tuple(identity_of(part) for part in trend),
        sizes.claim_draws,
        sizes.null_market.windows.test,
    )


def _assess(
    name: MarketName, planned: ProofPlan, done: dict[str, Done], sizes: Sizes
) -> MarketResult:
    parts = [done[part.key] for part in planned.parts[name]]
    if name == "planted":
        return assess_planted(parts)
    if name == "regime":
        return with_hierarchy(assess_regime(parts[0], _flat(parts)), parts)
    if name == "null":
        return assess_null(parts, done["null-power"], sizes.null_market)
    if name == "leaky":
        return assess_leaky(parts[0], parts[1:])
    return assess_costly(parts)


def _flat(parts: Sequence[Done]) -> list[Done]:
    """Flat agents that stand by themselves, not next to a hierarchy."""
    return [p for p in parts if p.key.startswith(("regime-flat-", "regime-shown-"))]
