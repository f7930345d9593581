"""How a tick export is written: encoding, delimiter, which column is which, times and prices.

`sniff` looks at the first piece of a file and decides once, so that every block of it is then
read in the same way. Column names follow Wind's exports 行情.csv (snapshots) and 逐笔成交.csv
(trades) and the English names of its terminal; `columns` maps any other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from echelon.data.sources._tables import MAX_COLUMNS, open_bytes, reading
from echelon.errors import SourceError

log = logging.getLogger(__name__)

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "symbol": (
        *("万得代码", "windcode", "wind_code", "证券代码", "股票代码", "代码", "symbol", "code"),
        *("ticker", "sec_code", "交易所代码"),
    ),
    "date": ("自然日", "日期", "交易日", "交易日期", "date", "trading_day", "tradingday", "day"),
    "time": ("时间", "成交时间", "交易时间", "time", "trade_time", "tradetime"),
    "datetime": ("日期时间", "datetime", "timestamp", "date_time"),
    "price": (
        *("成交价", "成交价格", "最新价", "最新", "现价", "price", "last", "last_price"),
        *("lastprice", "trade_price", "match"),
    ),
    "volume": ("成交量", "成交数量", "volume", "vol", "qty", "trade_volume", "ivolume"),
    "amount": ("成交额", "成交金额", "turnover", "amount", "amt", "turover", "iturover"),
    "acc_volume": (
        *("当日累计成交量", "累计成交量", "总成交量", "accvolume", "acc_volume", "iaccvolume"),
        *("total_volume", "totalvolume", "cum_volume"),
    ),
    "acc_amount": (
        *("当日成交额", "当日累计成交额", "累计成交额", "总成交额", "accturnover", "accturover"),
        *("acc_turnover", "acc_amount", "total_turnover", "totalturnover", "cum_amount"),
    ),
    "pre_close": ("前收盘", "前收盘价", "昨收", "昨收价", "昨收盘", "preclose", "pre_close"),
    "day_open": ("开盘价", "开盘", "open"),
    "day_high": ("最高价", "最高", "high"),
    "day_low": ("最低价", "最低", "low"),
    "trade_code": ("成交代码", "functioncode", "function_code", "trade_code"),
    "bs_flag": ("bs标志", "bsflag", "bs_flag", "买卖方向"),
}
_TEXT = frozenset({"symbol", "trade_code", "bs_flag"})
_PRICES = frozenset({"price", "pre_close", "day_open", "day_high", "day_low"})
_LEVELS = tuple(
    (re.compile(pattern), role)
    for pattern, role in (
        (r"(?:申买价|叫买价|买价|bid_?price_?|bid_?px_?|bid_?)(\d+)", "bid_price"),
        (r"(?:申卖价|叫卖价|卖价|ask_?price_?|ask_?px_?|ask_?)(\d+)", "ask_price"),
        (r"(?:申买量|叫买量|买量|bid_?vol(?:ume)?_?|bid_?size_?)(\d+)", "bid_volume"),
        (r"(?:申卖量|叫卖量|卖量|ask_?vol(?:ume)?_?|ask_?size_?)(\d+)", "ask_volume"),
    )
)
_NUMERALS = {c: str(i) for i, c in enumerate("一二三四五六七八九", start=1)} | {"十": "10"}
_UNITS = {"手": 100.0, "万股": 1e4, "千元": 1e3, "万元": 1e4, "亿元": 1e8}
NULLS = ["", "\x00", "-", "--", "NULL", "null", "NaN", "nan", "N/A", "None"]

_SNIFFED = 256 << 10

Clock = Literal["hmsf", "hms", "stamp17", "stamp14", "text", "stamp_text"]
"""How times are written: HHMMSSmmm, HHMMSS, the same after YYYYMMDD, or as text with colons."""


@dataclass(frozen=True)
class TickLayout:
    """How one tick file is written.

    names: our name of each column, in file order ("" for one without a header)
    headers: our name → the file's, for messages
    units: our name → multiplier to shares or money
    """

    path: Path
    encoding: str
    delimiter: str
    names: tuple[str, ...]
    headers: Mapping[str, str]
    units: Mapping[str, float]
    clock: Clock
    price_scale: float

    @property
    def roles(self) -> frozenset[str]:
        """The columns we know the meaning of."""
        return frozenset(n for n in self.names if is_role(n))

    @property
    def clock_column(self) -> str:
        """The column that says the time of day."""
        return "time" if "time" in self.names else "datetime"

    @property
    def date_column(self) -> str:
        """The column that says the day, which may be the same."""
        return "date" if "date" in self.names else self.clock_column

    @property
    def scales(self) -> dict[str, float]:
        """Multipliers to shares and money of the columns that need one."""
        prices = {n: self.price_scale for n in self.numbers if n in _PRICES or "_price" in n}
        return {n: f for n, f in (prices | dict(self.units)).items() if f != 1.0}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that hold numbers."""
        clocks = ("date", "time", "datetime")
        return tuple(n for n in self.names if is_role(n) and n not in (*_TEXT, *clocks))


