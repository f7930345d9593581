"""What a configuration asks of the machine, against what the machine has.

A width of 10⁶ or a million books would end hours later, or at once in an error of some library.
What the configuration alone says is checked here, before anything is allocated: lower
bounds, since what the data hold (symbols, features) may not be known yet. A setting is refused
where it alone, the others as they are, needs more memory than can be had, with the largest number
that would fit.
"""

from __future__ import annotations

import importlib
import os
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

from rich.filesize import decimal

from echelon.config._base import Section
from echelon.config.algorithms import ALGORITHMS
from echelon.config.tree import Config
from echelon.errors import ConfigError

_FLOAT = 4
_LEARNED = 4 * _FLOAT
"""Bytes of a learned weight: itself, its gradient and Adam's two means."""
_BAR = 64
"""Bytes of a bar in memory: eight fields, as a panel has them."""
WORKER = 450_000_000
"""Bytes of a worker process before it has done anything: torch, and what it is handed."""
SAMPLE_ASSETS = 20
"""Symbols of the bundled sample."""

SectionT = TypeVar("SectionT", bound=Section)


class Need(NamedTuple):
    """A setting and the bytes it needs, as a function of its value."""

    key: str
    value: int
    bytes_of: Callable[[int], int]


def refuse_sizes(config: Config) -> None:
    """Raise a ConfigError where the machine cannot hold what the configuration asks for."""
    if config.compute.engine == "local":
        refuse_processes("trainer.workers", config.trainer.workers, most=_members(config))
    available = memory_available()
    over = []
    for key, bytes_of in _needs(config):
        most = _largest(config, key)
        if bytes_of(most) > available:
            over.append(Need(key, most, bytes_of))
    if not over:
        return
    # Of settings that multiply, the one to lower is the one furthest from its default.
    defaults = Config()

    def blame(need: Need) -> tuple[bool, float]:
        return _fitting(need, available) > 0, need.value / max(_largest(defaults, need.key), 1)

    refuse_need(max(over, key=blame), available)


def _largest(config: Config, key: str) -> int:
    value = attrgetter(key)(config)
    return max(value, default=0) if isinstance(value, tuple) else int(value)


def refuse_need(need: Need, available: int) -> None:
    """Raise a ConfigError where `need` is more than the `available` bytes, with what would fit."""
    needed = need.bytes_of(need.value)
    if needed <= available:
        return
    fits = _fitting(need, available)
    remedy = f"At most {fits:,} would fit: lower {need.key}."
    if not fits:
        remedy = f"Not even 1 would fit: lower what {need.key} is multiplied with."
    raise ConfigError(
        f"{need.key} = {need.value:,} needs at least {decimal(needed)} of memory; "
        f"{decimal(available)} are available. {remedy}"
    )


def refuse_processes(key: str, workers: int, *, most: int | None = None, each: int = 1) -> None:
    """Raise a ConfigError where the machine cannot hold so many worker processes.

    most: that are started, however many may be; each: processes of one, with those it starts
    """

    def bytes_of(n: int) -> int:
        started = n if most is None else min(n, most)
        return started * each * WORKER if started > 1 else 0  # one works in this process

    refuse_need(Need(key, workers, bytes_of), machine_memory())


def processes_of_job(config: Config) -> int:
    """Processes that the training of a seed takes: its own, and those its experts live in."""
    experts = min(config.trainer.workers, _members(config))
    return 1 + experts if experts > 1 else 1


def actor_memory(config: Config) -> int:
    """Bytes that an actor of a cluster reserves: what it needs at least, or `compute.memory_gb`."""
    if config.compute.memory_gb is not None:
        return int(config.compute.memory_gb * 1e9)
    return WORKER + sum(bytes_of(_largest(config, key)) for key, bytes_of in _needs(config))


