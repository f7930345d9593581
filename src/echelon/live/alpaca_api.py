"""What Alpaca's broker and feed share: keys, requests, and what a failed one means.

A failure is one of three, and nothing else leaves here:

1. `Refused`: the venue understood and said no, with a code and a message; it did nothing.
2. `ConfigError`: it does not know the keys. Nothing goes on before somebody has mended them.
3. `BrokerError`: no answer that can be understood (a refused connection, a timeout, 429, 5xx, the
   page of a proxy). Nothing is known of what it did.

The library sends a request again after a 429 or a 504, waits for an answer without end, and follows
proxies of the environment to loopback: `prepare_client` takes all three from it. An order is never
sent twice because an answer was slow.
"""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import SecretStr

from echelon.config.secrets import Secrets, is_loopback
from echelon.errors import ConfigError, EchelonError, UsageError, shorten
from echelon.live.brokers import BrokerError

T = TypeVar("T")
URL_VARIABLE = "ECHELON_ALPACA_URL"
SECONDS = 10.0
"""That a request may take to connect, and between two parts of its answer."""
_UNSAID = frozenset({408, 425, 429})
"""Statuses below 500 that do not mean no."""


class Keys(NamedTuple):
    """Of an account; printed as asterisks."""

    key: SecretStr
    secret: SecretStr

    @classmethod
    def from_environment(cls) -> Keys:
        """APCA_API_KEY_ID and APCA_API_SECRET_KEY, which Alpaca's own tools read too."""
        secrets = Secrets()
        return cls(secrets.require("apca_api_key_id"), secrets.require("apca_api_secret_key"))

    @property
    def plain(self) -> tuple[str, str]:
        """For the library alone."""
        return self.key.get_secret_value(), self.secret.get_secret_value()

    def hide(self, text: object) -> str:
        """`text` in one short line without the keys: a server may quote what it was sent."""
        plain = str(text)
        for value in self.plain:
            plain = plain.replace(value, "…")
        return shorten(plain)


class Refused(EchelonError):
    """The venue said no; status: of HTTP; reason: its words."""

    def __init__(self, status: int, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(f"{status}: {reason}")


def load_alpaca(module: str) -> Any:  # noqa: ANN401 (a module of the library)
    """A module of alpaca-py, or how to install it."""
    try:
        with warnings.catch_warnings():
            # The library imports websockets.legacy, which says that it will go one day.
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"alpaca: the package {error.name!r} is not installed. Install the extra `live`: "
            "`pip install 'echelon[live]'` (tested with alpaca-py 0.44.0)."
        ) from error


def override_url(scheme: str = "http") -> str | None:
    """A fake venue's URL from the environment, for tests; keys go to loopback only."""
    text = os.environ.get(URL_VARIABLE, "").strip().rstrip("/")
    if not text:
        return None
    parts = urlsplit(text)
    if parts.scheme != "http" or not is_loopback(parts.hostname) or parts.path:
        raise UsageError(
            f"{URL_VARIABLE} is {shorten(text, 60)!r}: it is for tests, and must be "
            "http://127.0.0.1:PORT, or your keys would go elsewhere. Unset it to trade at Alpaca."
        )
    return f"{scheme}://{parts.netloc}"


def prepare_client(client: Any, seconds: float = SECONDS, *, direct: bool = False) -> Any:  # noqa: ANN401
    """A client of alpaca-py that asks once and waits so long at most. direct: past any proxy"""
    from requests import Session

    class OneTry(Session):
        """With a timeout for every request."""

        def request(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as requests has it)
            return super().request(*args, **{**kwargs, "timeout": seconds})

    client._session = OneTry()
    client._session.trust_env = not direct
    client._retry = 0
    return client


def ask(keys: Keys, what: str, call: Callable[[], T]) -> T:
    """The answer to one request; a failure is one of the three of the module's text."""
    from requests import RequestException

    api_error = load_alpaca("alpaca.common.exceptions").APIError
    try:
        return call()
    except api_error as error:
        raise _judge(keys, what, error) from None
    except (RequestException, OSError, ValueError) as error:
        text = keys.hide(f"{type(error).__name__}: {error}")
        raise BrokerError(f"alpaca: no answer to {what}: {text}") from None


def _judge(keys: Keys, what: str, error: Any) -> EchelonError:  # noqa: ANN401 (an APIError)
    status = error.status_code or 0
    try:
        body = json.loads(str(error))
    except ValueError:
        body = None
    message = body.get("message") if isinstance(body, dict) else None
    if status >= 500 or status in _UNSAID or not isinstance(message, str):
        return BrokerError(f"alpaca: {what} was answered with status {status}: {keys.hide(error)}")
    reason = keys.hide(message)
    if status == 401 or (status == 403 and "code" not in body):
        return ConfigError(
            f"alpaca: the venue does not accept the keys ({reason}). Check APCA_API_KEY_ID and "
            "APCA_API_SECRET_KEY: a paper account has keys of its own."
        )
    return Refused(status, reason)
