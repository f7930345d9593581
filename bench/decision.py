"""A bar in, orders out: the decision engine by ONNX Runtime, against eager torch and SB3's predict.

    python -m bench decision
    python -m bench.decision --bars 2000

Policies of four configurations on 20 assets and windows of 20 bars, as drawn: weights change
nothing about latency. Each is exported, loaded and pushed bars of a random walk, one by one
(`DecisionEngine.push`: checks, features, world, account, policy, orders and reasons); what a
hierarchy leaves for later (`complete`) is not counted, no order waits for it. One thread. Times are
processor time of the call, which is what a quiet machine takes and what a busy one does not change
much; wall time is printed beside. Peers, in the same run:

- eager: the same engine, its networks the modules of torch that were trained; and what its policy
  alone takes (`decide`: one window encoded, the actor asked, what a hierarchy does around it)
- before: what a bar took before there were streams: features computed over the look-back of the
  last bars, then eager
- SB3: `model.predict` on the same encoder and actor and a window that is ready; of a hierarchy one
  expert. Neither features nor orders, so less than we do

At 500 assets fewer bars. Then the stream's features alone, against computing them over the
look-back, and how many bar sets a second a replay is.

Fails where the 99th percentile is 1 ms or more for the flat agent, 2 ms for TimesNet or the tuned
hierarchy, 10 ms for 500 assets with a TimeCNN of width 32, or where a replay of the flat agent is
under 1,000 bar sets a second. Ratios have goals too (5× faster than eager, features 50× faster than
over the look-back), which are printed as met or missed and fail nothing.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from bench import _a2c_peer, _sac_peer
from echelon.agents.a2c import ActorPolicy
from echelon.backtest.policy import Policy
from echelon.config import Config, load_config, override_config
from echelon.data.bars import RawFrame, conform
from echelon.data.build import PanelRequest, build_panel
from echelon.data.importing import import_source
from echelon.data.panel import Panel
from echelon.data.sources import Source
from echelon.data.store import Store
from echelon.data.stream import BarSet
from echelon.envs.world import World, world_of
from echelon.features import Prepared, prepare
from echelon.features.engine import ACROSS, FeaturePlan, symbol_features
from echelon.features.scaler import Scaler
from echelon.features.stream import FeatureStream
from echelon.models.encoders import Encoder
from echelon.population.policy import HierarchyPolicy
from echelon.runs import RunDirectory
from echelon.runs.checkpoint import save_best, with_prefix
from echelon.serving.bundle import Bundle
from echelon.serving.engine import DecisionEngine, take_rows
from echelon.serving.export import ExportRequest, export_bundle
from echelon.serving.graphs import PolicySplit, as_graph
from echelon.serving.policies import actor_specs
from echelon.sources import SourceInfo
from echelon.training.run import TrainedRun, Training, Worlds, ready, seed_directory
from echelon.types import Floats, Floats32

ROOT = Path(__file__).parents[1]
FIRST, DAY = np.datetime64("2000-01-01", "us"), np.timedelta64(1, "D")
TRAIN, VALID, TEST = 600, 40, 40
HISTORY = TRAIN + VALID + TEST
SEED, DATASET, ASSETS, WIDE = 7, "bench", 20, 500
FIELDS = ("open", "high", "low", "close", "volume")
WARM_UP, BARS, PEER_BARS = 50, 10_000, 300
GOALS = {"qtmrl-fast": 1.0, "sac": 2.0, "hierarchical-tuned": 2.0, "hierarchical": None}
"""Configuration → most milliseconds of the 99th percentile; None: reported."""
WIDE_GOAL, EAGER_GOAL, STREAM_GOAL, REPLAY_GOAL = 10.0, 5.0, 50.0, 1000.0
WIDE_CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "TimeCNN, width 32": ("qtmrl-fast", ()),
    "TimeCNN, width 128": ("qtmrl-fast", ("model.d_model=128", "model.n_layers=3")),
    "TimesNet, width 64": ("sac", ()),
}


class Walks(Source):
    """Random walks [T,N] that trade on every day; the store has the first `HISTORY` of them."""

    def __init__(self, bars: int, assets: int) -> None:
        rng, bars = np.random.default_rng(SEED), HISTORY + bars
        level, close = np.zeros(assets), np.empty((bars, assets))
        for t in range(bars):  # drifts back, so that any number of bars has prices
            level = 0.995 * level + 0.015 * rng.standard_t(4, assets).clip(-6, 6)
            close[t] = 50 * np.exp(level)
        opens = close * np.exp(rng.normal(0, 0.004, close.shape))
        self.times = FIRST + np.arange(bars) * DAY
        self.symbols = tuple(f"S{n:03d}" for n in range(assets))
        self.grids = {
            "open": opens,
            "high": np.maximum(opens, close) * (1 + rng.exponential(0.003, close.shape)),
            "low": np.minimum(opens, close) * (1 - rng.exponential(0.003, close.shape)),
            "close": close,
            "volume": np.round(rng.lognormal(14, 1, close.shape)),
        }

    def info(self) -> SourceInfo:
        """Daily bars without holidays: a calendar that never ends."""
        return SourceInfo(
            name="walks",
            freq="1d",
            calendar="24/7",
            timezone="UTC",
            price_basis="split_adjusted",
            fields=frozenset(FIELDS),
            fingerprint=f"{len(self.times)}x{len(self.symbols)}",
        )

    def frames(self, since: Mapping[str, datetime] | None = None) -> Iterator[RawFrame]:
        """The history, one symbol after the other."""
        columns = {name: grid[:HISTORY].T.ravel() for name, grid in self.grids.items()}
        times = np.tile(self.times[:HISTORY], len(self.symbols))
        symbols = np.repeat(self.symbols, HISTORY)
        frame = pl.DataFrame({"time": times, "symbol": symbols, **columns})
        yield RawFrame(conform(frame.with_row_index("row", offset=1)), "walks")

    def bar_sets(self) -> Iterator[BarSet]:
        """What comes after the history."""
        for t in range(HISTORY, len(self.times)):
            yield BarSet(self.times[t], **{name: self.grids[name][t] for name in FIELDS})


class Case(NamedTuple):
    """An exported policy, and what it was made of."""

    bundle: Bundle
    policy: Policy  # of torch
    world: World
    store: Path

    @property
    def config(self) -> Config:
        """The bundle's."""
        return self.bundle.config


