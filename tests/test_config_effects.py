"""Every key of the configuration does something; what does not yet is listed.

The first tests fail if a key of a shipped file, or any key of an agent's section, is in no list, so
that a new key cannot arrive without an effect. A key leaves PENDING when what it steers lands.

Of a key the smallest part is looked at that reads it from the configuration and acts by it: what a
few updates make of weights, what a guard does to a book. The same changes must tell on a hierarchy
where it shares a section with single agents (`SHARED`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from commands import Always, Moving
from markets import CONFIGS
from rule_routers import EqualRouter
from test_evolution import Toy
from test_executor_portfolio import Line
from worlds import make_world

from echelon.agents.a2c import A2C, ActorPolicy
from echelon.agents.pretraining import pretrain
from echelon.backtest.baselines import make_baseline, run_baselines
from echelon.backtest.forecaster import fit_forecaster
from echelon.backtest.run import run_backtest
from echelon.cli.console import out
from echelon.cli.evaluate import print_evaluation
from echelon.cli.options import run_directory
from echelon.config import Config, load_config
from echelon.data.calendars import sessions
from echelon.data.datasets import ensure_dataset
from echelon.envs import World
from echelon.errors import ConfigError, StoreError
from echelon.evaluation.evaluate import Evaluation
from echelon.evaluation.folds import plan_folds
from echelon.features import Prepared, prepare
from echelon.features.engine import FeaturePlan
from echelon.features.registry import select
from echelon.market import resolve_rules
from echelon.ops.measures import Costs, measure
from echelon.population.evolution import Evolution, RouterEvolution
from echelon.population.meta_env import MetaEnv
from echelon.population.policy import HierarchyPolicy
from echelon.population.router import Router
from echelon.population.router_task import RouterReward
from echelon.runs.checkpoint import list_checkpoints, load_checkpoint
from echelon.runs.metrics import is_timing, read_metrics
from echelon.runs.registry import TrialRegistry
from echelon.runs.tracking import open_sinks
from echelon.training.run import Training, Worlds, make_learner
from echelon.workers import Pool

FIELDS = frozenset({"open", "high", "low", "close", "volume"})
SPLITS = (
    "split.train=[2015-01-02, 2016-01-29]",
    "split.valid=[2016-02-01, 2016-06-30]",
    "split.test=[2016-07-01, 2016-12-30]",
)

SMALL = (
    *("window=6", "model.d_model=8", "model.n_layers=1", "model.hidden=8", "reward.scale=100"),
    *("train.rollout_steps=5", "train.books=4", "train.offset_groups=2", "train.lr_actor=0.01"),
    *("train.lr_critic=0.01", "train.episode_steps=20", "train.total_env_steps=120"),
    *("train.log_interval_steps=40", "train.validate_every_steps=20", "logging.tensorboard=false"),
)
"""An agent that trains in no time: 20 steps an update, six updates."""

PENDING: set[str] = set()
"""Keys that steer nothing yet."""
ELSEWHERE = {
    # Steers the command, not an agent: the tests of `echelon train` see to it.
    "train.seeds",
    # How the work is done, on which no result may depend: tests/test_hierarchy_deaths.py has the
    # same numbers from several processes, whose replay is on disk.
    *("trainer.workers", "experts.sharing.on_disk"),
    # Nor on where it is done: tests/test_scale.py.
    "compute.engine",
}
FILES = ("qtmrl", "qtmrl-fast", "hierarchical", "demo", "sac")
OURS = (
    *("state", "model", "train", "reward", "eval", "logging", "walk_forward"),
    *("pretrain", "lora", "expert", "experts", "meta_router", "trainer", "risk"),
)
"""Sections of which every key must have an effect, whether a shipped file names it or not."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Observe = Callable[..., object]


def _leaves(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found.add(prefix + key)
    return found


def _keys(name: str) -> set[str]:
    return _leaves(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))


class Bench:
    """Prepares small variants of a configuration and says what came out."""

    def __init__(self, root: Path, bars: Path) -> None:
        self.root = root
        self.bars = bars
        self.n = 0
        self._usual: dict[Observe, object] = {}
        self._line: Line | None = None

    @property
    def line(self) -> Line:
        """A market with bars within the day."""
        if self._line is None:
            self._line = Line(self.root / "line")
        return self._line

    def usual(self, observe: Observe) -> object:
        """What is observed without a change; the same every time."""
        if observe not in self._usual:
            self._usual[observe] = observe(self)
            assert observe(self) == self._usual[observe]
        return self._usual[observe]

    def config(self, *overrides: str) -> Config:
        return load_config(
            CONFIGS / "qtmrl.yaml",
            [
                *("data.source=parquet", f"data.path={self.bars}", f"data.store={self.root}/store"),
                *("data.cache.enabled=false", *SPLITS, *overrides),
            ],
        )

    def prepared(self, *overrides: str) -> Prepared:
        self.n += 1
        return prepare(self.config(*overrides), self.root / f"run{self.n}").prepared


def _names(bench: Bench, *overrides: str) -> object:
    return FeaturePlan.from_specs(select(bench.config(*overrides).features, FIELDS).specs).names


def _x(bench: Bench, *overrides: str) -> object:
    return bench.prepared(*overrides).x.tobytes()


