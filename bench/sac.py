"""SAC end to end, collecting and learning, against Stable-Baselines3's SAC, step for step.

    python -m bench sac
    python -m bench.sac --rounds 9 -o expert.batch_size=256

The sizes are those of `configs/sac.yaml` (books, batch, updates, widths; printed first). The market
is a random walk of 16 assets with as many bars as the bundled sample, 30 features and windows of
20. What is timed is a bar of all books with the updates that are due for it: as many environment
steps and gradient updates on both sides. Both trade on the same books by the same kernel and learn
by networks of the same layers (`bench/_sac_peer.py`); before the clock starts it is checked that
the books pay the same and the networks answer the same.

1. Embeddings: SB3 is given them ready made, and stores them. Its networks have the layers and sizes
   of ours, written plainly; Adam plain or fused; all books as environments, or one of which as many
   steps are taken before the updates. What counts is the best of these. A line more has the very
   modules of ours inside SB3: what the loop alone gains, our networks being on both sides.
2. Matrix products: the time our loop spends in them, measured at each product.
3. Windows: SB3 encodes what it is shown, by the same encoder inside its policy. As SB3 has it by
   default, actor and critics have one each, which learns: that counts. Two lines more: one that is
   shared, so that the actor's loss alone moves it, and one that is frozen, as ours is. Ours looks
   up a table; making it is shared out over the bars of the configured run
   (`train.total_env_steps`) and counted; pre-training is not. SB3 has our modules inside here, a
   small buffer, and rounds of one bar, which takes it seconds: nothing is extrapolated.
4. Bytes of a transition: as SB3's buffer allocates them for windows, and ours.

All run in this process in turn, on one thread. What counts is the median of each side's processor
time over the rounds, so that a busy machine favours neither.

Fails where one of the goals is missed: 1.3× on embeddings, 15× on windows, 50× less memory.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import SAC as SB3
from stable_baselines3.common.buffers import ReplayBuffer
from torch.utils._python_dispatch import TorchDispatchMode

from bench._sac_peer import (
    BooksVec,
    Heads,
    PlainCritic,
    See,
    Setting,
    make_learner,
    see_embeddings,
    see_windows,
)
from bench.a2c import ASSETS, FEATURES, SEED, make_world
from echelon.agents import expert
from echelon.agents.expert import ExpertLearner, SACLearner
from echelon.agents.offpolicy import OffPolicy
from echelon.agents.replay import Replay
from echelon.agents.tables import EmbeddingTable
from echelon.config import Config, load_config
from echelon.envs.act import ActionRule, weights_of_actions
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.models.encoders import Encoder, build_encoder
from echelon.models.expert import ExpertCritic

SAC_YAML = Path(__file__).parents[1] / "configs" / "sac.yaml"
BARS = 8_300
"""Bars of the bundled sample, 1990 to 2022."""
ROUNDS, WINDOW_ROUNDS = 9, 3
ROUND_BARS = 20
GOAL_EMBEDDINGS, GOAL_WINDOWS, GOAL_MEMORY = 1.3, 15.0, 50.0

EQUAL = {
    "SB3": Setting(),
    "SB3, fused Adam": Setting(fused=True),
    "SB3, fused Adam, 1 environment": Setting(fused=True, n_envs=1),
}
INSIDE = {"SB3, our modules inside": Setting(fused=True, ours=True)}
LEARNS = "learns, SB3's default"
WINDOWED = {
    LEARNS: Setting(fused=True, ours=True),
    "shared": Setting(fused=True, ours=True, share=True),
    "frozen": Setting(fused=True, ours=True, frozen=True),
}
ENCODERS = ("TimeCNN", "TimesNet")
MATMULS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def config_of(asked: Sequence[str], encoder: str = "TimeCNN", **expert: int) -> Config:
    """The shipped configuration with what was `asked` on the command line."""
    # Buffers of equal length, which SB3's embeddings let stay below a gigabyte.
    sizes = {"buffer_size": 50_000, **expert}
    return load_config(
        SAC_YAML,
        [
            *asked,
            *(f"model.encoder={encoder}", f"train.rollout_steps={ROUND_BARS}"),
            *(f"expert.{name}={size}" for name, size in sizes.items()),
        ],
    )


def updates_of(config: Config) -> int:
    """Updates that are due for a bar of all books."""
    due = config.train.books * config.expert.updates_per_step
    assert due == round(due) > 0, f"{due} updates for a bar: SB3 makes whole ones only"
    return round(due)


def make_encoder(config: Config, world: World) -> Encoder:
    """Fitted, not trained: the time is the same."""
    torch.manual_seed(SEED)
    encoder = build_encoder(config, FEATURES)
    encoder.fit(torch.from_numpy(np.array(world.x)))
    return encoder


def check_environments(learner: ExpertLearner, see: See) -> None:
    """The peer's environment shows what our learner looks up, and pays what our books are paid."""
    config, world = learner.config, learner.world
    rng = np.random.default_rng(SEED + 1)
    env = BooksVec(world, config, 3, see)
    shown = env.reset()
    rule = ActionRule.from_config(config, "weights")
    books = Books(world, rule, config.reward, 3, learner.collector.starts.whole)
    books.reset(env.books.row)
    for _ in range(50):
        held = books.holdings()
        z = learner.table.look(books.row).flatten(1).numpy()
        mine = np.concatenate([z, held.weights, held.cash_share[:, None]], axis=1)
        np.testing.assert_array_equal(shown, mine)
        actions = rng.uniform(-1, 1, (3, world.n_assets)).astype(np.float32)
        shown, paid, done, _ = env.step(actions)
        expected = books.step(weights_of_actions(actions, held)).reward
        np.testing.assert_allclose(paid, expected, rtol=1e-6, atol=1e-9)
        books.reset(env.books.row, done)


