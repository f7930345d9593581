"""Robots of chat services, a webhook and a mail server on this machine, as their documents say.

A robot refuses, with the code of its service, what its document does not allow: another field, a
text that is too long, a signature of another secret or of another hour.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, NotRequired
from urllib.parse import parse_qs, urlsplit

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

STRICT = ConfigDict(extra="forbid", strict=True)


class _Content(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    text: str


class FeishuText(TypedDict):
    """A text to a custom bot of Feishu, signed or not; the body has at most 20 KB."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    msg_type: Literal["text"]
    content: _Content
    timestamp: NotRequired[str]
    sign: NotRequired[str]


class _Text(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    content: str
    mentioned_list: NotRequired[list[str]]
    mentioned_mobile_list: NotRequired[list[str]]


class WeComText(TypedDict):
    """A text to a group robot of WeCom: at most 2,048 bytes."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    msgtype: Literal["text"]
    text: _Text


class _Plain(TypedDict):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    content: str


class DingTalkText(TypedDict):
    """A text to a custom robot of DingTalk: the body has at most 20,000 bytes."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    msgtype: Literal["text"]
    text: _Plain
    at: NotRequired[dict[str, Any]]


class TelegramText(TypedDict):
    """sendMessage of the Bot API; the text has 1 to 4,096 characters, counted as UTF-16."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    chat_id: str
    text: str
    link_preview_options: NotRequired[dict[str, bool]]


class WebhookAlert(TypedDict):
    """An alert of it."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    kind: str
    severity: Literal["info", "warning", "critical"]
    who: str
    time: str
    values: dict[str, float | str | None]
    text: str


class WebhookBody(TypedDict):
    """Ours: docs/guide/alerts.md."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    schema: Literal[1]
    subject: str
    text: str
    alerts: list[WebhookAlert]


Reply = tuple[int, Mapping[str, Any], Mapping[str, str]]


def _judge(kind: type[Any], body: bytes, most: int = 20_000) -> str:
    """What is wrong with a body; nothing: ''."""
    if len(body) > most:
        return "too long"
    try:
        TypeAdapter(kind).validate_json(body)
    except ValidationError as error:
        return str(error)
    return ""


def _hmac(key: str, text: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()).decode()


def feishu(secret: str | None) -> Callable[[str, bytes, Mapping[str, str]], Reply]:
    def answer(_url: str, body: bytes, _headers: Mapping[str, str]) -> Reply:
        if wrong := _judge(FeishuText, body):
            return 200, {"code": 9499, "msg": f"Bad Request: {wrong}", "data": {}}, {}
        tree = json.loads(body)
        if secret is not None:
            stamp = tree.get("timestamp", "0")
            good = _hmac(f"{stamp}\n{secret}", "")
            if abs(time.time() - int(stamp)) > 3600 or tree.get("sign") != good:
                told = "sign match fail or timestamp is not within one hour from current time"
                return 200, {"code": 19021, "msg": told, "data": {}}, {}
        return 200, {"code": 0, "msg": "success", "data": {}, "StatusCode": 0}, {}

    return answer


def wecom(key: str) -> Callable[[str, bytes, Mapping[str, str]], Reply]:
    def answer(url: str, body: bytes, _headers: Mapping[str, str]) -> Reply:
        if parse_qs(urlsplit(url).query).get("key") != [key]:
            return 200, {"errcode": 93000, "errmsg": "invalid webhook url"}, {}
        if wrong := _judge(WeComText, body):
            return 200, {"errcode": 40008, "errmsg": f"invalid message: {wrong}"}, {}
        if len(json.loads(body)["text"]["content"].encode()) > 2048:
            return 200, {"errcode": 40058, "errmsg": "text.content exceed max length 2048"}, {}
        return 200, {"errcode": 0, "errmsg": "ok"}, {}

    return answer


def dingtalk(token: str, secret: str | None) -> Callable[[str, bytes, Mapping[str, str]], Reply]:
    def answer(url: str, body: bytes, _headers: Mapping[str, str]) -> Reply:
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        if query.pop("access_token", "") != token:
            return 200, {"errcode": 300001, "errmsg": "token is not exist"}, {}
        if secret is not None:
            stamp = query.get("timestamp", "0")
            good = _hmac(secret, f"{stamp}\n{secret}")
            if abs(time.time() * 1e3 - int(stamp)) > 3_600_000 or query.get("sign") != good:
                return 200, {"errcode": 310000, "errmsg": "sign not match"}, {}
        if wrong := _judge(DingTalkText, body):
            return 200, {"errcode": 40035, "errmsg": f"invalid parameter: {wrong}"}, {}
        return 200, {"errcode": 0, "errmsg": "ok"}, {}

    return answer


def telegram(token: str, chat: str) -> Callable[[str, bytes, Mapping[str, str]], Reply]:
    def answer(url: str, body: bytes, _headers: Mapping[str, str]) -> Reply:
        if urlsplit(url).path != f"/bot{token}/sendMessage":
            return 404, {"ok": False, "error_code": 404, "description": "Not Found"}, {}
        wrong = _judge(TelegramText, body, 100_000)
        tree = {} if wrong else json.loads(body)
        if wrong or tree["chat_id"] != chat:
            told = {"ok": False, "error_code": 400, "description": f"Bad Request: {wrong}"}
            return 400, told, {}
        if not 1 <= len(tree["text"].encode("utf-16-le")) // 2 <= 4096:
            told = {"ok": False, "error_code": 400, "description": "message is too long"}
            return 400, told, {}
        return 200, {"ok": True, "result": {"message_id": 1, "date": 1, "chat": {"id": 1}}}, {}

    return answer


def webhook(token: str | None = None) -> Callable[[str, bytes, Mapping[str, str]], Reply]:
    def answer(_url: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        if token is not None and headers.get("Authorization") != f"Bearer {token}":
            return 401, {"error": "who are you"}, {}
        wrong = _judge(WebhookBody, body, 1_000_000)
        return (400, {"error": wrong}, {}) if wrong else (200, {}, {})

    return answer


class Robot:
    """A server; bodies: what it was sent; taken: how many of these it took."""

    def __init__(self, answer: Callable[[str, bytes, Mapping[str, str]], Reply]) -> None:
        self.answer, self.bodies, self.taken = answer, list[dict[str, Any]](), 0
        self.refuse: list[Reply] = []
        """Answers to the next requests, whatever they are."""
        self.hang = threading.Event()
        self.hang.set()
        robot = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                robot.hang.wait(30.0)
                robot.bodies.append(json.loads(body))
                refused = robot.refuse.pop(0) if robot.refuse else None
                reply = refused or robot.answer(self.path, body, dict(self.headers))
                status, document, headers = reply
                good = status == 200 and not document.get("code") and not document.get("errcode")
                robot.taken += good
                data = json.dumps(document).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that went away."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Robot:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Mailbox:
    """mails: those that came, parsed; logins: what was said to AUTH PLAIN, decoded."""

    def __init__(self, port: int, mails: list[EmailMessage], logins: list[str]) -> None:
        self.port, self.mails, self.logins = port, mails, logins


@contextmanager
def mail_server(password: str | None = None) -> Iterator[Mailbox]:
    """SMTP as far as a client without TLS needs it."""
    mails: list[EmailMessage] = []
    logins: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def say(self, line: str) -> None:
            self.wfile.write(f"{line}\r\n".encode())

        def handle(self) -> None:
            self.say("220 here")
            while line := self.rfile.readline().decode().strip():
                verb, _, rest = line.partition(" ")
                match verb.upper():
                    case "EHLO":
                        self.say("250-here")
                        self.say("250 AUTH PLAIN")
                    case "AUTH":
                        said = base64.b64decode(rest.split()[1]).decode()
                        logins.append(said)
                        good = password is None or said.split("\0")[2] == password
                        self.say("235 fine" if good else f"535 {said!r} is nobody")
                    case "DATA":
                        self.say("354 go on")
                        data = b""
                        while (part := self.rfile.readline()) != b".\r\n":
                            data += part.removeprefix(b".") if part.startswith(b"..") else part
                        parsed = message_from_bytes(data, policy=policy.default)
                        assert isinstance(parsed, EmailMessage)
                        mails.append(parsed)
                        self.say("250 taken")
                    case "QUIT":
                        self.say("221 bye")
                        return
                    case _:
                        self.say("250 fine")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield Mailbox(server.server_address[1], mails, logins)
        finally:
            server.shutdown()
            thread.join()
