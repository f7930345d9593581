"""The certificate as a page: what each market showed, beside what it had to show.

One file that loads nothing: style inside, pictures as inline SVG in the page's own colours, so
light, dark and paper need no script. The same findings give the same page, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from echelon.files import write_atomic
from echelon.proving.certificate import Certificate, Check, MarketResult
from echelon.proving.null import CHEAP
from echelon.proving.prove import PROOF_MARKETS
from echelon.report.certificate_words import CertificateWords
from echelon.report.charts.palette import css_variables
from echelon.report.charts.svg import (
    Lane,
    LaneWords,
    PolicyRow,
    Threshold,
    dots,
    lanes,
    strip,
)
from echelon.report.languages import file_name, language_links, languages_with
from echelon.report.rules import rules_line
from echelon.report.texts import Words

STEM = "certificate"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""No connection and no script."""


def write_certificate(certificate: Certificate, directory: Path, lang: str = "en") -> Path:
    """Write certificate.html (in Chinese certificate.zh.html) and return its path.

    A page in another language that is there is written anew, since certificate.json is.
    """
    CertificateWords(lang)  # refuses a language that there is not
    written = languages_with(directory, STEM, lang)
    for name in written:
        page = render(certificate, CertificateWords(name), written)
        write_atomic(directory / file_name(STEM, "html", name), page)
    return directory / file_name(STEM, "html", lang)


def rows_of(certificate: Certificate, words: CertificateWords) -> list[list[str]]:
    """A row a check: market, what is measured, result, interval, bar, verdict."""
    return [
        [
            words(f"market_{market.name}"),
            words(f"check_{check.name}"),
            words.result(check),
            words.interval(check),
            words.bar(check),
            words.verdict(check.passed),
        ]
        for market in certificate.markets
        for check in market.checks
    ]


def render(certificate: Certificate, words: CertificateWords, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    style = files("echelon.report").joinpath("style.css").read_text(encoding="utf-8")
    own = files("echelon.report").joinpath("certificate.css").read_text(encoding="utf-8")
    body = [
        f'<header class="top"><div><p class="eyebrow">Echelon'
        f"{language_links(STEM, words.lang, written)}</p>"
        f"<h1>{escape(words('title'))}</h1></div></header>",
        _summary(certificate, words),
        *(_market(market, words) for market in certificate.markets),
        _facts(certificate, words),
        f"<footer>{escape(words('footer'))}</footer>",
    ]
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="{"zh-CN" if words.lang == "zh" else "en"}">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(words('title'))} · Echelon</title>",
            f"<style>\n{css_variables()}\n{style}\n{own}</style></head>",
            "<body><main>",
            *body,
            "</main></body></html>\n",
        ]
    )


def _summary(certificate: Certificate, words: CertificateWords) -> str:
    names = {
        passed: [words(f"market_{m.name}") for m in certificate.markets if m.passed == passed]
        for passed in (True, False)
    }
    shown = {market.name for market in certificate.markets}
    left_out = [words(f"market_{name}") for name in PROOF_MARKETS if name not in shown]
    passed = words("some_passed", markets=", ".join(names[True])) if names[True] else ""
    if not certificate.passed:
        lead, below = words("some_failed", markets=", ".join(names[False])), [passed]
    elif left_out:  # what all five show together cannot be said of a part of them
        lead, below = passed, []
    else:
        lead, below = words("all_passed"), [passed]
    if left_out:
        below.append(words("left_out", markets=", ".join(left_out)))
    said = " ".join(text for text in (*below, words.mode(certificate)) if text)
    head = [words(k) for k in ("market", "check", "result", "interval_95", "bar", "verdict")]
    checks = [check for market in certificate.markets for check in market.checks]
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[:-1])
        + f"<td>{_badge(check.passed, words)}</td></tr>"
        for row, check in zip(rows_of(certificate, words), checks, strict=True)
    )
    return (
        f'<div class="card summary"><div class="lead"><p>{_badge(certificate.passed, words)} '
        f"{escape(lead)}</p><p>{escape(said)}</p></div>{_table(head, body, 'checks')}</div>"
    )