def check_networks(learner: ExpertLearner, peer: SB3, see: See) -> None:
    """The peer's policy and its critics, given our weights, answer as our networks do."""
    core: OffPolicy = learner.core
    heads = Heads(learner.world.n_assets, learner.config.model.d_model, 0, ours=True)
    rows = learner.collector.books.row
    held = learner.collector.books.holdings()
    seen = np.concatenate([see(rows), held.weights, held.cash_share[:, None]], axis=1)
    obs, action = torch.from_numpy(seen), torch.rand(len(seen), heads.n_assets) * 2 - 1
    policy: Any = peer.policy
    policy.actor.net.load_state_dict(core.actor.state_dict())
    assert isinstance(core.critic, ExpertCritic)
    for k, net in enumerate(policy.critic.nets):
        if isinstance(net, PlainCritic):
            net.load(core.critic, k)
        else:
            net.load_state_dict(core.critic.state_dict())
    with torch.no_grad():
        expected = core.actor(heads.read(obs))
        torch.testing.assert_close(policy.actor.get_action_dist_params(obs)[:2], expected)
        theirs = torch.stack(policy.critic(obs, action))[..., 0]
        torch.testing.assert_close(
            theirs, core.critic(heads.read(obs), action), atol=1e-5, rtol=1e-4
        )


@dataclass
class Contestant:
    """Something that goes some bars on, with their updates, and what a bar took."""

    name: str
    train: Callable[[], int]
    """Some bars of 64 books with their updates; how many."""
    seconds: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Train, on the clock."""
        began = time.process_time()
        bars = self.train()
        self.seconds.append((time.process_time() - began) / bars)

    @property
    def bar(self) -> float:
        """Median seconds of a bar."""
        return median(self.seconds)


def ours(learner: ExpertLearner) -> Contestant:
    """Our learner, past its first steps by lot."""
    books, bars = learner.collector.books.n_books, learner.config.train.rollout_steps
    due = updates_of(learner.config)
    while learner.steps < learner.config.expert.learning_starts + books * bars:
        learner.train_once()

    def train() -> int:
        before, updates = learner.steps, learner.core.updates
        learner.train_once()
        found = (learner.steps - before) // books
        assert learner.core.updates - updates == due * found, "too few or many updates"
        return found

    return Contestant("ours", train)


def theirs(name: str, learner: SB3, config: Config, bars: int) -> Contestant:
    """SB3's, likewise."""
    books, due = config.train.books, updates_of(config)
    learner.learn(config.expert.learning_starts + books, reset_num_timesteps=False)

    def train() -> int:
        before, updates = learner.num_timesteps, learner._n_updates
        learner.learn(bars * books, reset_num_timesteps=False)
        found = (learner.num_timesteps - before) // books
        assert learner._n_updates - updates == due * found, "too few or many updates"
        return found

    return Contestant(name, train)


class Shares(NamedTuple):
    """Seconds of a bar of our loop."""

    whole: float
    parts: Mapping[str, float]
    products: Mapping[str, float]


