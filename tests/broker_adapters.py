"""Venues outside this project, for the contract that every broker keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_alpaca import KEY, SECRET, FakeAlpaca
from pydantic import SecretStr

from echelon.live.alpaca_api import Keys
from echelon.live.brokers import Broker
from echelon.live.brokers.alpaca import AlpacaBroker
from echelon.live.brokers.sheet import SheetBroker

SYMBOLS = ("AAPL", "MSFT")


class AlpacaAdapter:
    """Alpaca, which a fake on loopback stands for."""

    symbols = SYMBOLS
    keeps_rejections = False

    def __init__(self, directory: Path) -> None:
        pytest.importorskip("alpaca", reason="alpaca-py is in the extra `live`")
        self.venue = FakeAlpaca(directory / "venue.db", fill="hold")
        self.venue.book.blocked.add("NO-SUCH")

    def open(self) -> Broker:
        keys = Keys(SecretStr(KEY), SecretStr(SECRET))
        return AlpacaBroker((*SYMBOLS, "NO-SUCH"), "1d", keys=keys, url=self.venue.url)

    def go_on(self, _broker: Broker) -> None:
        self.venue.book.settle()

    def close(self) -> None:
        self.venue.close()


class SheetAdapter:
    """Order sheets, and somebody who trades by them and writes down what happened."""

    symbols = SYMBOLS
    keeps_rejections = False

    def __init__(self, directory: Path) -> None:
        self.path = directory / "sheets"
        self.path.mkdir()
        self.done: set[str] = set()
        self.fills = ["trade_id,order_id,symbol,side,shares,price,commission,stamp,time"]
        self.closed = ["order_id,state,reason"]
        self.cash, self.held = 10_000.0, dict.fromkeys(SYMBOLS, 0.0)
        self._write()

    def open(self) -> Broker:
        return SheetBroker(self.path, SYMBOLS)

    def go_on(self, _broker: Broker) -> None:
        """Type every order that is on a sheet and not asked to be cancelled."""
        cancelled = {order["id"] for order in self._read("cancels")}
        for order in self._read("orders"):
            if order["id"] in self.done:
                continue
            self.done.add(order["id"])
            if order["id"] in cancelled:
                self.closed.append(f"{order['id']},cancelled,by hand")
                continue
            cells = (order["id"], order["symbol"], order["side"], repr(order["shares"]))
            sign = 1.0 if order["side"] == "buy" else -1.0
            self.fills.append(f"T{len(self.fills)},{','.join(cells)},10.5,0.25,0.125,2026-01-05")
            self.held[order["symbol"]] += sign * order["shares"]
            self.cash -= sign * order["shares"] * 10.5 + 0.375
        self._write()

    def close(self) -> None:
        pass

    def _read(self, kind: str) -> list[dict[str, Any]]:
        sheets = [json.loads(p.read_text()) for p in sorted((self.path / kind).glob("*.json"))]
        return [order for sheet in sheets for order in sheet["orders"]]

    def _write(self) -> None:
        rows = [f"{symbol},{shares!r}" for symbol, shares in self.held.items()]
        account = ["symbol,shares", f"$cash,{self.cash!r}", *rows]
        for name in ("fills", "closed"):
            self._file(name, getattr(self, name))
        self._file("account", account)

    def _file(self, name: str, lines: list[str]) -> None:
        (self.path / f"{name}.csv").write_text("".join(f"{line}\n" for line in lines))
