"""The hierarchy as one learner: experts, router and population, each in its turn.

A round, `trainer.round_steps` environment steps of every expert:

1. **Collect.** Every member trades its books and remembers what they did.
2. **Experts**, every `experts.freq` rounds. The router stands still. Whose bar is whose
   (responsibilities) and what tells skills apart (the bonus's model) are brought up to date; then
   every member learns: `experts.steps` · `expert.updates_per_step` updates.
3. **Router**, every `router.freq` rounds. The experts stand still. It learns `router.steps`
   decisions on its own part of the train window.
4. **Population**, every `population.freq` rounds. Fitness on the validation window, evolution of
   hyperparameters, and a fresh beginning for the worst where the experts have become alike. Where
   the experts would not learn again before training ends, it waits: the policy would have experts
   in it that have learned nothing. A training that is resumed for longer begins with it.

Experts live in a pool (`echelon.workers`), in this process or in several. Each phase begins from
what stood at its beginning, so results do not depend on how many there are; a process that dies is
replaced, its members are put back to the beginning of the phase, and the phase is done again.
Members on other machines collect for the next round as soon as nothing of this one will change
them: while the router learns, the policy is validated and a checkpoint is written.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from echelon.agents.learner import Learner, TrainingSetup
from echelon.agents.replay import RingMark
from echelon.backtest.policy import Policy
from echelon.cluster import freeze
from echelon.config import Config
from echelon.envs.world import World
from echelon.errors import StoreError
from echelon.models.encoders import build_served
from echelon.ops.information import quality_gate
from echelon.ops.measures import sharpe_annual
from echelon.population import measurement
from echelon.population.evolution import Evolution, RouterEvolution, fitness
from echelon.population.expert_books import survey
from echelon.population.expert_reward import ActionSamples, SkillBonus, target_portfolios
from echelon.population.member import Brief, Member, MemberFactory, expert_policy, new_tables
from echelon.population.meta_env import MetaEnv
from echelon.population.policy import HierarchyPolicy
from echelon.population.record import (
    PopulationEvent,
    PopulationHistory,
    Reading,
    Round,
    from_plain_tree,
    plain_tree,
)
from echelon.population.recovery import Members
from echelon.population.router import Router, probabilities_along
from echelon.population.rule_expert import ForecastExpert, load_rules, rule_experts
from echelon.population.settings import refuse_hierarchy
from echelon.population.shared_replay import SharedReplay
from echelon.rng import stream
from echelon.runs.checkpoint import below_prefix, with_prefix
from echelon.types import Bools, Floats32, Metrics
from echelon.workers import Pool, engine

log = logging.getLogger(__name__)
_FORMAT = 2  # of the state in checkpoints
_BONUS_UPDATES, _BONUS_SAMPLES = 50, 8192
_PHASES = ("collect", "experts", "router", "population")


class HierarchyLearner(Learner):
    """Population, router, and where they stand. `steps`: of all experts and of the router."""

    def __init__(self, setup: TrainingSetup) -> None:
        config, train, valid, directory, seed, base = setup
        assert base is not None, "experts stand on a pre-trained encoder"
        refuse_hierarchy(config)
        self.config, self.valid, self.directory, self.seed = config, valid, directory, seed
        self.steps = self.round = 0
        self.parts = measurement.parts_of(train, config.meta_router.window_share)
        self.evolution = Evolution.from_config(config, seed)
        self.router_evolution = RouterEvolution.from_config(config, seed)
        n_members, n_experts = self.evolution.plan.members, config.experts.n_experts
        self.base = base.requires_grad_(requires_grad=False).eval()
        # Of the frozen encoder: all members share them, or begin with them.
        self._tables = new_tables(train, valid, base, directory / "tables")
        for table in self._tables:
            table.refresh(base)
        sharing, workers = config.experts.sharing, config.trainer.workers
        away = engine().away and workers > 1
        on_disk = sharing.on_disk or (workers > 1 and not away)
        place = directory / "tables" / "replay" if on_disk else None
        self.replay = SharedReplay(sharing.buffer_size, n_members, train.n_assets, place)
        factory = MemberFactory(
            config,
            self.parts.experts,
            valid,
            base,
            directory / "tables",
            seed,
            self._skills(),
            tuple(dict(h) for h in self.evolution.hyperparameters()),
            self.replay,
            self._tables,
            away,
        )
        if away:
            freeze((self.parts, valid))
        pool = Pool(factory, n_members, workers, threads=config.train.threads)
        self._events: list[PopulationEvent] = []
        self._unwritten = False
        """Something happened that population.json does not say yet."""
        self.members = Members(pool, self.evolution, self.replay, self._event)
        self._unheard: list[Any] = []
        """What members collected that the others, on other machines, have not been told yet."""
        self.bonus = SkillBonus(
            n_experts, train.n_assets, config.experts.skill_dim, config.experts.mi_estimator, seed
        )
        self.rules = rule_experts(config, self.parts.experts)
        self.router = Router(config, config.experts.count, seed)
        self._best = list(range(0, n_members, self.evolution.plan.per_niche))
        """Member that stands for each expert."""
        rng, world = stream(seed, "probes"), self.parts.experts
        n_probes = config.trainer.probe_states
        rows = measurement.probe_states(world.spans("train"), n_probes, rng)
        self._probes = rows, measurement.probe_books(world, rows, rng)
        self._diversity = measurement.Diversity(math.nan, math.nan)
        self._alike = math.nan
        """MAPD of the experts that learn."""
        self._fitness = np.full(n_members, math.nan)
        self._reseeded = 0
        """Round in which an expert was last re-seeded for being alike."""
        self._postponed = False
        """An evolution is due that no learning of this training would have followed."""
        self._rounds: list[Round] = []
        self._readings: list[Reading] = []
        self._metrics: Metrics = {}
        """Of each phase, the last; none of those that have not come yet."""
        self._forget_policy()
        self._meta: MetaEnv | None = None
        self._experts_market: Floats32 | None = None

    @classmethod
    def from_setup(cls, setup: TrainingSetup) -> Self:
        return cls(setup)

    @classmethod
    def load_policy(
        cls, config: Config, weights: Mapping[str, Tensor], n_features: int, seed: int, name: str
    ) -> HierarchyPolicy:
        with torch.random.fork_rng(devices=[]):  # drawing weights would move the caller's generator
            base = build_served(config, n_features)
        base.load_state_dict(below_prefix("encoder.", weights))
        n_experts = config.experts.n_experts
        experts = [
            expert_policy(config, below_prefix(f"expert.{k}.", weights), base, seed, k)
            for k in range(n_experts)
        ]
        router = Router(config, config.experts.count, seed)
        router.load(below_prefix("router.", weights))
        rules = load_rules(config, below_prefix("forecast.", weights), n_features)
        return HierarchyPolicy([*experts, *rules], router, config, seed, name)

    @classmethod
    def pretraining_world(cls, config: Config, train: World) -> World:
        """The experts' part: what the router learns on is unseen by everything below it."""
        return measurement.parts_of(train, config.meta_router.window_share).experts

    def train_once(self) -> Metrics:
        """One round, with the phases that are due after it."""
        schedule = self.config.trainer.training_schedule
        metrics = self._metrics | {f"time/{phase}": 0.0 for phase in _PHASES}
        if self._postponed and self._experts_learn_again():
            with _time_phase(metrics, "population"):
                metrics |= self._evolve()
        self.round += 1
        with _time_phase(metrics, "collect"):
            metrics["charts/reward"] = self._collect()
        if self.round % schedule.experts.freq == 0:
            with _time_phase(metrics, "experts"):
                metrics |= self._learn()
        evolves = self.round % schedule.population.freq == 0
        if not evolves:
            self._collect_ahead()
        if self.round % schedule.router.freq == 0:
            with _time_phase(metrics, "router"):
                metrics |= self._route()
        if evolves:
            self._postponed = not self._experts_learn_again()
            if not self._postponed:
                with _time_phase(metrics, "population"):
                    metrics |= self._evolve()
                self._collect_ahead()
        self._write_history()
        self._metrics = metrics
        return dict(metrics)

    def _experts_learn_again(self) -> bool:
        """Whether a phase of the experts follows the present round before training ends."""
        config, schedule = self.config, self.config.trainer.training_schedule
        due = (self.round // schedule.experts.freq + 1) * schedule.experts.freq
        # Training ends after the first round that reaches the total.
        between = due - 1 - self.round
        routed = (due - 1) // schedule.router.freq - self.round // schedule.router.freq
        meta = config.meta_router
        rollout = max(meta.n_steps // meta.n_envs, 1) * meta.n_envs
        decisions = -(-schedule.router.steps // rollout) * rollout
        ahead = between * self._round_bars * config.train.books * len(self.members)
        ahead += routed * decisions * meta.every_bars
        return self.steps + ahead < config.train.total_env_steps

    @property
    def _round_bars(self) -> int:
        """Bars that every book goes on in a round."""
        return -(-self.config.trainer.round_steps // self.config.train.books)

    def _collect_ahead(self) -> None:
        """Have members on other machines begin the next round, of which nothing changes for them.

        Meanwhile the router learns here, the policy is validated and a checkpoint is written.
        """
        more = self.steps < self.config.train.total_env_steps and not self._postponed
        if self.members.pool.away and more:
            self._acting()
            self.members.send_ahead(Member.collect, self._bars_to_collect())

    def _bars_to_collect(self) -> dict[int, int]:
        return dict.fromkeys(self.members.numbers, self._round_bars)

    def _collect(self) -> float:
        bars = self._round_bars
        done = self.members.advance(Member.collect, self._bars_to_collect())
        if self.members.pool.away:
            news = [done[m]["news"] for m in sorted(done)]
            self.replay.take_news(news)
            self._unheard += news
        else:
            self.replay.refresh(tuple(RingMark(*done[m]["mark"]) for m in sorted(done)))
        self.steps += bars * self.config.train.books * len(self.members)
        return float(np.mean([collected["reward"] for collected in done.values()]))

    def _learn(self) -> Metrics:
        steps = self.config.trainer.training_schedule.experts.steps
        updates = int(steps * self.config.expert.updates_per_step)
        if self._unheard:
            self.members.ask(Member.hear, None, self._unheard)
            self._unheard = []
        weights, gate = self._whose_bars()
        bonus, marks, skills = self._tell_skills_apart(), self.replay.snapshot(), self._skills()
        briefs = {}
        for m in self.members.numbers:
            k = self.evolution.plan.niche_of(m)
            briefs[m] = Brief(updates, weights[k], marks, bonus, skills, bool(gate[k]))
        by_member = self.members.advance(Member.learn, briefs)
        self._forget_policy()
        learned = [own for own in by_member.values() if own]
        metrics: Metrics = {
            name: float(np.mean([own[name] for own in learned]))
            for name in (learned[0] if learned else ())
            if "_from_" not in name
        }
        metrics |= {f"responsibility/expert_{k}": float(w.mean()) for k, w in enumerate(weights)}
        for m, own in by_member.items():
            metrics |= {f"expert_{m}/{k}": v for k, v in own.items() if k.startswith("sharing/")}
        metrics |= self._watch()
        self._readings.append(Reading(self.round, self.steps, *self._diversity))
        self._unwritten = True
        return metrics

    def _whose_bars(self) -> tuple[Floats32, Bools]:
        """(weights[K,T] of rows in the experts' losses, [K] who is near enough to the best)."""
        experts = self.config.experts
        answers = self.members.ask(Member.own_returns, self._best)
        returns = np.stack([answers[m] for m in self._best])
        world = self.parts.experts
        sharpes = [sharpe_annual(own[np.isfinite(own)], world.periods_per_year) for own in returns]
        gate = quality_gate(np.array(sharpes), experts.mi_margin)
        if not experts.responsibility:
            return np.ones(returns.shape, dtype=np.float32), gate
        if experts.responsibility_by == "router" and self.router.decisions:
            spans, market = world.spans("train"), self._experts_market
            surveyed = survey(self._experts(), world, spans, self.config, market)
            self._experts_market = surveyed.market
            probabilities = probabilities_along(self.router, surveyed)[:, : len(returns)]
            return measurement.routed_weights(probabilities, experts.responsibility_floor), gate
        return measurement.row_weights(returns, world, experts), gate

    def _tell_skills_apart(self) -> dict[str, Tensor] | None:
        """Train the bonus's model on everybody's data; its weights, None without a bonus."""
        if not self.config.experts.mi_reward_weight or not len(self.replay):
            return None
        rng = stream(self.seed, "bonus", self.round)
        drawn = self.replay.batch(0, _BONUS_SAMPLES, 1, 0.0, 1, rng)
        # Rings still hold what members did before they restarted, with other skills.
        numbers = self.members.ask(Member.skill_number)
        now = np.array([numbers[m] for m in self.members.numbers])
        kept = drawn.behaviour.skill[0] == now[drawn.source]
        if not kept.any():
            return None
        step = drawn.transitions
        parts = (step.raw[0], step.weights[0], step.cash[0], step.free[0])
        raw, held, cash, free = (torch.from_numpy(part[kept]) for part in parts)
        wanted = target_portfolios(torch.tanh(raw), held, cash, free)
        experts = torch.from_numpy(drawn.source[kept] // self.evolution.plan.per_niche)
        samples = ActionSamples(held, cash, wanted, experts)
        self.bonus.learn(samples, torch.from_numpy(self._skills()), _BONUS_UPDATES)
        return self.bonus.weights()

    def _route(self) -> Metrics:
        world, experts = self.parts.router, self._experts()
        if self._meta is None:
            spans = world.spans("train")
            self._meta = MetaEnv(experts, world, spans, self.config, self.seed, self.round)
        else:
            self._meta.renew(self.round, experts)
        before = self.router.decisions
        steps = self.config.trainer.training_schedule.router.steps
        metrics = self.router.learn(self._meta, steps, self.round)
        # Whole rollouts: some more decisions than were asked for.
        self.steps += (self.router.decisions - before) * self.config.meta_router.every_bars
        return metrics

    def _evolve(self) -> Metrics:
        config = self.config
        self._postponed = False
        answers = self.members.ask(Member.sharpes)
        penalty = config.trainer.evolution.variance_penalty
        self._fitness = np.array([fitness(answers[m], penalty) for m in sorted(answers)])
        metrics = self._watch()
        self._evolve_router()
        values = self.evolution.hyperparameters()  # that fitness was measured under
        waits = self.round - self._reseeded < config.trainer.diversity_patience
        decisions = self.evolution.step(self._fitness, math.nan if waits else self._alike)
        if any(decision.kind == "reseed" for decision in decisions):
            self._reseeded = self.round
        self.members.carry_out(decisions)
        self._forget_policy()
        per_niche = self.evolution.plan.per_niche
        for niche in range(config.experts.n_experts):
            members = range(niche * per_niche, (niche + 1) * per_niche)
            known = [m for m in members if math.isfinite(self._fitness[m])]
            self._best[niche] = max(known or members, key=lambda m: self._fitness[m])
        self._rounds.append(
            Round(
                self.round,
                self.steps,
                *self._diversity,
                self.router.incentive.usage.entropy() if self.router.decisions else math.nan,
                tuple(float(self._fitness[m]) for m in self._best),
                tuple(dict(values[m]) for m in self._best),
            )
        )
        self._unwritten = True
        return metrics | {"population/fitness": float(np.nanmean(self._fitness))}

    def _evolve_router(self) -> None:
        """Try other settings of the router, by how the whole hierarchy does on validation."""
        if not self.router_evolution.values:
            return
        sharpes = measurement.window_sharpes(self.policy(), self.valid, self.config)
        fit = float(fitness(sharpes, self.config.trainer.evolution.variance_penalty))
        before = self.router_evolution.values
        decisions = self.router_evolution.step(fit, self.router.decisions)
        if not decisions:
            return
        for d in decisions:
            self._event(d.kind, "router", *d.cause)
        values = self.router_evolution.values
        self.router.set_lr(values["router_lr"])
        if "kl_lambda" in values:
            # λ has adapted since: evolution multiplies what it has become.
            change = values["kl_lambda"] / before["kl_lambda"]
            reward, most = self.router.incentive, self.config.meta_router.kl_lambda_max
            reward.weight = min(reward.weight * change, most)

    def _watch(self) -> Metrics:
        """How different the experts are, on the probe states."""
        answers = self.members.ask(Member.portfolios, self._best, *self._probes)
        rows, held = self._probes
        wanted = [answers[m] for m in self._best]
        for rule in self.rules:
            rule.start(self.parts.experts, range(int(rows[0]), int(rows[-1]) + 1))
            wanted.append(rule.decide(rows, held))
        weights = np.stack([measurement.fill_targets(targets, held) for targets in wanted])
        self._diversity = measurement.measure_diversity(weights)
        # Re-seeding can only change those that learn.
        learned = weights[: len(self._best)]
        alike = measurement.measure_diversity(learned) if self.rules else self._diversity
        self._alike = alike.mapd
        return {f"population/{name}": v for name, v in self._diversity._asdict().items()}

    def _event(self, kind: str, who: str, code: str, values: Mapping[str, float | str]) -> None:
        self._forget_policy()  # a member may have begun afresh
        event = PopulationEvent(self.round, self.steps, kind, who, code, dict(values))
        self._events.append(event)
        self._unwritten = True
        if kind in ("worker_lost", "quarantine"):
            log.warning("seed %d, round %d: %s", self.seed, self.round, event)

    def _skills(self) -> Floats32:
        """[K,Z] as they are now."""
        return self.evolution.skills.astype(np.float32)

    def _forget_policy(self) -> None:
        self._policy: HierarchyPolicy | None = None
        self._acting_weights: dict[int, dict[str, Tensor]] | None = None

    def _acting(self) -> dict[int, dict[str, Tensor]]:
        """Weights of the members that stand for the experts, as they are now."""
        if self._acting_weights is None:
            self._acting_weights = self.members.ask(Member.acting, self._best)
        return self._acting_weights

    def _experts(self) -> list[Policy]:
        """Policies of the members that stand for the experts, as they are now, and the rules."""
        answers = self._acting()
        learned = [
            expert_policy(self.config, answers[m], self.base, self.seed, k, self._tables)
            for k, m in enumerate(self._best)
        ]
        return [*learned, *self.rules]

    def policy(self) -> HierarchyPolicy:
        if self._policy is None:
            self._policy = HierarchyPolicy(self._experts(), self.router, self.config, self.seed)
        return self._policy

    def weights(self) -> dict[str, Tensor]:
        tensors = with_prefix("encoder.", self.base.state_dict())
        for k, m in enumerate(self._best):
            tensors |= with_prefix(f"expert.{k}.", self._acting()[m])
        for rule in self.rules:
            if isinstance(rule, ForecastExpert):
                tensors |= with_prefix("forecast.", rule.weights())
        return tensors | with_prefix("router.", self.router.weights())

    def _write_history(self) -> None:
        """Say in population.json what has happened since it was written, if anything has."""
        if not self._unwritten:
            return
        PopulationHistory(
            tuple(f"expert {k}" for k in range(len(self._best))),
            self.evolution.skills,
            tuple(self.evolution.lineage.lives),
            tuple(self._rounds),
            tuple(self._events),
            tuple(self._readings),
        ).write(self.directory)
        self._unwritten = False

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays, replay = self.replay.state()
        tensors = {f"replay.{k}": torch.from_numpy(np.asarray(v)) for k, v in arrays.items()}
        members = self.members.states()
        for m, answer in enumerate(members):
            tensors |= with_prefix(f"member.{m}.", answer["tensors"])
        router, router_facts = self.router.state()
        bonus, bonus_facts = self.bonus.state()
        tensors |= with_prefix("router.", router) | with_prefix("bonus.", bonus)
        tensors["fitness"] = torch.from_numpy(self._fitness.copy())
        return tensors, {
            "format": _FORMAT,
            "steps": self.steps,
            "round": self.round,
            "replay": replay,
            "members": [answer["facts"] for answer in members],
            "router": router_facts,
            "bonus": bonus_facts,
            "evolution": self.evolution.state(),
            "router_evolution": self.router_evolution.state(),
            "best": self._best,
            "reseeded": self._reseeded,
            "postponed": self._postponed,
            "metrics": self._metrics,
            "rounds": plain_tree(self._rounds),
            "events": plain_tree(self._events),
            "readings": plain_tree(self._readings),
        }

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave; refuses that of another format."""
        if state.get("format", 1) != _FORMAT:
            raise StoreError(
                f"the checkpoint's population has format {state.get('format', 1)}, this version "
                f"reads {_FORMAT}. Resume with the version that saved it, or start a new run."
            )
        arrays = {k: v.numpy() for k, v in below_prefix("replay.", tensors).items()}
        self.replay.restore(arrays, state["replay"])
        states = [
            {"tensors": below_prefix(f"member.{m}.", tensors), "facts": facts}
            for m, facts in enumerate(state["members"])
        ]
        self.router.restore(below_prefix("router.", tensors), state["router"])
        self.bonus.restore(below_prefix("bonus.", tensors), state["bonus"])
        self.evolution.restore(state["evolution"])
        self.router_evolution.restore(state["router_evolution"])
        self._fitness = tensors["fitness"].numpy().copy()
        self.steps, self.round = int(state["steps"]), int(state["round"])
        self._best = [int(m) for m in state["best"]]
        self._reseeded = int(state["reseeded"])
        self._postponed = bool(state["postponed"])
        self._metrics = {name: float(value) for name, value in state["metrics"].items()}
        self._rounds = from_plain_tree(state["rounds"], list[Round])
        self._events = from_plain_tree(state["events"], list[PopulationEvent])
        self._readings = from_plain_tree(state["readings"], list[Reading])
        self._unwritten = True  # the file may be ahead of the checkpoint
        self._unheard = []
        self.members.restore(states)
        self._forget_policy()

    def close(self) -> None:
        """End the pool and remove what can be computed again, or is in the checkpoints."""
        self._write_history()
        self.members.close()
        for table in self._tables:
            table.close()
        self.replay.close()


@contextmanager
def _time_phase(metrics: Metrics, phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    metrics[f"time/{phase}"] = time.perf_counter() - began