def make_case(directory: Path, name: str, walks: Walks, *more: str) -> Case:
    """The policy of `configs/<name>.yaml`, as drawn, exported from a run of its own."""
    store = directory / "store"
    if not store.exists():
        import_source(walks, Store(store), DATASET)
    day = [str(t) for t in walks.times[:HISTORY].astype("datetime64[D]")]
    ends = np.cumsum([TRAIN, VALID, TEST])
    parts = zip(("train", "valid", "test"), (0, *ends[:2]), ends, strict=True)
    split = ", ".join(f"{part}: [{day[low]}, {day[high - 1]}]" for part, low, high in parts)
    overrides = [
        *("data.source=store", f"data.dataset={DATASET}", f"data.store={store}"),
        *(f"data.cache.dir={directory}/cache", "assets=[]", "market.preset_confirmed=true"),
        *("pretrain.enabled=false", "train.books=8", "train.episode_steps=50"),
        *("expert.buffer_size=4000", "logging.tensorboard=false", f"split={{{split}}}", *more),
    ]
    if name == "qtmrl-fast":
        overrides.append("train.offset_groups=2")
    run = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory))
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    prepared = prepare(config, run).prepared
    RunDirectory(run).record(config, "prepare", prepared=prepared.manifest["content_hash"])
    worlds = Worlds.from_prepared(Prepared.open(run), config)
    place = seed_directory(run, SEED)
    assert ready(config, worlds, place, lambda: False)
    training = Training(config, worlds, place, SEED)
    save_best(
        training.checkpoints,
        training.learner.steps,
        with_prefix("net.", training.learner.weights()),
        {"score": 0.0, **training.made_of},
        config_hash=training.identity,
    )
    bundle = export_bundle(run, run / "bundle", ExportRequest(seed=SEED))
    policy = TrainedRun.open(run).policy(SEED)
    return Case(bundle, policy, world_of(prepared, config), store)


