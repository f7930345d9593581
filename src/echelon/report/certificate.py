"""The certificate as a page: what each market showed, and what it had to show.

One file that loads nothing: style inside, pictures as inline SVG in the page's own colours, so
light, dark and paper need no script. Where things stand in a picture is said at the end of this
module; the macro `picture` of templates/blocks.html draws them. The same findings give the same
page, byte for byte. templates/certificate.html says what is on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from echelon.evaluation.statistics import seed_interval
from echelon.files import write_atomic
from echelon.proving.certificate import Certificate, Check, MarketResult
from echelon.proving.null import CHEAP
from echelon.proving.prove import PROOF_MARKETS
from echelon.report.pages import Block, render_page
from echelon.report.rules import rules_line
from echelon.report.texts import DASH, Words, file_name, languages_with

STEM = "certificate"
_WIDTH, _LEFT, _RIGHT = 1100, 300, 150
_ROW, _TOP, _BOTTOM = 26, 18, 30
_NEAR = 40

Unit = Literal["share", "sharpe"]
HEADS = ("market", "check", "result", "interval_95", "bar", "verdict")


def write_certificate(certificate: Certificate, directory: Path, lang: str = "en") -> Path:
    Words(lang)  # refuses a language that there is not
    written = languages_with(directory, STEM, lang)
    for name in written:
        page = render(certificate, Words(name), written)
        write_atomic(directory / file_name(STEM, "html", name), page)
    return directory / file_name(STEM, "html", lang)


def render(certificate: Certificate, words: Words, written: Sequence[str] = ()) -> str:
    """The whole page. written: languages that there are pages in"""
    cheap = ", ".join(policy_name(name, words) for name in CHEAP)
    markets = []
    for market in certificate.markets:
        agents = market.facts.get("claims", {}).get("agent", [0, 0])[1]
        fields = {"cheap": cheap, "agents": agents, "assets": market.facts.get("assets")}
        notes = [words(f"proof_note_{note}", **fields) for note in market.notes]
        pictures = list(_PICTURES[market.name](market, words))
        markets.append((market, pictures, notes, " · ".join(_sizes(market, words))))
    return render_page(
        "certificate",
        words,
        words("proof_title"),
        stem=STEM,
        written=written,
        interactive=False,
        certificate=certificate,
        lead=_lead(certificate, words),
        heads=HEADS,
        rows=check_rows(certificate, words),
        checks=[check.passed for market in certificate.markets for check in market.checks],
        verdict=_verdict,
        markets=markets,
        facts=_facts(certificate, words),
    )


def check_rows(certificate: Certificate, words: Words) -> list[list[str]]:
    """A row a check: market, what is measured, result, interval, bar, verdict."""
    return [
        [
            words(f"proof_market_{market.name}"),
            words(f"proof_check_{check.name}"),
            _result(check, words),
            _interval(check, words),
            _bars(check, words),
            _verdict(check.passed, words),
        ]
        for market in certificate.markets
        for check in market.checks
    ]


def mode_text(certificate: Certificate, words: Words) -> str:
    """How large a proof it is."""
    sizes, pace = (certificate.about.get(name, {}) for name in ("sizes", "pace"))
    numbers = {name: f"{n:,}" for name, n in sizes.items()}
    mode = words(f"proof_mode_{certificate.mode}", **numbers)
    return mode + (words("proof_mode_pace", **pace) if pace else "")


def time_text(about: Mapping[str, Any], words: Words) -> str:
    """How long it took. about: the certificate's"""
    seconds, cpu = f"{about['seconds']:,.0f}", f"{about['cpu_seconds']:,.0f}"
    return words("proof_time", cores=about["cores"], seconds=seconds, cpu=cpu)


def policy_name(name: str, words: Words) -> str:
    if name.startswith(("momentum ", "reversal ", "relative ")):
        kind, bars = name.rsplit(" ", 1)
        return words("proof_rule", kind=words(f"policy_{kind}"), bars=bars)
    return words(f"policy_{name}")


def _number(value: float | None, unit: str) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:.1%}" if unit == "share" else f"{value:.2f}"


def _result(check: Check, words: Words) -> str:
    if check.unit == "names":
        return ", ".join(check.names) or words("proof_nothing")
    if check.count is not None:
        k, n = check.count
        return words("proof_k_of_n", k=k, n=n, share=_number(check.estimate, "share"))
    return _number(check.estimate, check.unit)


def _interval(check: Check, words: Words) -> str:
    if check.low is None or check.high is None:
        return DASH
    low, high = (_number(end, check.unit) for end in (check.low, check.high))
    return words("proof_interval", low=low, high=high)


