"""Train a little of everything and hash the values: a refactoring changes none of them.

    python scripts/fingerprint.py --output before.json            # every part, about ten minutes
    python scripts/fingerprint.py --short --compare before.json   # the quick ones, under three

1. Each part is a handful of `echelon` commands on a synthetic market, in processes of their own:
   nothing here knows how the code inside is arranged.
2. What the commands left is read and hashed value by value: tensors by their names, each metric's
   series, each column of a table, each number of a JSON document. Clocks, versions, hashes and
   paths are left out (`VOLATILE`).
3. Two fingerprints are compared key by key. A key that was renamed on purpose is named in
   `RENAMED`, so that the map of what changed its name is read here and nowhere else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]

RENAMED: Mapping[str, str] = {
    r"(state\.json:state\..*)\bbegun_anew$": r"\1reseeded",
    r"(state\.json:state\..*)\btold\.": r"\1metrics.",
    r"^(.*\.json:.*)\bcompanions\b": r"\1reference_policies",
}
"""Regular expression over the keys of the older fingerprint → what they are called now."""

DROPPED = re.compile(
    # English sentences of events and decisions, now codes and values.
    r"(risk_events\.jsonl:done|(events|lineage)\.\d+\.(done|reason)|decision\.reason)$"
)
"""Keys of the older fingerprint whose values are no longer kept in that form, on purpose."""

VOLATILE = re.compile(
    r"(^|[./_:])(time|seconds?|finished|evaluated|started|took|when|code|echelon|python|platform|libraries|"
    r"command|path|paths|store|sha256|tensors_sha256|fingerprint|identity|cpu_seconds|version|"
    r"config_hash|training_hash|hash|key|files|sizes|format|settings|machine|lines|date)([./_:]|$)"
)
"""Parts of keys whose values depend on the clock, the machine, the place or the code's wording."""

MARKET = (
    *("seed=42", "window=6", "data.source=synthetic", "data.synthetic.n_symbols=4"),
    *("data.synthetic.n_days=700", "features.indicators={sma: [5], rsi: [6]}"),
    "split={train: ['2015-01-05', '2016-06-30'], valid: ['2016-07-01', '2016-12-30'], "
    "test: ['2017-01-02', '2017-06-30']}",
    *("model.encoder=TimeCNN", "model.d_model=8", "model.n_layers=1", "model.hidden=8"),
    *("train.books=4", "train.episode_steps=40", "train.log_interval_steps=100"),
    *("logging.tensorboard=false", "eval.baselines=[cash, equal_weight, momentum]"),
    "market.preset=paper",
)
FLAT = (
    *("train.algo=A2C", "train.rollout_steps=10", "train.total_env_steps=800", "train.seeds=2"),
    *("train.validate_every_steps=200", "train.checkpoint_every_steps=400"),
)
EXPERT = (
    *("train.total_env_steps=600", "train.validate_every_steps=200", "expert.hidden=8"),
    *("train.checkpoint_every_steps=300", "expert.batch_size=16", "expert.learning_starts=64"),
    *("expert.updates_per_step=0.25", "expert.warmup_updates=2", "pretrain.epochs=1"),
)
HIERARCHY = (
    *("train.lr_actor=0.003", "train.lr_critic=0.003"),
    *("train.algo=HIERARCHY", "train.episode_steps=12", "train.gamma=0.9", "reward.scale=100"),
    *("expert.hidden=8", "expert.batch_size=16", "expert.learning_starts=16"),
    *("expert.updates_per_step=0.25", "expert.warmup_updates=0", "experts.n_experts=3"),
    *("experts.skill_dim=4", "experts.responsibility_bars=5", "pretrain.epochs=1"),
    *("experts.sharing.buffer_size=3000", "experts.sharing.sequence_steps=3"),
    *("experts.sharing.fresh_steps=200", "trainer.round_steps=16", "trainer.probe_states=12"),
    *("trainer.training_schedule.experts={freq: 2, steps: 16}", "meta_router.n_steps=32"),
    *("trainer.training_schedule.router={freq: 4, steps: 32}", "meta_router.n_envs=4"),
    *("trainer.training_schedule.population={freq: 3, mutation_rate: 0.1}", "lora.rank=2"),
    *("meta_router.batch_size=16", "meta_router.episode_decisions=4", "meta_router.every_bars=2"),
    *("meta_router.horizons=[2, 5]", "trainer.evolution.windows=2", "lora.every_updates=2"),
    *("lora.refresh_updates=3", "lora.lr=0.01", "train.total_env_steps=480"),
    *("train.validate_every_steps=160", "train.checkpoint_every_steps=160"),
)
EXECUTION = (
    *("data.source=synthetic", "data.freq=5min", "data.synthetic.n_symbols=2"),
    *("data.synthetic.n_days=40", "data.synthetic.minutes_per_day=120"),
    "split={train: ['2015-01-05', '2015-01-23'], valid: ['2015-01-26', '2015-02-06'], "
    "test: ['2015-02-09', '2015-02-20']}",
    *("execution.ticks_per_step=4", "execution.hidden=8", "execution.block=2"),
    *("execution.learner.total_steps=600", "execution.learner.validate_every=200"),
    *("execution.learner.orders=16", "execution.learner.memory=64", "execution.orders.per_day=2"),
    *("data.synthetic.delistings=0.0", "data.synthetic.late_listings=0.0"),
    "data.synthetic.suspension_rate=0.0",
)
PROOF = (
    *("window=8", "model.d_model=8", "model.n_layers=1", "model.hidden=8", "train.books=4"),
    *("train.offset_groups=2", "train.rollout_steps=10", "train.episode_steps=40"),
    *("train.total_env_steps=400", "train.log_interval_steps=200", "logging.tensorboard=false"),
)
FOLDS = "walk_forward={scheme: rolling, unit: month, train: 12, valid: 3, test: 3, first_test: "
FOLDS += "'2016-07-01', last_test: '2016-12-30', purge_bars: 1, embargo_bars: 5}"