class Windows(nn.Module):
    """An encoder as it is trained, asked about one window: x[1,W,N,F] -> z[1,N,D]."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder.eval()

    def forward(self, x: Tensor) -> Tensor:
        """The embedding of the window's last bar."""
        z: Tensor = self.encoder(x)
        return z[:, 0]


def encoders_of(policy: Policy) -> list[Encoder]:
    """Of each actor in a policy, in order."""
    if isinstance(policy, HierarchyPolicy):
        return [encoder for expert in policy.experts for encoder in encoders_of(expert)]
    return [policy.net.encoder if isinstance(policy, ActorPolicy) else policy.encoder]


def eager_bundle(case: Case) -> Bundle:
    """The bundle with the modules of torch in place of its graphs."""
    n_features = case.bundle.manifest["n_features"]
    split = PolicySplit(case.policy, case.config, n_features)
    actors = zip(actor_specs(split.spec), encoders_of(case.policy), strict=True)
    own = {spec["encoder"]: as_graph(Windows(encoder)) for spec, encoder in actors}
    return replace(case.bundle, spec=split.spec, graphs=split.graphs() | own, runtime="torch")


class Timing(NamedTuple):
    """Milliseconds of each bar: processor time and wall time of a push, and of its policy alone."""

    push: Floats
    wall: Floats
    decide: Floats


def time_pushes(bundle: Bundle, store: Path, bars: Iterable[BarSet]) -> Timing:
    """Push bars into a fresh engine; the first `WARM_UP` do not count."""
    engine = DecisionEngine.from_store(bundle, store)
    decide, push, wall, alone = engine.policy.decide, [], [], []

    def timed_decide(*args: Any) -> Any:
        began = time.process_time_ns()
        action = decide(*args)
        alone.append(time.process_time_ns() - began)
        return action

    engine.policy.decide = timed_decide  # type: ignore[method-assign]
    n_orders = 0
    for bar_set in bars:
        began, began_wall = time.process_time_ns(), time.perf_counter_ns()
        decision = engine.push(bar_set)
        push.append(time.process_time_ns() - began)
        wall.append(time.perf_counter_ns() - began_wall)
        engine.complete()
        n_orders += len(decision.orders)
    assert n_orders > len(push) / 10, "the policy hardly trades"
    return Timing(*(np.array(part[WARM_UP:]) / 1e6 for part in (push, wall, alone)))


def sb3_predict(case: Case) -> Callable[[], object]:
    """SB3's `model.predict` on the same encoder and actor, about a window."""
    encoder, config, world = encoders_of(case.policy)[0], case.config, case.world
    if isinstance(case.policy, ActorPolicy):
        model = _a2c_peer.make_learner(config, world, 1)
        model.policy.net.load_state_dict(case.policy.net.state_dict())
        env = _a2c_peer.WindowEnv(world, config)
        obs, _ = env.reset(seed=SEED, options={"row": world.window})
    else:
        small = override_config(config, ["expert.buffer_size=128"])
        setting = _sac_peer.Setting(n_envs=1, ours=True, share=True, frozen=True)
        see = _sac_peer.see_windows(world)
        model = _sac_peer.make_learner(small, world, see, setting, lambda: copy.deepcopy(encoder))
        obs = model.env.reset()[0]
    return lambda: model.predict(obs, deterministic=True)