def _bars(check: Check, words: Words) -> str:
    if check.unit == "names":
        return words("proof_bar_names")
    if not check.bars:
        return words("proof_information")
    form = "{:.0%}" if check.unit == "share" else "{:g}"
    return words("proof_and").join(
        words(f"proof_bar_{bar.of}", side=words(f"proof_{bar.side}"), value=form.format(bar.value))
        for bar in check.bars
    )


def _verdict(passed: bool | None, words: Words) -> str:
    return DASH if passed is None else words("proof_passed" if passed else "proof_failed")


def _lead(certificate: Certificate, words: Words) -> list[str]:
    names = {
        passed: [words(f"proof_market_{m.name}") for m in certificate.markets if m.passed == passed]
        for passed in (True, False)
    }
    shown = {market.name for market in certificate.markets}
    left_out = [words(f"proof_market_{name}") for name in PROOF_MARKETS if name not in shown]
    passed = words("proof_some_passed", markets=", ".join(names[True])) if names[True] else ""
    if not certificate.passed:
        lead, below = words("proof_some_failed", markets=", ".join(names[False])), [passed]
    elif left_out:  # what all five show together cannot be said of a part of them
        lead, below = passed, []
    else:
        lead, below = words("proof_all_passed"), [passed]
    if left_out:
        below.append(words("proof_left_out", markets=", ".join(left_out)))
    text = " ".join(text for text in (*below, mode_text(certificate, words)) if text)
    return [lead, text]


def _sizes(market: MarketResult, words: Words) -> Iterator[str]:
    facts = market.facts
    if facts.get("seeds"):
        yield words("proof_seeds", seeds=", ".join(map(str, facts["seeds"])))
    steps = facts.get("steps")
    if isinstance(steps, Mapping):
        for fee, n in steps.items():
            yield f"{words('proof_steps', steps=f'{n:,}')} ({fee} bp)"
    elif steps:
        yield words("proof_steps", steps=f"{steps:,}")
    if "windows" in facts:
        train, valid, test = facts["windows"]
        yield words("proof_null_draws", draws=facts["draws"])
        yield words("proof_windows", train=train, valid=valid, test=test)
    elif "draws" in facts:
        yield words("proof_draws", draws=facts["draws"])
    if "pairs" in facts:
        yield words("proof_pairs", pairs=facts["pairs"])
    if "hierarchy_seeds" in facts:
        yield words(
            "proof_hierarchies",
            seeds=", ".join(map(str, facts["hierarchy_seeds"])),
            steps=f"{facts['hierarchy_steps']:,}",
            pairs=facts["hierarchy_pairs"],
        )
    yield words("proof_spent", cpu=f"{market.cpu_seconds:,.0f}")


_Pictures: TypeAlias = "Iterator[tuple[str, Picture]]"


def _planted_lines(market: MarketResult, words: Words) -> _Pictures:
    lines = []
    checks = {check.name: check for check in market.checks}
    for signal in dict.fromkeys(key.split("/")[0] for key in market.rows):
        bayes = market.rows[f"{signal}/bayes"]
        for key, values in market.rows.items():
            own, name = key.split("/")
            if own != signal or name == "bayes":
                continue
            shares = [v / b for v, b in zip(values, bayes, strict=True)]
            ends = None
            if name == "agent":
                low, high = checks[f"{signal}_share"].low, checks[f"{signal}_share"].high
                ends = None if low is None or high is None else (low, high)
            label = f"{policy_name(signal, words)}: {policy_name(name, words)}"
            lines.append(PolicyRow(label, tuple(shares), ends, strong=name == "agent"))
    asked = sorted({bar.value for check in market.checks for bar in check.bars if bar.value})
    marks = {value: f"{100 * value:.0f} %" for value in reversed(asked)}
    yield words("proof_pic_share"), dots(lines, unit="share", thresholds=marks)


def _sharpes(market: MarketResult, words: Words) -> _Pictures:
    strong = ("agent", "hierarchy", "peeking")
    lines = [
        PolicyRow(policy_name(name, words), tuple(values), strong=name.endswith(strong))
        for name, values in market.rows.items()
    ]
    title, marks = "pic_sharpe", {5.0: "5"}
    if market.name == "regime":
        title = "pic_sharpe_hierarchy" if "hierarchy" in market.rows else "pic_sharpe_pairs"
        marks = {0.0: ""}
    yield words(f"proof_{title}"), dots(lines, unit="sharpe", thresholds=marks)
    if "shown" in market.facts:
        yield _in_charge(market.facts, words)