def _splits(bench: Bench, *overrides: str) -> object:
    return bench.prepared(*overrides).splits


def _symbols(bench: Bench, *overrides: str) -> object:
    return bench.prepared(*overrides).symbols


def _window(bench: Bench, *overrides: str) -> object:
    return bench.prepared(*overrides).window


def _market(bench: Bench, *overrides: str) -> object:
    small = ("data.synthetic.n_symbols=2", "data.synthetic.n_days=40", "data.source=synthetic")
    return ensure_dataset(bench.config(*small, "assets=[]", *overrides)).content_hash


def _registry(bench: Bench, *overrides: str) -> object:
    return TrialRegistry.for_run(
        Path("runs/a"), bench.config(*overrides).logging.registry
    ).path.name


def _run_directory(bench: Bench, *overrides: str) -> object:
    config = bench.config(*overrides)
    return run_directory(Path("qtmrl.yaml"), None, None, config.logging.output_dir)


def _refusal(bench: Bench, *overrides: str) -> object:
    try:
        return bench.config(*overrides).normalization.fit_on
    except ConfigError as error:
        return str(error)


def _rules(bench: Bench, *overrides: str) -> object:
    return resolve_rules(bench.config(*overrides), calendar=None)


def _confirmed(bench: Bench, *overrides: str) -> object:
    """What becomes of A-share rules on US data."""
    try:
        return bench.config("market.preset=cn", *overrides).market.preset_for("XNYS")
    except ConfigError as error:
        return str(error)


def _world(config: Config) -> World:
    splits = {"train": range(60), "valid": range(60, 90), "test": range(90, 140)}
    return make_world(n_rows=140, n_assets=4, seed=6, window=config.window, splits=splits)


def _rule_of_thumb(bench: Bench, *overrides: str) -> object:
    config = bench.config(*overrides)
    momentum = make_baseline("momentum", config)
    return run_backtest(momentum, _world(config), range(20, 40), config).value.tobytes()


def _executed(bench: Bench, *overrides: str) -> object:
    """What a rule's orders come to when they are worked through the day, or why they cannot be."""
    try:
        world = bench.line.world("market.executor=vwap", *overrides)
    except (ConfigError, StoreError) as error:
        return str(error)
    config, first = bench.line.config, world.span("valid").start
    run = run_backtest(Moving("a"), world, range(first, first + 6), config)
    return run.value.tobytes()


def _learned(bench: Bench, *overrides: str) -> object:
    """Weights after three updates."""
    config = bench.config(*SMALL, *overrides)
    agent = A2C(config, _world(config), config.seed)
    for _ in range(3):
        agent.train_once()
    return [p.detach().numpy().tobytes() for p in agent.net.parameters()]


EXPERT = (
    *SMALL,
    *("train.algo=SAC", "train.rollout_steps=10", "train.lr_actor=0.003", "expert.hidden=8"),
    *("pretrain.horizons=[1, 2]", "pretrain.epochs=2", "pretrain.batch_rows=16"),
    *("expert.batch_size=8", "expert.buffer_size=400", "expert.learning_starts=20"),
    *("expert.updates_per_step=0.1", "expert.warmup_updates=4", "lora.rank=2", "lora.lr=0.01"),
    *("lora.every_updates=2", "lora.refresh_updates=4"),
)
"""An expert as small: 40 steps a round, four updates."""


def _expert(bench: Bench, *overrides: str) -> object:
    """Weights of an expert and of its encoder after four rounds."""
    bench.n += 1
    config = bench.config(*EXPERT, *overrides)
    world = _world(config)
    place = bench.root / f"run{bench.n}" / "seeds" / "1"
    learner = make_learner(config, Worlds(world, world, "data"), place, 1)
    for _ in range(4):
        learner.train_once()
    return {name: value.numpy().tobytes() for name, value in learner.weights().items()}


def _passes(bench: Bench, *overrides: str) -> object:
    """How long pre-training went on."""
    config = bench.config(*EXPERT, *overrides)
    found = pretrain(config, _world(config), 1)
    assert found is not None
    return found.facts["epochs"]


def _trained(bench: Bench, *overrides: str) -> dict[str, object]:
    """What a training leaves behind."""
    bench.n += 1
    directory = bench.root / f"seed{bench.n}"
    config = bench.config(*SMALL, *overrides)
    world = _world(config)
    # A seed under which validations differ and the best is not the last.
    training = Training(config, Worlds(world, world, "data"), directory, 1)
    outcome = training.run()
    log = read_metrics(directory)
    return {
        "step": outcome.step,
        "ending": outcome.ending,
        "logged": log.drop_nulls("losses/total")["step"].to_list(),
        "validated": log.drop_nulls("valid/calmar")["step"].to_list(),
        "checkpoints": [path.name for path in list_checkpoints(training.checkpoints)],
        "score": load_checkpoint(training.checkpoints / "best").state["score"],
    }


def _threads(bench: Bench, *overrides: str) -> object:
    config = bench.config(*SMALL, *overrides)
    world = _world(config)
    Training(config, Worlds(world, world, "data"), bench.root / "none", 1)
    return torch.get_num_threads()