def workers_that_fit(each: int) -> int:
    """Trainings, of `each` so many processes, that the machine can hold side by side; 1 or more."""
    return max(1, machine_memory() // (each * WORKER))


def _members(config: Config) -> int:
    if ALGORITHMS[config.train.algo].memory != "population":
        return 1
    return config.experts.n_experts * config.trainer.evolution.members_per_niche


def refuse_idle_expert(config: Config) -> None:
    """Raise a ConfigError where a single expert, SAC's or TD3's, would never learn."""
    train, expert = config.train, config.expert
    if expert.buffer_size < train.books:
        raise ConfigError(
            f"expert.buffer_size = {expert.buffer_size:,} cannot hold a bar of {train.books:,} "
            f"books (train.books). Take at least {train.books:,}."
        )
    updates = (train.total_env_steps - expert.learning_starts) * expert.updates_per_step
    if updates < 1:
        raise ConfigError(
            f"of train.total_env_steps = {train.total_env_steps:,} steps the first "
            f"{expert.learning_starts:,} (expert.learning_starts) are by lot, and "
            f"expert.updates_per_step = {expert.updates_per_step:g} leaves no update after them. "
            "Train longer, or let learning start earlier."
        )
    if config.lora.enabled and updates < config.lora.refresh_updates:
        raise ConfigError(
            f"lora.refresh_updates = {config.lora.refresh_updates:,} is more than the "
            f"{int(updates):,} updates of this training, so the adapter would never reach the "
            "policy. Take fewer, or train longer."
        )


def _fitting(need: Need, available: int) -> int:
    """The largest value that would fit; 0: none."""
    return bisect_right(range(1, need.value), available, key=need.bytes_of)


def refuse_settings(config: Config) -> None:
    """Raise where the configuration alone says that nothing could be learned."""
    refuses = ALGORITHMS[config.train.algo].refuses
    if refuses is not None:
        module, _, name = refuses.partition(":")
        getattr(importlib.import_module(module), name)(config)


def memory_available() -> int:
    """Bytes that this process can still have: of the machine, and of its ulimit."""
    known = [machine_memory()]
    ceiling, _ = resource.getrlimit(resource.RLIMIT_AS)
    if ceiling != resource.RLIM_INFINITY:
        pages = (_text(Path("/proc/self/statm")) or "0").split()[0]
        known.append(max(ceiling - int(pages) * os.sysconf("SC_PAGE_SIZE"), 0))
    return min(known)


def machine_memory() -> int:
    """Bytes that all processes together can still have: of memory and its control group."""
    known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    meminfo = _numbers(Path("/proc/meminfo"))
    if "MemAvailable:" in meminfo:
        known.append(meminfo["MemAvailable:"] * 1024)
    groups, old = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    for directory, limit, used, cache in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (old, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (most := _number(directory / limit)) is not None:
            given_back = _numbers(directory / "memory.stat").get(cache, 0)
            known.append(max(most - (_number(directory / used) or 0) + given_back, 0))
    return min(known)


def bytes_of_transition(n_assets: int, *, behaviour: bool = False) -> int:
    """Bytes of a step in a replay buffer (see `agents.replay.replay_columns`)."""
    plain = 3 * n_assets * _FLOAT + 2 * ((n_assets + 7) // 8) + 5 * _FLOAT + 1
    return plain + (2 * n_assets * _FLOAT + 3 * _FLOAT if behaviour else 0)


def _needs(config: Config) -> Iterator[tuple[str, Callable[[int], int]]]:
    data, model = config.data, config.model
    of_source = data.synthetic.n_symbols if data.source == "synthetic" else 1
    if data.source == "sample":
        of_source = SAMPLE_ASSETS
    n_assets = len(config.assets) or of_source
    if data.source == "synthetic":
        yield from _synthetic_needs(config)
    for key in _learner_keys(config):
        yield key, partial(_learner_bytes, config, n_assets, key)
    if config.lora.enabled:
        yield "lora.rank", lambda n: 2 * n * model.d_model * _LEARNED
    yield from _expert_needs(config, n_assets)
    learner, state = config.execution.learner, config.execution.hidden * _FLOAT
    yield "execution.hidden", lambda n: n * n * 6 * _LEARNED
    yield "execution.learner.orders", lambda n: n * learner.copies * state
    yield "execution.learner.copies", lambda n: n * learner.orders * state
    yield "execution.learner.memory", lambda n: n * 16 * _FLOAT


def _synthetic_needs(config: Config) -> Iterator[tuple[str, Callable[[int], int]]]:
    market, a_day = config.data.synthetic, config.data.synthetic.minutes_per_day
    day = {"1d": 1, "5min": -(-a_day // 5), "1min": a_day}[config.data.freq]
    yield "data.synthetic.minutes_per_day", lambda n: n * 8 * 64
    bars = market.n_days * day * _BAR

    def symbols(n: int) -> int:
        learner = _learner_bytes(config, len(config.assets) or n, "seed", config.seed)
        return max(n * bars + a_day * 8, learner)

    yield "data.synthetic.n_symbols", symbols
    bars_of_day = market.n_symbols * day * _BAR
    yield "data.synthetic.n_days", lambda n: n * bars_of_day + a_day * 8


def _learner_keys(config: Config) -> Iterator[str]:
    """Settings that the size of networks, rollouts and batches depends on."""
    family, memory = ALGORITHMS[config.train.algo].family, ALGORITHMS[config.train.algo].memory
    if family == "sb3":  # whose networks are its own
        yield "train.books"
        return
    yield from ("model.d_model", "model.n_layers", "model.direct", "window", "train.books")
    if family == "flat":
        yield from ("model.hidden", "train.rollout_steps", "train.offset_groups")
        return
    yield from ("expert.hidden", "expert.batch_size", "pretrain.batch_rows")
    if memory == "population":
        yield from ("experts.n_experts", "trainer.evolution.members_per_niche")


def _learner_bytes(config: Config, n_assets: int, key: str, value: int) -> int:
    """What networks, rollouts and batches of a learner take at least, with `value` for `key`."""
    config = _with_value(config, key, value)
    model, train, expert = config.model, config.train, config.expert
    family = ALGORITHMS[train.algo].family
    books = train.books * n_assets * 8 * _FLOAT
    if family == "sb3":
        return books
    width, encoder = model.d_model, encoder_weights(config)
    # Bytes that a bar of all assets leaves in an encoder for its gradient: what its last layer
    # says and its gate, the gate's sigmoid and the product, or as much of a block.
    bar = n_assets * 4 * width * _FLOAT
    if family == "flat":
        parts = 1 if model.shared_encoder else 2
        weights = parts * (encoder + width * model.hidden) + model.hidden**2
        # A group's bars are encoded once; of each book and asset, what was held and what was done.
        encoded = train.rollout_steps * train.offset_groups * bar
        rollout = train.books * train.rollout_steps * n_assets * 3 * _FLOAT
        return weights * _LEARNED + parts * encoded + rollout
    heads = expert.hidden * (expert.hidden + width) * 3
    heads *= _members(config)
    pretraining = config.pretrain.batch_rows * bar if config.pretrain.enabled else 0
    batch = expert.batch_size * n_assets * width * _FLOAT
    return (encoder + heads) * _LEARNED + max(pretraining, batch) + books


def encoder_weights(config: Config) -> int:
    """Weights of the encoder at least: of features, only those that every dataset has are counted.

    An encoder that is not listed has a first layer.
    """
    features, window, width = _least_features(config), config.window, config.model.d_model
    layers, direct = config.model.n_layers, config.model.direct
    past = direct * (features + direct + width)
    match config.model.encoder:
        case "TimeCNN":  # three rows at once, twice for the gate
            return past + 6 * features * width + (layers - 1) * 6 * width**2
        case "Transformer":
            return past + (features + window) * width + layers * 8 * width**2
        case "TimesNet":  # nine taps from the width to a quarter of it, and back
            return past + (6 * features + window) * width + layers * 18 * width * (width // 4)
    return past + features * width


def _least_features(config: Config) -> int:
    """Features that a close alone gives; other data have more."""
    features = config.features
    count = 5 if features.ohlcv else 0
    count += sum(len(periods) for periods in (features.indicators.sma, features.indicators.ema))
    if features.wants_stationary:
        count += len(features.stationary.returns) + len(features.stationary.volatility)
    return max(count, 1)


def _with_value(section: SectionT, key: str, value: int) -> SectionT:
    name, _, rest = key.partition(".")
    return section.model_copy(
        update={name: _with_value(getattr(section, name), rest, value) if rest else value}
    )


def _expert_needs(config: Config, n_assets: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    memory, expert, experts = ALGORITHMS[config.train.algo].memory, config.expert, config.experts
    if memory in (None, "rollout"):
        return
    if memory == "replay":
        each = bytes_of_transition(n_assets)
        yield "expert.buffer_size", lambda n: n * each
    if memory == "horizon":
        books = config.train.books * n_assets * _FLOAT
        yield "expert.horizon", lambda n: n * books
    if memory != "population":
        return
    router, sharing = config.meta_router, experts.sharing
    if sharing.enabled and not sharing.on_disk:
        shared = bytes_of_transition(n_assets, behaviour=True)
        yield "experts.sharing.buffer_size", lambda n: n * shared
    yield "experts.skill_dim", lambda n: n * expert.hidden * _LEARNED
    seen = experts.count * len(router.horizons) * _FLOAT
    yield "meta_router.n_steps", lambda n: n * seen
    yield "meta_router.n_envs", lambda n: n * n_assets * experts.count * 8
    probe = n_assets * experts.count * 8
    yield "trainer.probe_states", lambda n: n * probe
    books = experts.count * router.n_envs * 8
    yield "risk.cvar_window", lambda n: n * books
    yield "risk.drawdown_window", lambda n: n * books
    yield "meta_router.horizons", lambda n: n * books


def _number(path: Path) -> int | None:
    """The number that a file of the kernel's holds; None where there is none ('max')."""
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """The first number of every line `name number …` of a file of the kernel's."""
    words = [line.split() for line in (_text(path) or "").splitlines()]
    return {row[0]: int(row[1]) for row in words if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
