"""Every key of the two source configurations does something; what does not yet is listed.

A key leaves PENDING when the part it steers lands; the first test fails if a key of either file
is in neither list, so a new key cannot arrive without an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from markets import CONFIGS

from echelon.cli.options import run_directory
from echelon.config import Config, load_config
from echelon.data.datasets import ensure_dataset
from echelon.errors import ConfigError
from echelon.features import Prepared, prepare
from echelon.features.registry import select
from echelon.market import resolve_rules

FIELDS = frozenset({"open", "high", "low", "close", "volume"})
SPLITS = (
    "split.train=[2015-01-02, 2016-01-29]",
    "split.valid=[2016-02-01, 2016-06-30]",
    "split.test=[2016-07-01, 2016-12-30]",
)

PENDING = {
    # the environment and the A2C agent
    *("buy_pct", "sell_pct", "state.include_pos", "state.include_cash"),
    *("model.encoder", "model.d_model", "model.n_layers", "model.dropout"),
    *("train.algo", "train.gamma", "train.entropy_coef", "train.value_coef", "train.lr_actor"),
    *("train.lr_critic", "train.grad_clip", "train.rollout_steps", "train.total_env_steps"),
    *("train.log_interval_steps", "eval.deterministic", "eval.use_fee", "eval.metrics"),
    "logging.use_wandb",
    # the hierarchy
    *("experts.n_experts", "experts.skill_dim", "experts.mi_reward_weight"),
    *("meta_router.kl_lambda", "meta_router.ent_coef", "trainer.diversity_threshold"),
    *("trainer.training_schedule.router.freq", "trainer.training_schedule.router.steps"),
    *("trainer.training_schedule.experts.freq", "trainer.training_schedule.experts.steps"),
    "trainer.training_schedule.population.freq",
    "trainer.training_schedule.population.mutation_rate",
}


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
    return select(bench.config(*overrides).features, FIELDS).names


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


def _run_directory(bench: Bench, *overrides: str) -> object:
    config = bench.config(*overrides)
    return run_directory(Path("qtmrl.yaml"), None, None, config.logging.output_dir)


def _refusal(bench: Bench, *overrides: str) -> object:
    try:
        return bench.config(*overrides).normalization.fit_on
    except ConfigError as error:
        return str(error)


def _rules(bench: Bench, *overrides: str) -> object:
    return resolve_rules(bench.config(*overrides), discrete=True)


EFFECTS: dict[str, tuple[str, Callable[..., object]]] = {
    "seed": ("seed=43", _market),
    "assets": ("assets=[AAPL, JNJ]", _symbols),
    "window": ("window=30", _window),
    "split.train": ("split.train=[2015-01-02, 2015-12-31]", _splits),
    "split.valid": ("split.valid=[2016-02-01, 2016-05-31]", _splits),
    "split.test": ("split.test=[2016-07-01, 2016-11-30]", _splits),
    "fee_rate": ("fee_rate=0.001", _rules),
    "market.preset": ("market.preset=cn", _rules),
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
    "normalization.method": ("normalization.method=none", _x),
    "normalization.fit_on": ("normalization.fit_on=all", _refusal),
    "normalization.include": ("normalization.include=[OHLCV]", _x),
    "logging.output_dir": ("logging.output_dir=./elsewhere", _run_directory),
}


def test_every_key_is_either_effective_or_pending() -> None:
    keys = _keys("qtmrl") | _keys("hierarchical")
    assert keys == set(EFFECTS) | PENDING
    assert not set(EFFECTS) & PENDING


@pytest.mark.parametrize("key", EFFECTS)
def test_changing_the_key_changes_what_it_steers(key: str, tmp_path: Path, bars_file: Path) -> None:
    override, observe = EFFECTS[key]
    bench = Bench(tmp_path, bars_file)
    assert observe(bench) == observe(bench)
    assert observe(bench, override) != observe(bench)


def test_every_section_of_the_tree_is_in_a_shipped_file() -> None:
    files = ("qtmrl", "hierarchical", "demo")
    given = {key.split(".")[0] for name in files for key in _keys(name)}
    assert set(Config.model_fields) == given