def _market(market: MarketResult, words: CertificateWords) -> str:
    about = words(f"about_{market.name}")
    notes = "".join(f'<p class="note">{escape(text)}</p>' for text in _notes(market, words))
    return (
        f'<section class="card" id="{market.name}"><div class="head">'
        f"<h2>{escape(words(f'market_{market.name}'))}</h2>"
        f'<div class="tools">{_badge(market.passed, words)}</div></div>'
        f'<p class="note">{escape(about)}</p>{"".join(_pictures(market, words))}{notes}'
        f'<p class="sizes">{escape(_sizes(market, words))}</p></section>'
    )


def _notes(market: MarketResult, words: CertificateWords) -> Iterator[str]:
    cheap = ", ".join(words.policy(name) for name in CHEAP)
    agents = market.facts.get("claims", {}).get("agent", [0, 0])[1]
    for note in market.notes:
        yield words(f"note_{note}", cheap=cheap, agents=agents)


def _sizes(market: MarketResult, words: CertificateWords) -> str:
    facts = market.facts
    parts: list[str] = []
    if facts.get("seeds"):
        parts.append(words("seeds", seeds=", ".join(map(str, facts["seeds"]))))
    steps = facts.get("steps")
    if isinstance(steps, Mapping):
        parts += [f"{words('steps', steps=f'{n:,}')} ({fee} bp)" for fee, n in steps.items()]
    elif steps:
        parts.append(words("steps", steps=f"{steps:,}"))
    if "windows" in facts:
        train, valid, test = facts["windows"]
        parts.append(words("null_draws", draws=facts["draws"]))
        parts.append(words("windows", train=train, valid=valid, test=test))
    elif "draws" in facts:
        parts.append(words("draws", draws=facts["draws"]))
    if "pairs" in facts:
        parts.append(words("pairs", pairs=facts["pairs"]))
    if "hierarchy_seeds" in facts:
        parts.append(
            words(
                "hierarchies",
                seeds=", ".join(map(str, facts["hierarchy_seeds"])),
                steps=f"{facts['hierarchy_steps']:,}",
                pairs=facts["hierarchy_pairs"],
            )
        )
    parts.append(words("spent", cpu=f"{market.cpu_seconds:,.0f}"))
    return " · ".join(parts)


def _pictures(market: MarketResult, words: CertificateWords) -> Iterator[str]:
    """The pictures of a market, each below its title."""
    makers = {
        "planted": _planted,
        "regime": _regime,
        "null": _null,
        "leaky": _leaky,
        "costly": _costly,
    }
    for title, picture in makers[market.name](market, words):
        yield f"<figure><figcaption>{escape(title)}</figcaption>{picture}</figure>"


def _planted(market: MarketResult, words: CertificateWords) -> Iterator[tuple[str, str]]:
    lines = []
    checks = {check.name: check for check in market.checks}
    signals = list(dict.fromkeys(key.split("/")[0] for key in market.rows))
    for signal in signals:
        bayes = market.rows[f"{signal}/bayes"]
        for key, values in market.rows.items():
            found, name = key.split("/")
            if found != signal or name == "bayes":
                continue
            shares = [v / b for v, b in zip(values, bayes, strict=True)]
            check = checks[f"{signal}_share"] if name == "agent" else None
            label = f"{words.policy(signal)}: {words.policy(name)}"
            lines.append(_line(label, shares, check))
    asked = sorted({bar.value for check in market.checks for bar in check.bars if bar.value})
    marks = [Threshold(value, f"{100 * value:.0f} %") for value in reversed(asked)]
    yield words("pic_share"), dots(lines, unit="share", thresholds=marks)


def _regime(market: MarketResult, words: CertificateWords) -> Iterator[tuple[str, str]]:
    lines = [
        _line(words.policy(name), values, None, strong=name.endswith(("agent", "hierarchy")))
        for name, values in market.rows.items()
    ]
    title = "pic_sharpe_hierarchy" if "hierarchy" in market.rows else "pic_sharpe_pairs"
    yield words(title), dots(lines, unit="sharpe", thresholds=[Threshold(0.0, "")])
    if "shown" in market.facts:
        yield _in_charge(market.facts, words)


