"""A2C end to end, steps/s of training, against Stable-Baselines3's A2C on windows.

    python -m bench a2c
    python -m bench.a2c --rounds 5

Both learn on the same market (2,770 bars of 16 assets with 30 features, windows of 20 bars), with
the same network (TimeCNN, 3 layers of 128, then our heads), rollouts of 50 steps, the other
settings of `configs/qtmrl-fast.yaml` and one thread. SB3 does it on an ordinary
Gymnasium environment (`bench/_a2c_peer.py`) of which it is shown a window per step and book; ours
is the learner that `echelon train` runs. An environment step is a bar of a book, on both sides.
Before the clock starts it is checked that the two environments pay the same for the same actions,
and that the two networks answer the same to the same window and book.

All run in this process in turn, several rounds of some seconds each. What counts is the processor
time of each side's best round, so that a busy machine favours neither. The last columns say where
ours spends it: `encode` is the encoder forward and backward, `collect` is acting and trading,
`update` is the rest: heads, losses, optimizer.

Fails where 64 books in 4 groups are under 40× the better of SB3 with 1 and 16 environments.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from bench._a2c_peer import WindowEnv, make_learner
from echelon.agents.a2c import A2C
from echelon.config import Config, load_config
from echelon.envs.act import ActionRule
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.market import PriceHistory, market_rows, resolve_rules
from echelon.models.actor_critic import ActorCritic, MarketTensors

FAST = Path(__file__).parents[1] / "configs" / "qtmrl-fast.yaml"
BARS, ASSETS, FEATURES, SEED = 2770, 16, 30, 7
NETWORK = (
    *("window=20", "model.encoder=TimeCNN", "model.d_model=128", "model.n_layers=3"),
    *("model.hidden=64", "model.cross_asset=mlp", "model.shared_encoder=true"),
    *("train.rollout_steps=50", "train.gamma=0.96"),
)
"""Design note 003's, whatever the configuration recommends."""
ENVS = (1, 16)
GOAL = 40.0
ROUND_SECONDS = 4.0


class Crew(NamedTuple):
    """Books of ours, and in how many offset groups they are."""

    books: int
    groups: int


CREWS = (Crew(1, 1), Crew(64, 1), Crew(64, 4), Crew(64, 8), Crew(64, 64))


def config_of(crew: Crew = CREWS[0]) -> Config:
    sizes = (
        *(f"train.books={crew.books}", f"train.offset_groups={crew.groups}"),
        "train.peer_baseline=false",  # SB3 has none, and a book alone has no peers
    )
    return load_config(FAST, [*NETWORK, *sizes])


def make_world(config: Config, bars: int = BARS) -> World:
    """A random walk of which everything may be traded and nothing can be known."""
    rng = np.random.default_rng(SEED)
    close = 50 * np.exp(np.cumsum(rng.normal(0, 0.01, (bars, ASSETS)), axis=0))
    history = PriceHistory(
        times=np.datetime64("2000-01-03", "us") + np.arange(bars) * np.timedelta64(1, "D"),
        symbols=tuple(f"T{n:02d}" for n in range(ASSETS)),
        price_basis="adjusted",
        close=close,
        open=close * np.exp(rng.normal(0, 0.003, close.shape)),
        tradable=np.ones(close.shape, dtype=bool),
        delisted=np.zeros(close.shape, dtype=bool),
    )
    everywhere = np.ones(close.shape, dtype=bool)
    return World(
        rows=market_rows(history, lots=False, stamp_duty=False),
        rules=resolve_rules(config, calendar=None).rules,
        x=rng.standard_normal((bars, ASSETS, FEATURES)).astype(np.float32),
        present=everywhere,
        member=everywhere,
        growth=close,
        times=history.times,
        symbols=history.symbols,
        splits={"train": range(bars)},
        window=config.window,
        fill_open=True,
        initial_cash=config.market.initial_cash,
        periods_per_year=252.0,
        benchmark=None,
        ledger={},
    )


def check_environments(world: World, config: Config) -> None:
    """The peer's environment pays what our books are paid."""
    rng = np.random.default_rng(SEED + 1)
    env = WindowEnv(world, config)
    env.reset(seed=SEED, options={"row": world.window - 1})
    books = Books(
        world, ActionRule.from_config(config, "discrete"), config.reward, 1, world.span("train")
    )
    for _ in range(300):
        action = rng.integers(0, 3, ASSETS)
        _, theirs, *_ = env.step(action)
        ours = books.step(action[None]).reward[0]
        np.testing.assert_allclose(theirs, ours, rtol=1e-6, atol=1e-9)


