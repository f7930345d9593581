"""Settings of alerts: where they go and how many; see docs/guide/alerts.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from echelon.config._base import Section

Severity = Literal["info", "warning", "critical"]
Variable = Annotated[str, Field(pattern=r"^ECHELON_ALERT_[A-Z0-9_]{1,60}$")]
"""NAME of an environment variable. Others cannot be named: a run's configuration may be a
stranger's, and sends no other secret of this machine."""


class ChannelConfig(Section):
    """Where alerts go."""

    kind: Literal["webhook", "smtp", "feishu", "wecom", "dingtalk", "telegram"]
    """What is spoken there: JSON to a webhook, e-mail, or a robot of 飞书 (feishu), 企业微信
    (wecom), 钉钉 (dingtalk) or Telegram."""
    url: Variable
    """NAME of the environment variable that holds the address, ECHELON_ALERT_…: https://…, of
    Telegram https://api.telegram.org/botTOKEN/sendMessage, of e-mail smtp://USER:PASSWORD@HOST:587
    or smtps://…:465."""
    secret: Variable | None = None
    """NAME of the environment variable that holds the secret by which messages to a robot of 飞书
    or 钉钉 are signed, or the bearer token of a webhook."""
    severity: Severity = "warning"
    """The least severe alert that goes there."""
    to: tuple[str, ...] = ()
    """Addresses of an e-mail; the one chat of Telegram."""
    sender: str | None = None
    """Address an e-mail comes from; null: the first of `to`."""

    def _contradictions(self) -> Iterator[str]:
        if self.kind == "smtp" and not self.to:
            yield "kind smtp needs `to`: the addresses the e-mail goes to"
        if self.kind == "telegram" and len(self.to) != 1:
            yield f"kind telegram needs one chat in `to`, found {len(self.to)}"
        if self.to and self.kind not in ("smtp", "telegram"):
            yield f"kind {self.kind} has no `to`: its url says where messages go"
        if self.secret and self.kind not in ("webhook", "feishu", "dingtalk"):
            yield f"kind {self.kind} has no `secret`: all of it is in the url"


class AlertsConfig(Section):
    """What is told to whom while something runs; no result depends on it."""

    channels: tuple[ChannelConfig, ...] = ()
    """Where alerts go."""
    language: Literal["en", "zh"] = "en"
    """Of the texts."""
    repeat_seconds: NonNegativeFloat = 3600.0
    """How long the same alert is not sent again."""
    per_minute: PositiveInt = 10
    """Messages a minute to a channel; alerts that come faster share one."""
    drawdown: Annotated[float, Field(gt=0, le=1)] | None = 0.1
    """Drawdown of a live account that is warned of; null: none is."""