def _in_charge(facts: Mapping[str, Any], words: CertificateWords) -> tuple[str, str]:
    """Who was in charge at each bar of one draw, over the regime that nobody saw."""
    shown, seeds = facts["shown"], facts["information"]
    own = seeds[str(shown["seed"])]
    shares = [one["information"] / one["of"] if one["of"] else 0.0 for one in seeds.values()]
    title = words(
        "pic_in_charge",
        seed=shown["seed"],
        bits=f"{own['information']:.2f}",
        of=f"{own['of']:.2f}",
        share=f"{own['information'] / own['of'] if own['of'] else 0.0:.0%}",
    )
    if len(shares) > 1:
        title += words(
            "pic_in_charge_seeds",
            seeds=len(shares),
            mean=f"{sum(shares) / len(shares):.0%}",
            low=f"{min(shares):.0%}",
            high=f"{max(shares):.0%}",
        )
    experts = shown["experts"]
    choices = [Lane(words("lane_expert", number=k), k) for k in range(experts)]
    choices.append(Lane(words("lane_cash"), experts))
    told = LaneWords(
        *(words(f"lane_{name}") for name in ("hidden", "up", "down", "in_charge", "of_that"))
    )
    return title, lanes(shown["regime"], shown["in_charge"], choices, told)


def _null(market: MarketResult, words: CertificateWords) -> Iterator[tuple[str, str]]:
    lines = []
    for key, values in market.rows.items():
        place, policy = key.split("/")
        name = words("market_null") if place == "null" else words.policy("trend")
        claims = [v for c in market.checks if c.name == "null_power" for v in c.count or ()]
        k, n = market.facts["claims"][policy] if place == "null" else claims
        label = f"{name}: {words.policy(policy)}"
        lines.append(PolicyRow(label, tuple(values), right=f"{k} / {n}", strong=place == "trend"))
    yield words("pic_low"), strip(lines, head=words("claims"))


def _leaky(market: MarketResult, words: CertificateWords) -> Iterator[tuple[str, str]]:
    lines = [
        _line(words.policy(name), values, None, strong=name == "peeking")
        for name, values in market.rows.items()
    ]
    yield words("pic_sharpe"), dots(lines, unit="sharpe", thresholds=[Threshold(5.0, "5")])


def _costly(market: MarketResult, words: CertificateWords) -> Iterator[tuple[str, str]]:
    for kind, title in (("sharpes", "pic_sharpe"), ("turnover", "pic_turnover")):
        lines = []
        for key, values in market.rows.items():
            fee, found, name = key.split("/")
            if found == kind:
                label = words("at_fee", policy=words.policy(name), fee=fee)
                lines.append(_line(label, values, None, strong=name == "agent"))
        yield words(title), dots(lines, unit="sharpe", thresholds=[Threshold(0.0, "")])


def _line(
    label: str, values: Sequence[float], check: Check | None, *, strong: bool | None = None
) -> PolicyRow:
    interval = None
    if check is not None and check.low is not None and check.high is not None:
        interval = (check.low, check.high)
    return PolicyRow(
        label, tuple(values), interval, strong=check is not None if strong is None else strong
    )


def _facts(certificate: Certificate, words: CertificateWords) -> str:
    about: Mapping[str, Any] = certificate.about
    took = words(
        "time",
        seconds=f"{about['seconds']:,.0f}",
        cpu=f"{about['cpu_seconds']:,.0f}",
        cores=about["cores"],
    )
    facts = {
        "command": about["command"],
        "mode": words(certificate.mode),
        "config_hash": about["config_hash"],
        **({"rules": rules_line(about["rules"], Words(words.lang))} if "rules" in about else {}),
        "code": ", ".join(about["code"]),
        "finished": about["finished"],
        "time": took,
        "platform": f"Echelon {about['echelon']}, Python {about['python']}, {about['platform']}",
    }
    items = "".join(
        f'<div><dt>{escape(words(f"fact_{name}"))}</dt><dd class="code">{escape(value)}</dd></div>'
        for name, value in facts.items()
    )
    return (
        f'<div class="card"><div class="head"><h2>{escape(words("facts"))}</h2></div>'
        f'<dl class="facts">{items}</dl></div>'
    )


def _badge(passed: bool | None, words: CertificateWords) -> str:
    kind = "neutral" if passed is None else "good" if passed else "bad"
    return f'<span class="badge {kind}">{escape(words.verdict(passed))}</span>'


def _table(head: Sequence[str], body: str, kind: str) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