def _in_charge(facts: Mapping[str, Any], words: Words) -> tuple[str, Picture]:
    """Who was in charge at each bar of one draw, over the regime that nobody saw."""
    shown, seeds = facts["shown"], facts["information"]
    own = seeds[str(shown["seed"])]
    shares = [seed["information"] / seed["of"] if seed["of"] else 0.0 for seed in seeds.values()]
    title = words(
        "proof_pic_in_charge",
        seed=shown["seed"],
        bits=f"{own['information']:.2f}",
        of=f"{own['of']:.2f}",
        share=f"{own['information'] / own['of'] if own['of'] else 0.0:.0%}",
    )
    if len(shares) > 1:
        title += words(
            "proof_pic_in_charge_seeds",
            seeds=len(shares),
            mean=f"{sum(shares) / len(shares):.0%}",
            low=f"{min(shares):.0%}",
            high=f"{max(shares):.0%}",
        )
    experts = shown["experts"]
    choices = {words("proof_lane_expert", number=k): k for k in range(experts)}
    choices[words("proof_lane_cash")] = experts
    names = ("hidden", "up", "down", "in_charge", "of_that")
    texts = {name: words(f"proof_lane_{name}") for name in names}
    return title, lanes(shown["regime"], shown["in_charge"], choices, texts)


def _null(market: MarketResult, words: Words) -> _Pictures:
    lines = []
    power = [n for check in market.checks if check.name == "null_power" for n in check.count or ()]
    for key, values in market.rows.items():
        place, policy = key.split("/")
        name = words("proof_market_null") if place == "null" else policy_name("trend", words)
        k, n = market.facts["claims"][policy] if place == "null" else power
        label = f"{name}: {policy_name(policy, words)}"
        lines.append(PolicyRow(label, tuple(values), right=f"{k} / {n}", strong=place == "trend"))
    yield words("proof_pic_low"), strip(lines, head=words("proof_claims"))


def _costly(market: MarketResult, words: Words) -> _Pictures:
    for kind, title in (("sharpes", "pic_sharpe"), ("turnover", "pic_turnover")):
        lines = []
        for key, values in market.rows.items():
            fee, own, name = key.split("/")
            if own == kind:
                label = words("proof_at_fee", policy=policy_name(name, words), fee=fee)
                lines.append(PolicyRow(label, tuple(values), strong=name == "agent"))
        yield words(f"proof_{title}"), dots(lines, unit="sharpe", thresholds={0.0: ""})


_PICTURES: Mapping[str, Callable[[MarketResult, Words], _Pictures]] = {
    "planted": _planted_lines,
    "regime": _sharpes,
    "null": _null,
    "leaky": _sharpes,
    "costly": _costly,
}


def _facts(certificate: Certificate, words: Words) -> list[tuple[str, list[str]]]:
    about = certificate.about
    facts = {
        "command": about["command"],
        "mode": words(f"proof_{certificate.mode}"),
        "config_hash": about["config_hash"],
        **({"rules": rules_line(about["rules"], words)} if "rules" in about else {}),
        "code": ", ".join(about["code"]),
        "finished": about["finished"],
        "time": time_text(about, words),
        "platform": f"Echelon {about['echelon']}, Python {about['python']}, {about['platform']}",
    }
    return [(f"proof_fact_{name}", [value]) for name, value in facts.items()]


@dataclass(frozen=True)
class PolicyRow:
    """One row: values as rings around a dot at their mean, or as ticks where there is no dot.

    interval: of the mean; paths: class and outline of what fills a lane
    right, far: text in the first and in the last column at the right
    """

    label: str
    values: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    right: str = ""
    strong: bool = False
    mean: float | None = None
    paths: Sequence[tuple[str, str]] = ()
    far: str = ""