def _decided(bench: Bench, *overrides: str) -> object:
    """Actions of a new network."""
    config = bench.config(*SMALL, *overrides)
    world = _world(config)
    policy = ActorPolicy(A2C(config, world, config.seed).net, config, config.seed)
    return run_backtest(policy, world, world.span("test"), config).actions.tobytes()


def _fees(bench: Bench, *overrides: str) -> object:
    config = bench.config(*overrides)
    return Worlds.from_prepared(bench.prepared(*overrides), config).valid.rules


def _baselines(bench: Bench, *overrides: str) -> object:
    config = bench.config(*overrides)
    world = _world(config)
    done = run_baselines(world, world.span("test"), config)
    return {name: backtest.value.tobytes() for name, backtest in done.items()}


def _forecast(bench: Bench, *overrides: str) -> object:
    """The forecaster's trees or weights, and what it trades."""
    config = bench.config(*overrides)
    world = _world(config)
    made = fit_forecaster(config, world)
    assert made is not None
    done = run_backtest(made.policy(), world, world.span("test"), config)
    return [part.tobytes() for part in made.model], done.value.tobytes()


def _summary(bench: Bench, *overrides: str) -> object:
    """The table `echelon evaluate` prints."""
    returns = np.linspace(-0.01, 0.012, 30)
    one = measure(
        returns,
        periods_per_year=252,
        turnover=np.abs(returns),
        exposure=np.ones(30),
        costs=Costs(0.0, 0.0, 0.0),
        initial_value=1.0,
    )
    facts = {"split": "valid", "first": "a", "last": "b", "ledger": {"fill": "c"}, "reads": 1}
    with out.capture() as printed:
        print_evaluation(
            Evaluation(bench.root, {1: one}, {}, facts), bench.config(*overrides).eval.metrics
        )
    return printed.get()


def _folds(bench: Bench, *overrides: str) -> object:
    """Folds of a walk-forward through data that end in the middle of a year."""
    times = sessions("XNYS", date(2000, 1, 3), date(2018, 6, 29))
    return plan_folds(bench.config(*overrides).walk_forward, times)


def _sinks(bench: Bench, *overrides: str) -> object:
    """What is opened to log to, or why not: nobody has a key in these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        try:
            sinks = open_sinks(bench.config(*overrides).logging, bench.root, "run", None)
        except ConfigError as error:
            return str(error)
    for sink in sinks:
        sink.finish("finished")
    return [type(sink).__name__ for sink in sinks]


HIERARCHY = (
    *EXPERT,
    *("train.algo=HIERARCHY", "pretrain.enabled=false", "train.gamma=0.9", "train.lr_actor=0.001"),
    *("expert.batch_size=12", "expert.learning_starts=8", "expert.updates_per_step=0.25"),
    *("lora.every_updates=1", "lora.refresh_updates=1", "experts.n_experts=2"),
    *("experts.skill_dim=3", "experts.mi_reward_weight=0", "experts.responsibility_bars=5"),
    "trainer.round_steps=48",
    *("experts.sharing.buffer_size=2000", "experts.sharing.fresh_steps=20"),
    *("experts.sharing.sequence_steps=3", "trainer.probe_states=12", "trainer.evolution.windows=2"),
    *("meta_router.n_steps=16", "meta_router.n_envs=4", "meta_router.batch_size=8"),
    *("meta_router.every_bars=2", "meta_router.horizons=[2, 5]", "risk.drawdown_window=5"),
    "meta_router.episode_decisions=4",
    "trainer.training_schedule.experts={freq: 1, steps: 8}",
    "trainer.training_schedule.router={freq: 9, steps: 16}",
    "trainer.training_schedule.population={freq: 9, mutation_rate: 0.1}",
    "train.total_env_steps=2000",
)
"""A population as small: a round is 48 steps of each of two experts and two updates."""


def _numbers(told: Mapping[str, float]) -> dict[str, float]:
    """Without what clocks say, nor what is told of each expert: the same names for any number."""
    return {
        name: value
        for name, value in told.items()
        if not is_timing(name) and not name.startswith("expert_")
    }


def _round(bench: Bench, *overrides: str, rounds: int = 1) -> object:
    """What a round of a population tells: losses, information, distances, fitness, router."""
    bench.n += 1
    config = bench.config(*HIERARCHY, *overrides)
    world = _world(config)
    place = bench.root / f"run{bench.n}" / "seeds" / "1"
    learner = make_learner(config, Worlds(world, world, "data"), place, 1)
    told = [learner.train_once() for _ in range(rounds)][-1]
    learner.close()
    return _numbers(told)


def _router_evolved(bench: Bench, *overrides: str) -> object:
    """The router's settings after evolutions by made-up fitness."""
    config = bench.config("train.lr_actor=0.001", *overrides)
    evolution = RouterEvolution.from_config(config, 1)
    for turn in range(1, 4):
        evolution.step(float(turn), 100 * turn)
    return evolution.values


def _reseeded(bench: Bench, *overrides: str) -> object:
    """Who begins anew in a first round whose experts are alike."""
    bench.n += 1
    config = bench.config(
        *HIERARCHY,
        *("trainer.training_schedule.population.freq=1", "trainer.diversity_threshold=1"),
        *overrides,
    )
    world = _world(config)
    place = bench.root / f"run{bench.n}" / "seeds" / "1"
    learner = make_learner(config, Worlds(world, world, "data"), place, 1)
    learner.train_once()
    tensors, state = learner.state()
    learner.close()
    assert tensors
    return [event["kind"] for event in state["events"]]


