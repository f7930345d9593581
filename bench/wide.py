"""The wide A-share universe: which symbols may be looked at while anything is tuned, and the study.

    python -m bench.wide PARQUET development.parquet [held-out.parquet]
    python -m bench.wide study PARQUET DIR [-o key=value …] [--seeds 3] [--workers N] [--held-out]

A hundred of the 500 symbols are set aside by a hash of their names, before anything is tuned: the
others are the development data, and the hundred are looked at once, at the end.

The study, from `--config` (configs/wide.yaml), is resumed by the same command:

1. `DIR/development.parquet` and `DIR/held-out.parquet`, made once.
2. `echelon walk-forward` by year on the development symbols, into `DIR/NAME` (`--name`). Variants
   go next to it under other names: the registry between them counts every look at the test years.
3. `DIR/NAME.md`: the information ratio over equal weight, net of costs, of the mean of the seeds,
   their ensemble and `forecast`; Sharpe ratios against both; every year, and 2017 to the end alone;
   what was counted in the deflation; capacity; and by how much each bar was met or missed.

With `--held-out` the same is done on the hundred symbols, once, into `DIR/NAME-held-out`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

HELD_OUT = 100
PARTS = ("development", "held-out")
BOOKS = ("agent", "ensemble", "forecast", "equal_weight")
ALONE = "2017"
"""The year from which on the rest of the study is shown alone."""
LEAST_IR = 0.0
LEAST_VS_FORECAST = (-0.05, -0.25)
"""Of the Sharpe difference to the forecast: its estimate at least, its lower end above."""
Tree = Mapping[str, Any]


def split_symbols(symbols: Sequence[str]) -> tuple[list[str], list[str]]:
    """(development, set aside): the 100 names whose SHA-256 is lowest are set aside."""
    ranked = sorted(set(symbols), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return sorted(ranked[HELD_OUT:]), sorted(ranked[:HELD_OUT])


def write_parts(parquet: Path, targets: Sequence[Path]) -> None:
    """Write the bars of each part to a file of its own."""
    bars = pl.read_parquet(parquet)
    for target, names in zip(targets, split_symbols(bars["symbol"].to_list()), strict=False):
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = target.with_name(f".{target.name}")
        bars.filter(pl.col("symbol").is_in(names)).write_parquet(whole)
        whole.replace(target)
        print(f"{target}: {len(names)} symbols, from {names[0]} to {names[-1]}")


def walk_command(given: argparse.Namespace, data: Path, place: Path) -> list[str]:
    """The walk-forward on a file of bars, or what goes on with it."""
    walk = [sys.executable, "-m", "echelon", "walk-forward"]
    if (place / "walk_forward.json").is_file():
        walk += ["--resume", str(place)]
    else:
        walk += ["--config", str(given.config), "-o", f"data.path={data}"]
        for override in given.overrides:
            walk += ["-o", override]
        walk += ["--seeds", str(given.seeds), "--output-dir", str(place)]
    return walk if given.workers is None else [*walk, "--workers", str(given.workers)]


def show(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.2f}"


def show_both(both: Tree | None, annual: float) -> str:
    """An estimate and its intervals at both block lengths, a year."""
    if both is None:
        return "–"
    spans = []
    for kind in ("single", "double"):
        part = both[kind]
        low, high = (None if part[end] is None else part[end] * annual for end in ("low", "high"))
        spans.append(f"{show(low)} to {show(high)}")
    estimate = both["single"]["estimate"]
    return f"{show(None if estimate is None else estimate * annual)} ({'; '.join(spans)})"


def lowest(both: Tree, annual: float) -> float:
    lows = [both[kind]["low"] for kind in ("single", "double")]
    return math.nan if None in lows else min(lows) * annual


def study_table(directory: Path) -> str:
    """What a walk-forward came to, as Markdown; intervals at both block lengths."""
    tree = json.loads((directory / "walk_forward.json").read_text(encoding="utf-8"))
    if "statistics" not in tree:
        raise SystemExit(f"{directory}: a fold failed or is missing. Run the same command again.")
    measures = pl.read_parquet(directory / "walk_forward.parquet")
    annual = math.sqrt(tree["stitched"]["periods_per_year"])
    books = [who for who in BOOKS if who in set(measures["who"])]
    sections = (
        _ratio_lines(tree["statistics"], annual),
        _measure_lines(measures, books),
        _year_lines(measures, books, annual, tree["statistics"]),
        _search_lines(tree["statistics"], annual),
        _capacity_lines(tree["statistics"]),
        _bar_lines(tree["statistics"], annual),
    )
    about = tree["stitched"]
    head = f"{directory.name}: {about['first']} to {about['last']}, {about['periods']:,} returns"
    return "\n\n".join([head, *("\n".join(lines) for lines in sections)]) + "\n"


def _ratio_lines(found: Tree, annual: float) -> Iterator[str]:
    yield "| a year, 95 % at both block lengths | agents, mean of seeds | ensemble | forecast |"
    yield "|---|---|---|---|"
    active = (show_both(found["active"].get(who), annual) for who in BOOKS[:3])
    yield f"| information ratio over equal weight | {' | '.join(active)} |"
    for other in ("equal_weight", "forecast"):
        both = (found[key].get(other) for key in ("differences", "ensemble") if key in found)
        cells = [*(show_both(part, annual) for part in both), "–"]
        yield f"| Sharpe minus {other} | {' | '.join(cells[:2])} | – |"


def _measure_lines(measures: pl.DataFrame, books: Sequence[str]) -> Iterator[str]:
    names = ("annual_return", "sharpe_annual", "max_drawdown", "turnover_annual", "exposure")
    yield f"| stitched | {' | '.join(names)} |"
    yield f"|---|{'---|' * len(names)}"
    for who in books:
        values = _values(measures, "stitched", who)
        yield f"| {who} | {' | '.join(show(values[name]) for name in names)} |"


def _year_lines(
    measures: pl.DataFrame, books: Sequence[str], annual: float, found: Tree
) -> Iterator[str]:
    """Information ratio / Sharpe ratio of each book."""
    yield f"| IR / Sharpe | {' | '.join(books)} |"
    yield f"|---|{'---|' * len(books)}"
    for label in dict.fromkeys(measures["fold"]):
        if label.startswith("year-") or label == f"from-{ALONE}":
            rows = [_values(measures, label, who) for who in books]
            cells = [f"{show(r['information_ratio'])} / {show(r['sharpe_annual'])}" for r in rows]
            yield f"| {label} | {' | '.join(cells)} |"
    for who, line in found["from"].get(ALONE, {}).items():
        yield f"| from-{ALONE}, {who} | IR {show_both(line['information'], annual)} |"


def _search_lines(found: Tree, annual: float) -> Iterator[str]:
    for name in ("deflation", "active_deflation"):
        if (part := found[name]) is not None:
            probability = "–" if part["probability"] is None else f"{part['probability']:.3f}"
            yield (
                f"{name}: {probability} above a hurdle of {show(part['hurdle'] * annual)} a year, "
                f"of {part['n_trials']} counted."
            )
    yield f"verdict on the mean of the seeds: {found['verdict']['key']}"


def _capacity_lines(found: Tree) -> Iterator[str]:
    yield "| cash | Sharpe | IR | costs | orders | cut | participation, mean | 95th percentile |"
    yield "|---|---|---|---|---|---|---|---|"
    for line in found["capacity"]:
        ratios = (show(line[name]) for name in ("sharpe_annual", "information_ratio"))
        shares = (
            "–" if line[name] is None else f"{line[name]:.2%}"
            for name in ("cut", "participation_mean", "participation_95")
        )
        costs = "–" if line["cost_share"] is None else f"{line['cost_share']:.1%}"
        cells = [*ratios, costs, f"{line['orders']:,}", *shares]
        yield f"| {line['cash']:,.0f} | {' | '.join(cells)} |"


def _bar_lines(found: Tree, annual: float) -> Iterator[str]:
    """Each bar, and by how much it was met or missed, by what one would trade."""
    who = "ensemble" if "ensemble" in found else "agent"
    if (active := found["active"].get(who)) is not None:
        yield _bar_line(f"{who}: information ratio, lower end", lowest(active, annual), LEAST_IR)
    differences = found["ensemble"] if who == "ensemble" else found["differences"]
    if (both := differences.get("forecast")) is not None:
        estimate, low = both["single"]["estimate"] * annual, lowest(both, annual)
        yield _bar_line(f"{who}: Sharpe minus forecast", estimate, LEAST_VS_FORECAST[0])
        yield _bar_line(f"{who}: Sharpe minus forecast, lower end", low, LEAST_VS_FORECAST[1])


def _bar_line(what: str, value: float, bar: float) -> str:
    word = "met by" if value >= bar else "missed by"
    return f"- {what} {show(value)}, bar {show(bar)}: {word} {show(abs(value - bar))}"


def _values(measures: pl.DataFrame, label: str, who: str) -> dict[str, Any]:
    rows = measures.filter((pl.col("fold") == label) & (pl.col("who") == who)).to_dicts()
    return rows[0] if rows else dict.fromkeys(measures.columns)


def study(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.wide study")
    parser.add_argument("parquet", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--config", type=Path, default=Path("configs/wide.yaml"))
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    parser.add_argument("--name", default="walk")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--held-out", action="store_true", help="the one confirmation, at the end")
    given = parser.parse_args(argv)
    files = [given.directory / f"{part}.parquet" for part in PARTS]
    if not all(file.is_file() for file in files):
        write_parts(given.parquet, files)
    name, data = (f"{given.name}-held-out", files[1]) if given.held_out else (given.name, files[0])
    place = given.directory / name
    done = subprocess.run(walk_command(given, data, place), check=False)
    if done.returncode:
        return done.returncode
    table = study_table(place)
    (given.directory / f"{name}.md").write_text(table, encoding="utf-8")
    print(table)
    return 0


def main(argv: Sequence[str] = ()) -> int:
    if not argv:
        print("needs data: python -m bench.wide [study] PARQUET …")
        return 0
    if argv[0] == "study":
        return study(argv[1:])
    write_parts(Path(argv[0]), [Path(target) for target in argv[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
