"""A population of five against five SAC runs of Stable-Baselines3, one after another, on two cores.

    python -m bench population
    python -m bench.population --window-rounds 5 -o model.encoder=TimesNet

Sizes are those of `configs/hierarchical.yaml` (printed first), on the random walk of `bench/sac.py`
(16 assets, 30 features, windows of 20). Both sides take the same environment steps and make as many
updates with as many transitions each; the peer is that of `bench/sac.py` (`bench/_sac_peer.py`):
our books, networks of the same layers. What is timed, by the clock on the wall, is

- ours: the rounds of one whole cycle, five experts in two processes of one thread each. What
  counts are the experts' phases: collecting, and learning with all that belongs to it (whose bars
  are whose, the model of the bonus, diversity, states kept for the case that a process dies). The
  frozen encoder's table is made once in a run, and its share is added.
- SB3: bars with their updates, with one thread and with two; the quicker of both counts. Its
  networks have an encoder of windows that learns, as SB3 has it by default; beside it one that is
  frozen, as ours is. **Five runs are five times one, and a cycle is its bars times the median bar:
  both sides repeat the same work, and a whole cycle of five SB3 runs would take it half an hour.**

Beside the goal:

1. equal inputs: SB3 on embeddings ready made;
2. adapters: our experts with one LoRA adapter each, every 16th update through the encoder; the
   tables that are made anew every `lora.refresh_updates` updates are added;
3. matrix products: their share of our experts' phases, measured at each product, of two experts in
   one process;
4. a whole cycle of ours by phase, as the training log has it;
5. the router's updates next to those of sb3-contrib's MaskablePPO on the same rollout, in turns, by
   processor time (`python -m bench.population --only-router` for this alone).

Fails where the population is not 15× faster than five SB3 runs on windows. A busy machine favours
whoever runs while it is quiet: run it alone.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from stable_baselines3.common.logger import Logger

from bench._sac_peer import See, Setting, make_learner, see_embeddings, see_windows
from bench.a2c import ASSETS, SEED, make_world
from bench.sac import Products, make_encoder, said, updates_of
from echelon.agents.learner import TrainingSetup
from echelon.agents.tables import EmbeddingTable
from echelon.config import Config, load_config
from echelon.envs.world import World
from echelon.models.encoders import Encoder
from echelon.population.learner import HierarchyLearner
from echelon.population.member import Member
from echelon.population.ppo import EPOCHS, Rollout
from echelon.population.router import Router

HIERARCHY_YAML = Path(__file__).parents[1] / "configs" / "hierarchical.yaml"
TRAIN, VALID = 5_796, 1_260
"""Bars of the shipped configuration's train and validation windows."""
CORES = 2
GOAL = 15.0
PHASES = ("collect", "experts", "router", "population")
EXPERTS = PHASES[:2]

SIZES = (
    *("model.encoder=TimeCNN", "trainer.workers=2", "train.threads=1"),
    # Whole bars in a round, and with them 2 updates for a bar on both sides.
    *("trainer.round_steps=1024", "trainer.training_schedule.experts={freq: 5, steps: 5120}"),
    # A batch is whole sequences of 5: 25 of them.
    *("expert.batch_size=125", "expert.learning_starts=1280"),
    # As long on both sides; nobody begins anew within the cycle.
    *("experts.sharing.buffer_size=250000", "expert.buffer_size=50000"),
    "trainer.diversity_threshold=0",
)
ALONE = (
    "trainer.training_schedule.router={freq: 1000000, steps: 1}",
    "trainer.training_schedule.population.freq=1000000",
    "train.total_env_steps=10000000000",
)
"""The experts' phases only: the others would come due after more steps than are made."""
FEW = ("trainer.workers=1", "experts.n_experts=2")
"""Each expert's work is the same: two in one process show where the time goes as five do."""
ADAPTED = 1
"""Phases of learning that are measured with adapters."""
WINDOWS = ("expert.buffer_size=2560",)
"""A window is 38 kB twice: a short buffer, which SB3 reads the faster for it."""


def config_of(asked: Sequence[str], *more: str) -> Config:
    """The shipped configuration with the sizes of the benchmark and what was `asked`."""
    return load_config(HIERARCHY_YAML, [*SIZES, "lora.enabled=false", *asked, *more])


def worlds_of(config: Config) -> World:
    """A random walk with a train and a validation window."""
    world = make_world(config, TRAIN + VALID)
    splits = {"train": range(TRAIN), "valid": range(TRAIN, TRAIN + VALID)}
    return replace(world, splits=splits)