def time_calls(work: Callable[[], object], count: int = PEER_BARS) -> Floats:
    """Milliseconds of processor time of each call, after a few that do not count."""
    took = []
    for _ in range(count + 10):
        began = time.process_time_ns()
        work()
        took.append(time.process_time_ns() - began)
    return np.array(took[10:]) / 1e6


class Features(NamedTuple):
    """Median milliseconds of a row of X: from the stream, and from the look-back."""

    stream: float
    batch: float
    look_back: int


def time_features(case: Case, count: int) -> Features:
    """A row of features of all assets, both ways; over the whole history they are the same."""
    config, bundle = case.config, case.bundle
    request = PanelRequest(bundle.symbols, None, None, config.data.limits, config.data.delist_after)
    panel = build_panel(Store(case.store), DATASET, request)
    engine = DecisionEngine.from_store(bundle, case.store)
    plan, scaler = engine._features.plan, bundle.scaler
    look_back = plan.warmup + config.window
    first = len(panel.times) - count
    stream = FeatureStream.from_panel(take_rows(panel, slice(0, first)), plan, scaler)
    rows = [take_rows(panel, slice(t, t + 1)) for t in range(first, len(panel.times))]
    made: list[Floats32] = []
    streamed = time_calls(lambda: made.append(stream.push(rows[len(made)]).x), count - 10)
    assert np.array_equal(made[-1], batch_row(panel, plan, scaler)), "stream and batch differ"
    last = take_rows(panel, slice(-look_back, None))
    batch = time_calls(lambda: batch_row(last, plan, scaler), max(10, min(50, count)))
    return Features(float(np.median(streamed)), float(np.median(batch)), look_back)


def batch_row(panel: Panel, plan: FeaturePlan, scaler: Scaler) -> Floats32:
    """The last row of X[N,F] by the batch over a panel of the look-back."""
    last, n_assets = len(panel.times) - 1, len(panel.symbols)
    x = np.zeros((n_assets, len(plan.names)), dtype=np.float32)
    present = np.zeros(n_assets, dtype=np.bool_)
    for n in range(n_assets):
        values, here = symbol_features(panel, n, plan, last)
        x[n, : len(plan.sources)], present[n] = values[0, plan.sources], here[0]
    for column, rank in enumerate(plan.ranks, len(plan.sources) - len(plan.ranks)):
        base = x[:, column].astype(np.float64)[None]
        mask = (present & panel.member[last])[None]
        x[:, column] = ACROSS[rank.method](base, mask)[0]
    return scaler.transform(x)


class Outcome(NamedTuple):
    """A goal, whether it is met, and whether the benchmark fails where it is not."""

    goal: str
    met: bool
    promised: bool = True


def show(outcomes: Iterable[Outcome]) -> bool:
    """Print goals; whether all that is promised is met."""
    good = True
    for goal, met, promised in outcomes:
        print(f"goal: {goal}: {'met' if met else 'MISSED'}", flush=True)
        good &= met or not promised
    return good


def percentiles(values: Floats) -> list[float]:
    return [float(value) for value in np.percentile(values, [50, 99, 99.9])]


def print_row(title: str, numbers: Iterable[float]) -> None:
    print(f"{title:<20}" + "".join(f"{number:>8.2f}" for number in numbers), flush=True)


