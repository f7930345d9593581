"""Alerts: each channel as its service documents it, and what never happens to whom they watch."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bundles import tiny_settings
from robots import Robot, dingtalk, feishu, mail_server, telegram, webhook, wecom
from shells import Shell, tiny
from worlds import prepared_run

from echelon.config.alerts import AlertsConfig, ChannelConfig
from echelon.config.live import LiveConfig
from echelon.config.load import fingerprint, load_config, load_section, to_yaml
from echelon.errors import ConfigError, EchelonError, UsageError
from echelon.evaluation.evaluate import evaluate
from echelon.features import Prepared
from echelon.monitoring import alerts as module
from echelon.monitoring.alerts import QUEUE, Alert, Alerter, plain_text, send_now
from echelon.monitoring.channels import Channel, Message, Redactor, Undelivered, clip
from echelon.report.texts import Words
from echelon.risk.events import RiskEvent, RiskKind, RiskLog
from echelon.training.loop import Progress
from echelon.training.run import TrainedRun, Training, Worlds, ready, seed_directory

ASSETS = "assets=[AAPL, MSFT, NVDA, JNJ]"
TOKEN = "7f3a9c52e1b84d60a5"
SECRET = "SECd41d8cd98f00b204"
PASSWORD = "hunter2/geheim"
HALT = Alert("halt", "critical", "limit", "2024-01-05", {"detail": "drawdown 0.12"})
MASKED = Alert("masked", "warning", "expert 2", "2024-01-05")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.01)
    for name in ("URL", "SECRET", "OTHER"):
        monkeypatch.delenv(f"ECHELON_ALERT_{name}", raising=False)


@pytest.fixture
def robot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Robot]]:
    """Starts a robot and names its address in the environment."""
    running: list[Robot] = []

    def start(answer: Any, path: str = "", secret: str | None = None) -> Robot:
        made = Robot(answer).__enter__()
        running.append(made)
        monkeypatch.setenv("ECHELON_ALERT_URL", made.url + path)
        if secret is not None:
            monkeypatch.setenv("ECHELON_ALERT_SECRET", secret)
        return made

    yield start
    for made in running:
        made.__exit__()


def channel(kind: str, *, secret: bool = False, **more: Any) -> ChannelConfig:
    named = {"secret": "ECHELON_ALERT_SECRET"} if secret else {}
    return ChannelConfig.model_validate({"kind": kind, "url": "ECHELON_ALERT_URL", **named, **more})


def settings(*channels: ChannelConfig, **more: Any) -> AlertsConfig:
    return AlertsConfig.model_validate({"channels": channels, "per_minute": 60_000, **more})


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(2_000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came")


LONG = "K 线缺失 📉 " * 3_000

# --- every service -------------------------------------------------------------------------------

SERVICES = {
    "webhook": (webhook(SECRET), "/hook", True, {}),
    "feishu": (feishu(SECRET), f"/open-apis/bot/v2/hook/{TOKEN}", True, {}),
    "wecom": (wecom(TOKEN), f"/cgi-bin/webhook/send?key={TOKEN}", False, {}),
    "dingtalk": (dingtalk(TOKEN, SECRET), f"/robot/send?access_token={TOKEN}", True, {}),
    "telegram": (telegram(TOKEN, "-100"), f"/bot{TOKEN}/sendMessage", False, {"to": ["-100"]}),
}


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("text", ["short", LONG], ids=["short", "long"])
def test_a_message_is_as_the_service_documents_it(
    robot: Callable[..., Robot], kind: str, text: str
) -> None:
    answer, path, signed, more = SERVICES[kind]
    service = robot(answer, path, SECRET if signed else None)
    Channel(channel(kind, secret=signed, **more)).send(Message("subject", text))
    assert service.taken == 1
    said = json.dumps(service.bodies[0], ensure_ascii=False)
    assert ("short" if text == "short" else "K 线缺失 📉") in said


@pytest.mark.parametrize("kind", SERVICES)
def test_words_of_others_mention_nobody(robot: Callable[..., Robot], kind: str) -> None:
    answer, path, signed, more = SERVICES[kind]
    service = robot(answer, path, SECRET if signed else None)
    said = 'no <at user_id="all">x</at> of <@all> and @desk'
    Channel(channel(kind, secret=signed, **more)).send(Message("subject", said))
    (text,) = [t for t in _texts(service.bodies[0]) if "user_id" in t]
    shown = 'no ＜at user_id="all">x＜/at> of ＜＠all> and ＠desk'
    assert text == (said if kind == "webhook" else shown)


def _texts(tree: object) -> list[str]:
    if isinstance(tree, dict):
        return [text for part in tree.values() for text in _texts(part)]
    return [tree] if isinstance(tree, str) else []


@pytest.mark.parametrize("kind", ["feishu", "dingtalk"])
@pytest.mark.parametrize("wrong", ["secret", "clock"])
def test_a_robot_refuses_another_signature_and_is_not_asked_again(
    robot: Callable[..., Robot], kind: str, wrong: str
) -> None:
    answer, path, _, _ = SERVICES[kind]
    robot(answer, path, "SECother" if wrong == "secret" else SECRET)
    late = time.time() - (0.0 if wrong == "secret" else 7_200.0)
    with pytest.raises(Undelivered, match=r"19021|310000") as caught:
        Channel(channel(kind, secret=True), lambda: late).send(Message("s", "t"))
    assert not caught.value.again


def test_robots_without_a_secret_get_no_signature(robot: Callable[..., Robot]) -> None:
    service = robot(feishu(None))
    Channel(channel("feishu")).send(Message("s", "t"))
    assert service.bodies == [{"msg_type": "text", "content": {"text": "t"}}]


def test_an_alert_reaches_the_webhook_as_data_and_text(robot: Callable[..., Robot]) -> None:
    service = robot(webhook())
    with Alerter(settings(channel("webhook")), "demo", Words("zh").alert) as alert:
        alert(HALT)
    (body,) = service.bodies
    assert service.taken == 1
    assert body["subject"] == "[Echelon] 严重：停止交易：触及亏损限额：drawdown 0.12"
    assert body["text"] == "Echelon · demo\n严重：停止交易：触及亏损限额：drawdown 0.12"
    assert body["alerts"][0]["kind"] == "halt"
    assert body["alerts"][0]["values"] == {"detail": "drawdown 0.12"}


def test_an_email_has_the_text_and_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with mail_server(PASSWORD) as box:
        url = f"smtp://me%40example.org:hunter2%2Fgeheim@127.0.0.1:{box.port}"
        monkeypatch.setenv("ECHELON_ALERT_URL", url)
        to = ["desk@example.org", "boss@example.org"]
        config = settings(channel("smtp", to=to, sender="engine@example.org"))
        send_now(config, Message("盈亏 +1\nBcc: x@y", "正文", (), ("day.html", "<p>页面</p>")))
    (mail,) = box.mails
    assert box.logins == [f"\0me@example.org\0{PASSWORD}"]
    assert (mail["Subject"], mail["To"]) == ("盈亏 +1 Bcc: x@y", ", ".join(to))
    assert mail["Bcc"] is None
    body, page = mail.get_body(("plain",)), next(mail.iter_attachments())
    assert body is not None
    assert body.get_content().strip() == "正文"
    assert (page.get_filename(), page.get_content().strip()) == ("day.html", "<p>页面</p>")


def test_a_refused_login_is_not_tried_again_and_shows_no_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mail_server("another") as box:
        url = f"smtp://me:hunter2%2Fgeheim@127.0.0.1:{box.port}"
        monkeypatch.setenv("ECHELON_ALERT_URL", url)
        with pytest.raises(EchelonError, match=r"smtp: .*535") as caught:
            send_now(settings(channel("smtp", to=["a@b"])), Message("s", "t"))
    assert len(box.logins) == 1
    assert "hunter2" not in str(caught.value)


# --- how often -----------------------------------------------------------------------------------


def test_what_is_not_taken_is_sent_again_until_it_is(robot: Callable[..., Robot]) -> None:
    service = robot(*SERVICES["telegram"][:2])
    busy = {"ok": False, "error_code": 429, "parameters": {"retry_after": 0}}
    service.refuse = [(503, {}, {}), (429, busy, {"Retry-After": "0"}), (200, {"ok": False}, {})]
    service.refuse.pop()
    with Alerter(settings(channel("telegram", to=["-100"]))) as alert:
        alert(HALT)
        wait_for(lambda: alert.sent)
    assert len(service.bodies) == 3
    assert alert.sent == {("telegram", "critical"): 1}
    assert not alert.failed


@pytest.mark.parametrize(
    ("kind", "busy"),
    [
        ("feishu", {"code": 11232, "msg": "frequency limited"}),
        ("wecom", {"errcode": 45009, "errmsg": "api freq out of limit"}),
        ("dingtalk", {"errcode": 130101, "errmsg": "send too fast"}),
    ],
)
def test_a_robot_that_is_asked_too_fast_is_asked_again(
    robot: Callable[..., Robot], kind: str, busy: dict[str, Any]
) -> None:
    answer, path, signed, _ = SERVICES[kind]
    service = robot(answer, path, SECRET)
    service.refuse = [(200, busy, {})]
    send_now(settings(channel(kind, secret=signed)), Message("s", "t"))
    assert (len(service.bodies), service.taken) == (2, 1)


def test_a_dead_channel_is_given_up_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ECHELON_ALERT_URL", f"http://127.0.0.1:1/{TOKEN}")
    with caplog.at_level(logging.WARNING), Alerter(settings(channel("webhook"))) as alert:
        alert(HALT)
        wait_for(lambda: alert.failed)
    assert alert.failed == {"webhook": 1}
    assert "no answer (ConnectionRefusedError) (tries: 6)" in caplog.text
    assert TOKEN not in caplog.text


def test_the_same_alert_is_held_back_and_counted(robot: Callable[..., Robot]) -> None:
    service = robot(webhook())
    with Alerter(settings(channel("webhook"), repeat_seconds=0.2), "", plain_text) as alert:
        for _ in range(5):
            alert(MASKED)
        alert(Alert("masked", "warning", "expert 3"))
        wait_for(lambda: len(service.bodies) >= 1)
        time.sleep(0.25)
        alert(MASKED)
    texts = [each["text"] for body in service.bodies for each in body["alerts"]]
    assert texts.count("warning: masked expert 2") == 1
    assert texts[-1] == "warning: masked expert 2: repeated 4"
    assert alert.dropped == {"repeated": 4}
    assert Words("en").alert(MASKED) == "Warning: Masked: Expert 2: masked for the router"


def test_a_halt_of_another_bar_is_another_alert(robot: Callable[..., Robot]) -> None:
    service = robot(webhook())
    with Alerter(settings(channel("webhook"))) as alert:
        for day in ("2024-01-05", "2024-01-05", "2024-01-08"):
            alert(Alert("halt", "critical", "limit", day, {"detail": "x"}))
    assert sum(len(body["alerts"]) for body in service.bodies) == 2


def test_alerts_that_come_fast_share_messages(robot: Callable[..., Robot]) -> None:
    service = robot(webhook())
    with Alerter(settings(channel("webhook"), per_minute=1)) as alert:
        for k in range(50):
            alert(Alert("masked", "warning", f"expert {k}"))
    assert 2 <= len(service.bodies) <= 5
    assert sum(len(body["alerts"]) for body in service.bodies) == 50
    assert service.bodies[1]["subject"].endswith("(+19)")


def test_a_channel_gets_what_is_severe_enough(
    robot: Callable[..., Robot], monkeypatch: pytest.MonkeyPatch
) -> None:
    loud, every = robot(webhook()), robot(webhook())
    monkeypatch.setenv("ECHELON_ALERT_OTHER", loud.url)
    only = channel("webhook", severity="critical").model_copy(update={"url": "ECHELON_ALERT_OTHER"})
    with Alerter(settings(only, channel("webhook", severity="info"))) as alert:
        for each in (HALT, MASKED, Alert("answers", "info")):
            alert(each)
    kinds = [[a["kind"] for body in r.bodies for a in body["alerts"]] for r in (loud, every)]
    assert kinds == [["halt"], ["halt", "masked", "answers"]]
    assert alert.sent["webhook-0", "critical"] == alert.sent["webhook-1", "critical"] == 1


# --- nobody waits --------------------------------------------------------------------------------


def test_a_hanging_channel_and_a_full_queue_hold_nobody_up(robot: Callable[..., Robot]) -> None:
    service = robot(webhook())
    service.hang.clear()
    alert = Alerter(settings(channel("webhook")))
    done = threading.Event()

    def flood() -> None:
        for k in range(3 * QUEUE):
            alert(Alert("masked", "warning", f"expert {k}"))
        done.set()

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    assert done.wait(20.0)
    assert not service.bodies, "the channel hangs all the while"
    assert alert.dropped["queue_full"] >= 2 * QUEUE - 30
    closing = threading.Thread(target=alert.close, args=(0.1,), daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive(), "closing is bounded"
    alert(HALT)
    assert alert.dropped["closed"] == 1


def test_callbacks_get_every_alert_in_order_and_may_hang_or_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Alert] = []
    go = threading.Event()

    def broken(_alert: Alert) -> None:
        raise ConnectionError("no line")

    def hanging(_alert: Alert) -> None:
        go.wait(20.0)

    with Alerter(AlertsConfig(), alert_callbacks=[broken, hanging, heard.append]) as alert:
        alert(MASKED)
        alert(MASKED)
        alert(HALT)
        wait_for(lambda: len(heard) == 3)
        go.set()
    assert heard == [MASKED, MASKED, HALT]
    assert "ConnectionError: no line" in caplog.text


def test_risk_events_are_alerts_of_the_same_kind(robot: Callable[..., Robot]) -> None:
    service = robot(webhook())
    with Alerter(settings(channel("webhook")), "backtest", Words("en").alert) as alert:
        RiskLog([alert]).append(RiskEvent(40, RiskKind.HALTED, "portfolio", 0.31, 0.25))
    (told,) = service.bodies[0]["alerts"]
    assert told["text"] == (
        "Critical: Halted: Portfolio: all to cash (measured 31.00%, limit 25.00%)"
    )
    assert told["values"] == {"measured": 0.31, "limit": 0.25, "bar": 40}


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_risk_event_has_a_sentence(lang: str) -> None:
    for kind in RiskKind:
        text = Words(lang).alert(Alert(kind.value, "info", "expert 1", "", {"factor": 0.5}))
        assert kind.value not in text or lang == "en"


# --- secrets -------------------------------------------------------------------------------------


def test_no_secret_is_in_a_message_or_a_log(
    robot: Callable[..., Robot],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ECHELON_TOKEN", "a-long-token-of-the-engine")
    service = robot(webhook(), f"/hook/{TOKEN}?sign=abcdef123", SECRET)
    leak = f"cannot reach {service.url}/hook/{TOKEN}: {SECRET} a-long-token-of-the-engine abcdef123"
    service.refuse = [(500, {"seen": leak}, {}), (400, {"seen": leak}, {})]
    with caplog.at_level(logging.DEBUG), Alerter(settings(channel("webhook"))) as alert:
        alert(Alert("ended", "critical", values={"detail": leak}))
        wait_for(lambda: alert.failed)
        alert(Alert("ended", "critical", time="2", values={"detail": leak}))
    everything = caplog.text + json.dumps(service.bodies)
    assert "***" in caplog.text
    for secret in (TOKEN, SECRET, "a-long-token-of-the-engine", "abcdef123"):
        assert secret not in everything


def test_parts_of_addresses_are_secret_and_plain_words_are_not() -> None:
    redact = Redactor(
        [
            f"https://oapi.dingtalk.com/robot/send?access_token={TOKEN}",
            f"https://api.telegram.org/bot{SECRET}:x/sendMessage",
            "smtp://me:p%40ssword@mail.example.org:587",
        ]
    )
    assert redact(f"{TOKEN} p@ssword p%40ssword bot{SECRET}:x") == "*** *** *** ***"
    assert redact("the robot of mail.example.org: sendMessage") == (
        "the robot of mail.example.org: sendMessage"
    )


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("{kind: smtp, url: ECHELON_ALERT_URL}", "needs `to`"),
        ("{kind: telegram, url: ECHELON_ALERT_URL, to: [a, b]}", "one chat in `to`, found 2"),
        ("{kind: wecom, url: ECHELON_ALERT_URL, to: [a]}", "has no `to`"),
        ("{kind: wecom, url: ECHELON_ALERT_URL, secret: ECHELON_ALERT_S}", "has no `secret`"),
        ("{kind: webhook, url: AWS_SECRET_ACCESS_KEY}", "should match pattern"),
        ("{kind: webhook, url: 'https://example.org/hook'}", "should match pattern"),
        ("{kind: pager, url: ECHELON_ALERT_URL}", "'webhook', 'smtp', 'feishu'"),
        ("{kind: webhook, urL: ECHELON_ALERT_URL}", "did you mean 'url'?"),
    ],
)
def test_a_channel_that_cannot_be_is_refused(tree: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"alerts\.channels") as caught:
        load_section(LiveConfig, None, [f"alerts.channels=[{tree}]"])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "ECHELON_ALERT_URL is not set"),
        ("http://example.org/hook", "must hold a URL that begins with https://"),
        ("nonsense", "must hold a URL"),
        ("https://[", "must hold a URL"),
    ],
)
def test_an_address_must_be_there_and_encrypted(
    monkeypatch: pytest.MonkeyPatch, value: str | None, message: str
) -> None:
    if value is not None:
        monkeypatch.setenv("ECHELON_ALERT_URL", value)
    with pytest.raises(ConfigError, match=message) as caught:
        Alerter(settings(channel("webhook")))
    assert value is None or value not in str(caught.value)


def test_alerts_change_no_hash_and_are_kept_by_name() -> None:
    named = "alerts.channels=[{kind: feishu, url: ECHELON_ALERT_URL}]"
    plain, alerted = load_config(None, []), load_config(None, [named])
    assert fingerprint(plain) == fingerprint(alerted)
    assert "ECHELON_ALERT_URL" in to_yaml(alerted)


def test_nobody_to_send_to_is_said() -> None:
    with pytest.raises(UsageError, match="nobody to send it to"):
        send_now(AlertsConfig(), Message("s", "t"))


def test_a_channel_that_refuses_is_named_though_another_of_its_kind_takes_it(
    robot: Callable[..., Robot], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = robot(wecom(TOKEN), f"/cgi-bin/webhook/send?key={TOKEN}")
    monkeypatch.setenv("ECHELON_ALERT_OTHER", f"{service.url}/cgi-bin/webhook/send?key=other")
    other = channel("wecom").model_copy(update={"url": "ECHELON_ALERT_OTHER"})
    with pytest.raises(EchelonError, match=r"not every channel took the message:\nwecom: status"):
        send_now(settings(other, channel("wecom")), Message("s", "t"))
    assert service.taken == 1


@pytest.mark.parametrize("most", [7, 8, 9, 10, 2_048])
def test_a_clipped_text_is_whole_characters(most: int) -> None:
    for encoding in ("utf-8", "utf-16-le"):
        text = clip("K 线📉" * 400, most, encoding)
        assert len(text.encode(encoding)) <= most
        assert "�" not in text


# --- trainings and backtests ---------------------------------------------------------------------


def test_a_backtest_and_a_training_alert_of_risk_control(
    tmp_path: Path, bars_file: Path, robot: Callable[..., Robot], shell: Shell
) -> None:
    service = robot(webhook())
    named = "alerts={channels: [{kind: webhook, url: ECHELON_ALERT_URL, severity: info}]}"
    strict = ("risk.drawdown_limit=0.001", "risk.drawdown_release=0.0005", named)
    run = prepared_run(tmp_path / "run", bars_file, *tiny_settings("HIERARCHY"), ASSETS, *strict)
    config = load_config(run / "config.yaml")
    worlds, place = Worlds.from_prepared(Prepared.open(run), config), seed_directory(run, 1)
    assert ready(config, worlds, place, lambda: False)
    seen: list[Progress] = []
    Training(config, worlds, place, 1).run(seen.append)
    assert {alert.kind for now in seen for alert in now.alerts} >= {"masked"}
    times = [(alert.kind, alert.who, alert.time) for now in seen for alert in now.alerts]
    assert len(times) < 2 * 100, "bounded, and handed over once"

    heard: list[Alert] = []
    evaluate(TrainedRun.open(run), "valid", trust=False, alert_callbacks=[heard.append])
    masked = [alert for alert in heard if alert.kind == "masked"]
    assert masked
    first, last = (str(day) for day in config.split.valid)
    assert first <= masked[0].time[:10] <= masked[-1].time[:10] <= last
    assert masked[0].values["measured"] > masked[0].values["limit"]
    assert all(alert.severity != "info" for alert in heard)

    shell.works("evaluate", str(run), "--split", "valid")
    assert "masked" in {each["kind"] for body in service.bodies for each in body["alerts"]}
    shell.monkeypatch.delenv("ECHELON_ALERT_URL")
    _, err = shell.works("evaluate", str(run), "--split", "valid")
    assert "no alerts are sent: the environment variable ECHELON_ALERT_URL is not set" in err


def test_the_end_of_a_training_is_an_alert(
    bars_file: Path, robot: Callable[..., Robot], shell: Shell
) -> None:
    service = robot(webhook())
    named = "alerts.channels=[{kind: webhook, url: ECHELON_ALERT_URL, severity: info}]"
    words = tiny(bars_file, named)
    shell.works("train", *words, "--output-dir", "run", "--workers", "1")
    told = [each for body in service.bodies for each in body["alerts"]]
    assert [each["kind"] for each in told] == ["training_ended"]
    assert told[0]["text"].startswith("Notice: training ended: seed 42, ")
    shell.monkeypatch.delenv("ECHELON_ALERT_URL")
    code, _, err = shell("train", *words, "--output-dir", "other", "--workers", "1")
    assert code == 3
    assert "ECHELON_ALERT_URL is not set" in err
