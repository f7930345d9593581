"""A walk-forward: train, choose and test again and again, each time on later data.

    DIR/base.yaml               the configuration
    DIR/walk_forward.json       the folds, for going on later; at the end also what they came to
    DIR/folds/NAME/             a run directory like any other
    DIR/walk_forward.csv, .parquet    every measure, by fold, stitched, by calendar year and from
                                each year to the end: of agents, their ensemble, baselines
                                and a hierarchy's reference policies
    DIR/stitched.csv, .parquet  time, fold, and returns of each of them, one after another
    DIR/splits.png              the windows
    DIR/report/report.html      all of it as a page

Each fold is a whole experiment of its own (see evaluation.batch): features, scaler, training and
the choice of a checkpoint know the fold's train and validation windows only. Its assets are those
with a bar between the first day of its train window and the last of its test window, delisted
ones included; who is in the universe on a day (`member`) is what was known on that day.

Stitched is what somebody got who trained a new agent before every test window and traded it
through that window: the test returns of the folds, one after the other, of everybody. Every fold
begins with cash and a new book, and first decides on the first bar of its window, so that one
return per fold is not in the series. Under a drawdown budget or a target volatility a book's peak
and past are carried from fold to fold (`past`), so that the stitched path keeps the budget. Costs
are the sum over the folds, and their share is that sum over the money of one.

Beside all of it stands every calendar year of the stitched series by itself, and what is left of it
from the first day of each year: no span is picked, so none can be picked for its result.

The `ensemble` trades the folds' seeds as one book (backtest.ensemble): what one would trade. Each
fold's evaluation runs it, so it is one more backtest a fold, and kept as the others are.

Of a hierarchy's experts the mean is shown and no best one, which would be chosen after the fact: an
expert of one fold has nothing but its number from that of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import polars as pl

from echelon.backtest.budget import is_limited
from echelon.backtest.ensemble import ENSEMBLE
from echelon.backtest.files import AGENT, Book
from echelon.config import Config
from echelon.data.build import PanelRequest, panel_times
from echelon.data.datasets import ensure_dataset
from echelon.data.store import Store
from echelon.evaluation.batch import BatchMember, Course, RunBatch, evaluations_of, write_table
from echelon.evaluation.capacity import mean_capacity
from echelon.evaluation.evaluate import Evaluation, load_evaluation
from echelon.evaluation.folds import Fold, plan_folds
from echelon.evaluation.statistics import (
    active_ratio,
    at_both_blocks,
    deflate_by_sharpes,
    seed_interval,
)
from echelon.evaluation.test_access import Look, SplitName
from echelon.evaluation.trust import (
    LEAST_BARS,
    YARDSTICK,
    Measured,
    Track,
    both_blocks,
    by_row,
    compare_books,
    deflate_active,
    load_trust,
    reference_differences,
    stricter,
)
from echelon.files import finite_values
from echelon.ops.measures import LABELS, Costs, mean_std, measure, sharpe_annual
from echelon.training.run import TrainedRun
from echelon.types import Bools, Floats, Times

STITCHED = "stitched"
_T = TypeVar("_T")


def plan_walk(config: Config, *, quarantine: bool = False) -> tuple[Fold, ...]:
    """The folds of the configured data, which are imported where they are not there yet."""
    dataset = ensure_dataset(config, quarantine=quarantine)
    store = Store(config.data.store, pin=dataset)
    request = PanelRequest(symbols=config.assets, end=config.data.end)
    times = panel_times(store, dataset.name, request)
    if config.data.start is not None:
        times = times[times >= np.datetime64(config.data.start)]
    facts = store.symbols(dataset.name)
    folds = []
    for fold in plan_folds(config.walk_forward, times):
        # Symbols that list later are left out: nobody knew of them, and the random numbers an agent
        # draws depend on how many assets there are. The others keep their order.
        listed = pl.col("first").dt.date() <= fold.test[1]
        alive = pl.col("last").dt.date() >= fold.train[0]
        known = facts.filter(listed & alive)["symbol"].to_list()
        assets = [s for s in config.assets if s in known] if config.assets else known
        folds.append(replace(fold, assets=tuple(assets)))
    return tuple(folds)


@dataclass(frozen=True)
class WalkForward(RunBatch):
    noun = command = "walk-forward"
    stem = "walk_forward"
    member = "fold"
    trust = ensemble = True
    results = (
        *("walk_forward.csv", "walk_forward.parquet", "stitched.csv", "stitched.parquet"),
        *("splits.png", "report/report.html", "report/report.zh.html"),
    )

    planned = ("folds",)

    folds: tuple[Fold, ...]
    split: SplitName = field(default="test", kw_only=True)

    def make_members(self) -> Iterator[BatchMember]:
        """A run of each fold, through its windows and of its assets."""
        for fold in self.folds:
            config = self.base.model_copy(update={"split": fold.split, "assets": fold.assets})
            yield BatchMember(fold.name, config, {"fold": fold.name})

    @property
    def follows(self) -> bool:
        """Under a drawdown budget or a target volatility, books go on from one fold to the next."""
        return is_limited(self.base.risk)

    def past(self, k: int) -> Mapping[Book, Floats]:
        """Values of each book, and of it without limits, in the folds before fold k: [H,2]."""
        if not self.follows or k == 0:
            return {}
        folds = [load_evaluation(self.run(j), self.split) for j in range(k)]
        last = folds[-1]
        books = [Book(AGENT, seed) for seed in last.seeds] + [Book(name) for name in last.baselines]
        books += [Book(n, seed) for seed, own in last.reference_policies.items() for n in own]
        books += [] if last.ensemble is None else [Book(ENSEMBLE)]
        return {book: _chain([fold.tables(*book).equity for fold in folds]) for book in books}

    def summarise(self, course: Course) -> WalkForwardResult:
        evaluations = evaluations_of(self, course)
        problems = {fold.name: course.problem(k) for k, fold in enumerate(self.folds)}
        complete = len(evaluations) == len(self.folds) and not any(problems.values())
        stitched = stitch(evaluations) if complete else None
        sure: Mapping[str, Any] = {}
        if stitched is not None:
            loaded = (load_trust(self.run(k), self.split) for k in range(len(self.folds)))
            trusts = [trust for trust in loaded if trust is not None]
            # As counted now: who looked at these days since a fold was evaluated counts too.
            looks = max(len(Look.back(run, self.split).rivals()) for run in self.trained_runs())
            sure = statistics(stitched, self.base.seed, looks=looks, trusts=trusts)
        return WalkForwardResult(self.folds, evaluations, problems, stitched, sure)

    def trained_runs(self) -> Iterator[TrainedRun]:
        for k, member in enumerate(self.members):
            yield TrainedRun(self.run(k), member.config, self.seeds)

    def save_result(self, result: WalkForwardResult) -> None:
        done: dict[str, Any] = {}
        if result.stitched is not None:
            done = {STITCHED: result.stitched.tree(), "statistics": result.statistics}
        self.save(**done)


@dataclass(frozen=True)
class WalkForwardResult:
    """Every fold's evaluation, by name, but of those that failed; stitched only if none did."""

    folds: tuple[Fold, ...]
    evaluations: Mapping[str, Evaluation]
    problems: Mapping[str, str]
    stitched: Stitched | None
    statistics: Mapping[str, Any]

    def frame(self) -> pl.DataFrame:
        """A line per fold and per seed, mean of the seeds (with std) and baseline; then stitched.

        fold: its name, `stitched`, or of the stitched series `year-2017` and `from-2017`
        who: `agent` (the mean over seeds), `ensemble`, `seed-42`, a baseline, `hedge`, …
        """
        lines: list[dict[str, object]] = []
        for fold in self.folds:
            about = {
                "fold": fold.name,
                "first": str(fold.test[0]),
                "last": str(fold.test[1]),
                "problem": self.problems.get(fold.name, ""),
            }
            if (own := self.evaluations.get(fold.name)) is None:
                lines.append(about | {"who": AGENT, "seeds": 0})
            else:
                lines += _lines(about, own)
        if self.stitched is not None:
            first, last = self.stitched.days
            about = {"fold": STITCHED, "first": first, "last": last, "problem": ""}
            lines += _lines(about, self.stitched.measures)
            for name, span in self.stitched.spans.items():
                about = {"fold": name, "first": span.first, "last": span.last, "problem": ""}
                lines += _lines(about, span.measures)
        return pl.DataFrame(lines, schema=_SCHEMA)

    def write(self, directory: Path) -> None:
        write_table(self.frame(), directory / WalkForward.stem)
        if self.stitched is not None:
            write_table(self.stitched.frame(), directory / STITCHED)


