"""Orders as files, and what a person writes back, right and wrong."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from pydantic import SecretStr

from echelon.errors import ConfigError, DamagedError, StoreError, UsageError
from echelon.live.brokers import BrokerError, OrderRequest, OrderStatus
from echelon.live.brokers.sheet import SheetBroker, open_sheet
from echelon.serving.engine import Account

SYMBOLS = ("600000.SH", "000001.SZ", "=cmd|' /C calc'!A0")
A, B, C = "a" * 32, "b" * 32, "c" * 32


def order(name: str, shares: float = 100.0, symbol: str = SYMBOLS[0], side: Any = "buy") -> Any:
    return OrderRequest(name, symbol, side, shares, 10.0)


def sheet_at(path: Path, **settings: Any) -> SheetBroker:
    now = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
    return SheetBroker(path, SYMBOLS, now=lambda: now, **settings)


@pytest.fixture
def sheet(tmp_path: Path) -> Iterator[SheetBroker]:
    with sheet_at(tmp_path) as broker:
        yield broker


def report(directory: Path, name: str, *lines: str) -> None:
    (directory / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


FILLS = "trade_id,order_id,shares,price"


def test_a_bar_is_one_sheet_in_json_and_csv(tmp_path: Path, sheet: SheetBroker) -> None:
    orders = [order(A), order(B, 200.0, SYMBOLS[1], "sell")]
    assert sheet.submit(orders) == [OrderStatus(A, "accepted"), OrderStatus(B, "accepted")]
    sheet.submit([order(C)])
    names = sorted(path.name for path in (tmp_path / "orders").iterdir())
    assert names == ["000001.csv", "000001.json", "000002.csv", "000002.json"]
    tree = json.loads((tmp_path / "orders/000001.json").read_text())
    assert tree["written"] == "2026-01-05T08:00:00+00:00"
    assert [(o["id"], o["symbol"], o["side"], o["shares"]) for o in tree["orders"]] == [
        (A, SYMBOLS[0], "buy", 100.0),
        (B, SYMBOLS[1], "sell", 200.0),
    ]
    table = pl.read_csv(tmp_path / "orders/000001.csv")
    assert table.columns == ["id", "symbol", "side", "shares", "price", "limit"]
    assert table["id"].to_list() == [A, B]


def test_the_same_order_again_is_written_once(tmp_path: Path) -> None:
    with sheet_at(tmp_path) as broker:
        first = broker.submit([order(A), order(B)])
        assert broker.submit([order(A), order(B)]) == first
    with sheet_at(tmp_path) as broker:  # after a kill
        assert broker.submit([order(B), order(C)])[0] == first[1]
        assert set(broker.orders([A, B, C, "d" * 32])) == {A, B, C}
    trees = [json.loads(p.read_text()) for p in sorted((tmp_path / "orders").glob("*.json"))]
    assert [[o["id"] for o in tree["orders"]] for tree in trees] == [[A, B], [C]]


def test_a_kill_between_json_and_csv_is_mended_and_a_torn_sheet_is_refused(tmp_path: Path) -> None:
    with sheet_at(tmp_path) as broker:
        broker.submit([order(A)])
    csv = tmp_path / "orders/000001.csv"
    whole = csv.read_bytes()
    csv.unlink()
    with sheet_at(tmp_path) as broker:
        assert csv.read_bytes() == whole
        assert set(broker.orders([A])) == {A}
    path = tmp_path / "orders/000001.json"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DamagedError, match=r"000001\.json"):
        sheet_at(tmp_path)


def test_symbols_that_a_spreadsheet_would_run_are_inert_and_come_back(
    tmp_path: Path, sheet: SheetBroker
) -> None:
    sheet.submit([order(A, symbol=SYMBOLS[2])])
    text = (tmp_path / "orders/000001.csv").read_text()
    cell = pl.read_csv(tmp_path / "orders/000001.csv")["symbol"][0]
    assert cell == f"'{SYMBOLS[2]}"
    assert ",=" not in text
    report(tmp_path, "fills.csv", f"{FILLS},symbol", f'1,{A},100,10,"{cell}"')
    assert [fill.symbol for fill in sheet.fills("")[0]] == [SYMBOLS[2]]


def test_orders_are_open_until_they_are_reported_or_closed(
    tmp_path: Path, sheet: SheetBroker
) -> None:
    sheet.submit([order(A), order(B), order(C, side="sell")])
    assert {status.state for status in sheet.open_orders()} == {"accepted"}
    report(tmp_path, "fills.csv", FILLS, f"T1,{A},40,10.5", f"T2,{A},60,10.6", f"T3,{B},1,9")
    assert sheet.orders([A, B, C]) == {
        A: OrderStatus(A, "filled", 100.0),
        B: OrderStatus(B, "partial", 1.0),
        C: OrderStatus(C, "accepted", 0.0),
    }
    report(
        tmp_path, "closed.csv", "order_id,state,reason", f"{B},cancelled,", f"{C},废单,no shares"
    )
    assert sheet.orders([B, C]) == {
        B: OrderStatus(B, "cancelled", 1.0, "cancelled"),
        C: OrderStatus(C, "rejected", 0.0, "no shares"),
    }
    assert sheet.open_orders() == []


def test_cancels_are_asked_for_once_and_are_the_users_to_report(
    tmp_path: Path, sheet: SheetBroker
) -> None:
    sheet.submit([order(A), order(B)])
    sheet.cancel([A, "unknown"])
    sheet.cancel([A])
    sheet.cancel([A, B])
    trees = [json.loads(p.read_text()) for p in sorted((tmp_path / "cancels").glob("*.json"))]
    assert [[o["id"] for o in tree["orders"]] for tree in trees] == [[A], [B]]
    assert {status.state for status in sheet.orders([A, B]).values()} == {"accepted"}


def test_fills_by_cursor_over_a_restart(tmp_path: Path) -> None:
    lines = [FILLS + ",commission,stamp,time", f"T1,{A},40,10.5,5,0,2026-01-05T09:30:00"]
    with sheet_at(tmp_path) as broker:
        assert broker.fills("") == ([], "")
        broker.submit([order(A), order(B, 7.0, side="sell")])
        report(tmp_path, "fills.csv", *lines)
        (fill,), cursor = broker.fills("")
        assert fill.trade_id == "T1"
        assert (fill.symbol, fill.shares, fill.price) == (SYMBOLS[0], 40.0, 10.5)
        assert (fill.commission, fill.time) == (5.0, "2026-01-05T09:30:00")
        assert broker.fills(cursor) == ([], cursor)
    with sheet_at(tmp_path) as broker:
        report(tmp_path, "fills.csv", *lines, f"T2,{B},7,10.5,,0.1,", f"T3,{A},60,10.5,,,")
        fills, end = broker.fills(cursor)
        assert [(f.trade_id, f.order_id, f.shares) for f in fills] == [
            ("T2", B, -7.0),
            ("T3", A, 60.0),
        ]
        assert len(broker.fills("")[0]) == 3
        assert broker.fills(end) == ([], end)


@pytest.mark.parametrize("restart", [False, True])
def test_a_history_that_shrinks_or_changes_is_refused(tmp_path: Path, restart: bool) -> None:
    broker = sheet_at(tmp_path)
    broker.submit([order(A), order(B)])
    rows = [FILLS, f"T1,{A},40,10.5", f"T2,{B},7,10.5"]
    report(tmp_path, "fills.csv", *rows)
    _, cursor = broker.fills("")
    if restart:
        broker.close()
        broker = sheet_at(tmp_path)
    with broker:
        report(tmp_path, "fills.csv", *rows[:2])
        with pytest.raises(BrokerError, match=r"has 1 trade\(s\), of which 2 were read before"):
            broker.fills(cursor)
        (tmp_path / "fills.csv").unlink()
        with pytest.raises(BrokerError, match="has 0 trade"):
            broker.fills(cursor)
        report(tmp_path, "fills.csv", *rows[:2], f"T2,{B},7,10.6", f"T3,{B},1,10")
        place = "fills.csv: its" if restart else "fills.csv, row 3: its"
        with pytest.raises(BrokerError, match=f"{place} first 2 trades are not those"):
            broker.fills(cursor)
        report(tmp_path, "fills.csv", *rows, f"T3,{B},1,10")
        assert [fill.trade_id for fill in broker.fills(cursor)[0]] == ["T3"]


PROBLEMS = [
    (f",{A},1,10", "row 2, field 'trade_id': is empty"),
    (f"T1,{A},1,10\nT1,{A},1,10", "row 3, field 'trade_id': 'T1' is in row 2 already"),
    ("T1,xyz,1,10", "row 2, field 'order_id': 'xyz' is no order of these sheets"),
    (f"T1,{A},-1,10", "row 2, field 'shares': -1, expected more than 0"),
    (f'T1,{A},"1,000",10', "row 2, field 'shares': '1,000' is no number"),
    (f"T1,{A},nan,10", "row 2, field 'shares': 'nan' is no number"),
    (f"T1,{A},1e999,10", "row 2, field 'shares': '1e999' is no number"),
    (f"T1,{A},1_0,10", "row 2, field 'shares': '1_0' is no number"),
    (f"T1,{A},1,", "row 2, field 'price': '' is no number"),
    (f"T1,{A},60,10\nT2,{A},41,10", "row 3, field 'shares': with this row 101 of 100"),
    (f"T1,{A},1,10,,sell", "row 2, field 'side': sell, but the order is to buy"),
    (f"T1,{A},1,10,,give", "row 2, field 'side': 'give' is neither buy nor sell"),
    (f"T1,{A},1,10,AAPL,", "row 2, field 'symbol': 'AAPL', but the order is for"),
    ("T1,,1,10,,", "row 2, field 'symbol': is empty"),
    (f"T1,{A},1", "row 2: 3 cells, the header has 6"),
    (f'T1,{A},1,10,"', "row 2: unexpected end"),
]


@pytest.mark.parametrize(("rows", "problem"), PROBLEMS)
def test_every_problem_has_its_place_and_a_remedy(
    tmp_path: Path, sheet: SheetBroker, rows: str, problem: str
) -> None:
    sheet.submit([order(A)])
    wide = rows if rows.endswith(('1"', "A},1", '"')) or rows == f"T1,{A},1" else widen(rows)
    report(tmp_path, "fills.csv", f"{FILLS},symbol,side", wide)
    for request in (lambda: sheet.fills(""), lambda: sheet.orders([A])):
        with pytest.raises(BrokerError) as caught:
            request()
        assert f"fills.csv, {problem}" in str(caught.value)
        assert str(caught.value).endswith(".")  # a remedy


def widen(rows: str) -> str:
    """Rows with as many cells as the header has."""
    return "\n".join(
        row + "," * (5 - row.replace('"1,000"', "x").count(",")) for row in rows.split("\n")
    )


def test_every_problem_of_a_file_is_listed_at_once(tmp_path: Path, sheet: SheetBroker) -> None:
    sheet.submit([order(A)])
    report(tmp_path, "fills.csv", FILLS, f"T1,{A},x,y", "T2,z,1,1")
    with pytest.raises(BrokerError, match="3 problem") as caught:
        sheet.fills("")
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("fills.csv", "trade_id,shares\n", "field 'order_id': is missing"),
        ("fills.csv", f"{FILLS},colour\nT1,{A},1,1,red\n", "field 'colour': unknown column"),
        ("fills.csv", f"{FILLS}\nT1,{A},1,1", "row 2: the line has no end"),
        ("fills.csv", "\xff\xff\x00", "neither UTF-8 nor GBK"),
        ("fills.json", "{}", "not a list"),
        ("fills.json", "[1]", "row 1: not an object"),
        ("fills.json", '[{"trade_id": 1', "no JSON"),
        ("fills.json", '[{"trade_id": 1}]', "row 1, field 'price': is missing"),
        ("closed.csv", "order_id,state\nxyz,cancelled\n", "'xyz' is no order"),
        ("closed.csv", f"order_id,state\n{A},gone\n", "'gone' is neither cancelled nor rejected"),
    ],
)
def test_files_that_cannot_be_read_say_why(
    tmp_path: Path, sheet: SheetBroker, name: str, text: str, problem: str
) -> None:
    sheet.submit([order(A)])
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(BrokerError) as caught:
        sheet.orders([A])
    assert name in str(caught.value)
    assert problem in str(caught.value)


def test_json_gbk_and_trades_of_ones_own(tmp_path: Path, sheet: SheetBroker) -> None:
    sheet.submit([order(A)])
    row = {"trade_id": 7, "order_id": A, "shares": 100, "price": 10.5, "time": None}
    own = {"trade_id": "m1", "order_id": "", "symbol": SYMBOLS[1], "side": "卖出", **PRICE}
    (tmp_path / "fills.json").write_text(json.dumps([row, own]))
    fills, _ = sheet.fills("")
    assert [(f.trade_id, f.order_id, f.symbol, f.shares) for f in fills] == [
        ("7", A, SYMBOLS[0], 100.0),
        ("m1", "", SYMBOLS[1], -5.0),
    ]
    (tmp_path / "fills.csv").write_text("")
    with pytest.raises(BrokerError, match="Keep one"):
        sheet.fills("")
    (tmp_path / "fills.json").unlink()
    rows = f"{FILLS},side\r\nT1,{A},100,10.5,买入\r\n"
    for encoding in ("gb18030", "utf-8-sig"):
        (tmp_path / "fills.csv").write_bytes(rows.encode(encoding))
        assert [fill.shares for fill in sheet.fills("")[0]] == [100.0]


PRICE = {"shares": 5, "price": 9}


def test_the_account_with_shares_that_t_plus_one_locks(tmp_path: Path, sheet: SheetBroker) -> None:
    with pytest.raises(BrokerError, match=r"account\.csv: not there"):
        sheet.account()
    report(
        tmp_path,
        "account.csv",
        "symbol,shares,available",
        "$cash,1000.25,",
        f"{SYMBOLS[0]},300,100",
        f"{SYMBOLS[1]},50,",
        "AAPL,9,9",
    )
    held = {SYMBOLS[0]: 300.0, SYMBOLS[1]: 50.0}
    assert sheet.account() == Account(1000.25, held, {SYMBOLS[0]: 200.0})
    for rows, problem in (
        ((f"{SYMBOLS[0]},1,",), "no row $cash"),
        (("$cash,1,", "$cash,1,"), "row 3, field 'symbol': '$cash' is there twice"),
        (("$cash,x,",), "row 2, field 'shares': 'x' is no number"),
        (("$cash,1,", f"{SYMBOLS[0]},5,6"), "row 3, field 'shares': 5 shares, 6 available"),
        (("$cash,1,", f"{SYMBOLS[0]},-5,"), "row 3, field 'shares': -5 shares"),
    ):
        report(tmp_path, "account.csv", "symbol,shares,available", *rows)
        with pytest.raises(BrokerError) as caught:
            sheet.account()
        assert problem in str(caught.value)


def test_one_engine_at_a_time_and_how_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ECHELON_SHEET_WEBHOOK", raising=False)
    request: Any = SimpleNamespace(address="", bundle=SimpleNamespace(symbols=SYMBOLS))
    with pytest.raises(UsageError, match="name the directory"):
        open_sheet(request)
    request.address = str(tmp_path / "new")
    with pytest.raises(UsageError, match=r"account\.csv: not there"):
        open_sheet(request)
    report(tmp_path / "new", "account.csv", "symbol,shares", "$cash,1")
    with open_sheet(request) as broker:
        assert broker.account() == Account(1.0, {}, {})
        with pytest.raises(StoreError, match="another process"):
            open_sheet(request)


# The webhook.


class Hook:
    """Takes what is posted, answering with `answers` in turn, then 200."""

    def __init__(self, *answers: int) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []
        self.answers = list(answers)
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hook.taken.append((self.headers["Idempotency-Key"], body))
                self.send_response(hook.answers.pop(0) if hook.answers else 200)
                self.send_header("Location", "http://127.0.0.1:9/")
                self.end_headers()

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = SecretStr(f"http://127.0.0.1:{self.server.server_port}/hook/aSecretPath")
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    opened = Hook()
    yield opened
    opened.close()


def test_sheets_are_posted_until_they_are_taken_each_with_one_id(
    tmp_path: Path,
    hook: Hook,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("echelon.live.brokers.sheet._AGAIN_SECONDS", 0.0)
    hook.answers = [500, 302]
    with sheet_at(tmp_path, webhook=hook.url) as broker:
        assert broker.submit([order(A)])[0].state == "accepted"  # it is on the sheet
        broker.orders([A])
        broker.submit([order(B)])  # now both are taken, in their order
        broker.cancel([A])
        broker.orders([A])
    with sheet_at(tmp_path, webhook=hook.url) as broker:
        broker.orders([A, B])
    keys = [key for key, _ in hook.taken]
    bodies = [body for _, body in hook.taken]
    assert [[o["id"] for o in body["orders"]] for body in bodies] == [[A], [A], [A], [B], [A]]
    assert [body["kind"] for body in bodies] == ["orders"] * 4 + ["cancels"]
    assert keys == [body["id"] for body in bodies]
    assert len(set(keys)) == 3
    assert bodies[0] == json.loads((tmp_path / "orders/000001.json").read_text())
    assert "status 500" in caplog.text
    everything = caplog.text + "".join(
        path.read_text() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert "aSecretPath" not in everything


def test_a_webhook_that_is_gone_stops_nothing(
    tmp_path: Path, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    hook.close()
    with sheet_at(tmp_path, webhook=hook.url) as broker:
        assert broker.submit([order(A)])[0].state == "accepted"
        broker.orders([A])
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 1  # tried again after a while, not at every look
    assert "did not take orders/000001" in messages[0]
    assert "aSecretPath" not in caplog.text


@pytest.mark.parametrize("url", ["http://example.com/x", "ftp://127.0.0.1/", "nonsense"])
def test_a_webhook_goes_by_https_or_on_this_machine(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="https://") as caught:
        sheet_at(tmp_path, webhook=SecretStr(url))
    assert url not in str(caught.value)
