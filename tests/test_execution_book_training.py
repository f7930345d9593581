"""Execution learned on an order book: a recording cut into sessions, and the synthetic market's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from test_execution_book import book_of
from test_execution_training import SMALL, configured, run

from echelon.config import Config, load_config
from echelon.config.execution import ExecutionConfig
from echelon.errors import ConfigError, DataError
from echelon.execution.book_days import cut_sessions
from echelon.training.execution_data import load_execution_data, sessions_by_share

SESSIONS = (
    *("execution.price=book", "execution.book_session=10", "execution.book_split=[0.6, 0.2, 0.2]"),
    *("execution.ticks_per_step=5", "execution.orders.share=[0.01, 0.05]"),
)


def write_book(path: Path, n: int = 401) -> Path:
    """A recording of two levels, a snapshot a minute from 22:00."""
    rng = np.random.default_rng(2)
    middle = 100.0 * np.exp(rng.normal(0.0, 1e-3, n).cumsum())
    frame = {
        "ts": np.datetime64("2021-04-17T22:00", "us") + np.arange(n) * np.timedelta64(1, "m"),
        "midpoint": middle,
        "spread": 2e-4 * middle,
        "buys": middle * rng.uniform(1.0, 50.0, n),
        "sells": middle * rng.uniform(1.0, 50.0, n),
    }
    for side, sign in (("bids", -1.0), ("asks", 1.0)):
        for level in (0, 1):
            frame[f"{side}_distance_{level}"] = np.full(n, sign * 1e-4 * (level + 1))
            frame[f"{side}_notional_{level}"] = rng.uniform(100.0, 5000.0, n)
    pl.DataFrame(frame).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_book(tmp_path_factory.mktemp("book") / "BTC.parquet")


def on_book(path: Path, *more: str) -> Config:
    return load_config(None, [*SMALL, *SESSIONS, f"execution.book={path}", *more])


# --- sessions


def test_sessions_share_a_snapshot_and_no_trade() -> None:
    book = book_of(8)
    for k in range(8):
        book.bought[0, k] = k
    cut = cut_sessions(book, 3)
    assert cut.shape == (2, 4, 3)
    assert cut.bought.tolist() == [[0.0, 1.0, 2.0, 0.0], [3.0, 4.0, 5.0, 0.0]]
    assert cut.to_days().volume.tolist() == [[60.0, 61.0, 62.0], [63.0, 64.0, 65.0]]
    # The book's clock begins at 09:30; a session's begins with the session.
    begins = np.array(["2020-01-06T09:30", "2020-01-06T09:33"], dtype="datetime64[us]")
    np.testing.assert_array_equal(cut.dates, begins)
    assert cut.clock.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert cut.to_days().name(1) == "SYM on 2020-01-06T09:33:00"


def test_no_session_spans_a_pause() -> None:
    book = book_of(9)
    book.clock[5:] += 100.0  # five snapshots, then four
    cut = cut_sessions(book, 2)
    minutes = (cut.dates - cut.dates[0]) / np.timedelta64(1, "m")
    assert minutes.tolist() == [0.0, 2.0, 105.0]
    with pytest.raises(DataError, match="pauses 1 times, and no part"):
        cut_sessions(book, 6)
    with pytest.raises(DataError, match="9 snapshots, too few for a session of 9"):
        cut_sessions(book, 9)


def test_splits_by_share_follow_one_another_in_time() -> None:
    train, valid, test = sessions_by_share(10, (0.6, 0.2, 0.2))
    assert np.flatnonzero(train).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.flatnonzero(valid).tolist() == [6, 7]
    assert np.flatnonzero(test).tolist() == [8, 9]


# --- data


def test_a_recording_becomes_three_splits_with_the_features_of_a_book(recording: Path) -> None:
    data = load_execution_data(on_book(recording))
    assert data.days.shape == (40, 10)
    assert set(data.days.symbols) == {"BTC"}
    assert {"spread", "imbalance", "volatility", "volume"} <= set(data.public.names)
    last = {name: data.days.dates[which] for name, which in data.inside.items()}
    assert last["train"].max() < last["valid"].min()
    assert last["valid"].max() < last["test"].min()
    # Bought at the ask and sold at the bid: 2 bp apart.
    np.testing.assert_allclose(data.days.buy / data.days.sell - 1.0, 2e-4, rtol=1e-3)
    # Sessions of one date do not draw the same orders.
    sides = data.orders["train"].buying.reshape(-1, 2)
    assert len(np.unique(sides, axis=0)) > 1


def test_the_scaler_is_fitted_on_train_sessions_alone(recording: Path, tmp_path: Path) -> None:
    frame = pl.read_parquet(recording)
    later = pl.int_range(pl.len()) > 300
    other = frame.with_columns(pl.when(later).then(pl.col("buys") * 9).otherwise("buys"))
    other.write_parquet(tmp_path / "BTC.parquet")
    one, two = (
        load_execution_data(on_book(path)).public.scaler
        for path in (recording, tmp_path / "BTC.parquet")
    )
    assert one is not None
    assert two is not None
    assert one.to_dict() == two.to_dict()


def test_dates_part_the_sessions_where_there_are_enough(tmp_path: Path) -> None:
    path = write_book(tmp_path / "book.parquet", 3 * 1440)
    spans = ("train=[2021-04-17, 2021-04-18]", "valid=[2021-04-19, 2021-04-19]")
    dated = [f"split.{one}" for one in (*spans, "test=[2021-04-20, 2021-04-21]")]
    data = load_execution_data(
        on_book(path, "execution.book_split=null", "execution.book_session=60", *dated)
    )
    assert [int(which.sum()) for which in data.inside.values()] == [26, 24, 21]
    with pytest.raises(DataError, match=r"split\.train .* has no day .*book_split"):
        load_execution_data(on_book(path, "execution.book_split=null"))


def test_the_synthetic_market_has_a_book_without_a_file(tmp_path: Path) -> None:
    short = ("data.synthetic.n_symbols=1", "split.train=[2015-01-05, 2015-01-20]")
    spans = ("split.valid=[2015-01-21, 2015-01-23]", "split.test=[2015-01-26, 2015-01-28]")
    data = load_execution_data(
        configured(tmp_path / "store", "execution.price=book", *short, *spans)
    )
    assert data.days.shape[1] == 389  # a snapshot as each of 390 minutes ends
    assert data.days.price_source == "book"
    assert "imbalance" in data.public.names


# --- the command


def test_train_and_evaluate_on_a_recording(recording: Path, tmp_path: Path) -> None:
    told = [x for one in (*SMALL, *SESSIONS, f"execution.book={recording}") for x in ("-o", one)]
    run("train", *told, "--output-dir", str(tmp_path / "run"), "--workers", "1")
    run("evaluate", str(tmp_path / "run"), "--split", "test")
    place = tmp_path / "run" / "evaluations" / "test"
    summary = json.loads((place / "summary.json").read_text())
    assert summary["facts"]["price"] == "book"
    assert summary["facts"]["symbols"] == ["BTC"]
    assert summary["policies"]["twap"]["measures"]["ffr"]["estimate"] == pytest.approx(1.0)
    # Sessions of one date are not independent: without a second date there is no interval.
    assert summary["facts"]["dates"] == 1
    assert summary["policies"]["twap"]["measures"]["gain_arrival"]["low"] is None
    assert (place / "report.html").is_file()


def test_the_real_recording_gives_three_splits(shared_data: Path) -> None:
    path = shared_data / "crypto_lob15_btc_20210417.parquet"
    if not path.is_file():
        pytest.skip(f"no real order book: {path.name} is not in ../shared/data")
    data = load_execution_data(on_book(path, "execution.book_session=20"))
    assert data.days.shape == (29, 20)
    assert [int(which.sum()) for which in data.inside.values()] == [17, 6, 6]


# --- settings


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"book": "a.parquet", "book_session": 5}, "is for price book"),
        ({"price": "book", "book": "a.parquet"}, "go together"),
        ({"price": "book", "book_split": [0.6, 0.2, 0.2]}, "book is not set"),
        (
            {"price": "book", "book": "a", "book_session": 5, "book_split": [0.6, 0.2, 0.1]},
            "sum to 1",
        ),
        (
            {"price": "book", "book": "a", "book_session": 5, "orders": {"path": "b"}},
            "draw orders",
        ),
    ],
)
def test_impossible_books_are_refused(tree: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ExecutionConfig.model_validate(tree)


def test_a_book_that_is_not_there_is_refused(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"execution\.book: .* is no file"):
        load_execution_data(on_book(tmp_path / "none.parquet"))
    with pytest.raises(ConfigError, match="the recording of one"):
        load_execution_data(on_book(recording, "assets=[A, B]"))
    with pytest.raises(ConfigError, match="has no order book"):
        load_execution_data(load_config(None, ["execution.price=book", "data.source=sample"]))
    few = ("execution.book_session=100", "execution.book_split=[0.9, 0.05, 0.05]")
    with pytest.raises(DataError, match=r"leaves a split of the 4 sessions empty"):
        load_execution_data(on_book(recording, *few))


def test_books_are_days_of_one_symbol(recording: Path) -> None:
    data = load_execution_data(on_book(recording, "assets=[XBT]"))
    assert set(data.days.symbols) == {"XBT"}
    assert data.quotes is not None
    assert data.quotes.bid.shape == data.days.shape
