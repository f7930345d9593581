"""What a configuration asks of the machine, against what the machine has.

A width of 10⁶ or a million books would end hours later, or at once in an error of some library.
What the configuration alone says is checked here, before anything is allocated: lower
bounds, since what the data hold (symbols, features) may not be known yet. A setting is refused
where it alone, the others as they are, needs more memory than can be had, with the largest number
that would fit.
"""

from __future__ import annotations

import importlib
import math
import os
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from echelon.config.algorithms import ALGORITHMS
from echelon.config.tree import Config
from echelon.errors import ConfigError

_FLOAT = 4
_LEARNED = 4 * _FLOAT
"""Bytes of a learned weight: itself, its gradient and Adam's two means."""
_BAR = 64
"""Bytes of a bar in memory: eight fields, as a panel has them."""


class Need(NamedTuple):
    """A setting and the bytes it needs, as a function of its value."""

    key: str
    value: int
    bytes_of: Callable[[int], int]


def refuse_sizes(config: Config) -> None:
    """Raise a ConfigError where the machine cannot hold what the configuration asks for."""
    available = memory_available()
    over = []
    for key, bytes_of in _needs(config):
        value = attrgetter(key)(config)
        most = max(value) if isinstance(value, tuple) else value
        if bytes_of(most) > available:
            over.append(Need(key, most, bytes_of))
    if over:
        # Of settings that multiply, the one to lower is the one furthest from what would fit.
        fits = {need: _fitting(need, available) for need in over}
        refuse_need(max(over, key=lambda need: need.value / (fits[need] or math.inf)), available)


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
    """Bytes that can still be had: of memory, its control group (less its cache) and ulimit."""
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
    ceiling, _ = resource.getrlimit(resource.RLIMIT_AS)
    if ceiling != resource.RLIM_INFINITY:
        pages = (_text(Path("/proc/self/statm")) or "0").split()[0]
        known.append(max(ceiling - int(pages) * os.sysconf("SC_PAGE_SIZE"), 0))
    return min(known)


def bytes_of_transition(n_assets: int, *, behaviour: bool = False) -> int:
    """Bytes of a step in a replay buffer (see `agents.replay.replay_columns`)."""
    plain = 3 * n_assets * _FLOAT + 2 * ((n_assets + 7) // 8) + 5 * _FLOAT + 1
    return plain + (2 * n_assets * _FLOAT + 3 * _FLOAT if behaviour else 0)


def _needs(config: Config) -> Iterator[tuple[str, Callable[[int], int]]]:
    data, model, train = config.data, config.model, config.train
    synthetic = data.source == "synthetic"
    n_assets = len(config.assets) or (data.synthetic.n_symbols if synthetic else 1)
    if synthetic:
        market, a_day = data.synthetic, data.synthetic.minutes_per_day
        day = {"1d": 1, "5min": -(-a_day // 5), "1min": a_day}[data.freq]
        yield "data.synthetic.minutes_per_day", lambda n: n * 8 * 64
        bars = market.n_days * day * _BAR
        yield "data.synthetic.n_symbols", lambda n: n * bars + a_day * 8
        bars_of_day = market.n_symbols * day * _BAR
        yield "data.synthetic.n_days", lambda n: n * bars_of_day + a_day * 8

    def encoder(width: int, layers: int) -> int:
        inner = max(layers - 1, 0) * 3 * width * width  # TimeCNN reads three rows at once
        return (inner + width * model.hidden) * _LEARNED

    yield "model.d_model", lambda n: encoder(n, model.n_layers)
    yield "model.n_layers", lambda n: encoder(model.d_model, n)
    yield "model.hidden", lambda n: n * (n + model.d_model) * _LEARNED
    if model.encoder != "TimeCNN":  # whose positions are learned
        yield "window", lambda n: n * model.d_model * _LEARNED
    if config.lora.enabled:
        yield "lora.rank", lambda n: 2 * n * model.d_model * _LEARNED
    if ALGORITHMS[train.algo].memory == "rollout":
        # A rollout keeps, of each book and asset, what was held and what was done.
        each = n_assets * 3 * _FLOAT
        yield "train.books", lambda n: n * train.rollout_steps * each
        yield "train.rollout_steps", lambda n: n * train.books * each
    else:
        yield "train.books", lambda n: n * n_assets * 8 * _FLOAT
    yield from _expert_needs(config, n_assets)
    learner, state = config.execution.learner, config.execution.hidden * _FLOAT
    yield "execution.hidden", lambda n: n * n * 6 * _LEARNED
    yield "execution.learner.orders", lambda n: n * learner.copies * state
    yield "execution.learner.copies", lambda n: n * learner.orders * state
    yield "execution.learner.memory", lambda n: n * 16 * _FLOAT


def _expert_needs(config: Config, n_assets: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    memory, expert, experts = ALGORITHMS[config.train.algo].memory, config.expert, config.experts
    if memory in (None, "rollout"):
        return
    width, d_model = expert.hidden, config.model.d_model
    if memory == "replay":
        each = bytes_of_transition(n_assets)
        yield "expert.buffer_size", lambda n: n * each
    batch = n_assets * d_model * _FLOAT
    yield "expert.batch_size", lambda n: n * batch
    yield "expert.hidden", lambda n: n * (n + d_model) * 3 * _LEARNED
    if memory == "horizon":
        books = config.train.books * n_assets * _FLOAT
        yield "expert.horizon", lambda n: n * books
    if memory != "population":
        return
    router, sharing = config.meta_router, experts.sharing
    if sharing.enabled and not sharing.on_disk:
        shared = bytes_of_transition(n_assets, behaviour=True)
        yield "experts.sharing.buffer_size", lambda n: n * shared
    network = width * (width + d_model) * 3 * _LEARNED
    members = config.trainer.evolution.members_per_niche
    yield "experts.n_experts", lambda n: n * members * network
    niches = experts.n_experts * network
    yield "trainer.evolution.members_per_niche", lambda n: n * niches
    yield "experts.skill_dim", lambda n: n * width * _LEARNED
    seen = experts.n_experts * len(router.horizons) * _FLOAT
    yield "meta_router.n_steps", lambda n: n * seen
    yield "meta_router.n_envs", lambda n: n * n_assets * experts.n_experts * 8
    probe = n_assets * experts.n_experts * 8
    yield "trainer.probe_states", lambda n: n * probe
    books = experts.n_experts * router.n_envs * 8
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