class Work(NamedTuple):
    """What an expert does between two of its phases of learning, and SB3 in as many bars."""

    rounds: int
    bars: int
    updates: int

    @classmethod
    def of(cls, config: Config) -> Work:
        """From the schedule; refuses one with other updates for a bar than SB3 makes."""
        due = config.trainer.training_schedule.experts
        bars = due.freq * -(-config.trainer.round_steps // config.train.books)
        updates = int(due.steps * config.expert.updates_per_step)
        if updates != bars * updates_of(config):
            raise SystemExit(
                f"{updates} updates after {bars} bars are not {updates_of(config)} for each: set "
                "trainer.training_schedule.experts.steps to the steps of its rounds."
            )
        return cls(due.freq, bars, updates)


class Spent(NamedTuple):
    """Seconds of some rounds of ours by phase; bars, updates: of each expert; steps: of all."""

    phases: dict[str, float]
    bars: int
    updates: int
    steps: int

    @property
    def experts(self) -> float:
        """Seconds of the experts' phases."""
        return sum(self.phases[phase] for phase in EXPERTS)


def updates_made(learner: HierarchyLearner) -> int:
    """By the first expert."""
    state = learner.members.ask(Member.state, [0])[0]
    return int(state["facts"]["networks"]["core"]["updates"])


def spend(learner: HierarchyLearner, rounds: int) -> Spent:
    """Go so many rounds on."""
    work, updates, steps = Work.of(learner.config), updates_made(learner), learner.steps
    phases = dict.fromkeys(PHASES, 0.0)
    for _ in range(rounds):
        told = learner.train_once()
        for phase in PHASES:
            phases[phase] += told[f"time/{phase}"]
    times = rounds // work.rounds
    made = updates_made(learner) - updates
    assert made == times * work.updates, f"{made} updates in the place of {times * work.updates}"
    return Spent(phases, times * work.bars, made, learner.steps - steps)


def begun(config: Config, world: World, directory: Path) -> HierarchyLearner:
    """Our learner after its first phase of learning, whose steps were by lot."""
    encoder = make_encoder(config, world)
    setup = TrainingSetup(config, world, world, directory, SEED, encoder)
    learner = HierarchyLearner(setup)
    for _ in range(Work.of(config).rounds):
        learner.train_once()
    return learner


def ours(config: Config, world: World, rounds: int) -> Spent:
    """Seconds of so many rounds."""
    with tempfile.TemporaryDirectory() as place:
        learner = begun(config, world, Path(place) / "seeds" / "0")
        try:
            return spend(learner, rounds)
        finally:
            learner.close()


def products_of(config: Config, world: World) -> dict[str, float]:
    """Name → share of the experts' phases, in one process of one thread, by processor time."""
    with tempfile.TemporaryDirectory() as place:
        learner = begun(config, world, Path(place) / "seeds" / "0")
        rounds = Work.of(config).rounds
        try:
            began = time.process_time()
            spend(learner, rounds)
            whole = time.process_time() - began
            # The mode itself costs: what it times inside counts, against the loop without it.
            with Products() as mode:
                spend(learner, rounds)
        finally:
            learner.close()
    return {name: seconds / whole for name, seconds in mode.seconds.items()}


class Peer(NamedTuple):
    """SB3 with so many threads: seconds of each round's bar."""

    threads: int
    seconds: list[float]

    @property
    def bar(self) -> float:
        """The median."""
        return median(self.seconds)


def theirs(
    config: Config,
    world: World,
    see: See,
    setting: Setting,
    made: Callable[[], Encoder] | None,
    rounds: int,
    bars: int,
) -> list[Peer]:
    """SB3's bars with one thread and with two."""
    learner = make_learner(config, world, see, setting, made)
    books, due = config.train.books, updates_of(config)
    learner.learn(config.expert.learning_starts + books, reset_num_timesteps=False)
    peers = [Peer(threads, []) for threads in range(1, CORES + 1)]
    for _ in range(rounds):
        for peer in peers:
            torch.set_num_threads(peer.threads)
            updates = learner._n_updates
            began = time.perf_counter()
            learner.learn(bars * books, reset_num_timesteps=False)
            peer.seconds.append((time.perf_counter() - began) / bars)
            assert learner._n_updates - updates == due * bars, "too few or many updates"
    torch.set_num_threads(1)
    return peers


def table_seconds(config: Config, world: World) -> float:
    """Of one embedding table, with as many threads as there are cores."""
    encoder, table = make_encoder(config, world), EmbeddingTable(world, config.model.d_model)
    torch.set_num_threads(CORES)
    began = time.perf_counter()
    table.refresh(encoder)
    taken = time.perf_counter() - began
    torch.set_num_threads(1)
    return taken


def embeddings_of(config: Config, world: World) -> See:
    """What SB3 sees of them."""
    encoder, table = make_encoder(config, world), EmbeddingTable(world, config.model.d_model)
    table.refresh(encoder)
    rows = np.arange(world.window - 1, len(world.times))
    z = torch.zeros(len(world.times), ASSETS, config.model.d_model)
    z[world.window - 1 :] = table.look(rows)
    return see_embeddings(z)


class Compared(NamedTuple):
    """One side's cycle in seconds, and how it came to be."""

    name: str
    seconds: float
    how: str


def five(name: str, peers: list[Peer], bars: int, n_experts: int) -> Compared:
    """Five runs of so many bars: the quicker number of threads."""
    best = min(peers, key=lambda peer: peer.bar)
    tried = ", ".join(f"{p.threads} thread(s) {p.bar * 1e3:,.0f} ms" for p in peers)
    how = f"{n_experts} × {bars} bars; a bar, of {len(best.seconds)}: {tried}"
    return Compared(name, n_experts * bars * best.bar, how)


def show(one: Compared, base: float) -> None:
    """Its line, as soon as it is measured, and how many times `base` seconds it takes."""
    print(
        f"{one.name:<34}{one.seconds:>9,.1f} s{one.seconds / base:>9.2f}×   {one.how}", flush=True
    )


def cycle_of(config: Config) -> int:
    """Rounds after which all phases have come as often as they do."""
    due = config.trainer.training_schedule
    whole = due.population.freq
    if whole % due.router.freq or whole % due.experts.freq:
        raise SystemExit(
            f"trainer.training_schedule.population.freq = {whole} is not a multiple of the "
            "router's and the experts': there is no whole cycle to measure."
        )
    return whole


def compare(asked: Sequence[str], window_rounds: int, rounds: int) -> bool:
    """Everything in turn; whether the goal is met."""
    config = config_of(asked)
    work, n_experts = Work.of(config), config.experts.n_experts
    kind, workers = config.model.encoder, config.trainer.workers
    world = worlds_of(config)
    table = table_seconds(config, world)
    spent = ours(config, world, cycle_of(config))
    cycles = max(1, config.train.total_env_steps // spent.steps)
    mine = Compared(
        "ours, experts' phases",
        spent.experts + table / cycles,
        f"{workers} process(es) of 1 thread; a table of {table:.1f} s over {cycles} cycles",
    )
    whole = Compared("ours, the whole cycle", sum(spent.phases.values()), "router and all")
    print(
        f"one cycle: {spent.bars * config.train.books:,} environment steps and {spent.updates} "
        f"updates of {config.expert.batch_size} transitions for each of {n_experts} experts"
    )
    show(mine, mine.seconds)
    show(whole, mine.seconds)
    gc.collect()

    def made() -> Encoder:
        return make_encoder(config, world)

    def peer(name: str, setting: Setting, *, windows: bool) -> Compared:
        if windows:
            short, see = config_of(asked, *WINDOWS), see_windows(world)
            peers = theirs(short, world, see, setting, made, window_rounds, 1)
        else:
            see = embeddings_of(config, world)
            peers = theirs(config, world, see, setting, None, rounds, 10)
        found = five(name, peers, spent.bars, n_experts)
        show(found, mine.seconds)
        return found

    inside = Setting(fused=True, ours=True)
    learns = peer(f"SB3, windows, {kind} learns", inside, windows=True)
    peer(f"SB3, windows, {kind} frozen", replace(inside, frozen=True), windows=True)
    equal = peer("SB3, embeddings", Setting(fused=True), windows=False)
    gc.collect()
    adapted = with_adapters(asked, world, spent.bars // work.bars, table)
    show(adapted, mine.seconds)
    met = said(
        f"faster than {n_experts} SB3 runs with a {kind} in their policies",
        learns.seconds / mine.seconds,
        GOAL,
    )
    print(f"with adapters that learn: {learns.seconds / adapted.seconds:.2f}× faster than them")
    print(f"with the router counted too: {learns.seconds / whole.seconds:.2f}×")
    print(f"equal inputs: {equal.seconds / mine.seconds:.2f}×\n")
    report_products(products_of(config_of(asked, *ALONE, *FEW), world))
    report_phases(spent)
    report_router(config)
    return met


def with_adapters(asked: Sequence[str], world: World, times: int, table: float) -> Compared:
    """Our experts' phases with an adapter each, for a cycle of `times` phases of learning."""
    every = config_of(asked).lora.refresh_updates
    # Within so few updates tables may come once or never: their share is added instead.
    config = config_of(asked, *ALONE, "lora.enabled=true", "lora.refresh_updates=1000000")
    spent = ours(config, world, ADAPTED * Work.of(config).rounds)
    # Two for each adapter, its own and its target's. `table` was made by all cores.
    tables = 2 * table * config.experts.n_experts * spent.updates / every
    how = f"{ADAPTED} of {times} phases measured; tables anew every {every:,} updates added"
    return Compared("ours, with adapters", (spent.experts + tables) * times / ADAPTED, how)


def report_products(shares: dict[str, float]) -> None:
    """Part 3."""
    print("of the processor time of our experts' phases:")
    for name, share in shares.items():
        print(f"{name:<34}{share:>9.0%}")
    print()


def report_phases(spent: Spent) -> None:
    """Part 4."""
    whole = sum(spent.phases.values())
    print("a whole cycle of ours by phase:")
    for phase, seconds in spent.phases.items():
        print(f"{'time/' + phase:<34}{seconds:>9,.1f} s{seconds / whole:>9.0%}")


def report_router(config: Config, turns: int = 7) -> None:
    """Part 5: milliseconds of an update of a minibatch, and the median ratio of the turns."""
    meta, n_experts = config.meta_router, config.experts.count
    router, rng = Router(config, n_experts, SEED), np.random.RandomState(SEED)
    n_envs, n_obs = meta.n_envs, router.net.n_obs
    peer = MaskablePPO(
        "MlpPolicy",
        None,  # type: ignore[arg-type]  # no environment: the rollout is made up
        n_steps=meta.n_steps // n_envs,
        batch_size=meta.batch_size,
        ent_coef=meta.ent_coef,
        policy_kwargs={"net_arch": [64, 64], "optimizer_kwargs": {"eps": 1e-5, "fused": True}},
        device="cpu",
        _init_setup_model=False,
    )
    peer.observation_space = spaces.Box(-5.0, 5.0, (n_obs,), np.float32)
    peer.action_space, peer.n_envs = spaces.Discrete(n_experts + 1), n_envs
    peer._setup_model()
    peer.set_logger(Logger(folder=None, output_formats=[]))
    buffer, shape = peer.rollout_buffer, (meta.n_steps // n_envs, n_envs)
    obs = rng.standard_normal((*shape, n_obs)).astype(np.float32)
    actions = rng.randint(0, n_experts + 1, shape)
    gains = rng.standard_normal(shape).astype(np.float32)
    even = torch.full((meta.n_steps,), -float(np.log(n_experts + 1)))
    allowed = torch.ones(meta.n_steps, n_experts + 1, dtype=torch.bool)
    flat = (torch.from_numpy(part.reshape(meta.n_steps, -1)) for part in (obs, actions, gains))
    seen, chosen, gained = flat
    ours = Rollout(seen, allowed, chosen[:, 0], even, gained[:, 0], gained[:, 0])
    spent = []
    for _ in range(turns):
        buffer.reset()
        buffer.observations[:], buffer.actions[:] = obs, actions[..., None]
        buffer.log_probs[:], buffer.advantages[:], buffer.returns[:] = even[0], gains, gains
        buffer.full = True
        began = time.process_time()
        peer.train()
        between = time.process_time()
        router.ppo.update(ours, np.zeros(meta.n_steps, dtype=np.float32), rng)
        spent.append((between - began, time.process_time() - between))
    updates = EPOCHS * meta.n_steps // meta.batch_size / 1e3
    print(
        f"the router's update of {meta.batch_size} decisions: MaskablePPO "
        f"{median(a for a, _ in spent) / updates:.2f} ms, ours "
        f"{median(b for _, b in spent) / updates:.2f} ms, {median(a / b for a, b in spent):.2f}× "
        f"(median of {turns} turns)"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of 10 bars of SB3 on embeddings")
    parser.add_argument("--window-rounds", type=int, default=5, help="of a bar on windows")
    parser.add_argument("-o", "--override", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only-router", action="store_true", help="part 5 alone")
    # `python -m bench population` has its own arguments: only our own command line is parsed.
    args = parser.parse_args(argv or [])
    if min(args.rounds, args.window_rounds) < 1:
        parser.error("at least 1 round")
    torch.set_num_threads(1)
    config = config_of(args.override)
    if args.only_router:
        report_router(config)
        return 0
    print(
        f"{config.experts.n_experts} experts, {config.train.books} books, {ASSETS} assets, "
        f"embeddings of {config.model.d_model}, networks of {config.expert.hidden}; seconds on the "
        f"wall, {os.cpu_count()} cores, of which others keep {os.getloadavg()[0]:.1f} busy\n",
        flush=True,
    )
    return 0 if compare(args.override, args.window_rounds, args.rounds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