def sniff(path: Path, columns: Mapping[str, str], price_scale: float | None = None) -> TickLayout:
    """Find out how `path` is written; `columns` maps its names to ours where we do not know them.

    `price_scale` multiplies prices; None decides from the first rows (see `_price_scale`).
    """
    with reading(path), open_bytes(path) as handle:
        head = handle.read(_SNIFFED)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise SourceError(f"{path}: the file is UTF-16. Save it as UTF-8 or GBK.")
    cut = head.rfind(b"\n") + 1 or len(head)
    encoding = _encoding(path, head[:cut])
    lines = head[:cut].decode(encoding).splitlines()
    if not lines or not lines[0].strip():
        raise SourceError(f"{path}: no header in line 1. Export the file with column names.")
    delimiter = max(",\t;|", key=lines[0].count)
    if lines[0].count(delimiter) >= MAX_COLUMNS or (len(lines) == 1 and len(head) == _SNIFFED):
        raise SourceError(
            f"{path}: the first line has {len(lines[0]):,} characters or more, the header of no "
            "tick file. Export it with its column names in line 1 and a line per tick."
        )
    headers = [h.strip().strip('"').strip() for h in lines[0].split(delimiter)]
    names, units = _name_columns(path, headers, columns)
    rows = [[c.strip().strip('"') for c in line.split(delimiter)] for line in lines[1:]]
    sample = [r for r in rows if len(r) == len(names)]
    return TickLayout(
        path=path,
        encoding=encoding,
        delimiter=delimiter,
        names=tuple(names),
        headers=dict(zip(names, headers, strict=True)),
        units=units,
        clock=_clock(path, names, sample),
        price_scale=_price_scale(path, names, sample) if price_scale is None else price_scale,
    )


def is_role(name: str) -> bool:
    """Whether `name` is one of our tick columns (and not just a header we kept)."""
    return name in _ALIASES or bool(re.fullmatch(r"(?:bid|ask)_(?:price|volume)\d+", name))


def _encoding(path: Path, head: bytes) -> str:
    for encoding in ("utf-8-sig", "gb18030"):
        try:
            head.decode(encoding)
        except UnicodeDecodeError:
            continue
        return "utf-8" if encoding == "utf-8-sig" else encoding
    raise SourceError(f"{path}: the text is neither UTF-8 nor GBK. Save it as UTF-8.")


