"""The paper venue as a process of its own, over loopback HTTP: what can die alone.

`serve_venue` runs a `PaperVenue` behind routes, one call after the other in one thread, which its
journal belongs to. `RemoteBroker` is its client. Both sides name the bundle in every call: a venue
of another universe refuses it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from echelon.config.secrets import require_token
from echelon.data.stream import BarSet
from echelon.errors import UsageError
from echelon.files import Closing
from echelon.live.brokers import (
    BrokerRequest,
    OrderRequest,
    OrderStatus,
    Shown,
    VenueFill,
    account_of,
    statuses,
)
from echelon.live.brokers.paper import PaperVenue
from echelon.live.http import Client, Handler, Server
from echelon.live.journal import decode_bars, encode_bars
from echelon.serving.bundle import Bundle
from echelon.serving.engine import Account

T = TypeVar("T")
_SECONDS = 30.0
_ORDERS, _IDS = TypeAdapter(list[OrderRequest]), TypeAdapter(list[str])


class RemoteBroker(Closing):
    """A `Broker` and `SimulatedVenue` at the other end of a connection."""

    name = PaperVenue.name

    def __init__(self, url: str, token: str, bundle: str, seconds: float = _SECONDS) -> None:
        """bundle: its id; seconds: that an answer is waited for"""
        self._client, self._bundle = Client(url, token, seconds), bundle

    def close(self) -> None:
        self._client.close()

    def submit(self, orders: Sequence[OrderRequest]) -> list[OrderStatus]:
        answer = self._call("submit", orders=[order._asdict() for order in orders])
        return statuses(answer["statuses"])

    def cancel(self, ids: Sequence[str]) -> None:
        self._call("cancel", ids=list(ids))

    def orders(self, ids: Sequence[str]) -> dict[str, OrderStatus]:
        answer = self._call("orders", ids=list(ids))
        return {status.id: status for status in statuses(answer["statuses"])}

    def open_orders(self) -> list[OrderStatus]:
        return statuses(self._call("open_orders")["statuses"])

    def fills(self, after: str) -> tuple[list[VenueFill], str]:
        answer = self._call("fills", after=after)
        return [VenueFill(**fill) for fill in answer["fills"]], answer["cursor"]

    def account(self) -> Account:
        return account_of(self._call("account"))

    def show_bars(self, bars: BarSet) -> Shown:
        document, data = encode_bars(bars)
        answer = self._call("bars", bars=document, data=base64.b64encode(data).decode())
        return Shown.from_dict(answer)

    def _call(self, name: str, **body: object) -> dict[str, Any]:
        return self._client.call("POST", f"/v1/{name}", {"bundle": self._bundle, **body})


def open_paper(request: BrokerRequest) -> RemoteBroker | PaperVenue:
    """The paper venue of `--broker paper`, beside the engine's journal, or `paper:URL`."""
    if request.address:
        return RemoteBroker(request.address, require_token(), request.bundle.id)
    place = request.journal.with_name(f"{request.journal.name}.venue")
    sync = request.config.sync
    return PaperVenue.open(request.bundle, place, request.store, request.until, sync=sync)


@contextmanager
def serve_venue(
    bundle: Bundle,
    journal: Path,
    store: Path,
    until: date | None,
    token: str,
    port: int = 0,
) -> Iterator[str]:
    """A paper venue behind HTTP for as long as the block runs; its URL."""
    with ExitStack() as stack:
        worker = ThreadPoolExecutor(1, "venue")
        stack.callback(worker.shutdown)
        venue = worker.submit(PaperVenue.open, bundle, journal, store, until).result()
        stack.callback(lambda: worker.submit(venue.close).result())

        def guard(handler: Handler) -> Handler:
            def answer(body: Mapping[str, Any]) -> dict[str, Any]:
                if body.get("bundle") != bundle.id:
                    raise UsageError(
                        f"this venue trades the universe of {bundle.path}, not that of bundle "
                        f"{str(body.get('bundle'))[:12]!r}. Start one for it: `echelon live venue`."
                    )
                return worker.submit(handler, body).result()

            return answer

        routes = {
            ("POST", f"/v1/{name}"): guard(handler) for name, handler in _handlers(venue).items()
        }
        yield stack.enter_context(Server(routes, token, port)).url


def _handlers(venue: PaperVenue) -> dict[str, Handler]:
    """Name of a route → what it does."""

    def list_statuses(said: Sequence[OrderStatus]) -> dict[str, Any]:
        return {"statuses": [status._asdict() for status in said]}

    def cancel(body: Mapping[str, Any]) -> dict[str, Any]:
        venue.cancel(_read(_IDS.validate_python, body.get("ids")))
        return {}

    def fills(body: Mapping[str, Any]) -> dict[str, Any]:
        done, cursor = venue.fills(str(body.get("after", "")))
        return {"fills": [fill._asdict() for fill in done], "cursor": cursor}

    return {
        "submit": lambda body: list_statuses(
            venue.submit(_read(_ORDERS.validate_python, body.get("orders")))
        ),
        "cancel": cancel,
        "orders": lambda body: list_statuses(
            [*venue.orders(_read(_IDS.validate_python, body.get("ids"))).values()]
        ),
        "open_orders": lambda _body: list_statuses(venue.open_orders()),
        "fills": fills,
        "account": lambda _body: venue.account()._asdict(),
        "bars": lambda body: venue.show_bars(_read(_bars_of, body)).to_dict(),
    }


def _bars_of(body: Mapping[str, Any]) -> BarSet:
    return decode_bars(body["bars"], base64.b64decode(body["data"], validate=True))


def _read(read: Callable[[Any], T], value: object) -> T:
    """What a client sent, or what is wrong with it."""
    try:
        return read(value)
    except (ValidationError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UsageError(f"the request cannot be understood: {error}") from None