def _second_round(bench: Bench, *overrides: str) -> object:
    """What is told after a round whose router has learned in the one before."""
    routed = "trainer.training_schedule.router={freq: 1, steps: 16}"
    return _round(bench, routed, *overrides, rounds=2)


def _evolved(bench: Bench, *overrides: str) -> object:
    """Weights and hyperparameters of toy members after evolutions by made-up fitness."""
    config = bench.config("experts.n_experts=2", "train.lr_actor=0.001", *overrides)
    evolution = Evolution.from_config(config, 1)
    n_members = evolution.plan.members
    with Pool(Toy, n_members) as crew:
        for turn in range(3):
            fit = np.sin(np.arange(n_members) + turn)
            assert evolution.apply(evolution.step(fit, mapd=0.3), crew) == {}
        toys = crew.call(Toy.facts, range(n_members)).values()
        weights = [toy["weights"].tolist() for toy in toys]
    return weights, evolution.hyperparameters()


def _routed(bench: Bench, *overrides: str) -> object:
    """What two rollouts of a router over three rules tell."""
    config = bench.config(*HIERARCHY, *overrides)
    experts = [Moving("a"), Moving("b", -1.0), Always("c", (0.2, 0.2, 0.2, 0.2))]
    router = Router(config, len(experts), 1)
    env = MetaEnv(experts, _world(config), [range(10, 50)], config, 5)
    return _numbers(router.learn(env, 32, 0))


def _prior_routed(bench: Bench, *overrides: str) -> object:
    """The same from the fixed-share rule on."""
    return _routed(bench, "meta_router.prior=fixed_share", *overrides)


def _blended(bench: Bench, *overrides: str) -> object:
    """What a hierarchy that has learned nothing makes of two rules."""
    config = bench.config(*HIERARCHY, *overrides)
    experts = [Moving("a"), Moving("b", -1.0)]
    policy = HierarchyPolicy(experts, Router(config, 2, 1), config, 1)
    return run_backtest(policy, _world(config), range(20, 50), config).value.tolist()


def _paid(bench: Bench, *overrides: str) -> object:
    """Pay for choosing one of three experts always, λ adapting to it."""
    incentive = RouterReward(bench.config(*overrides).meta_router, 3)
    relative, chosen = np.linspace(-0.01, 0.02, 40), np.zeros(40, dtype=np.int64)
    paid = []
    for _ in range(9):
        paid.append(incentive.pay(relative, chosen, None).tolist())
        incentive.adapt()
    return paid


def _commanded(bench: Bench, *overrides: str) -> object:
    """What risk control made of a book in a market so wild that it has always something to do."""
    command = ("meta_router.every_bars=5", "meta_router.horizons=[2, 5]", "risk.cvar_window=20")
    masks = ("risk.drawdown_window=8", "risk.cooldown_bars=4", "risk.release_bars=2")
    halts = ("risk.halt_drawdown=0.12", "risk.halt_bars=4")
    config = bench.config(*command, *masks, *halts, *overrides)
    steps = np.random.default_rng(2).normal(0.0, 0.035, (120, 2))
    world = make_world(close=100.0 * np.exp(np.cumsum(steps, axis=0)))
    experts = [Always("one", (1.0, 0.0)), Moving("two")]
    policy = HierarchyPolicy(experts, EqualRouter(), config, 1)
    value = run_backtest(policy, world, range(10, 119), config).value
    return value.tobytes(), [(event.time, event.kind, event.who) for event in policy.log]


def under(observe: Observe, *base: str) -> Observe:
    """The same observation where other keys have been set already."""
    return lambda bench, *overrides: observe(bench, *base, *overrides)