class Part(NamedTuple):
    """A name, the commands (without `echelon`), and whether the short form has it.

    fails: exit codes that are no failure (a proof of an agent that learned nothing is not passed)
    """

    name: str
    commands: tuple[tuple[str, ...], ...]
    short: bool
    fails: tuple[int, ...] = ()


def _flags(*overrides: str) -> tuple[str, ...]:
    return tuple(word for item in overrides for word in ("-o", item))


def _portfolio(name: str, *overrides: str, short: bool, workers: int = 1) -> Part:
    train = ("train", *_flags(*MARKET, *overrides), "--workers", str(workers), "--output-dir", name)
    return Part(name, (train, ("evaluate", name, "--split", "test")), short)


def _execution(algo: str, *, short: bool) -> Part:
    name = f"execution-{algo.lower()}"
    flags = _flags(*EXECUTION, f"execution.learner.algo={algo}")
    train = ("execution", "train", *flags, "--workers", "1", "--output-dir", name)
    return Part(name, (train, ("execution", "evaluate", name, "--split", "test")), short)


PARTS = (
    _portfolio("a2c", *FLAT, short=True, workers=2),
    _portfolio("sac", "train.algo=SAC", *EXPERT, short=True),
    _portfolio("td3", "train.algo=TD3", *EXPERT, short=False),
    _portfolio("apg", "train.algo=APG", *EXPERT, short=False),
    _portfolio("timesnet", "train.algo=SAC", *EXPERT, "model.encoder=TimesNet", short=False),
    _portfolio("hierarchy", *HIERARCHY, "lora.enabled=false", short=True),
    _portfolio("hierarchy-2", *HIERARCHY, "lora.enabled=false", "trainer.workers=2", short=False),
    _portfolio("hierarchy-lora", *HIERARCHY, "lora.enabled=true", short=False),
    _portfolio(
        "hierarchy-lora-2", *HIERARCHY, "lora.enabled=true", "trainer.workers=2", short=False
    ),
    _execution("PPO", short=True),
    _execution("DQN", short=False),
    _execution("OPD", short=False),
    Part(
        "walk-forward",
        (
            (
                *("walk-forward", *_flags(*MARKET, *FLAT, "train.seeds=1", FOLDS)),
                *("--workers", "1", "--output-dir", "walk-forward"),
            ),
        ),
        False,
    ),
    Part(
        "proof",
        (
            (
                *("prove", "leaky", "--quick", "--config", str(ROOT / "configs/qtmrl-fast.yaml")),
                *(*_flags(*PROOF), "--workers", "1", "--output-dir", "proof"),
            ),
        ),
        False,
        fails=(1,),
    ),
)
"""Everything that trains."""


def run_part(part: Part, home: Path) -> None:
    """Run a part's commands in `home`; ends the script where one of them fails."""
    threads = ("OMP", "OPENBLAS", "MKL", "NUMBA")
    environment = os.environ | {f"{name}_NUM_THREADS": "1" for name in threads}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "POLARS_MAX_THREADS": "1"}
    for command in part.commands:
        words = [sys.executable, "-m", "echelon", *command]
        done = subprocess.run(words, cwd=home, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, *part.fails):
            sys.exit(f"{part.name}: `echelon {' '.join(command[:2])}` failed:\n{done.stderr}")


def read_values(run: Path) -> Iterator[tuple[str, bytes]]:
    """(key, value as bytes) of everything in a directory that is a result."""
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        name = path.relative_to(run).as_posix()
        if re.search(r"(^|/)(store|cache|prepared)/|\.lock$|\.png$|\.html$|\.csv$|/\.", name):
            continue  # what the store holds is tested elsewhere; pages and pictures are not values
        if path.suffix == ".safetensors":
            yield from _tensors(path, name)
        elif path.suffix == ".parquet":
            yield from _columns(path, name)
        elif path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            yield from _series(lines, name)
        elif path.suffix == ".json":
            yield from _leaves(json.loads(path.read_text()), name)
        elif path.suffix == ".npy":
            array = np.load(path)
            yield name, f"{array.dtype}{array.shape}".encode() + array.tobytes()


