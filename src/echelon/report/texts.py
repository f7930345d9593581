"""Every word a report says: one catalogue a language, catalogue/en.yaml and catalogue/zh.yaml.

`Words("zh")("equity")` gives the Chinese text; texts with fields take them by name. A measure, a
baseline or a reason that has no text is shown by its own name. Training and risk control record
events as a code and values; their sentences are made here, of the texts event_CODE.

Pages and pictures are named by language, so that neither is written over the other: report.html
is in English, report.zh.html in Chinese. A page links to those in other languages that are there
when it is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from echelon.errors import UsageError
from echelon.files import package_yaml
from echelon.monitoring.alerts import Alert
from echelon.ops.measures import LABELS

Lang = Literal["en", "zh"]
DASH = "–"
"""Stands for a number that there is not."""
MEAN = "mean"
"""Key of what is a mean over seeds."""

_SUBJECTS = {
    "halt": "live_halt",
    "refused": "refused",
    "stopped": "stopped",
    "rejected": "reason",
    "command": "live_command",
}
"""Kind of an alert whose subject is a code → what it is a code of."""
_EXPERT = re.compile(r"expert (\d+)")


@cache
def catalogue(lang: str) -> Mapping[str, str]:
    tree: dict[str, str] = package_yaml("echelon.report", f"catalogue/{lang}.yaml")
    return tree


class Words:
    def __init__(self, lang: str) -> None:
        if lang not in get_args(Lang):
            raise UsageError(f"no report in language {lang!r}: choose en or zh.")
        self.lang = lang
        self._texts = catalogue(lang)

    def rename(self, **keys: str) -> Words:
        """The same, with the text of another key in place of some: name → key."""
        other = Words(self.lang)
        other._texts = {**self._texts, **{name: self._texts[key] for name, key in keys.items()}}
        return other

    def __call__(self, key: str, **fields: object) -> str:
        return self._texts[key].format(**fields)

    def __contains__(self, key: str) -> bool:
        return key in self._texts

    def count(self, key: str, n: int) -> str:
        """So many of something: the text of `key`_one, or of `key`_n."""
        return self(f"{key}_one") if n == 1 else self(f"{key}_n", n=n)

    def measure(self, name: str) -> str:
        """What a measure is called; without a translation, as in English."""
        label = LABELS.get(name)
        if label is None:
            return name.replace("_", " ")
        return (self.lang == "zh" and label.text_zh) or label.text

    def meaning(self, name: str) -> str:
        """What a measure means, in a sentence; without a translation, as in English."""
        label = LABELS.get(name)
        if label is None:
            return self.measure(name)
        return (self.lang == "zh" and label.meaning_zh) or label.meaning

    def name(self, key: str) -> str:
        """What a baseline, an agent (`seed-42`) or the mean of agents is called."""
        if key == MEAN:
            return self("mean_of_seeds")
        if key.startswith("seed-"):
            return self("seed_n", seed=key.removeprefix("seed-"))
        return self._text_or("book", key, key.replace("_", " "))

    def in_text(self, key: str) -> str:
        """What a baseline is called in the middle of a sentence."""
        return self._text_or("in_text", key, self.name(key))

    def term(self, kind: str, key: str) -> str:
        """What a reason (of a cut order), an event of a life or a ledger's phrase is called."""
        return self._text_or(kind, key, key.replace("_", " "))

    def who(self, name: str) -> str:
        """What an expert, the portfolio or the router is called; other names are their own."""
        match = _EXPERT.fullmatch(name)
        if match:
            return self("expert_n", n=match[1])
        return self._text_or("who", name, self._text_or("book", name, name))

    def reference(self, name: str) -> str:
        """What a reference policy is called: Fixed-Share, an expert by its number or its rule."""
        kind, *rest = name.split("-", 2)
        if len(rest) == 2:
            return self.name(rest[1])
        return self("expert_n", n=rest[0]) if rest else self(f"row_{kind}")

    def event(self, code: str, values: Mapping[str, float | str]) -> str:
        """The sentence of an event, made of its code and values; without a text, both."""
        text = self._texts.get(f"event_{code}")
        if text is not None:
            with suppress(KeyError, ValueError):  # values that are not those of the text
                return text.format(**values)
        details = (f"{name} {value}" for name, value in values.items())
        return self("comma").join((code.replace("_", " "), *details))

    def alert(self, alert: Alert) -> str:
        """The sentence of an alert, after its severity; of risk control's as in a report."""
        kind, values = alert.kind, dict(alert.values)
        term = _SUBJECTS.get(kind)
        who = self.who(alert.who) if term is None else self.term(term, alert.who)
        text = self._texts.get(f"alert_{kind}")
        if text is None:
            event = self.event(kind, values)
            text = self("colon").join(filter(None, (self.term("risk", kind), who, event)))
            if "limit" in values:
                text += self("alert_measured", **values)
        else:
            text = text.format(who=who, **values)
        if "repeated" in values:
            text += self("alert_repeated", n=values["repeated"])
        return self("colon").join((self(f"alert_{alert.severity}"), text))

    def in_charge(self, charge: Mapping[str, Any]) -> str:
        """Who of a hierarchy is in charge, and why, as a live decision has it."""
        key = "summary_chosen" if charge["decided_now"] else "summary_kept"
        said = self(key, who=self.who(charge["expert"]))
        if odds := charge["probabilities"]:
            said += self("summary_odds", p=f"{odds.get(charge['expert'], 0.0):.0%}")
        parts = [said]
        if charge["masked"]:
            parts.append(
                self("summary_masked", who=self("comma").join(map(self.who, charge["masked"])))
            )
        if charge["position_scale"] < 1.0:
            parts.append(self("event_halved", factor=charge["position_scale"]))
        parts += [self("event_halted")] * charge["halted"]
        parts += [self("untraded_turnover_limit")] * charge["turnover_limited"]
        return self("join").join(parts)

    def _text_or(self, kind: str, key: str, default: str) -> str:
        return self._texts.get(f"{kind}_{key}", default)


def time_text(time: object) -> str:
    """A bar's time as a reader wants it: a day where it is one."""
    return DASH if time is None else str(time)[:16].replace("T", " ").removesuffix(" 00:00")


def file_name(stem: str, ending: str, lang: str) -> str:
    """Name of a page or picture: `report.html`, `report.zh.html`."""
    return f"{stem}.{ending}" if lang == "en" else f"{stem}.{lang}.{ending}"


def languages_with(directory: Path, stem: str, lang: str) -> list[str]:
    """`lang`, and those that the directory has a page in already."""
    return [
        name
        for name in get_args(Lang)
        if name == lang or (directory / file_name(stem, "html", name)).is_file()
    ]


def language_of(file: str) -> str:
    middle = file.split(".")[-2] if file.count(".") > 1 else "en"
    return middle if middle in get_args(Lang) else "en"
