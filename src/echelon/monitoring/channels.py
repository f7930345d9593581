"""Channels: a message as each service wants it (`_FORMATS`), or as an e-mail.

Addresses and secrets come from the environment. They are written nowhere: `Redactor` takes them out
of whatever is logged or sent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import smtplib
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from email.message import EmailMessage
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote_plus, unquote, urlsplit

from pydantic import SecretStr

from echelon.config.alerts import ChannelConfig
from echelon.config.secrets import Secrets, is_loopback
from echelon.errors import ConfigError, shorten
from echelon.files import json_line

SECONDS = 5.0
"""That a service may take for each part of an answer."""
_MOST_ANSWER = 64 * 1024
_AGAIN = {"feishu": (11232,), "wecom": (-1, 45009), "dingtalk": (-1, 130101)}
"""Codes of robots that are busy, or want fewer messages."""


class Message(NamedTuple):
    """What a channel sends. alerts: as JSON has them; page: (file name, HTML)"""

    subject: str
    text: str
    alerts: tuple[Mapping[str, Any], ...] = ()
    page: tuple[str, str] | None = None


class Undelivered(Exception):
    """A message that was not taken, and why. again: whether to try; after: seconds to wait."""

    def __init__(self, why: str, *, again: bool = True, after: float = 0.0) -> None:
        super().__init__(why)
        self.again, self.after = again, after


class Answer(NamedTuple):
    """What a service answered. after: seconds to wait, if it says so"""

    status: int
    body: bytes
    after: float = 0.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A webhook that moved gets nothing: its address is a secret, and so may be what it is sent."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 (as urllib has it)
        return None


def post_json(url: str, document: object, headers: Mapping[str, str]) -> Answer:
    """Post a document; Undelivered, without the URL, where no answer came."""
    try:
        request = urllib.request.Request(  # noqa: S310 (https, or loopback: check_url)
            url,
            json_line(document, ensure_ascii=False).encode(),
            {"Content-Type": "application/json; charset=utf-8", **headers},
            method="POST",
        )
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=SECONDS) as answer:
            return Answer(answer.status, answer.read(_MOST_ANSWER))
    except urllib.error.HTTPError as error:
        with error:
            after = error.headers.get("Retry-After", "")
            wait = float(after) if after.isdigit() else 0.0
            return Answer(error.code, error.read(_MOST_ANSWER), wait)
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Undelivered(
            f"no answer ({type(reason).__name__})"
        ) from None  # words may hold the URL


def check_url(url: SecretStr, variable: str, secure: str = "https", plain: str = "http") -> None:
    """Refuse an address that is neither encrypted nor of this machine."""
    try:
        parts = urlsplit(url.get_secret_value())
        _, host = parts.port, parts.hostname
    except ValueError:
        host = None
    if not host or not (parts.scheme == secure or (parts.scheme == plain and is_loopback(host))):
        raise ConfigError(
            f"the environment variable {variable} must hold a URL that begins with {secure}:// "
            f"({plain}:// on this machine only)."
        )


class Redactor:
    """Takes secrets out of a text: addresses as a whole and in their parts, tokens, passwords."""

    def __init__(self, secrets: Iterable[str]) -> None:
        parts = {part for secret in secrets for part in (secret, *_secret_parts(secret))}
        every = {form for part in parts for form in (part, unquote(part), quote_plus(part))}
        self._parts = sorted((part for part in every if len(part) >= 4), key=len, reverse=True)

    @classmethod
    def from_environment(cls) -> Redactor:
        """Of every secret that this process was given."""
        known = [value.get_secret_value() for _, value in Secrets() if value is not None]
        ours = [value for name, value in os.environ.items() if name.startswith("ECHELON_ALERT_")]
        return cls([*known, *ours])

    def __call__(self, text: str) -> str:
        for part in self._parts:
            text = text.replace(part, "***")
        return text


def _secret_parts(secret: str) -> list[str]:
    """What of an address is secret by itself: password, tokens in its path and query."""
    try:
        parts = urlsplit(secret if "://" in secret else "")
    except ValueError:  # no address; the whole of it is secret
        return []
    long = [part for part in parts.path.split("/") if len(part) >= 16]
    values = [value for _, value in parse_qsl(parts.query)]
    return [*long, *(part.removeprefix("bot") for part in long), *values, parts.password or ""]


class _Post(NamedTuple):
    """What a robot is sent."""

    url: str
    document: Mapping[str, Any]
    headers: Mapping[str, str] = {}


class Channel:
    """One of the configuration's channels; `send` raises Undelivered."""

    def __init__(self, config: ChannelConfig, now: Callable[[], float] = time.time) -> None:
        """now: for tests"""
        self.config, self.now = config, now
        self.url = _environment(config.url)
        self.secret = None if config.secret is None else _environment(config.secret)
        mail = config.kind == "smtp"
        secure = "https" if not mail else "smtp" if self.url.startswith("smtp:") else "smtps"
        check_url(SecretStr(self.url), config.url, secure, "smtp" if mail else "http")

    def send(self, message: Message) -> None:
        """Send a message; it was taken when this returns."""
        kind = self.config.kind
        if kind == "smtp":
            self._mail(message)
            return
        if kind != "webhook":
            message = message._replace(text=message.text.translate(_MENTIONS))
        answer = post_json(*_FORMATS[kind](self, message))
        why = f"status {answer.status}: {shorten(answer.body.decode(errors='replace'), 200)}"
        said = _document(answer)
        if answer.status in (408, 425, 429) or answer.status >= 500:
            raise Undelivered(why, after=answer.after or _retry_after(said))
        code = said.get("code", said.get("StatusCode", said.get("errcode")))
        taken = kind == "webhook" or said.get("ok") is True or code == 0
        if not 200 <= answer.status < 300 or not taken:
            raise Undelivered(why, again=code in _AGAIN.get(kind, ()))

    def _mail(self, message: Message) -> None:
        parts, to = urlsplit(self.url), self.config.to
        mail = EmailMessage()
        mail["Subject"], mail["From"] = shorten(message.subject, 200), self.config.sender or to[0]
        mail["To"] = ", ".join(to)
        mail.set_content(message.text)
        if message.page is not None:
            mail.add_attachment(message.page[1], subtype="html", filename=message.page[0])
        host, safe = parts.hostname or "", ssl.create_default_context()
        try:
            with (
                smtplib.SMTP_SSL(host, parts.port or 465, timeout=SECONDS, context=safe)
                if parts.scheme == "smtps"
                else smtplib.SMTP(host, parts.port or 587, timeout=SECONDS)
            ) as server:
                if parts.scheme == "smtp" and not is_loopback(host):
                    server.starttls(context=safe)
                if parts.username:
                    server.login(unquote(parts.username), unquote(parts.password or ""))
                server.send_message(mail)
        except (OSError, ValueError) as error:  # all of smtplib are OSErrors
            again = not 500 <= getattr(error, "smtp_code", 0) < 600
            raise Undelivered(f"{type(error).__name__}: {error}", again=again) from None