_SCHEMA: Mapping[str, Any] = {
    **dict.fromkeys(("fold", "first", "last", "who"), pl.String),
    "seeds": pl.Int64,
    **{name + ending: pl.Float64 for name in LABELS for ending in ("", "_std")},
    "problem": pl.String,
}


def _name_seeds(seeds: Mapping[int, _T]) -> dict[str, _T]:
    return {f"seed-{seed}": value for seed, value in seeds.items()}


def _name_references(reference_policies: Mapping[int, Mapping[str, _T]]) -> dict[str, _T]:
    return {
        f"seed-{s}-{name}": value
        for s, own in reference_policies.items()
        for name, value in own.items()
    }


def _lines(
    about: Mapping[str, object], own: Evaluation | StitchedMeasures
) -> list[dict[str, object]]:
    """The mean over the seeds with its std, each seed, baseline and reference policy."""

    def singles(books: Mapping[str, Measured]) -> list[dict[str, object]]:
        return [
            {**about, "who": who, "seeds": None, **finite_values(values)}
            for who, values in books.items()
        ]

    def mean(who: str, seeds: Sequence[Measured]) -> dict[str, object]:
        line: dict[str, object] = {**about, "who": who, "seeds": len(seeds)}
        for name in LABELS:
            value = mean_std([values[name] for values in seeds])
            line |= finite_values({name: value.mean, f"{name}_std": value.std})
        return line

    joined = {} if own.ensemble is None else {ENSEMBLE: own.ensemble}
    return [
        mean(AGENT, list(own.seeds.values())),
        *singles(joined | _name_seeds(own.seeds) | dict(own.baselines)),
        *(mean(who, every) for who, every in by_row(own.reference_policies).items()),
        *singles(_name_references(own.reference_policies)),
    ]