def compare_one(name: str, case: Case, walks: Walks) -> tuple[Timing, Features, list[Outcome]]:
    """Print the row of a configuration."""
    ours = time_pushes(case.bundle, case.store, walks.bar_sets())
    some = islice(walks.bar_sets(), WARM_UP + PEER_BARS)
    eager = time_pushes(eager_bundle(case), case.store, some)
    sb3 = float(np.median(time_calls(sb3_predict(case))))
    made = time_features(case, 100)
    push, wall, alone = (float(np.median(part)) for part in ours)
    eager_push, _, eager_alone = (float(np.median(part)) for part in eager)
    before = eager_push - made.stream + made.batch
    ratios = (alone, eager_alone, eager_alone / alone, eager_push, eager_push / push)
    peers = (before, before / push, sb3, sb3 / push)
    print_row(name, (*percentiles(ours.push), wall, *ratios, *peers))
    outcomes = []
    p99, most = percentiles(ours.push)[1], GOALS[name]
    if most is not None:
        outcomes.append(Outcome(f"{name}: p99 {p99:.2f} ms, under {most:g} ms", p99 < most))
    for ratio, what in ((eager_push / push, "eager"), (before / push, "before")):
        goal = f"{name}: {ratio:.1f}× faster than {what}, at least {EAGER_GOAL:g}×"
        outcomes.append(Outcome(goal, ratio >= EAGER_GOAL, promised=False))
    return ours, made, outcomes


def compare(directory: Path, bars: int) -> bool:
    """Print the table of 20 assets; whether what is promised of it holds."""
    walks = Walks(WARM_UP + bars, ASSETS)
    print(f"N = {ASSETS}, W = 20, {bars:,} bars, ms of processor time (wall: on the clock)")
    print(f"{'':<20}{'push':>32}{'decide':>24}{'eager push':>16}{'before':>16}{'SB3':>16}")
    heads = ("p50", "p99", "p99.9", "wall", "ours", "eager", "ratio", *("ms", "ratio") * 3)
    print(" " * 20 + "".join(f"{head:>8}" for head in heads))
    results = {}
    for name in GOALS:
        results[name] = compare_one(name, make_case(directory, name, walks), walks)
    ours, made, _ = results["qtmrl-fast"]
    ratio, rate = made.batch / made.stream, 1e3 / float(ours.push.mean())
    print(
        f"features of {ASSETS} assets: {made.stream:.3f} ms streamed, {made.batch:.2f} ms over the "
        f"last {made.look_back} bars"
    )
    outcomes = [outcome for *_, some in results.values() for outcome in some]
    features = f"features {ratio:.0f}× faster than the batch, at least {STREAM_GOAL:g}×"
    replay = f"replay of the flat agent {rate:,.0f} bar sets/s, at least {REPLAY_GOAL:,.0f}"
    outcomes.append(Outcome(features, ratio >= STREAM_GOAL, promised=False))
    outcomes.append(Outcome(replay, rate >= REPLAY_GOAL))
    return show(outcomes)


def compare_wide(directory: Path, bars: int) -> bool:
    """Print the table of 500 assets; whether what is promised of it holds."""
    walks = Walks(WARM_UP + bars, WIDE)
    print(f"\nN = {WIDE}, W = 20, {bars:,} bars, ms of processor time (wall: on the clock)")
    print(" " * 20 + "".join(f"{head:>8}" for head in ("p50", "p99", "p99.9", "wall", "decide")))
    p99 = {}
    for title, (name, more) in WIDE_CASES.items():
        case = make_case(directory, name, walks, *more)
        ours = time_pushes(case.bundle, case.store, walks.bar_sets())
        wall, alone = float(np.median(ours.wall)), float(np.median(ours.decide))
        print_row(title, (*percentiles(ours.push), wall, alone))
        p99[title] = percentiles(ours.push)[1]
    title = next(iter(WIDE_CASES))
    goal = f"{title}: p99 {p99[title]:.2f} ms, under {WIDE_GOAL:g} ms"
    return show([Outcome(goal, p99[title] < WIDE_GOAL)])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bars", type=int, default=BARS)
    # `python -m bench decision` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if args.bars < 100:
        parser.error("at least 100 bars")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        narrow, wide = Path(scratch) / "narrow", Path(scratch) / "wide"
        narrow.mkdir()
        wide.mkdir()
        good = compare(narrow, args.bars)
        good &= compare_wide(wide, max(100, args.bars // 50))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
