"""Small worlds that cases damage: data files, and runs of every kind, made once and kept.

A world is a directory with everything a command needs, by relative paths: `run/`, `store/`,
`cache/`. It is made by the commands themselves, on three symbols and a year of days (two symbols
and weeks of 5-minute bars for order execution), in seconds, and kept under the digest of
Echelon's source, so that a changed source makes new ones.

    python -m reliability.worlds DIRECTORY NAME     make one here; what `ensure` runs
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.live.engine import LiveEngine
    from echelon.serving.bundle import Bundle

ROOT = Path(__file__).resolve().parents[1]
SYMBOLS = ("AAA", "BBB", "CCC")
DAYS = 230
SPLIT = (
    "split={train: [2015-01-02, 2015-07-31], valid: [2015-08-03, 2015-09-30], "
    "test: [2015-10-01, 2015-11-13]}"
)
_MARKET = (
    *("data.source=csv", "data.path=bars.csv", "data.store=store", "data.cache.dir=cache"),
    *(SPLIT, "window=5", "features.indicators={sma: [5]}", "features.stationary.enabled=false"),
    *("model.d_model=8", "model.n_layers=1", "model.hidden=8", "logging.tensorboard=false"),
    *("eval.baselines=[cash, equal_weight]", "market.preset=paper"),
)
_FLAT = (
    *("train.books=4", "train.rollout_steps=10", "train.total_env_steps=200"),
    *("train.log_interval_steps=100", "train.validate_every_steps=100"),
    "train.checkpoint_every_steps=100",
)
_LEARNING = (
    *("expert.hidden=8", "train.books=4", "train.episode_steps=12", "train.gamma=0.9"),
    *("expert.batch_size=16", "expert.learning_starts=16", "expert.updates_per_step=0.25"),
    *("expert.warmup_updates=0", "pretrain.epochs=1", "pretrain.pass_rows=64"),
    *("train.lr_actor=0.001", "train.lr_critic=0.001"),
)
_EXPERT = (
    *("train.algo=SAC", *_LEARNING, "train.total_env_steps=200", "train.log_interval_steps=100"),
    *("train.validate_every_steps=100", "train.checkpoint_every_steps=100"),
)
_HIERARCHY = (
    *("train.algo=HIERARCHY", *_LEARNING, "experts.n_experts=2", "experts.skill_dim=4"),
    *("experts.responsibility_bars=5", "experts.sharing.buffer_size=1000"),
    *("experts.sharing.sequence_steps=3", "experts.sharing.fresh_steps=200"),
    *("trainer.round_steps=16", "trainer.probe_states=12", "trainer.workers=1"),
    *("trainer.training_schedule.experts={freq: 2, steps: 16}", "meta_router.n_steps=16"),
    *("trainer.training_schedule.router={freq: 4, steps: 32}", "meta_router.n_envs=2"),
    *("trainer.training_schedule.population={freq: 4, mutation_rate: 0.1}", "lora.enabled=false"),
    *("meta_router.batch_size=16", "meta_router.episode_decisions=4", "meta_router.every_bars=2"),
    *("meta_router.horizons=[2, 5]", "trainer.evolution.windows=2", "train.total_env_steps=300"),
    *("train.log_interval_steps=100", "train.validate_every_steps=150"),
    "train.checkpoint_every_steps=150",
)
_EXECUTION = (
    *("data.source=synthetic", "data.freq=5min", "data.synthetic.n_symbols=2"),
    *("data.synthetic.n_days=40", "data.synthetic.minutes_per_day=120", "data.store=store"),
    *("data.synthetic.delistings=0", "data.synthetic.late_listings=0", "data.cache.dir=cache"),
    *("data.synthetic.suspension_rate=0", "split.train=[2015-01-05, 2015-02-06]"),
    *("split.valid=[2015-02-09, 2015-02-17]", "split.test=[2015-02-18, 2015-02-27]"),
    *("execution.ticks_per_step=6", "execution.hidden=8", "execution.orders.per_day=2"),
    *("execution.learner.memory=16", "execution.learner.minibatches=2"),
    *("execution.learner.total_steps=96", "execution.learner.validate_every=48"),
    *("execution.learner.orders=24", "execution.learner.epochs=1"),
)
SMALL: Mapping[str, tuple[str, ...]] = {
    "flat": (*_MARKET, *_FLAT),
    "expert": (*_MARKET, *_EXPERT),
    "hierarchy": (*_MARKET, *_HIERARCHY),
    "execution": _EXECUTION,
}
"""Overrides that make a run of a kind small."""
WORLDS = ("files", *SMALL)
SERVED = ("flat", "hierarchy")
"""Worlds with a bundle, an engine's state and requests of its service."""