class StitchedMeasures(NamedTuple):
    seeds: Mapping[int, Measured]
    baselines: Mapping[str, Measured]
    reference_policies: Mapping[int, Mapping[str, Measured]]
    ensemble: Measured | None = None


class Span(NamedTuple):
    """A part of the stitched series. rows: of it; first, last: its days"""

    rows: slice
    first: str
    last: str
    measures: StitchedMeasures


@dataclass(frozen=True)
class Stitched:
    """Test windows one after another: times[T], folds[T] and returns of books in all folds.

    spans: `year-2017`, a calendar year alone, and `from-2017`, from its first day to the end
    """

    times: Times
    folds: tuple[str, ...]
    seeds: Mapping[int, Track]
    baselines: Mapping[str, Track]
    reference_policies: Mapping[int, Mapping[str, Track]]
    periods_per_year: float
    ensemble: Track | None = None
    spans: Mapping[str, Span] = field(default_factory=dict)

    @property
    def days(self) -> tuple[str, str]:
        return _days(self.times)

    @property
    def measures(self) -> StitchedMeasures:
        return StitchedMeasures(
            {seed: track.measures for seed, track in self.seeds.items()},
            {name: track.measures for name, track in self.baselines.items()},
            {
                s: {n: track.measures for n, track in own.items()}
                for s, own in self.reference_policies.items()
            },
            None if self.ensemble is None else self.ensemble.measures,
        )

    def tracks_by_name(self) -> dict[str, Track]:
        """Tracks of seeds, ensemble and baselines by name."""
        joined = {} if self.ensemble is None else {ENSEMBLE: self.ensemble}
        return _name_seeds(self.seeds) | joined | dict(self.baselines)

    def frame(self) -> pl.DataFrame:
        """time, fold, and a column of returns for each seed, baseline and reference policy."""
        tracks = self.tracks_by_name() | _name_references(self.reference_policies)
        returns = {name: track.returns for name, track in tracks.items()}
        return pl.DataFrame({"time": self.times, "fold": self.folds, **returns})

    def tree(self) -> dict[str, Any]:
        first, last = self.days
        tree = {
            "first": first,
            "last": last,
            "periods": len(self.times),
            "periods_per_year": self.periods_per_year,
            "measures": {
                name: finite_values(t.measures) for name, t in self.tracks_by_name().items()
            },
        }
        if self.reference_policies:
            tree["reference_policies"] = {
                str(seed): {name: finite_values(track.measures) for name, track in own.items()}
                for seed, own in self.reference_policies.items()
            }
        return tree


def _chain(tables: Sequence[pl.DataFrame]) -> Floats:
    """[H,2] value and unscaled value of a book's folds, each going on where the last one ended."""
    chained = np.ones((1, 2))
    for table in tables:
        marks = table.select("value", "unscaled").to_numpy()
        chained = np.concatenate([chained, marks[1:] / marks[0] * chained[-1]])
    return chained