def _name_columns(
    path: Path, headers: list[str], columns: Mapping[str, str]
) -> tuple[list[str], dict[str, float]]:
    """Our name for each of the file's columns, and the units that headers such as (手) give."""
    headers = [h.lstrip("\ufeff") for h in headers]
    unknown = [c for c in columns if c not in headers]
    if unknown:
        raise SourceError(
            f"{path}: data.columns names {unknown[0]!r}, which is not a column of the file. "
            f"It has: {', '.join(headers)}."
        )
    wrong = [ours for ours in columns.values() if not is_role(ours)]
    if wrong:
        raise SourceError(
            f"data.columns maps to {wrong[0]!r}, which is not a tick column. Use one of "
            f"{', '.join(_ALIASES)}, bid_price1, ask_volume1 …"
        )
    bare = [re.sub(r"[（(\[].*[)）\]]$", "", h).strip().lower().replace(" ", "_") for h in headers]
    names = [columns.get(h, "") for h in headers]
    for role, aliases in _ALIASES.items():
        found = [a for a in aliases if a in bare and not names[bare.index(a)]]
        if found and role not in names:
            names[bare.index(found[0])] = role
    taken: set[str] = {n for n in names if n}
    for i, header in enumerate(headers):
        name = names[i] or _level(bare[i]) or header
        if name in taken and not names[i]:
            name = header if header not in taken else f"{header}_{i}"
        names[i] = name
        taken.add(name)
    _require(path, names, headers)
    units = {
        name: _UNITS[unit.group(1)]
        for name, header in zip(names, headers, strict=True)
        if (unit := re.search(r"[（(\[](\w+)[)）\]]$", header)) and unit.group(1) in _UNITS
    }
    return names, units


def _level(header: str) -> str | None:
    """bid_price1 … of a book column's name: 申买价1, 买一价, BidPrice1."""
    if chinese := re.fullmatch(r"([买卖])([一二三四五六七八九十])(价|量)", header):
        side, level, what = chinese.groups()
        header = f"{side}{what}{_NUMERALS[level]}"
    for pattern, role in _LEVELS:
        if found := pattern.fullmatch(header):
            return f"{role}{int(found.group(1))}"
    return None


def _require(path: Path, names: list[str], headers: list[str]) -> None:
    missing = [role for role in ("symbol", "price") if role not in names]
    if "time" not in names and "datetime" not in names:
        missing.append("time")
    if missing:
        raise SourceError(
            f"{path}: no column for {', '.join(missing)} among {', '.join(headers)}. Name it with "
            f'data.columns, for example -o \'data.columns={{"{headers[0]}": "{missing[0]}"}}\'.'
        )


def _clock(path: Path, names: list[str], sample: list[list[str]]) -> Clock:
    """How times are written, from the first rows."""
    column = "time" if "time" in names else "datetime"
    texts = [t for r in sample if (t := r[names.index(column)]) not in NULLS]
    digits = [t for t in texts if t.isdigit()]
    dated = "date" in names
    clock: Clock
    if not digits:
        clock = "text" if dated else "stamp_text"
    elif max(map(len, digits)) >= 14:
        clock = "stamp17" if max(map(len, digits)) >= 17 else "stamp14"
    elif not dated:
        clock = "text"
    else:
        # 93000 can only be 09:30:00; a file of milliseconds soon has a time after 00:02:40.
        clock = "hmsf" if max(map(int, digits)) > 235_959 else "hms"
    stamped = clock.startswith("stamp") and (
        clock != "stamp_text" or not texts or re.match(r"\d{4}\D?\d{2}", texts[0])
    )
    if not dated and not stamped:
        raise SourceError(
            f"{path}: no date column, and {column} has no date in it. Name it with data.columns."
        )
    return clock


def _price_scale(path: Path, names: list[str], sample: list[list[str]]) -> float:
    """1, or 1e-4 where prices are whole ten-thousandths, as Wind's TDB writes them.

    The ticks of stocks and funds (0.01, 0.001) are then multiples of 100 or 10 and no price is
    below 1000 (0.1 yuan), while real prices of whole yuan in every row do not occur.
    """
    column = names.index("price")
    texts = [t for r in sample if (t := r[column]) not in NULLS and t.strip("0.")]
    if not texts or not all(t.isdigit() and int(t) >= 1000 and int(t) % 10 == 0 for t in texts):
        return 1.0
    log.warning(
        "%s: prices are whole numbers such as %s; read as 1/10000 of a yuan (Wind TDB). "
        "Pass price_scale=1 if they are yuan.",
        path,
        texts[0],
    )
    return 1e-4