class Products(TorchDispatchMode):
    """Times every matrix product where it happens, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = {"matrix products": 0.0, "attention": 0.0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kind = "matrix products" if name in MATMULS else "attention" if ATTENTION in name else None
        if kind is None:
            return func(*args, **(kwargs or {}))
        began = time.process_time()
        result = func(*args, **(kwargs or {}))
        self.seconds[kind] += time.process_time() - began
        return result


@contextmanager
def clocked(learner: ExpertLearner) -> Iterator[dict[str, float]]:
    """Seconds our learner spends in its parts, by name: gathered while this is open."""
    spent: dict[str, float] = {}

    def clock(name: str, owner: object, method: str) -> Any:
        spent[name] = 0.0
        plain = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            result = plain(*args, **kwargs)
            spent[name] += time.process_time() - began
            return result

        return patch.object(owner, method, run)

    with (
        clock("collect", learner.collector, "step"),
        clock("draw", learner.replay, "sample"),
        clock("batch", expert, "replayed_obs"),
        clock("update", learner.core, "update"),
    ):
        yield spent


def products_of(learner: ExpertLearner, rounds: int = 3) -> Shares:
    """Where a bar of our loop goes: medians of rounds that take turns."""
    mine = ours(learner)
    bars = learner.config.train.rollout_steps
    parts: list[dict[str, float]] = []
    products: list[dict[str, float]] = []
    for _ in range(rounds):
        mine.run()
        with clocked(learner) as spent:
            learner.train_once()
        # The mode itself costs: what it times inside counts, against the loop without it.
        with Products() as mode:
            learner.train_once()
        parts.append(spent)
        products.append(mode.seconds)

    def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
        return {name: median(spent[name] for spent in rounds) / bars for name in rounds[0]}

    return Shares(mine.bar, middle(parts), middle(products))


def compare(everyone: list[Contestant], rounds: int) -> None:
    """All in turn, `rounds` times."""
    for _ in range(rounds):
        for one in everyone:
            one.run()


def show(everyone: list[Contestant], base: float) -> None:
    """A line for each, and how much longer it takes than ours, `base` seconds."""
    for one in everyone:
        low, high = (f(one.seconds) * 1e3 for f in (min, max))
        print(
            f"{one.name:<34}{one.bar * 1e3:>10,.1f} ms{one.bar / base:>9.2f}×"
            f"   ({low:,.1f} to {high:,.1f})"
        )


def said(what: str, ratio: float, goal: float) -> bool:
    good = ratio >= goal
    print(f"goal: at least {goal:g}× {what}: {ratio:.2f}×, {'met' if good else 'MISSED'}\n")
    return good


def on_embeddings(asked: Sequence[str], rounds: int) -> tuple[bool, Contestant]:
    """(Whether the goal is met, ours); prints parts 1 and 2."""
    config = config_of(asked)
    world = make_world(config, BARS)
    learner = SACLearner(config, world, SEED, make_encoder(config, world))
    # Rows without a whole window before them are never shown.
    z = torch.zeros(BARS, ASSETS, config.model.d_model)
    z[world.window - 1 :] = learner.table.look(np.arange(world.window - 1, BARS))
    see = see_embeddings(z)
    check_environments(learner, see)
    for own in (False, True):
        check_networks(learner, make_learner(config, world, see, Setting(ours=own)), see)
    mine = ours(learner)
    peers = {}
    for name, setting in (EQUAL | INSIDE).items():
        peer = make_learner(config, world, see, setting)
        peers[name] = theirs(name, peer, config, 5 if setting.n_envs == 1 else ROUND_BARS)
    compare([mine, *peers.values()], rounds)
    print(f"1. embeddings: a bar, median of {rounds} rounds (least to most)")
    show([mine, *peers.values()], mine.bar)
    best = min(peers[name].bar for name in EQUAL)
    met = said("faster than SB3's best on embeddings", best / mine.bar, GOAL_EMBEDDINGS)
    report_products(products_of(learner))
    return met, mine


def report_products(shares: Shares) -> None:
    """Part 2."""
    print("2. where a bar of ours goes")
    for name, seconds in shares.parts.items():
        print(f"{name:<34}{seconds * 1e3:>10.2f} ms{seconds / shares.whole:>9.0%}")
    print("of it all:")
    for name, seconds in shares.products.items():
        print(f"{name:<34}{seconds * 1e3:>10.2f} ms{seconds / shares.whole:>9.0%}")
    print()


def on_windows(asked: Sequence[str], kind: str, own: Contestant, rounds: int) -> bool:
    """Part 3 for one encoder; own: our learner, which takes turns with SB3.

    Its table is TimeCNN's throughout; looking up takes as long in any.
    """
    # A window is 38 kB twice: a short buffer, which SB3 reads the faster for it.
    config = config_of(asked, kind, buffer_size=2_560, learning_starts=1_280)
    world = make_world(config, BARS)
    encoder = make_encoder(config, world)
    table = EmbeddingTable(world, encoder.d_model)
    began = time.process_time()
    table.refresh(encoder)
    taken = time.process_time() - began
    run = config.train.total_env_steps // config.train.books

    def made() -> Encoder:
        return make_encoder(config, world)

    see = see_windows(world)
    peers = {
        name: theirs(
            f"SB3, {kind} {name}", make_learner(config, world, see, setting, made), config, 1
        )
        for name, setting in WINDOWED.items()
    }
    mine = Contestant("ours, its table counted", own.train)
    compare([mine, *peers.values()], rounds)
    mine.seconds = [seconds + taken / run for seconds in mine.seconds]
    print(f"3. windows, {kind}: a bar, median of {rounds} rounds (least to most)")
    print(
        f"table: {taken:.2f} s for {BARS:,} bars, once in the {run:,} bars of a run: "
        f"{taken / run * 1e3:.2f} ms of each"
    )
    show([mine, *peers.values()], mine.bar)
    ratio = peers[LEARNS].bar / mine.bar
    return said(f"faster than SB3 with a {kind} in its policy", ratio, GOAL_WINDOWS)


def bytes_of(world: World, n_seen: int, *, once: bool) -> int:
    """What SB3's replay buffer allocates for a transition; once: with `optimize_memory_usage`."""
    slots = 64
    buffer = ReplayBuffer(
        slots,
        spaces.Box(-np.inf, np.inf, (n_seen,), np.float32),
        spaces.Box(-1.0, 1.0, (world.n_assets,), np.float32),
        "cpu",
        optimize_memory_usage=once,
        handle_timeout_termination=not once,
    )
    arrays = [part for part in vars(buffer).values() if isinstance(part, np.ndarray)]
    return sum(part.nbytes for part in arrays) // slots


