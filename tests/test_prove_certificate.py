"""The certificate: what it holds, what passes, and the page that shows it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from echelon.errors import StoreError, UsageError
from echelon.ops.information import mutual_information
from echelon.proving.certificate import (
    Bar,
    Certificate,
    Check,
    MarketResult,
    count_check,
    seed_check,
)
from echelon.proving.null import CHEAP
from echelon.proving.planted import PLANTED, SHOWN_RULES
from echelon.proving.regime import BLIND, CHOOSING
from echelon.report.certificate import (
    PolicyRow,
    check_rows,
    dots,
    lanes,
    render,
    strip,
    write_certificate,
)
from echelon.report.texts import Words

ABOUT = {
    "command": "echelon prove --quick -o 'a=<b>'",
    "finished": "2026-01-01T00:00:00+00:00",
    "config_hash": "ab" * 32,
    "seed": 42,
    "echelon": "0.1",
    "code": ["abc", "def"],
    "python": "3.12",
    "platform": "linux-x86_64",
    "cores": 2,
    "cpu_seconds": 500.0,
    "seconds": 260.0,
}


def example(*, power: int = 20) -> Certificate:
    """Every market, with numbers like real ones."""
    planted = {
        f"{signal}/{name}": [2.0 + 0.1 * k for k in range(3)]
        for signal in PLANTED
        for name in ("agent", "bayes", *(rule.name for rule in SHOWN_RULES[signal]))
    }
    shares = [
        seed_check(f"{s}_share", "share", [0.9, 0.91, 0.92], Bar("estimate", "at least", 0.85))
        for s in PLANTED
    ]
    regime = [
        seed_check(f"regime_{name}", "sharpe", [2.0, 2.2, 1.9], Bar("low", "above", 0.0))
        for name in CHOOSING
    ]
    flat = seed_check("regime_flat_agent", "sharpe", [0.1, -0.2, 0.0])
    shown = seed_check("regime_shown_agent", "sharpe", [1.0, 1.2, 1.1])
    names = [*BLIND, *CHOOSING, "regime-aware", "flat agent", "shown agent"]
    counts = {"agent": [0, 2], **{kind: [0, 3] for kind in CHEAP}}
    lows = {f"null/{kind}": [-0.5, -0.2, 0.1][:n] for kind, (_, n) in counts.items()}
    costly = {
        f"{fee}/{kind}/{name}": [1.0, 1.5]
        for fee in ("5", "500")
        for kind in ("sharpes", "turnover")
        for name in ("agent", "bayes", "thresholds")
    }
    refused = Check(
        "leaky_refused", "names", 1.0, 3, bars=(Bar("estimate", "at least", 1.0),), names=("x_1",)
    )
    return Certificate(
        "full",
        (
            MarketResult(
                "planted",
                tuple(shares),
                10.0,
                20.0,
                {"seeds": [1, 2, 3], "steps": 1000, "draws": 16},
                planted,
                ("planted_others",),
            ),
            MarketResult(
                "regime",
                (*regime, flat, shown),
                1.0,
                1.0,
                {"pairs": 3, "seeds": [1], "steps": 10},
                {name: [0.1, 2.0, 1.0] for name in names},
                ("regime_information", "regime_agents"),
            ),
            MarketResult(
                "null",
                (
                    count_check("null_claims", 0, 11, Bar("estimate", "at most", 0.05)),
                    count_check("null_power", power, 20, Bar("estimate", "at least", 0.9)),
                ),
                1.0,
                1.0,
                {"claims": counts, "draws": 11, "windows": [10, 5, 5], "steps": 5},
                lows | {"trend/agent": [2.0, 3.0]},
                ("null_trials", "null_stand_ins"),
            ),
            MarketResult(
                "leaky",
                (
                    refused,
                    seed_check("leaky_sharpe", "sharpe", [9.0], Bar("estimate", "above", 5.0)),
                    seed_check("leaky_gap", "sharpe", [8.0], Bar("estimate", "above", 3.0)),
                ),
                1.0,
                1.0,
                {"seeds": [1], "steps": 5},
                {"peeking": [9.0], "honest": [1.0], "equal_weight": [0.2]},
                ("leaky_separate",),
            ),
            MarketResult(
                "costly",
                (
                    seed_check(
                        "costly_share", "share", [0.7, 0.8], Bar("estimate", "at least", 0.5)
                    ),
                    seed_check(
                        "costly_turnover", "share", [0.0, 0.01], Bar("estimate", "at most", 0.05)
                    ),
                ),
                1.0,
                1.0,
                {"seeds": [1, 2], "steps": {"5": 100, "500": 50}, "draws": 16},
                costly,
            ),
        ),
        ABOUT,
    )


def with_router(whole: Certificate) -> Certificate:
    """The same with a hierarchy on the regime market: its router follows the regime 30 bars late.

    Of three experts the first follows the signal, the second opposes it, the third is in charge
    of every tenth decision; cash has the 20 bars after each turn.
    """
    flips = [k in (0, 330, 900, 1210, 1700) for k in range(2000)]
    regime = [1 - 2 * (sum(flips[: k + 1]) % 2) for k in range(2000)]
    late = [regime[max(0, k - 30)] for k in range(2000)]
    chosen = [
        3 if any(flips[max(0, k - 20) : k]) else 2 if k // 5 % 10 == 9 else int(late[k] < 0)
        for k in range(2000)
    ]
    told = mutual_information(np.array(chosen), (np.array(regime) > 0).astype(int))
    kinds = ("hierarchy", "hedge", "oracle", "best single expert", "flat sac", "shown a2c")
    markets = []
    for market in whole.markets:
        if market.name == "regime":
            checks = [
                seed_check("regime_share", "share", [0.9, 0.8], Bar("estimate", "at least", 0.8)),
                seed_check("regime_over_flat sac", "sharpe", [2.0, 2.1], Bar("low", "above", 1.0)),
            ]
            facts = {
                **market.facts,
                "hierarchy_seeds": [42, 43],
                "hierarchy_steps": 1_000_000,
                "hierarchy_pairs": 2,
                "information": {"42": told, "43": {"information": 0.5, "of": 1.0}},
                "shown": {"regime": regime, "in_charge": chosen, "seed": 42, "experts": 3},
            }
            market = replace(
                market,
                checks=(*market.checks, *checks),
                facts=facts,
                rows={**market.rows, **{name: [2.1, 2.3] for name in kinds}},
                notes=("regime_information", "regime_hierarchy"),
            )
        markets.append(market)
    return replace(whole, markets=tuple(markets))


@pytest.mark.parametrize(
    ("side", "value", "passes"),
    [
        ("at least", 0.85, True),
        ("at least", 0.849, False),
        ("at most", 0.85, True),
        ("at most", 0.851, False),
        ("above", 0.85, False),
        ("above", 0.851, True),
        ("at least", math.nan, False),
        ("at most", None, False),
    ],
)
def test_bars_are_passed_from_the_right_side(side: str, value: float | None, passes: bool) -> None:
    assert Bar("estimate", side, 0.85).passes(value) is passes  # type: ignore[arg-type]


def test_a_check_without_a_bar_neither_passes_nor_fails() -> None:
    check = seed_check("x", "share", [0.1, 0.2])
    assert check.passed is None
    assert MarketResult("planted", (check,), 1.0, 1.0).passed


def test_one_failed_check_fails_the_market_and_the_certificate() -> None:
    assert example().passed
    failed = example(power=17)
    assert not failed.passed
    assert [market.name for market in failed.markets if not market.passed] == ["null"]


@pytest.mark.parametrize(("lang", "left"), [("en", "Not run: Null, Leaky."), ("zh", "未运行")])
def test_some_of_the_markets_do_not_say_what_all_of_them_say(lang: str, left: str) -> None:
    whole, words = example(), Words(lang)
    kept = tuple(m for m in whole.markets if m.name not in ("null", "leaky"))
    text = render(replace(whole, markets=kept), words)
    assert left in text
    assert words("proof_all_passed") not in text
    assert words("proof_all_passed") in render(whole, words)


def test_json_has_every_number_and_is_read_again(tmp_path: Path) -> None:
    example().write(tmp_path)
    path = tmp_path / "certificate.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    assert set(tree) == {"format", "mode", "passed", "about", "markets"}
    assert [market["name"] for market in tree["markets"]] == [
        *("planted", "regime", "null", "leaky", "costly")
    ]
    for market in tree["markets"]:
        assert set(market) == {
            *("name", "checks", "seconds", "cpu_seconds", "facts", "rows", "notes", "passed")
        }
        for check in market["checks"]:
            assert set(check) == {
                *("name", "unit", "estimate", "n", "low", "high", "method", "bars", "count"),
                *("names", "passed"),
            }
    claims = tree["markets"][2]["checks"][0]
    assert claims["bars"] == [{"of": "estimate", "side": "at most", "value": 0.05}]
    assert (claims["count"], claims["method"], claims["passed"]) == ([0, 11], "exact", True)
    assert Certificate.read(path).tree() == tree


def test_a_single_seed_has_no_interval_in_json() -> None:
    tree = example().tree()
    sharpe = tree["markets"][3]["checks"][1]
    assert (sharpe["low"], sharpe["high"], sharpe["method"]) == (None, None, "none")


def test_what_is_not_a_certificate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    for text in ("{", '{"format": 1}', '{"format": 99}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(StoreError, match=r"Run\s+`echelon prove` again"):
            Certificate.read(path)


class Page(HTMLParser):
    """Collects what the page is made of; open tags must be closed in order."""

    VOID = frozenset({"meta", "line", "circle", "path"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_page_is_whole_and_loads_nothing(lang: str, tmp_path: Path) -> None:
    html = write_certificate(example(), tmp_path, lang).read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == []
    assert page.tags.count("svg") == 6
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"https?://|//[a-z]|url\(|@import", html)
    assert not [
        name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")
    ]
    policy = dict(page.attributes)
    assert "default-src 'none'" in str(policy["content"]) or "default-src 'none'" in html
    text = "".join(page.text)
    assert "echelon prove --quick -o 'a=<b>'" in text
    assert "ab" * 32 in text
    assert "abc, def" in text
    for name in ("planted", "regime", "null", "leaky", "costly"):
        assert Words(lang)(f"proof_about_{name}") in text


def test_page_is_the_same_every_time_and_says_what_failed() -> None:
    words = Words("en")
    assert render(example(), words) == render(example(), words)
    text = "".join(Page(render(example(power=17), words)).text)
    assert "Not passed: Null." in text
    assert "Passed: Planted, Regime, Leaky, Costly." in text


def test_rows_say_result_interval_and_bar_in_words() -> None:
    rows = check_rows(example(), Words("en"))
    assert rows[0][2:] == ["91.0%", "88.5% to 93.5%", "at least 85%", "passed"]
    by_check = {row[1]: row[2:] for row in rows}
    claims = by_check["claims where nothing is"]
    assert claims == ["0 of 11 (0.0%)", "0.0% to 28.5%", "at most 5%", "passed"]
    refused = by_check["refused by the leakage check"]
    assert refused == ["x_1", "–", "that factor and no other", "passed"]
    flat = by_check["flat agent that sees the signal alone"]
    assert flat[2:] == ["for information", "–"]


def test_other_languages_are_refused() -> None:
    with pytest.raises(UsageError, match="choose en or zh"):
        Words("fr")


def test_dots_stand_where_their_values_are() -> None:
    line = PolicyRow("a", (0.0, 1.0), strong=True)
    picture = dots([line], unit="share", thresholds={0.5: "50 %"}).__html__()
    rings = [float(x) for x in re.findall(r'class="ring strong" cx="([\d.]+)"', picture)]
    (mean,) = [float(x) for x in re.findall(r'class="mean strong" cx="([\d.]+)"', picture)]
    (bar,) = [float(x) for x in re.findall(r'class="bar" x1="([\d.]+)"', picture)]
    assert mean == bar == pytest.approx(sum(rings) / 2, abs=0.1)
    assert "50.0%" in picture


def test_strip_draws_a_tick_a_value_and_zero() -> None:
    row = PolicyRow("<b>", (-1.0, -0.5, 1.0), right="1 / 3")
    picture = strip([row], head="claims").__html__()
    assert picture.count('class="tick"') == 3
    assert picture.count('class="bar"') == 1
    assert "&lt;b&gt;" in picture
    assert "1 / 3" in picture


def test_lanes_are_filled_where_their_choice_was_in_charge_in_the_colour_of_the_hidden() -> None:
    texts = {"hidden": "hidden", "up": "up", "down": "<down>"}
    texts |= {"in_charge": "bars", "of_that": "of these up"}
    choices = {"a": 0, "b": 1, "cash": 2}
    picture = lanes([1, 1, -1, -1, 1], [0, 0, 0, 1, 1], choices, texts).__html__()
    key, *paths = re.findall(r'<path class="(?:up|down)" d="([^"]+)"/>', picture)[1:]
    assert key.startswith("M625 3")
    # The band up and down, then the lane of each choice; cash was never in charge.
    left, bar = 300, (1100 - 300 - 150) / 5
    runs = [
        [(round((float(x) - left) / bar, 3), round((float(last) - left) / bar, 3)) for x, last in r]
        for r in (re.findall(r"M([\d.]+) \d+H([\d.]+)v16", path) for path in paths)
    ]
    assert runs == [[(0, 2), (4, 5)], [(2, 4)], [(0, 2)], [(2, 3)], [(4, 5)], [(3, 4)]]
    figures = re.findall(r'class="figure" x="\d+" y="\d+"[^>]*>([^<]+)<', picture)
    assert figures == ["60%", "60%", "67%", "40%", "50%", "0%", "–"]
    assert "&lt;down&gt;" in picture


@pytest.mark.parametrize(
    ("lang", "said"),
    [("en", "bits of the regime"), ("zh", "状态信息")],
)
def test_a_hierarchy_has_a_picture_of_the_routers_choice_with_its_information(
    lang: str, said: str
) -> None:
    whole = with_router(example())
    page = Page(render(whole, Words(lang)))
    assert page.tags.count("svg") == 7
    text = "".join(page.text)
    own = whole.markets[1].facts["information"]["42"]
    assert said in text
    for number in (
        f"{own['information']:.2f}",
        f"{own['of']:.2f}",
        f"{own['information'] / own['of']:.0%}",
    ):
        assert number in text
    assert "1,000,000" in text