def _environment(variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(
            f"the environment variable {variable} is not set; `alerts.channels` names it. Set it "
            f"for this shell with `export {variable}=…`; secrets are never read from files."
        )
    return value


def _document(answer: Answer) -> dict[str, Any]:
    try:
        said = json.loads(answer.body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _retry_after(said: Mapping[str, Any]) -> float:
    """As Telegram says it."""
    parameters = said.get("parameters")
    after = parameters.get("retry_after") if isinstance(parameters, dict) else None
    return float(after) if isinstance(after, int) else 0.0


def clip(text: str, most: int, encoding: str = "utf-8") -> str:
    """The beginning of a text that is no longer than so many bytes."""
    data = text.encode(encoding)
    if len(data) <= most:
        return text
    return data[: most - len("…".encode(encoding))].decode(encoding, "ignore") + "…"


def _sign(key: str, text: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()).decode()


def _webhook(channel: Channel, message: Message) -> _Post:
    tree = {"schema": 1, "subject": message.subject, "text": message.text}
    headers = {} if channel.secret is None else {"Authorization": f"Bearer {channel.secret}"}
    return _Post(channel.url, {**tree, "alerts": list(message.alerts)}, headers)


def _feishu(channel: Channel, message: Message) -> _Post:
    tree: dict[str, Any] = {"msg_type": "text", "content": {"text": clip(message.text, 9_000)}}
    if channel.secret is not None:
        stamp = str(int(channel.now()))
        # The robot's documentation signs nothing with this text as the key.
        tree |= {"timestamp": stamp, "sign": _sign(f"{stamp}\n{channel.secret}", "")}
    return _Post(channel.url, tree)


def _wecom(channel: Channel, message: Message) -> _Post:
    return _Post(channel.url, {"msgtype": "text", "text": {"content": clip(message.text, 2_048)}})


def _dingtalk(channel: Channel, message: Message) -> _Post:
    url, stamp = channel.url, str(int(channel.now() * 1e3))
    if channel.secret is not None:
        sign = quote_plus(_sign(channel.secret, f"{stamp}\n{channel.secret}"))
        url += f"{'&' if '?' in url else '?'}timestamp={stamp}&sign={sign}"
    return _Post(url, {"msgtype": "text", "text": {"content": clip(message.text, 9_000)}})


def _telegram(channel: Channel, message: Message) -> _Post:
    # It counts characters as UTF-16 has them.
    text = clip(message.text, 2 * 4_096, "utf-16-le")
    more = {"link_preview_options": {"is_disabled": True}}
    return _Post(channel.url, {"chat_id": channel.config.to[0], "text": text, **more})


_MENTIONS = str.maketrans("<@", "\N{FULLWIDTH LESS-THAN SIGN}\N{FULLWIDTH COMMERCIAL AT}")
"""A venue's words are no orders to a robot: `<at user_id="all">` and `@all` call nobody."""

_FORMATS: Mapping[str, Callable[[Channel, Message], _Post]] = {
    "webhook": _webhook,
    "feishu": _feishu,
    "wecom": _wecom,
    "dingtalk": _dingtalk,
    "telegram": _telegram,
}