def check_networks(world: World, config: Config) -> None:
    """The peer's policy answers to a window as our network does to a row of a long stretch."""
    policy: Any = make_learner(config, world, 1).policy
    net: ActorCritic = policy.net
    first, count = world.window - 1, 5
    x = torch.from_numpy(world.x)
    book = torch.rand(count, ASSETS, 2)
    windows = torch.stack([x[k : k + world.window] for k in range(count)])
    with torch.no_grad():
        theirs = policy.ask({"x": windows, "book": book})
        market = net.encode(x[: first + count]).map(lambda part: part[:, None])
        ours = net(market, book[:, None], policy.present)
    torch.testing.assert_close(theirs.logits, ours.logits[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs.value, ours.value[:, 0], rtol=1e-4, atol=1e-5)


@dataclass
class Contestant:
    """Something that trains, and how fast it was."""

    name: str
    train: Callable[[], int]
    """One update; how many steps it was of."""
    rate: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        """Train for a while; the best rate is kept."""
        steps, began = 0, time.process_time()
        with clocked() as spent:
            while (taken := time.process_time() - began) < seconds:
                steps += self.train()
        if steps / taken > self.rate:
            self.rate = steps / taken
            encode = spent["_encode"] + spent["backward"]
            collect = spent["collect"] - spent["_encode"]
            self.shares = {
                "encode": encode / taken,
                "collect": collect / taken,
                "update": (spent["update"] - spent["backward"]) / taken,
            }


@contextmanager
def clocked() -> Iterator[dict[str, float]]:
    """Seconds our learner spends in its parts, by name: gathered while this is open."""
    spent: dict[str, float] = {}

    def clock(owner: type, name: str) -> Any:
        spent[name] = 0.0
        plain = getattr(owner, name)

        def run(*args: Any) -> Any:
            began = time.process_time()
            result = plain(*args)
            spent[name] += time.process_time() - began
            return result

        return patch.object(owner, name, run)

    with (
        clock(A2C, "_encode"),
        clock(A2C, "collect"),
        clock(A2C, "update"),
        clock(MarketTensors, "backward"),
    ):
        yield spent


def ours(crew: Crew) -> Contestant:
    config = config_of(crew)
    learner = A2C(config, make_world(config), SEED)

    def train() -> int:
        before = learner.steps
        learner.train_once()
        return learner.steps - before

    groups = "1 group" if crew.groups == 1 else f"{crew.groups} groups"
    books = "1 book" if crew.books == 1 else f"{crew.books} books, {groups}"
    return Contestant(f"ours, {books}", train)


def theirs(n_envs: int) -> Contestant:
    config = config_of()
    learner = make_learner(config, make_world(config), n_envs)
    steps = n_envs * config.train.rollout_steps

    def train() -> int:
        before = learner.num_timesteps
        learner.learn(steps, reset_num_timesteps=False)
        return learner.num_timesteps - before

    return Contestant(f"SB3, {n_envs} env{'s' if n_envs > 1 else ''}", train)


def report(peers: dict[int, Contestant], crews: dict[Crew, Contestant]) -> bool:
    """Print the table; whether the goal is met."""
    base = max(peer.rate for peer in peers.values())
    title = f"{'':<24}{'steps/s':>9}{'ratio':>8}{'1,000,000 steps':>18}"
    print(title + "".join(f"{name:>9}" for name in ("encode", "collect", "update")))
    for one in [*peers.values(), *crews.values()]:
        shares = "".join(f"{s:>9.0%}" for s in one.shares.values() if s)
        minutes = 1e6 / one.rate / 60
        print(
            f"{one.name:<24}{one.rate:>9,.0f}{one.rate / base:>7.1f}×{minutes:>14.1f} min{shares}"
        )
    many = crews[Crew(64, 4)].rate / base
    single = crews[Crew(1, 1)].rate / peers[1].rate
    print(f"one book against one environment: {single:.1f}×")
    good = many >= GOAL
    print(f"goal: at least {GOAL:g}× with 64 books in 4 groups: {'met' if good else 'MISSED'}")
    return good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    # `python -m bench a2c` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if args.rounds < 1:
        parser.error("at least 1 round")
    torch.set_num_threads(1)
    config = config_of()
    world = make_world(config)
    check_environments(world, config)
    check_networks(world, config)
    peers = {n_envs: theirs(n_envs) for n_envs in ENVS}
    crews = {crew: ours(crew) for crew in CREWS}
    everyone = [*peers.values(), *crews.values()]
    for one in everyone:
        one.train()
    for _ in range(args.rounds):
        for one in everyone:
            one.run(ROUND_SECONDS)
    print(f"processor time, one thread, best of {args.rounds} rounds of {ROUND_SECONDS:g} s")
    return 0 if report(peers, crews) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
