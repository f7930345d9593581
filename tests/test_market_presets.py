"""Market rules follow the data: `auto`, refusals, other names, what cannot act, what is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from markets import CONFIGS, SPLITS, make_bars
from shells import Shell, tiny

from echelon.config import fingerprint, load_config, to_yaml
from echelon.config.market import ALIASES, CALENDARS
from echelon.envs.world import rules_of, world_of
from echelon.errors import ConfigError
from echelon.features import prepare
from echelon.market import TradedData, drawn_market, rules_in_force
from echelon.market.presets import PRESETS
from echelon.report.rules import execution_line, idle_text, rules_line
from echelon.report.texts import Words
from echelon.training.run import training_hash

A_SHARES = TradedData("XSHG", "raw", ("600000.SH",), opens=True, volume=True, limits=True)
CLOSES = TradedData("XNYS", "adjusted", ("AAPL",), opens=False, volume=False, limits=False)


def test_preset_follows_the_calendar_of_the_data() -> None:
    market = load_config().market
    assert market.preset == "auto"
    for calendar, preset in CALENDARS.items():
        assert market.preset_for(calendar) == preset
    assert market.preset_for(None) == "paper"  # a drawn market is of no exchange


@pytest.mark.parametrize("calendar", ["data", "XHKG", "x" * 10_000])
def test_calendar_that_nobody_knows_asks_for_a_preset(calendar: str) -> None:
    with pytest.raises(ConfigError, match=r"market\.preset is 'auto'.*market\.preset=us") as caught:
        load_config().market.preset_for(calendar)
    assert len(str(caught.value)) < 600
    for name in PRESETS:
        assert load_config(None, [f"market.preset={name}"]).market.preset_for(calendar) == name


@pytest.mark.parametrize(
    ("preset", "calendar"),
    [
        *(("us", "XSHG"), ("crypto", "XSHG"), ("paper", "XSHG"), ("hierarchical", "XSHE")),
        *(("cn", "XNYS"), ("crypto", "XNYS"), ("us", "24/7"), ("cn", "24/7")),
    ],
)
def test_preset_that_contradicts_the_data_is_refused_unless_confirmed(
    preset: str, calendar: str
) -> None:
    market = load_config(None, [f"market.preset={preset}"]).market
    with pytest.raises(ConfigError, match=r"preset_confirmed=true") as caught:
        market.preset_for(calendar)
    assert f"'{preset}'" in str(caught.value)
    assert calendar in str(caught.value)
    assert f"market.preset={CALENDARS[calendar]}" in str(caught.value)
    confirmed = load_config(None, [f"market.preset={preset}", "market.preset_confirmed=true"])
    assert confirmed.market.preset_for(calendar) == preset


@pytest.mark.parametrize("preset", ["us", "paper", "hierarchical"])
def test_rules_of_the_design_notes_can_be_meant_on_us_data(preset: str) -> None:
    assert load_config(None, [f"market.preset={preset}"]).market.preset_for("XNYS") == preset


@pytest.mark.parametrize(
    ("other", "name"), [("ashare", "cn"), ("A-Share", "cn"), ("china", "cn"), ("US", "us")]
)
def test_other_names_of_presets_give_the_same_hash(other: str, name: str) -> None:
    known, meant = (load_config(None, [f"market.preset={word}"]) for word in (name, other))
    assert meant.market.preset == name
    assert fingerprint(meant) == fingerprint(known)


def test_unknown_preset_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"market\.preset: no preset is called 'xetra'") as caught:
        load_config(None, ["market.preset=xetra"])
    for name in ("auto", *PRESETS, *ALIASES):
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match=r"'ashar'; did you mean 'ashare'\? There are auto, us"):
        load_config(None, ["market.preset=ashar"])


def test_confirmation_changes_no_hash_and_older_hashes_stay() -> None:
    for name in ("auto", "paper", "us"):
        plain, confirmed = (
            load_config(None, [f"market.preset={name}", f"market.preset_confirmed={said}"])
            for said in ("false", "true")
        )
        assert fingerprint(plain) == fingerprint(confirmed)
        assert training_hash(plain) == training_hash(confirmed)
        assert "preset_confirmed: true" in to_yaml(confirmed)
    hashes = {training_hash(load_config(None, [f"market.preset={n}"])) for n in ("auto", *PRESETS)}
    assert len(hashes) == 1 + len(PRESETS)


def test_shipped_configurations_keep_their_rules_and_hashes() -> None:
    """The hashes that proofs/*.json and runs of before were made with."""
    known = {
        "demo.yaml": "64ed685192da",
        "demo-hierarchy.yaml": "ac74aaba642c",
        "hierarchical-tuned.yaml": "084a6a11a7d7",
        "qtmrl.yaml": "c538d4757b7a",
        "qtmrl-fast.yaml": "db30a3e78943",
        "sac.yaml": "1146c169a55b",
    }
    for name, hash_ in known.items():
        config = load_config(CONFIGS / name)
        assert training_hash(config)[:12] == hash_, name
        assert config.market.preset in ("paper", "hierarchical"), name


def test_rules_that_cannot_act_are_named_with_the_reason() -> None:
    us = rules_in_force(load_config(), CLOSES)
    assert us.idle == {
        "slippage": "no_volume",
        "participation": "no_volume",
        "fill": "no_opens",
    }
    confirmed = load_config(None, ["market.preset=cn", "market.preset_confirmed=true"])
    assert rules_in_force(confirmed, CLOSES).idle == {
        **us.idle,
        "lots": "adjusted",
        "price_limits": "adjusted",
    }
    raw = CLOSES._replace(price_basis="raw", opens=True, volume=True)
    assert rules_in_force(confirmed, raw).idle == {"lots": "no_lots", "price_limits": "no_limits"}
    assert rules_in_force(load_config(), A_SHARES).idle == {}
    assert rules_in_force(load_config(None, ["market.preset=paper"]), CLOSES).idle == {
        "fill": "no_opens"
    }
    drawn = drawn_market(load_config(None, ["market.preset=cn"]))
    assert drawn.idle == {
        **dict.fromkeys(("slippage", "participation"), "drawn_volume"),
        **dict.fromkeys(("stamp_duty", "lots", "price_limits"), "drawn"),
    }


def test_line_says_every_rule_in_both_languages() -> None:
    facts = rules_in_force(load_config(), A_SHARES).facts()
    assert rules_line(facts, Words("en")) == (
        "cn (auto) on calendar XSHG: commission 2.5 bp a side (at least 5 an order), stamp duty on "
        "sells, square-root slippage (100 bp at the whole volume), at most 10 % of the volume, "
        "whole lots, T+1, price limits, orders of at least 1,000; fills at the next bar's open"
    )
    chinese = rules_line(facts, Words("zh"))
    for part in ("2.5 bp", "印花税", "滑点", "10 %", "整手", "T+1", "涨跌停", "开盘价"):
        assert part in chinese
    assert facts == json.loads(json.dumps(facts))


def test_line_ends_with_what_cannot_act() -> None:
    facts = rules_in_force(load_config(None, ["eval.use_fee=false"]), CLOSES).facts()
    line = rules_line(facts, Words("en"))
    assert "evaluations charge nothing (eval.use_fee: false)" in line
    assert line.endswith(
        "Cannot act here: slippage, the volume cap (the data have no volume); fills at the open "
        "(the data have no opens)"
    )
    assert (
        idle_text(facts, Words("zh"))
        == "滑点，成交量上限（数据无成交量）；开盘成交（数据无开盘价）"
    )


def test_line_of_execution_says_spread_impact_cap_and_price() -> None:
    rules = {"ticks_per_step": 30, "volume_cap": 0.25, "half_spread": 1e-4}
    rules |= {"temporary": 0.002, "permanent": 0.0}
    line = execution_line(rules, "vwap", Words("en"))
    for part in ("half spread 1 bp", "20 bp temporary", "25 %", "every 30 bars", "VWAP"):
        assert part in line
    assert "no commission, stamp duty, lots, T+1 or price limits" in line


@pytest.fixture
def a_shares(tmp_path: Path) -> Path:
    """A file of two years of made-up A-shares, raw prices, by their exchange's calendar."""
    path = tmp_path / "a-shares.parquet"
    symbols = ("600000.SH", "600004.SH", "600006.SH")
    make_bars(symbols, calendar="XSHG").write_parquet(path)
    return path


def test_world_of_a_shares_has_their_rules_by_default(a_shares: Path, tmp_path: Path) -> None:
    overrides = [
        *("data.source=parquet", f"data.path={a_shares}", f"data.store={tmp_path / 'store'}"),
        *("data.price_basis=raw", "window=5", "features.indicators={sma: [5]}", SPLITS),
    ]
    config = load_config(None, overrides)
    prepared = prepare(config, tmp_path / "run").prepared
    world = world_of(prepared, config)
    assert world.ledger["preset"] == "cn"
    assert world.rules.t_plus_one
    assert world.rules.price_limits
    assert world.rows.stamp.any()
    assert (world.rows.lot == 100.0).all()
    assert np.isfinite(world.rows.limit_up).any()
    assert world.in_force is not None
    assert world.in_force.idle == {}
    assert rules_of(prepared, config) == world.in_force
    for preset in ("us", "paper"):
        wrong = load_config(None, [*overrides, f"market.preset={preset}"])
        with pytest.raises(ConfigError, match=rf"'{preset}'.*XSHG.*preset_confirmed"):
            world_of(prepared, wrong)
        with pytest.raises(ConfigError, match=r"preset_confirmed"):
            prepare(wrong, tmp_path / "other")


def test_training_refuses_us_rules_on_a_shares_before_it_computes(
    shell: Shell, a_shares: Path
) -> None:
    words = tiny(a_shares, "assets=[]", "market.preset=us")
    code, _, err = shell("train", *words, "--output-dir", "run")
    assert code == 3
    assert "market.preset is 'us' (US stocks)" in err
    assert "XSHG" in err
    assert not Path("run/prepared").exists()


def test_commands_say_the_rules_in_one_line_and_the_run_keeps_them(
    shell: Shell, a_shares: Path
) -> None:
    words = tiny(a_shares, "assets=[]", "market.preset=ashare", "fee_rate=null")
    _, err = shell.works("train", *words, "--output-dir", "run", "--workers", "1", columns=80)
    said = [line for line in err.splitlines() if line.startswith("rules: ")]
    assert len(said) == 1
    assert "cn on calendar XSHG: commission 2.5 bp" in said[0]
    assert "; fills at the next bar's open" in said[0]
    facts = json.loads(Path("run/run.json").read_text(encoding="utf-8"))["rules"]
    assert said[0] == f"rules: {rules_line(facts, Words('en'))}"
    _, err = shell.works("evaluate", "run", "--split", "test", columns=80)
    assert err.splitlines().count(said[0]) == 1
    summary = json.loads(Path("run/evaluations/test/summary.json").read_text(encoding="utf-8"))
    assert summary["rules"] == facts
    out, _ = shell.works("report", "run")
    page = Path(out.strip().removeprefix("report: ")).read_text(encoding="utf-8")
    assert "cn on calendar XSHG: commission 2.5 bp a side (at least 5 an order)" in page


def test_help_names_the_presets(shell: Shell) -> None:
    for command in ("train", "prepare"):
        out, _ = shell.works(command, "--help")
        for name in ("market.preset", "auto", "cn", "ashare", "us", "crypto"):
            assert name in out, (command, name)