@dataclass(frozen=True)
class Picture(Block):
    """Rows over an axis from `low` to `high`.

    thresholds: value of a vertical line → what stands above it
    heads: over the columns at the right; keys: class of a square's colour, its x, what it means
    """

    rows: Sequence[PolicyRow]
    low: float
    high: float
    unit: Unit = "sharpe"
    thresholds: Mapping[float, str] = field(default_factory=dict)
    heads: Sequence[str] = ()
    keys: Sequence[tuple[str, int, str]] = ()
    width: ClassVar = _WIDTH
    right: ClassVar = _WIDTH - _RIGHT + 24

    def at(self, value: float) -> float:
        """The place of a value; what lies outside is drawn at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    @staticmethod
    def middle(k: int) -> int:
        """Where the middle of row k is, from the top."""
        return _TOP + _ROW * k + _ROW // 2

    @property
    def bottom(self) -> int:
        """Where the axis is, from the top."""
        return _TOP + _ROW * len(self.rows)

    @property
    def height(self) -> int:
        """Of all."""
        return self.bottom + _BOTTOM

    @property
    def grid(self) -> list[tuple[float, str]]:
        """Places and labels of about six round values."""
        rough = (self.high - self.low) / 6
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        return [(self.at(v), self._text(v)) for v in (round(k * step, 10) for k in numbers)]

    def _text(self, value: float) -> str:
        if self.unit == "share":
            return f"{value:.0%}"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"

    @property
    def bars(self) -> list[tuple[float, str, str]]:
        """Place, label and anchor of thresholds; labels side by side grow away from one another."""
        places = [self.at(value) for value in self.thresholds]
        bars = []
        for x, label in zip(places, self.thresholds.values(), strict=True):
            before = any(0 < x - place < _NEAR for place in places)
            after = any(0 < place - x < _NEAR for place in places)
            bars.append((x, label, "end" if after else "start" if before else "middle"))
        return bars


def dots(rows: Sequence[PolicyRow], *, unit: Unit, thresholds: Mapping[float, str]) -> Picture:
    """A ring a value, a dot at the mean, its interval, and the mean in figures at the right."""
    drawn = []
    for row in rows:
        over_seeds = seed_interval(row.values)
        ends = row.interval or ((over_seeds.low, over_seeds.high) if over_seeds.n > 1 else None)
        mean = over_seeds.estimate
        right = f"{mean:.1%}" if unit == "share" else f"{mean:.2f}"
        drawn.append(replace(row, interval=ends, mean=mean, right=right))
    return Picture(drawn, *_ends(rows, thresholds), unit, thresholds)


def strip(rows: Sequence[PolicyRow], *, head: str) -> Picture:
    """A tick a value, and a line at zero."""
    return Picture(rows, *_ends(rows, ()), thresholds={0.0: ""}, heads=[head])


def _ends(rows: Sequence[PolicyRow], thresholds: Iterable[float]) -> tuple[float, float]:
    """Of an axis that shows all values, thresholds and zero, with a little room at both ends."""
    values = [*(v for row in rows for v in row.values), *thresholds, 0.0]
    low, high = min(values), max(values)
    room = 0.04 * (high - low) or 0.5
    return low - room, high + room


def lanes(
    hidden: Sequence[int],
    chosen: Sequence[int],
    choices: Mapping[str, int],
    texts: Mapping[str, str],
) -> Picture:
    """A band of what was hidden at each bar (±1), and below it a lane for each choice.

    A lane is filled where its choice was in charge, in the colour of what was hidden then: one of a
    single colour knows when it is its turn. Figures at the right: its share of the bars, and how
    much of that share lies in the first state.

    choices: what one is called → its number in `chosen`
    texts: hidden, its states up and down, heads in_charge and of_that
    """
    assert len(hidden) == len(chosen) > 0, "a state and a choice for every bar"
    places = {"up": _LEFT, "down": _LEFT + (_WIDTH - _LEFT - _RIGHT) // 2}
    keys = [(kind, x, texts[kind]) for kind, x in places.items()]
    heads = [texts["in_charge"], texts["of_that"]]
    empty = Picture((), 0.0, float(len(hidden)), heads=heads, keys=keys)
    rows = []
    for k, (label, number) in enumerate([(texts["hidden"], None), *choices.items()]):
        here = [number is None or choice == number for choice in chosen]
        y, paths = Picture.middle(k), []
        for state, kind in ((1, "up"), (-1, "down")):
            runs = _runs([a and b == state for a, b in zip(here, hidden, strict=True)])
            outline = "".join(
                f"M{empty.at(first)} {y - 8}H{empty.at(last)}v16H{empty.at(first)}z"
                for first, last in runs
            )
            if outline:
                paths.append((kind, outline))
        bars = sum(here)
        up = sum(b == 1 for a, b in zip(here, hidden, strict=True) if a)
        right = "" if number is None else f"{bars / len(hidden):.0%}"
        far = f"{up / bars:.0%}" if bars else DASH
        rows.append(PolicyRow(label, strong=number is None, paths=paths, right=right, far=far))
    return replace(empty, rows=rows)


def _runs(here: Sequence[bool]) -> list[tuple[int, int]]:
    """Stretches of true ones: the first, and the one after the last."""
    edges = [k for k in range(len(here)) if here[k] != (k > 0 and here[k - 1])]
    if here[-1]:
        edges.append(len(here))
    return list(zip(edges[::2], edges[1::2], strict=True))