def options(overrides: Iterable[str]) -> list[str]:
    """Overrides as words of a command line."""
    return [word for item in overrides for word in ("-o", item)]


def source_digest() -> str:
    """A digest of everything that worlds are made by."""
    state = hashlib.sha256()
    for path in (*sorted((ROOT / "src" / "echelon").rglob("*.py")), Path(__file__)):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]


def ensure(directory: Path, names: Iterable[str]) -> Path:
    """Make the worlds that are not there yet; the directory that holds them."""
    place = directory / f"worlds-{source_digest()}"
    for name in names:
        if not (place / name).is_dir():
            place.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "reliability.worlds", str(place), name]
            done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the world {name!r} could not be made:\n{done.stderr[-4000:]}")
    return place


def make(place: Path, name: str) -> None:
    """Make one world: whole, under its name, or not at all."""
    staging = place / f".{name}-{os.getpid()}"
    staging.mkdir(parents=True)
    home = Path.cwd()
    try:
        os.chdir(staging)
        write_files() if name == "files" else _train(name)
        os.chdir(home)
        if not (place / name).exists():  # another process may have been faster
            staging.rename(place / name)
    finally:
        os.chdir(home)
        shutil.rmtree(staging, ignore_errors=True)


def _train(name: str) -> None:
    Path("bars.csv").write_text(as_csv(bars_table()), encoding="utf-8")
    words = [*options(SMALL[name]), "--seeds", "1", "--workers", "1", "--output-dir", "run"]
    if name == "execution":
        _echelon("execution", "train", *words)
        _echelon("execution", "evaluate", "run", "--split", "valid")
    else:
        _echelon("train", *words)
        _echelon("evaluate", "run", "--split", "test")
        _echelon("report", "run")
    if name in SERVED:
        _serve()
    # What a report drew is never read again, and is larger than all the rest.
    for drawn in (*Path("run").rglob("*.html"), *Path("run").rglob("*.png")):
        drawn.unlink()


def _serve() -> None:
    """Export the run, and leave what a service does: its state after a bar, and what comes next.

    bodies.json: requests of the service, the first of which the state has answered
    feed.jsonl: messages of the same bars and some more; live.db: a journal of them
    """
    from echelon.serving.bundle import load_bundle
    from echelon.serving.engine import DecisionEngine

    _echelon("export", "run", "--output-dir", "bundle")
    until, table = date(2015, 9, 22), bars_table()
    engine = DecisionEngine.from_store(
        load_bundle(Path("bundle")), Path("store"), until=until, state=Path("engine.state")
    )
    times = [day for day in sorted({row[0] for row in table[1:]}) if day > str(until)][:4]
    bars = [[_bar(row) for row in table if row[0] == day] for day in times]
    bodies = [{"time": day, "bars": rows} for day, rows in zip(times, bars, strict=True)]
    engine.answer(engine.read_bars(times[0], bars[0]))
    engine.complete()
    Path("bodies.json").write_text(json.dumps(bodies), encoding="utf-8")
    _trade(engine.bundle, until)


def _trade(bundle: Bundle, until: date) -> None:
    """Leave messages of a feed behind that day, and the journal of a live engine."""
    from echelon.live.feeds import publish_bars

    publish_bars(bundle, Path("store"), "file:feed.jsonl", until, 6)
    with live_engine(bundle, until) as engine:
        engine.run(bars=3)
        if engine.state.mode != "running":
            raise RuntimeError(engine.state.why)


def live_engine(bundle: Bundle, until: date | None = None) -> LiveEngine:
    """The engine of the journal `live.db` here, on the store's bars and the paper venue."""
    from echelon.config.live import LiveConfig
    from echelon.live.brokers import open_broker
    from echelon.live.engine import LiveEngine
    from echelon.live.feeds import open_feed

    config = LiveConfig(sync=False, snapshot_every=2)
    store, journal = Path("store"), Path("live.db")
    broker = open_broker("paper", bundle, journal, store, until, config)
    feed = open_feed("store", bundle, store)
    try:
        return LiveEngine.open(bundle, store, journal, feed, broker, config, until=until)
    except BaseException:
        broker.close()
        raise