_few_baselines = under(_baselines, "eval.baselines=[equal_weight, min_variance, momentum]")
# 500 returns are known after one update.
_worked_by_file = under(_executed, "market.executor=learned")
_tailed = under(_learned, "train.books=120", "reward.cvar_penalty=1")
_patient = under(_passes, "pretrain.epochs=9", "pretrain.lr=0.1", "pretrain.patience=1")
_ranked = under(_expert, "pretrain.targets=[rank]")
_adapted = under(_expert, "lora.enabled=true")
_td3 = under(_expert, "train.algo=TD3")
_apg = under(_expert, "train.algo=APG", "expert.horizon=5")
_scored = under(_apg, "pretrain.cross_fit=2")
_top_k = under(
    _scored, "expert.actor=top_k", "expert.top_share=0.4", "expert.buffer=1.5", "reward.kind=active"
)
_timesnet = under(_learned, "model.encoder=TimesNet")
_informed = under(_round, "experts.mi_reward_weight=0.5")
_schedule = "trainer.training_schedule"
_no_lesson = under(_round, f"{_schedule}.experts.freq=9")
_with_router = under(_no_lesson, f"{_schedule}.router.freq=1")
_bred = under(_no_lesson, f"{_schedule}.population.freq=1")
_niches = under(
    _evolved, "trainer.evolution={members_per_niche: 8, subpopulations: 2, paces: [1, 3]}"
)
EFFECTS: dict[str, tuple[str, Observe]] = {
    "seed": ("seed=43", _market),
    "assets": ("assets=[AAPL, JNJ]", _symbols),
    "window": ("window=30", _window),
    "split.train": ("split.train=[2015-01-02, 2015-12-31]", _splits),
    "split.valid": ("split.valid=[2016-02-01, 2016-05-31]", _splits),
    "split.test": ("split.test=[2016-07-01, 2016-11-30]", _splits),
    "fee_rate": ("fee_rate=0.001", _rules),
    "market.preset": ("market.preset=cn", _rules),
    "market.preset_confirmed": ("market.preset_confirmed=true", _confirmed),
    "market.executor": ("market.executor=twap", _executed),
    "market.executor_dataset": ("market.executor_dataset=other", _executed),
    "market.executor_policy": ("market.executor_policy=nowhere", _worked_by_file),
    "market.executor_step_minutes": ("market.executor_step_minutes=120", _executed),
    "market.executor_price": ("market.executor_price=vwap", _executed),
    "market.executor_spread_bps": ("market.executor_spread_bps=5", _executed),
    "market.executor_impact_bps": ("market.executor_impact_bps=500", _executed),
    "market.executor_permanent_bps": ("market.executor_permanent_bps=500", _executed),
    "features.ohlcv": ("features.ohlcv=false", _names),
    "features.indicators.sma": ("features.indicators.sma=[10]", _names),
    "features.indicators.ema": ("features.indicators.ema=[]", _names),
    "features.indicators.rsi": ("features.indicators.rsi=[7]", _names),
    "features.indicators.macd": ("features.indicators.macd=[5, 35, 5]", _names),
    "features.indicators.atr": ("features.indicators.atr=[]", _names),
    "features.indicators.bbands": ("features.indicators.bbands=[20, 2.5]", _x),
    "features.indicators.ichimoku": ("features.indicators.ichimoku=null", _names),
    "features.indicators.heikin_ashi": ("features.indicators.heikin_ashi=false", _names),
    "features.indicators.supertrend": ("features.indicators.supertrend=[10, 2.0]", _x),
    "features.stationary.enabled": ("features.stationary.enabled=true", _names),
    "features.relative": ("features.relative=true", _x),
    "features.alpha158": ("features.alpha158=true", _names),
    "features.cross_section.method": ("features.cross_section.method=zscore", _names),
    "features.cross_section.of": (
        "features.cross_section.of=[close]",
        under(_names, "features.cross_section.method=rank"),
    ),
    "features.cross_section.keep": (
        "features.cross_section.keep=true",
        under(_names, "features.cross_section.method=rank"),
    ),
    "normalization.method": ("normalization.method=none", _x),
    "normalization.fit_on": ("normalization.fit_on=all", _refusal),
    "normalization.include": ("normalization.include=[OHLCV]", _x),
    "logging.output_dir": ("logging.output_dir=./elsewhere", _run_directory),
    "logging.registry": ("logging.registry=./elsewhere", _registry),
    "logging.use_wandb": ("logging.use_wandb=true", _sinks),
    "logging.use_mlflow": ("logging.use_mlflow=true", _sinks),
    "logging.tensorboard": ("logging.tensorboard=false", _sinks),
    "buy_pct": ("buy_pct=0.1", _rule_of_thumb),
    "sell_pct": ("sell_pct=0.3", _rule_of_thumb),
    "state.include_pos": ("state.include_pos=false", _learned),
    "state.include_cash": ("state.include_cash=false", _learned),
    "model.encoder": ("model.encoder=Transformer", _learned),
    "model.d_model": ("model.d_model=12", _learned),
    "model.n_layers": ("model.n_layers=2", _learned),
    "model.dropout": ("model.dropout=0.4", _learned),
    "model.hidden": ("model.hidden=12", _learned),
    "model.cross_asset": ("model.cross_asset=attention", _learned),
    "model.shared_encoder": ("model.shared_encoder=false", _learned),
    "model.periods": ("model.periods=[2, 4]", _timesnet),
    "model.n_periods": ("model.n_periods=1", _timesnet),
    "model.direct": ("model.direct=8", _learned),
    "pretrain.enabled": ("pretrain.enabled=false", _expert),
    "pretrain.horizons": ("pretrain.horizons=[1, 3]", _expert),
    "pretrain.targets": ("pretrain.targets=[return, rank]", _expert),
    "pretrain.loss": ("pretrain.loss=ic", _ranked),
    "pretrain.cross_fit": ("pretrain.cross_fit=2", _expert),
    "pretrain.masked_share": ("pretrain.masked_share=0.5", _expert),
    "pretrain.epochs": ("pretrain.epochs=4", _passes),
    "pretrain.pass_rows": ("pretrain.pass_rows=16", _expert),
    "pretrain.patience": ("pretrain.patience=8", _patient),
    "pretrain.batch_rows": ("pretrain.batch_rows=10", _expert),
    "pretrain.lr": ("pretrain.lr=0.01", _expert),
    "pretrain.weight_decay": ("pretrain.weight_decay=0.5", _expert),
    "lora.enabled": ("lora.enabled=true", _expert),
    "lora.rank": ("lora.rank=1", _adapted),
    "lora.alpha": ("lora.alpha=4", _adapted),
    "lora.lr": ("lora.lr=0.001", _adapted),
    "lora.every_updates": ("lora.every_updates=1", _adapted),
    "lora.refresh_updates": ("lora.refresh_updates=3", _adapted),
    "expert.hidden": ("expert.hidden=12", _expert),
    "expert.buffer_size": ("expert.buffer_size=40", _expert),
    "expert.batch_size": ("expert.batch_size=9", _expert),
    "expert.updates_per_step": ("expert.updates_per_step=0.2", _expert),
    "expert.learning_starts": ("expert.learning_starts=40", _expert),
    "expert.tau": ("expert.tau=0.5", _expert),
    "expert.warmup_updates": ("expert.warmup_updates=0", _expert),
    "expert.entropy": ("expert.entropy=0.3", _expert),
    "expert.first_temperature": ("expert.first_temperature=0.1", _expert),
    "expert.target_entropy": ("expert.target_entropy=-3", _expert),
    "expert.exploration_noise": ("expert.exploration_noise=0.5", _td3),
    "expert.target_noise": ("expert.target_noise=0.4", _td3),
    "expert.noise_clip": ("expert.noise_clip=0.05", _td3),
    "expert.policy_delay": ("expert.policy_delay=3", _td3),
    "expert.actor": ("expert.actor=top_k", _scored),
    "expert.top_share": ("expert.top_share=0.6", _top_k),
    "expert.buffer": ("expert.buffer=2", _top_k),
    "expert.speed": ("expert.speed=0.5", _top_k),
    "expert.horizon": ("expert.horizon=6", _apg),
    "expert.weight_decay": ("expert.weight_decay=0.5", _apg),
    "train.algo": ("train.algo=TD3", _expert),
    "train.gamma": ("train.gamma=0.5", _learned),
    "train.gae_lambda": ("train.gae_lambda=0.5", _learned),
    "train.entropy_coef": ("train.entropy_coef=0.2", _learned),
    "train.value_coef": ("train.value_coef=0.1", _learned),
    "train.lr_actor": ("train.lr_actor=0.02", _learned),
    "train.lr_critic": ("train.lr_critic=0.02", _learned),
    "train.lr_schedule": ("train.lr_schedule=cosine", _learned),
    "train.grad_clip": ("train.grad_clip=0.01", _learned),
    "train.rollout_steps": ("train.rollout_steps=4", _learned),
    "train.books": ("train.books=6", _learned),
    "train.offset_groups": ("train.offset_groups=4", _learned),
    "train.episode_steps": ("train.episode_steps=7", _learned),
    "train.normalize_advantages": ("train.normalize_advantages=true", _learned),
    "train.peer_baseline": ("train.peer_baseline=true", _learned),
    "train.total_env_steps": ("train.total_env_steps=60", _trained),
    "train.log_interval_steps": ("train.log_interval_steps=20", _trained),
    "train.validate_every_steps": ("train.validate_every_steps=60", _trained),
    "train.select_by": ("train.select_by=total_return", _trained),
    "train.patience": ("train.patience=1", _trained),
    "train.checkpoint_every_steps": ("train.checkpoint_every_steps=20", _trained),
    "train.keep_checkpoints": ("train.keep_checkpoints=1", _trained),
    "train.threads": ("train.threads=2", _threads),
    "reward.kind": ("reward.kind=log_return", _learned),
    "reward.scale": ("reward.scale=10", _learned),
    "reward.variance_penalty": ("reward.variance_penalty=100", _learned),
    "reward.drawdown_penalty": ("reward.drawdown_penalty=1", _learned),
    "reward.cvar_penalty": ("reward.cvar_penalty=2", _tailed),
    "reward.cvar_tail": ("reward.cvar_tail=0.2", _tailed),
    "reward.sharpe_decay": (
        "reward.sharpe_decay=0.1",
        under(_learned, "reward.kind=differential_sharpe"),
    ),
    "eval.deterministic": ("eval.deterministic=false", _decided),
    "eval.use_fee": ("eval.use_fee=false", _fees),
    "eval.metrics": ("eval.metrics=[sharpe]", _summary),
    "eval.baselines": ("eval.baselines=[cash]", _baselines),
    "eval.rebalance_bars": ("eval.rebalance_bars=5", _few_baselines),
    "eval.estimation_bars": ("eval.estimation_bars=30", _few_baselines),
    "eval.momentum_bars": ("eval.momentum_bars=3", _few_baselines),
    "forecast.model": ("forecast.model=ridge", _forecast),
    "forecast.horizon": ("forecast.horizon=6", _forecast),
    "forecast.tranches": ("forecast.tranches=2", _forecast),
    "forecast.trees": ("forecast.trees=9", _forecast),
    "walk_forward.scheme": ("walk_forward.scheme=expanding", _folds),
    "walk_forward.unit": ("walk_forward.unit=month", _folds),
    "walk_forward.train": ("walk_forward.train=5", _folds),
    "walk_forward.valid": ("walk_forward.valid=1", _folds),
    "walk_forward.test": ("walk_forward.test=2", _folds),
    "walk_forward.first_test": ("walk_forward.first_test=2010-01-01", _folds),
    "walk_forward.last_test": ("walk_forward.last_test=2015-12-31", _folds),
    "walk_forward.purge_bars": ("walk_forward.purge_bars=2", _folds),
    "walk_forward.embargo_bars": ("walk_forward.embargo_bars=0", _folds),
    "walk_forward.partial": ("walk_forward.partial=true", _folds),
    "experts.n_experts": ("experts.n_experts=3", _round),
    "experts.rules": ("experts.rules=[equal_weight]", _round),
    "experts.skill_dim": ("experts.skill_dim=4", _round),
    "experts.mi_reward_weight": ("experts.mi_reward_weight=1", _informed),
    "experts.mi_estimator": ("experts.mi_estimator=diayn", _informed),
    "experts.mi_margin": ("experts.mi_margin=0", _informed),
    "experts.responsibility": ("experts.responsibility=false", _round),
    "experts.responsibility_by": ("experts.responsibility_by=router", _second_round),
    "experts.responsibility_bars": ("experts.responsibility_bars=3", _round),
    "experts.responsibility_temperature": ("experts.responsibility_temperature=2", _round),
    "experts.responsibility_floor": ("experts.responsibility_floor=0.5", _round),
    "experts.sharing.enabled": ("experts.sharing.enabled=false", _round),
    "experts.sharing.buffer_size": ("experts.sharing.buffer_size=60", _round),
    "experts.sharing.own_share": ("experts.sharing.own_share=0.9", _round),
    "experts.sharing.fresh_steps": ("experts.sharing.fresh_steps=30", _round),
    "experts.sharing.sequence_steps": ("experts.sharing.sequence_steps=4", _round),
    "experts.sharing.trace": ("experts.sharing.trace=0.3", _round),
    "experts.sharing.kl_limit": ("experts.sharing.kl_limit=0.001", _round),
    "experts.sharing.corrected": ("experts.sharing.corrected=false", _round),
    "meta_router.every_bars": ("meta_router.every_bars=3", _routed),
    "meta_router.horizons": ("meta_router.horizons=[2, 6]", _routed),
    "meta_router.window_share": ("meta_router.window_share=0.4", _round),
    "meta_router.command": ("meta_router.command=blend", _blended),
    "meta_router.macro": ("meta_router.macro=1", _routed),
    "meta_router.prior": ("meta_router.prior=fixed_share", _routed),
    "meta_router.prior_kl": ("meta_router.prior_kl=0.5", _prior_routed),
    "meta_router.kl_lambda": ("meta_router.kl_lambda=0.15", _paid),
    "meta_router.kl_lambda_max": ("meta_router.kl_lambda_max=0.12", _paid),
    "meta_router.kl_bonus": ("meta_router.kl_bonus=policy", _routed),
    "meta_router.entropy_floor": ("meta_router.entropy_floor=0.8", _paid),
    "meta_router.ent_coef": ("meta_router.ent_coef=0.1", _routed),
    "meta_router.lr": ("meta_router.lr=0.001", _routed),
    "meta_router.gamma": ("meta_router.gamma=0.5", _routed),
    "meta_router.gae_lambda": ("meta_router.gae_lambda=0.5", _routed),
    "meta_router.n_steps": ("meta_router.n_steps=32", _routed),
    "meta_router.n_envs": ("meta_router.n_envs=2", _routed),
    "meta_router.batch_size": ("meta_router.batch_size=16", _routed),
    "meta_router.episode_decisions": ("meta_router.episode_decisions=6", _routed),
    "trainer.diversity_patience": ("trainer.diversity_patience=0", _reseeded),
    "trainer.diversity_threshold": ("trainer.diversity_threshold=0.5", _evolved),
    "trainer.round_steps": ("trainer.round_steps=60", _round),
    "trainer.probe_states": ("trainer.probe_states=20", _bred),
    f"{_schedule}.router.freq": (f"{_schedule}.router.freq=2", _with_router),
    f"{_schedule}.router.steps": (f"{_schedule}.router.steps=32", _with_router),
    f"{_schedule}.experts.freq": (f"{_schedule}.experts.freq=2", _round),
    f"{_schedule}.experts.steps": (f"{_schedule}.experts.steps=12", _round),
    f"{_schedule}.population.freq": (f"{_schedule}.population.freq=2", _bred),
    f"{_schedule}.population.mutation_rate": (f"{_schedule}.population.mutation_rate=0.2", _niches),
    "trainer.evolution.enabled": ("trainer.evolution.enabled=false", _evolved),
    "trainer.evolution.members_per_niche": ("trainer.evolution.members_per_niche=4", _evolved),
    # A check: the paces say how many there are, and both are to agree.
    "trainer.evolution.subpopulations": ("trainer.evolution.subpopulations=2", _refusal),
    "trainer.evolution.paces": ("trainer.evolution.paces=[1, 2]", _niches),
    "trainer.evolution.variance_penalty": ("trainer.evolution.variance_penalty=2", _bred),
    "trainer.evolution.windows": ("trainer.evolution.windows=3", _bred),
    "trainer.evolution.lr": ("trainer.evolution.lr=[0.001, 0.001]", _evolved),
    "trainer.evolution.target_entropy": ("trainer.evolution.target_entropy=[-1, -1]", _evolved),
    "trainer.evolution.mi_reward_weight": (
        "trainer.evolution.mi_reward_weight=[0.5, 0.5]",
        _evolved,
    ),
    "trainer.evolution.router_lr": (
        "trainer.evolution.router_lr=[0.0003, 0.0003]",
        _router_evolved,
    ),
    "trainer.evolution.kl_lambda": ("trainer.evolution.kl_lambda=[0.1, 0.1]", _router_evolved),
    "trainer.evolution.gamma": ("trainer.evolution.gamma=[0.96, 0.96]", _evolved),
    "risk.enabled": ("risk.enabled=false", _commanded),
    "risk.max_drawdown": ("risk.max_drawdown=0.15", _commanded),
    "risk.target_volatility": ("risk.target_volatility=0.1", _commanded),
    "risk.drawdown_window": ("risk.drawdown_window=12", _commanded),
    "risk.drawdown_limit": ("risk.drawdown_limit=0.12", _commanded),
    "risk.drawdown_release": ("risk.drawdown_release=0.02", _commanded),
    "risk.release_bars": ("risk.release_bars=4", _commanded),
    "risk.cooldown_bars": ("risk.cooldown_bars=9", _commanded),
    "risk.cvar_limit": ("risk.cvar_limit=0.07", _commanded),
    "risk.cvar_window": ("risk.cvar_window=30", _commanded),
    "risk.cvar_constraint": ("risk.cvar_constraint=true", _round),
    "risk.halt_drawdown": ("risk.halt_drawdown=0.2", _commanded),
    "risk.halt_bars": ("risk.halt_bars=null", _commanded),
    "risk.turnover_per_bar": ("risk.turnover_per_bar=0.5", _commanded),
    "risk.turnover_per_month": ("risk.turnover_per_month=5", _commanded),
}
SHARED: dict[str, Observe] = {
    **dict.fromkeys(("model.encoder", "model.d_model", "model.n_layers", "lora.enabled"), _round),
    **dict.fromkeys(("expert.hidden", "expert.batch_size", "expert.updates_per_step"), _round),
    **dict.fromkeys(("expert.learning_starts", "expert.tau", "expert.warmup_updates"), _round),
    **dict.fromkeys(("expert.first_temperature", "reward.variance_penalty"), _round),
    # Outside of the bounds of what evolves.
    **dict.fromkeys(
        ("train.gamma", "train.lr_actor"), under(_round, "trainer.evolution.enabled=false")
    ),
    **dict.fromkeys(("reward.kind", "train.lr_critic"), _round),
    **dict.fromkeys(("train.books", "train.episode_steps"), _round),
    "lora.rank": under(_round, "lora.enabled=true"),
}
"""Keys that a hierarchy shares with single agents, and how they are seen to tell on it."""
ANY_LEARNER = {
    # Of the loop around whichever learner there is.
    *("train.algo", "train.total_env_steps", "train.log_interval_steps"),
    *("train.validate_every_steps", "train.checkpoint_every_steps"),
    # Experts' rewards are divided by their standard deviation: none of it is left.
    "reward.scale",
}
"""Keys of the hierarchy's own file that its population does not heed."""