def _days(times: Times) -> tuple[str, str]:
    first, last = (str(times[k].astype("datetime64[D]")) for k in (0, -1))
    return first, last


def stitch(evaluations: Mapping[str, Evaluation]) -> Stitched:
    """Put the folds' test windows one after another, of seeds and books that every fold has."""
    every = list(evaluations.values())

    def in_every(tables: Iterable[Mapping[_T, Any]]) -> list[_T]:
        first, *others = tables
        return [name for name in first if all(name in table for table in others)]

    seeds = in_every(e.seeds for e in every)
    baselines = in_every(e.baselines for e in every)
    shared = {s: in_every(e.reference_policies.get(s, {}) for e in every) for s in seeds}
    books = [*(Book(AGENT, seed) for seed in seeds), *map(Book, baselines)]
    windows = []  # [T] times of each fold's returns, as the book that lasted longest has them
    for e in every:
        own = (e.tables(*book).equity["time"][1:].to_numpy() for book in books)
        windows.append(max(own, key=len))
    times, lengths = np.concatenate(windows), [len(w) for w in windows]
    rate = float(every[0].facts["periods_per_year"])

    def join(policy: str, seed: int | None = None) -> _Series:
        return _join([e.tables(policy, seed).equity for e in every], windows)

    agents = {seed: join(AGENT, seed) for seed in seeds}
    others = {name: join(name) for name in baselines}
    references = {s: {n: join(n, s) for n in names} for s, names in shared.items() if names}
    joined = None if any(e.ensemble is None for e in every) else join(ENSEMBLE)
    yardstick = others.get(YARDSTICK)

    def track(series: _Series) -> Track:
        return Track(series.measures(slice(None), rate, yardstick), series.returns)

    def measures(rows: slice) -> StitchedMeasures:
        return StitchedMeasures(
            {s: own.measures(rows, rate, yardstick) for s, own in agents.items()},
            {n: own.measures(rows, rate, yardstick) for n, own in others.items()},
            {},
            None if joined is None else joined.measures(rows, rate, yardstick),
        )

    return Stitched(
        times,
        tuple(fold for fold, n in zip(evaluations, lengths, strict=True) for _ in range(n)),
        {seed: track(own) for seed, own in agents.items()},
        {name: track(own) for name, own in others.items()},
        {s: {n: track(own) for n, own in theirs.items()} for s, theirs in references.items()},
        rate,
        None if joined is None else track(joined),
        {n: Span(rows, *_days(times[rows]), measures(rows)) for n, rows in _spans(times).items()},
    )


def _spans(times: Times) -> dict[str, slice]:
    """Rows of each calendar year, then from each but the first to the end; none of one year."""
    years = times.astype("datetime64[Y]")
    known, first = np.unique(years, return_index=True)
    if len(known) < 2:
        return {}
    ends = [*first[1:].tolist(), len(times)]
    rows = dict(zip(known, zip(first.tolist(), ends, strict=True), strict=True))
    alone = {f"year-{year}": slice(*of) for year, of in rows.items()}
    return alone | {f"from-{year}": slice(of[0], None) for year, of in list(rows.items())[1:]}


class _Series(NamedTuple):
    """A book's folds as one series. returns, traded, exposure[T], costs[T,3]; cash: at first

    times[T]: when each return ended; jumped[T]: its drawdown budget was jumped, None: it has none
    """

    times: Times
    returns: Floats
    traded: Floats
    exposure: Floats
    costs: Floats
    cash: float
    jumped: Bools | None

    def measures(self, rows: slice, rate: float, yardstick: _Series | None) -> dict[str, float]:
        """Of some rows. rate: periods a year"""
        return measure(
            self.returns[rows],
            periods_per_year=rate,
            turnover=self.traded[rows],
            exposure=self.exposure[rows],
            costs=Costs(*self.costs[rows].sum(axis=0).tolist()),
            initial_value=self.cash,
            times=self.times[rows],
            jumped=None if self.jumped is None else self.jumped[rows],
            yardstick=None if yardstick is None else yardstick.returns[rows],
        )