def _tensors(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    with safe_open(path, framework="numpy") as handle:
        for key in handle.keys():  # noqa: SIM118 (not a mapping)
            array = handle.get_tensor(key)
            yield f"{name}:{key}", f"{array.dtype}{array.shape}".encode() + array.tobytes()


def _columns(path: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Each column; tables of several books as the one table for each that there was once."""
    frame = pl.read_parquet(path)
    if not {"policy", "seed"} <= set(frame.columns):
        yield from _frame_columns(frame, name)
        return
    every = pl.read_parquet(path.with_name("equity.parquet"))
    for policy, seed in every.select("policy", "seed").unique(maintain_order=True).rows():
        known = pl.col("seed").is_null() if seed is None else pl.col("seed") == seed
        book = frame.filter((pl.col("policy") == policy) & known).drop("policy", "seed")
        if "kind" in book.columns:
            if (book["kind"] == "discrete").all():
                book = book.cast(dict.fromkeys(book.columns[2:], pl.Int8))
            book = book.drop("kind")
        stem = policy if seed is None else f"seed-{seed}"
        stem += "" if seed is None or policy == "agent" else f"-{policy}"
        yield from _frame_columns(book, name.removesuffix(path.name) + f"{stem}.{path.name}")


def _frame_columns(frame: pl.DataFrame, name: str) -> Iterator[tuple[str, bytes]]:
    for column in frame.iter_columns():
        yield f"{name}:{column.name}", repr(column.to_list()).encode()


def _series(lines: list[dict[str, Any]], name: str) -> Iterator[tuple[str, bytes]]:
    keys = sorted({key for line in lines for key in line})
    for key in keys:
        yield f"{name}:{key}", repr([line.get(key) for line in lines]).encode()


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, bytes]]:  # noqa: ANN401 (JSON)
    if isinstance(tree, dict):
        for key, value in sorted(tree.items()):
            yield from _leaves(
                value, f"{name}:{key}" if name.endswith(".json") else f"{name}.{key}"
            )
    elif isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        for k, value in enumerate(tree):
            yield from _leaves(value, f"{name}.{k}")
    else:
        yield name, repr(tree).encode()


def take(short: bool, home: Path) -> dict[str, str]:
    """Key → hash of every value of every part."""
    hashes: dict[str, str] = {}
    for part in PARTS:
        if short and not part.short:
            continue
        begin = time.monotonic()
        alone = home / f"of-{part.name}"  # the registry beside runs counts those it sees
        alone.mkdir()
        run_part(part, alone)
        values = {
            f"{part.name}/{key}": hashlib.sha256(value).hexdigest()[:16]
            for key, value in read_values(alone / part.name)
            if not VOLATILE.search(key)
        }
        hashes |= values
        print(f"{part.name}: {len(values)} values, {time.monotonic() - begin:.0f} s", flush=True)
    return hashes


def compare(before: Mapping[str, str], now: Mapping[str, str], parts: set[str]) -> int:
    """Print what differs between two fingerprints, of the parts both have; how much it is."""
    renamed = {}
    for key, value in before.items():
        if key.split("/")[0] not in parts:
            continue
        for pattern, name in RENAMED.items():
            key = re.sub(pattern, name, key)
        if not DROPPED.search(key):
            renamed[key] = value
    gone = sorted(renamed.keys() - now.keys())
    new = sorted(now.keys() - renamed.keys())
    changed = sorted(key for key in renamed.keys() & now.keys() if renamed[key] != now[key])
    for what, keys in (("changed", changed), ("gone", gone), ("new", new)):
        for key in keys[:40]:
            print(f"{what}: {key}")
        if len(keys) > 40:
            print(f"{what}: … and {len(keys) - 40} more")
    equal = len(renamed.keys() & now.keys()) - len(changed)
    print(f"{equal} equal, {len(changed)} changed, {len(gone)} gone, {len(new)} new")
    return len(changed) + len(gone)


def main() -> None:
    """Take a fingerprint; write it, compare it, or both."""
    parser = argparse.ArgumentParser(description="Hash what trainings and evaluations give.")
    parser.add_argument("--short", action="store_true", help="only the quick parts")
    parser.add_argument("--output", type=Path, help="write the fingerprint here, as JSON")
    parser.add_argument("--compare", type=Path, help="an earlier one; leaves with 1 on a change")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as home:
        hashes = take(args.short, Path(home))
    if args.output is not None:
        args.output.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")
    if args.compare is not None:
        parts = {part.name for part in PARTS if part.short or not args.short}
        sys.exit(1 if compare(json.loads(args.compare.read_text()), hashes, parts) else 0)


if __name__ == "__main__":
    main()
