"""Every key of the section `execution` does something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_execution_book_training import SESSIONS, write_book
from test_execution_training import configured

from echelon.agents.execution.network import NetworkSettings
from echelon.config import Config
from echelon.config.execution import ExecutionConfig
from echelon.errors import ConfigError, DataError
from echelon.evaluation.execution import make_schedules
from echelon.execution.policies import AlmgrenChriss
from echelon.execution.rewards import reward_from_config
from echelon.execution.simulator import ExecutionRules
from echelon.training.execution import make_execution_learner, train_execution
from echelon.training.execution_data import load_execution_data

Observe = Callable[[Config, Path], object]


def _rules(config: Config, _: Path) -> object:
    return ExecutionRules.from_config(config.execution)


def _network(config: Config, _: Path) -> object:
    return NetworkSettings.from_config(config.execution)


def _reward(config: Config, _: Path) -> object:
    return reward_from_config(config.execution.reward)


def _orders(config: Config, _: Path) -> object:
    try:
        return [one.tobytes() for one in load_execution_data(config).orders["train"]]
    except DataError as refused:  # of a file that is not there
        return str(refused)


def _foreign_orders(config: Config, place: Path) -> object:
    """Orders of a file whose direction is called `way`."""
    place.mkdir()
    path = place / "orders.csv"
    lines = [f"S0001,{day},buy,10" for day in ("2015-01-06", "2015-02-17")]
    path.write_text("\n".join(["symbol,date,way,amount", *lines]), encoding="utf-8")
    told = config.execution.orders.model_copy(update={"path": path})
    execution = config.execution.model_copy(update={"orders": told})
    try:
        data = load_execution_data(config.model_copy(update={"execution": execution}))
        return [len(orders) for orders in data.orders.values()]
    except DataError as refused:
        return str(refused)


def _days(config: Config, _: Path) -> object:
    try:
        data = load_execution_data(config)
    except ConfigError as refused:  # of a file that is not there
        return str(refused)
    return data.public.names, data.days.shape, data.days.buy[data.days.volume > 0].sum()


def _splits(config: Config, _: Path) -> object:
    return [int(which.sum()) for which in load_execution_data(config).inside.values()]


def _haste(config: Config, _: Path) -> object:
    schedules = make_schedules(load_execution_data(config), config.execution.kappa)
    return [one.kappa for one in schedules if isinstance(one, AlmgrenChriss)]


def _learner(config: Config, place: Path) -> object:
    """What a learner reports of its first rounds; OPD's teacher is a fresh one."""
    learner = make_execution_learner(config, load_execution_data(config), place, 42)
    return learner.algo, [learner.train_once() for _ in range(3)]


def _log(config: Config, place: Path) -> object:
    train_execution(config, load_execution_data(config), place, 42)
    return len((place / "metrics.jsonl").read_text().splitlines())


DQN, OPD = ("execution.learner.algo=DQN",), ("execution.learner.algo=OPD",)
ON_BOOK = (*SESSIONS, "execution.book={book}")
STRETCHES = ("execution.orders.window=random",)
EFFECTS: dict[str, tuple[object, Observe, tuple[str, ...]]] = {
    "ticks_per_step": (10, _rules, ()),
    "price": ("vwap", _days, ()),
    "book": ("nowhere.parquet", _days, ON_BOOK),
    "book_session": (20, _days, ON_BOOK),
    "book_split": ("[0.4, 0.3, 0.3]", _splits, ON_BOOK),
    "volume_cap": (0.5, _rules, ()),
    "half_spread": (0.001, _rules, ()),
    "temporary": (0.1, _rules, ()),
    "permanent": (0.1, _rules, ()),
    "features": ("[time, volume]", _days, ()),
    "extensions": ("[{mine}]", _days, ()),
    "actions": ("rate", _network, ()),
    "fractions": ("[0, 0.5, 1]", _network, ()),
    "rate_max": (2.0, _network, ()),
    "sequence": ("lstm", _network, ()),
    "hidden": (16, _network, ()),
    "block": (5, _network, ()),
    "kappa": (3.0, _haste, ()),
    "orders.path": ("nowhere.csv", _orders, ()),
    "orders.columns": ("{way: direction}", _foreign_orders, ()),
    "orders.per_day": (1, _orders, ()),
    "orders.share": ("[0.1, 0.2]", _orders, ()),
    "orders.buys": (1.0, _orders, ()),
    "orders.window": ("random", _orders, ()),
    "orders.min_ticks": (70, _orders, STRETCHES),
    "orders.lot": (100, _orders, ()),
    "reward.pa_penalty": (2.0, _reward, ()),
    "reward.penalty": (50.0, _reward, ()),
    "reward.ratio": (1.0, _reward, ()),
    "reward.thresholds": ("[1.0, 1.2]", _reward, ("execution.reward.ratio=1",)),
    "reward.classes": ("[-2, 0, 2]", _reward, ("execution.reward.ratio=1",)),
    "reward.shortfall": (1.0, _reward, ()),
    "reward.risk": (1.0, _reward, ()),
    "learner.algo": ("DQN", _learner, ()),
    "learner.total_steps": (400, _learner, ()),
    "learner.validate_every": (100, _log, ()),
    "learner.lr": (1e-3, _learner, ()),
    "learner.orders": (16, _learner, ()),
    "learner.copies": (2, _learner, ()),
    "learner.epochs": (1, _learner, ()),
    "learner.minibatches": (1, _learner, ()),
    "learner.clip": (1e-5, _learner, ()),
    "learner.gamma": (0.9, _learner, ()),
    "learner.trace": (0.5, _learner, ()),
    "learner.entropy": (0.1, _learner, ()),
    "learner.normalize_rewards": ("false", _learner, ()),
    "learner.normalize_advantages": ("false", _learner, ()),
    "learner.updates": (2, _learner, DQN),
    "learner.memory": (128, _learner, DQN),
    "learner.target_every": (10, _learner, DQN),
    "learner.distill": (1.0, _learner, OPD),
    "learner.distill_decay": (0.5, _learner, OPD),
    "learner.distill_target": ("distribution", _learner, OPD),
}
"""Key → (another value, where it tells, what else is set); {book} and {mine} are files."""


MINE = """
from echelon.execution import execution_feature

@execution_feature("ticks_so_far")
def ticks_so_far(past) -> float:
    return float(len(past.price))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("execution")
    write_book(place / "book.parquet")
    (place / "mine.py").write_text(MINE, encoding="utf-8")
    return place / "store"


def test_every_key_is_looked_at() -> None:
    tree = ExecutionConfig().model_dump()
    keys = set()
    for key, value in tree.items():
        keys |= {f"{key}.{below}" for below in value} if isinstance(value, dict) else {key}
    assert keys == set(EFFECTS)


@pytest.mark.parametrize("key", EFFECTS)
def test_changing_the_key_changes_what_it_steers(key: str, store: Path, tmp_path: Path) -> None:
    value, observe, told = EFFECTS[key]
    files = {"book": store.parent / "book.parquet", "mine": store.parent / "mine.py"}

    def filled(text: str) -> str:
        for name, path in files.items():
            text = text.replace(f"{{{name}}}", str(path))
        return text

    also = [filled(one) for one in told]
    usual = observe(configured(store, *also), tmp_path / "usual")
    other = configured(store, *also, filled(f"execution.{key}={value}"))
    assert observe(other, tmp_path / "other") != usual