def _join(tables: Sequence[pl.DataFrame], windows: Sequence[Times]) -> _Series:
    """One series of a book's folds, at the times[T] of each."""

    def join(parts: Iterable[pl.Series]) -> Floats:
        arrays = [part.to_numpy().astype(np.float64) for part in parts]
        padded = [np.pad(a, (0, len(w) - len(a))) for a, w in zip(arrays, windows, strict=True)]
        return np.concatenate(padded)  # nothing, after a ruin

    costs = [
        join(table[part][1:] for table in tables) for part in ("commission", "stamp", "slippage")
    ]
    limited = "budget_jumped" in tables[0].columns
    return _Series(
        np.concatenate(windows),
        join(table["return"][1:] for table in tables),
        join(table["traded"][1:] for table in tables),
        join(1.0 - table["cash_share"][:-1].cast(pl.Float64) for table in tables),
        np.column_stack(costs),
        float(tables[0]["value"][0]),
        join(table["budget_jumped"][1:] for table in tables) > 0.0 if limited else None,
    )


def statistics(
    stitched: Stitched, seed: int, *, looks: int, trusts: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """How sure the stitched result is: over the seeds, against the baselines, after the looks.

    looks: how often these test windows were looked at, this time included; the trials of the
           deflated Sharpe ratio, taken as independent ones
    trusts: trust.json of each fold, of whose cost and capacity sweeps the means are shown
    """
    ratios = [track.measures["sharpe_annual"] for track in stitched.seeds.values()]
    interval = seed_interval(ratios)._asdict() if np.isfinite(ratios).all() else None
    agents = {s: track.returns for s, track in stitched.seeds.items()}
    others = {name: track.returns for name, track in stitched.baselines.items()}
    joined = None if stitched.ensemble is None else stitched.ensemble.returns[:, None]
    compared = compare_books(agents, joined, others, seed)
    returns = np.column_stack(list(agents.values()))
    mean = returns.mean(axis=1)
    deflation = None
    if len(mean) >= LEAST_BARS:
        # The Sharpe ratios of earlier looks are not known here, so that of all is this one's, and
        # their variance is the least that `deflate_by_sharpes` takes.
        deflation = deflate_by_sharpes(mean, [sharpe_annual(mean, 1.0)] * looks)
    active = deflate_active(mean, others.get(YARDSTICK), looks)
    references = stitched.reference_policies
    deflated = stricter(None if deflation is None else deflation.probability, active)
    return {
        "sharpe_annual": None if interval is None else finite_values(interval),
        **compared.tree(),
        **(reference_differences(returns, references, seed) if deflation else {}),
        "from": _from_each_year(stitched, seed),
        "deflation": None if deflation is None else finite_values(deflation._asdict()),
        "active_deflation": None if active is None else finite_values(active._asdict()),
        "looks": looks,
        "costs": _mean_sweep([trust["costs"] for trust in trusts]),
        "capacity": mean_capacity([trust.get("capacity", ()) for trust in trusts]),
        "verdict": {"key": compared.verdict("test", deflated), "baseline": YARDSTICK},
    }


def _from_each_year(stitched: Stitched, seed: int) -> dict[str, dict[str, Any]]:
    """Year → of the agents' mean and of the ensemble, from its first day to the end of the series.

    information, sharpe: ratio over the yardstick, and difference of Sharpe ratios to it
    """
    if YARDSTICK not in stitched.baselines:
        return {}
    books = {AGENT: np.column_stack([track.returns for track in stitched.seeds.values()])}
    if stitched.ensemble is not None:
        books[ENSEMBLE] = stitched.ensemble.returns[:, None]
    theirs = stitched.baselines[YARDSTICK].returns
    lines: dict[str, dict[str, Any]] = {}
    for name, span in stitched.spans.items():
        if name.startswith("from-") and len(theirs[span.rows]) >= LEAST_BARS:
            lines[name.removeprefix("from-")] = {
                who: {
                    kind: both_blocks(ratio(own[span.rows], theirs[span.rows], seed=seed))
                    for kind, ratio in (("information", active_ratio), ("sharpe", at_both_blocks))
                }
                for who, own in books.items()
            }
    return lines


def _mean_sweep(sweeps: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """At each cost, the mean over the folds of the agents' and the yardstick's Sharpe ratio."""
    lines = []
    for folds in zip(*sweeps, strict=True):
        mine = [fold["sharpe_annual"] for fold in folds]
        theirs = [fold[f"{YARDSTICK}_sharpe_annual"] for fold in folds]
        own = None if None in mine else float(np.mean([interval["estimate"] for interval in mine]))
        other = None if None in theirs else float(np.mean(theirs))
        line = {"factor": folds[0]["factor"], "sharpe_annual": own}
        lines.append(line | {f"{YARDSTICK}_sharpe_annual": other})
    return lines