def _bar(row: list[str]) -> dict[str, Any]:
    """A row of the table as the service takes it."""
    numbers = zip(("open", "high", "low", "close", "volume"), row[2:], strict=True)
    return {"symbol": row[1], **{name: float(text) for name, text in numbers}}


def _echelon(*words: str) -> None:
    from echelon.cli.app import main

    sys.argv = ["echelon", *words]
    try:
        main()
    except SystemExit as leave:
        if leave.code:
            raise


# --- data files


def as_csv(table: list[list[str]], separator: str = ",") -> str:
    """A table as text."""
    return "".join(separator.join(row) + "\n" for row in table)


def bars_table(symbols: tuple[str, ...] = SYMBOLS, days: int = DAYS) -> list[list[str]]:
    """A year of daily bars on the days on which New York traded, the header first."""
    from echelon.data.calendars import sessions

    rng = random.Random(5)
    times = sessions("XNYS", date(2015, 1, 2), date(2015, 12, 30))[:days]
    table = [["date", "symbol", "open", "high", "low", "close", "volume"]]
    price = dict.fromkeys(symbols, 20.0)
    for time in times:
        for symbol in symbols:
            before, after = price[symbol], price[symbol] * (1 + rng.gauss(0, 0.01))
            high, low = max(before, after) * 1.004, min(before, after) * 0.996
            numbers = (before, high, low, after)
            cells = [f"{value:.4f}" for value in numbers]
            table.append([str(time)[:10], symbol, *cells, str(rng.randint(1000, 90_000))])
            price[symbol] = after
    return table


def write_files() -> None:
    """Write small files of every source into the current directory."""
    table = bars_table(days=25)
    texts = {"bars.csv": as_csv(table), "bars.tsv": as_csv(table, "\t"), **_side_files()}
    for name, text in texts.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("bars.csv.gz").write_bytes(gzip.compress(as_csv(table).encode(), mtime=0))
    Path("chinese.csv").write_bytes(_chinese().encode("gbk"))
    Path("ticks.csv").write_text(_ticks(), encoding="utf-8")
    shutil.copytree(ROOT / "tests" / "fixtures" / "qlib" / "bin", "qlib")
    for minutes in Path("qlib").rglob("*1min*"):
        minutes.unlink()


def _side_files() -> dict[str, str]:
    return {
        "universe.csv": "symbol,start,end\nAAA,2015-01-02,\nBBB,2015-01-02,2015-01-20\n",
        "instruments.csv": (
            "symbol,listed,delisted,reason,name\nAAA,2000-01-03,,,Alpha\n"
            "BBB,2001-01-02,2015-02-02,merged,Beta\n"
        ),
        "index.csv": (
            "date,symbol,close\n2015-01-02,IDX,100\n2015-01-05,IDX,101\n2015-01-06,IDX,99\n"
        ),
        "exogenous.csv": (
            "series,period,published,value\ncpi,2014-11,2014-12-12 08:30,1.1\n"
            "cpi,2014-12,2015-01-13 08:30,1.2\ngdp,2014Q4,2015-01-30,0.4\n"
        ),
        "orders.csv": "symbol,date,direction,amount\nS000,2015-02-10,buy,1000\n",
    }


def _chinese() -> str:
    lines = ["代码,日期,开盘价,最高价,最低价,收盘价,成交量,前收盘价"]
    for day in ("2015-01-05", "2015-01-06", "2015-01-07", "2015-01-08", "2015-01-09"):
        codes = ("600000.SH", "000001.SZ")
        lines += [f"{code},{day},10.00,10.20,9.90,10.10,120000,10.00" for code in codes]
    return "\n".join(lines) + "\n"


def _ticks() -> str:
    rng = random.Random(7)
    lines = ["万得代码,自然日,时间,成交价格,成交数量"]
    for k in range(60):
        clock = 93000000 + k * 100000 if k < 30 else 130000000 + (k - 30) * 100000
        lines.append(
            f"600000.SH,20240102,{clock},{100000 + rng.randint(-500, 500)},{rng.randint(1, 90)}00"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