def on_memory(asked: Sequence[str]) -> bool:
    """Part 4."""
    config = load_config(SAC_YAML, list(asked))
    world = make_world(config, BARS)
    windows = world.window * ASSETS * FEATURES + ASSETS + 1
    embeddings = ASSETS * (config.model.d_model + 1) + 1
    mine = Replay(1, ASSETS).bytes_per_transition
    table = 4 * len(world.times) * world.n_assets * config.model.d_model
    capacity = config.expert.buffer_size
    counted = mine + table / capacity
    print(f"4. bytes of a transition; the table ({table / 1e6:.0f} MB) over {capacity:,} of them")
    rows = {
        "ours": float(mine),
        "ours, with the table": counted,
        "SB3, windows": float(bytes_of(world, windows, once=False)),
        "SB3, windows, stored once": float(bytes_of(world, windows, once=True)),
        "SB3, embeddings": float(bytes_of(world, embeddings, once=False)),
        "SB3, embeddings, stored once": float(bytes_of(world, embeddings, once=True)),
    }
    for name, size in rows.items():
        print(f"{name:<34}{size:>10,.0f} B{size / counted:>9.1f}×")
    least = rows["SB3, windows, stored once"] / counted
    return said("less than SB3's windows, stored once", least, GOAL_MEMORY)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--window-rounds", type=int, default=WINDOW_ROUNDS)
    parser.add_argument("-o", "--override", action="append", default=[], metavar="KEY=VALUE")
    # `python -m bench sac` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if min(args.rounds, args.window_rounds) < 1:
        parser.error("at least 1 round")
    torch.set_num_threads(1)
    config = config_of(args.override)
    print(
        f"a bar: {config.train.books} books, {updates_of(config)} updates of "
        f"{config.expert.batch_size}; {ASSETS} assets, embeddings of {config.model.d_model}, "
        f"networks of {config.expert.hidden}; processor time, one thread\n"
    )
    met, mine = on_embeddings(args.override, args.rounds)
    for kind in ENCODERS:
        gc.collect()
        met &= on_windows(args.override, kind, mine, args.window_rounds)
    met &= on_memory(args.override)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
