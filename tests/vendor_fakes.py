"""Recorded frames of the vendor libraries, and fakes of the libraries that return them.

The frames are in fixtures/vendors; `record.py` there made them with the pinned libraries.
"""

import json
from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import polars as pl

from echelon.data.bars import SCHEMA
from echelon.data.sources import Source
from echelon.data.sources._vendor import Retry
from echelon.data.sources.akshare_ import AkshareSource
from echelon.data.sources.tushare_ import TushareSource
from echelon.data.sources.yfinance_ import YFinanceSource

FRAMES = Path(__file__).parent / "fixtures" / "vendors"
NAMES = sorted(p.stem for p in FRAMES.glob("*.csv"))
PINNED = {"yfinance": "1.7.0", "akshare": "1.19.5", "tushare": "1.4.29"}

Answer = pd.DataFrame | Exception | Callable[..., pd.DataFrame]


def recorded(name: str) -> pd.DataFrame:
    """Rebuild a recorded frame with the types its JSON states."""
    meta = json.loads((FRAMES / f"{name}.json").read_text(encoding="utf-8"))
    text = pd.read_csv(FRAMES / f"{name}.csv", dtype=str, index_col=0, keep_default_na=False)
    frame = pd.DataFrame(index=pd.RangeIndex(len(text)))
    for column, kind in meta["columns"].items():
        values = text[column].reset_index(drop=True)
        if kind == "date":
            frame[column] = [date.fromisoformat(v) for v in values]
        elif kind == "object":
            frame[column] = pd.Series([v or None for v in values], dtype=object)
        elif kind == "str":
            frame[column] = values.where(values != "", None)
        elif kind.startswith("datetime64"):
            frame[column] = pd.to_datetime(values).astype(kind)
        else:
            frame[column] = values.astype(kind)
    if meta["index"]["dtype"].startswith("datetime64"):
        unit, zone = (
            meta["index"]["dtype"].removeprefix("datetime64[").removesuffix("]").split(", ")
        )
        index = pd.to_datetime(text.index, utc=True).tz_convert(zone).as_unit(unit)
        frame.index = pd.DatetimeIndex(index, name=meta["index"]["name"])
    return frame


class Calls:
    """A fake of a vendor's module: answers by function, in turn, and notes the arguments."""

    def __init__(self, **answers: Answer | list[Answer]) -> None:
        self.answers = {k: v if isinstance(v, list) else [v] for k, v in answers.items()}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, function: str) -> Callable[..., pd.DataFrame]:
        if function not in self.__dict__["answers"]:
            raise AttributeError(function)

        def call(**arguments: Any) -> pd.DataFrame:
            self.calls.append((function, arguments))
            queue = self.answers[function]
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            if isinstance(answer, Exception):
                raise answer
            return answer(**arguments) if callable(answer) else answer.copy()

        return call

    def arguments(self, function: str) -> list[dict[str, Any]]:
        return [a for f, a in self.calls if f == function]


class Yahoo(Calls):
    """A fake of the yfinance module: Ticker(symbol).history(…) and config.debug."""

    def __init__(self, history: Answer | list[Answer]) -> None:
        super().__init__(history=history)
        self.config = SimpleNamespace(debug=SimpleNamespace(hide_exceptions=True))

    def Ticker(self, symbol: str) -> SimpleNamespace:
        def history(**arguments: Any) -> pd.DataFrame:
            assert self.config.debug.hide_exceptions is False, "errors would be swallowed"
            return Calls.__getattr__(self, "history")(symbol=symbol, **arguments)

        return SimpleNamespace(history=history)


class YFTickerMissingError(Exception):
    """Stands in for the library's class: yfinance/exceptions.py."""


class YFPricesMissingError(YFTickerMissingError):
    """Stands in for the library's class."""


class YFTzMissingError(YFTickerMissingError):
    """Stands in for the library's class."""


class YFRateLimitError(Exception):
    """Stands in for the library's class."""


class HTTPError(OSError):
    """Stands in for the class of requests and of curl_cffi: it carries the response."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP Error {status}")
        self.response = SimpleNamespace(status_code=status)


class Naps:
    """Stands in for time.sleep."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def clock(*when: int) -> Callable[[], datetime]:
    return lambda: datetime(*when, tzinfo=UTC)


def patient(naps: Naps | None = None) -> Retry:
    return Retry(attempts=3, sleep=naps or Naps(), jitter=lambda: 0.0)


def yahoo(client: Any, *symbols: str, **query: Any) -> YFinanceSource:
    fixed: dict[str, Any] = {"start": None, "end": None, "freq": "1d", "now": clock(2020, 9, 10)}
    fixed["retry"] = patient()
    return YFinanceSource(symbols or ("AAPL",), client=client, **(fixed | query))


def eastmoney(client: Any, *symbols: str, **query: Any) -> AkshareSource:
    fixed: dict[str, Any] = {"start": None, "end": None, "freq": "1d", "now": clock(2024, 6, 20)}
    fixed["retry"] = patient()
    return AkshareSource(symbols or ("000001.SZ",), client=client, **(fixed | query))


def pro(client: Any, *symbols: str, **query: Any) -> TushareSource:
    fixed: dict[str, Any] = {
        "start": date(2024, 6, 1),
        "end": None,
        "freq": "1d",
        "now": clock(2024, 6, 20),
        "retry": patient(),
    }
    return TushareSource(symbols or ("000001.SZ",), client=client, **(fixed | query))


def akshare_client(**changed: Answer | list[Answer]) -> Calls:
    answers: dict[str, Any] = {
        "stock_zh_a_hist": recorded("akshare_daily"),
        "stock_zh_a_daily": recorded("akshare_hfq_factor"),
        "stock_zh_index_daily_em": recorded("akshare_index_daily"),
        "index_zh_a_hist_min_em": recorded("akshare_index_5min"),
        "stock_info_sh_delist": recorded("akshare_sh_delist"),
        "stock_info_sz_delist": recorded("akshare_sz_delist"),
    }
    return Calls(**(answers | changed))


def tushare_client(**changed: Answer | list[Answer]) -> Calls:
    def basic(list_status: str, fields: str) -> pd.DataFrame:
        return recorded(f"tushare_basic_{list_status}")[fields.split(",")]

    answers: dict[str, Any] = {
        "daily": recorded("tushare_daily"),
        "adj_factor": recorded("tushare_adj_factor"),
        "namechange": recorded("tushare_namechange"),
        "index_daily": recorded("tushare_index_daily"),
        "stk_mins": recorded("tushare_stk_mins"),
        "idx_mins": recorded("tushare_idx_mins"),
        "stock_basic": basic,
    }
    return Calls(**(answers | changed))


def only(source: Source, since: dict[str, datetime] | None = None) -> pl.DataFrame:
    (raw,) = source.frames(since)
    assert list(raw.frame.columns) == [*SCHEMA, "row"]
    assert raw.frame.schema["time"] == pl.Datetime("us")
    return raw.frame