def test_every_key_of_a_shipped_file_is_either_effective_or_pending() -> None:
    # Where the demo's data come from is for the tests of data to see.
    keys = {k for name in FILES for k in _keys(name) if not k.startswith("data.")}
    assert keys - set(EFFECTS) - ELSEWHERE <= PENDING
    assert not set(EFFECTS) & (PENDING | ELSEWHERE)


def test_every_key_of_an_agents_section_has_an_effect() -> None:
    known = _leaves({section: getattr(Config(), section).model_dump() for section in OURS})
    ours = {k for k in set(EFFECTS) | ELSEWHERE | PENDING if k.split(".")[0] in OURS}
    assert ours == known


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, bars_file: Path) -> Bench:
    return Bench(tmp_path_factory.mktemp("effects"), bars_file)


@pytest.mark.parametrize("key", EFFECTS)
def test_changing_the_key_changes_what_it_steers(key: str, bench: Bench) -> None:
    override, observe = EFFECTS[key]
    assert observe(bench, override) != bench.usual(observe)


def test_every_key_that_the_hierarchys_file_shares_is_looked_at() -> None:
    shared = ("model", "lora", "expert", "reward", "train")
    keys = {k for k in _keys("hierarchical") if k.split(".")[0] in shared}
    assert keys == SHARED.keys() | ANY_LEARNER


@pytest.mark.parametrize("key", SHARED)
def test_a_hierarchy_heeds_what_it_shares_with_single_agents(key: str, bench: Bench) -> None:
    override, observe = EFFECTS[key][0], SHARED[key]
    assert observe(bench, override) != bench.usual(observe)


def test_every_section_of_the_tree_is_in_a_shipped_file() -> None:
    # What the keys of execution do is seen in tests/test_execution_config.py; whom to alert is
    # everybody's own, and what comes of it is seen in tests/test_alerts.py.
    given = {key.split(".")[0] for name in (*FILES, "execution", "wide") for key in _keys(name)}
    assert set(Config.model_fields) == given | {"alerts"}
