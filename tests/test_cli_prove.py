"""`echelon prove` from the command line, on sizes of seconds."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from markets import CONFIGS
from provings import TINY, shrink_leaky, shrink_quick
from typer.testing import CliRunner

from echelon.cli import app
from echelon.config import load_config
from echelon.config.algorithms import FLAT_SETTINGS
from echelon.errors import EchelonError, Stopped, UsageError
from echelon.proving.null import NullCheapPart
from echelon.proving.prove import FULL, PROOF_MARKETS, QUICK, QUICK_HIERARCHY, at_pace, plan

OVERRIDES = [word for item in TINY for word in ("-o", item)]
NUMBERS = {"estimate", "low", "high", "n"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_leaky(monkeypatch)
    shrink_quick(monkeypatch)


def prove(*words: str, config: bool = True) -> Result:
    command = ["prove", *words, "--quick", "--workers", "1", *OVERRIDES]
    if config:
        command += ["--config", str(CONFIGS / "qtmrl-fast.yaml")]
    return CliRunner().invoke(app, command)


def certificate(directory: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((directory / "certificate.json").read_text(encoding="utf-8"))
    return tree


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """(directory, result) of a proof of all five markets, which a tiny agent cannot pass."""
    directory = tmp_path_factory.mktemp("proof") / "all"
    with pytest.MonkeyPatch.context() as patch:
        shrink_leaky(patch)
        shrink_quick(patch)
        return directory, prove("--output-dir", str(directory))


def test_all_markets_are_proved_and_failing_is_an_error(whole: tuple[Path, Result]) -> None:
    directory, result = whole
    assert isinstance(result.exception, EchelonError), result.output
    assert result.exception.exit_code == 1
    assert "not passed: Planted" in str(result.exception)
    tree = certificate(directory)
    assert [market["name"] for market in tree["markets"]] == list(PROOF_MARKETS)
    assert tree["passed"] is False
    assert tree["mode"] == "quick"
    assert tree["about"]["config_hash"]
    assert (directory / "config.yaml").is_file()
    for word in (
        "Planted",
        "Regime",
        "Null",
        "Leaky",
        "Costly",
        "FAILED",
        "CPU seconds",
        "rules: ",
    ):
        assert word in result.output


def test_what_must_pass_even_without_learning_does(whole: tuple[Path, Result]) -> None:
    checks = {
        check["name"]: check
        for market in certificate(whole[0])["markets"]
        for check in market["checks"]
    }
    assert checks["leaky_refused"]["passed"] is True
    assert checks["null_claims"]["count"][1] == 5
    assert checks["null_power"]["count"][1] == 2
    assert all(set(check) >= NUMBERS for check in checks.values())


def test_page_and_parts_are_beside_the_certificate(whole: tuple[Path, Result]) -> None:
    directory, _ = whole
    page = (directory / "certificate.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert 'lang="en"' in page
    keys = {path.parent.name for path in (directory / "parts").glob("*/part.json")}
    assert {"planted-trend-42", "null-agent-000", "null-power", "leaky-check"} < keys
    assert {"costly-5bp-42", "costly-500bp-42", "regime-references"} < keys


def test_the_same_command_again_trains_nothing_and_finds_the_same(
    whole: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = whole
    before = certificate(directory)

    def refuse(*_: object) -> None:
        raise AssertionError("a part with a finding was run again")

    monkeypatch.setattr("echelon.proving.parts._work", refuse)
    again = prove("--output-dir", str(directory), "--lang", "zh")
    assert isinstance(again.exception, EchelonError), again.output
    assert certificate(directory)["markets"] == before["markets"]
    page = (directory / "certificate.zh.html").read_text(encoding="utf-8")
    assert 'lang="zh-CN"' in page
    assert "验证场证书" in again.output


def test_another_configuration_in_the_directory_is_refused(whole: tuple[Path, Result]) -> None:
    result = prove("costly", "--output-dir", str(whole[0]), "-o", "train.gamma=0.5")
    assert isinstance(result.exception, UsageError)
    assert "--overwrite" in str(result.exception)


def test_overwrite_proves_anew(tmp_path: Path) -> None:
    directory = str(tmp_path)
    prove("regime", "--output-dir", directory)
    before = certificate(tmp_path)
    result = prove("regime", "--output-dir", directory, "--overwrite", "-o", "seed=7")
    assert "Regime" in result.output
    assert certificate(tmp_path)["about"]["seed"] == 7
    assert before["about"]["seed"] == 42


def test_momentum_is_the_trend_alone(tmp_path: Path) -> None:
    result = prove(
        *("momentum", "--seeds", "1", "--draws", "1", "--bars", "1000"),
        *("--output-dir", str(tmp_path)),
    )
    assert isinstance(result.exception, EchelonError), result.output
    (market,) = certificate(tmp_path)["markets"]
    assert [check["name"] for check in market["checks"]] == ["trend_share"]
    assert (market["facts"]["seeds"], market["facts"]["draws"]) == ([42], 1)
    tree = certificate(tmp_path)
    assert tree["mode"] == "reduced"
    assert tree["about"]["sizes"] == {"seeds": 1, "draws": 1, "bars": 1000, "null_draws": 5}
    assert "Reduced by the command line: 1 seeds and 1 unseen draws of 1,000 bars" in " ".join(
        result.output.split()
    )


def test_signals_can_be_named_alone_and_experts_have_all_seeds_on_each() -> None:
    config = load_config(CONFIGS / "sac.yaml")
    sizes = replace(FULL, signals=("trend", "reversion"))
    parts = plan(config, ["planted"], sizes).parts["planted"]
    names = [(part.market.signal, part.seed) for part in parts]  # type: ignore[attr-defined]
    assert names == [(s, 42 + k) for s in ("trend", "reversion") for k in range(5)]
    flat = plan(load_config(CONFIGS / "qtmrl-fast.yaml"), ["planted"], sizes).parts["planted"]
    assert len(flat) == FULL.planted_seeds + FULL.other_seeds


def test_without_a_configuration_the_shipped_agent_is_proved(tmp_path: Path) -> None:
    result = prove("regime", "--output-dir", str(tmp_path), config=False)
    assert certificate(tmp_path)["markets"][0]["name"] == "regime", result.output
    shipped, named = load_config(None, FLAT_SETTINGS), load_config(CONFIGS / "qtmrl-fast.yaml")
    assert (shipped.buy_pct, named.buy_pct) == (0.2, 0.06)  # of few drawn assets, of 16 stocks
    steps = ("total_env_steps", "checkpoint_every_steps")
    assert shipped.train.model_dump(exclude={*steps}) == named.train.model_dump(exclude={*steps})
    for section in ("window", "fee_rate", "sell_pct", "model", "reward"):
        assert getattr(shipped, section) == getattr(named, section), section
    for section in ("state", "market", "eval", "normalization", "seed"):
        if section != "normalization":
            assert getattr(shipped, section) == getattr(named, section), section


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = NullCheapPart.run

    def interrupted(self: NullCheapPart, *args: Any) -> Any:
        found = run(self, *args)
        if self.draws[0] > 1:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(NullCheapPart, "run", interrupted)
    command = ["null", "--output-dir", str(tmp_path)]
    result = prove(*command)
    assert isinstance(result.exception, Stopped), result.output
    assert "Run the same command again" in str(result.exception)
    kept = list((tmp_path / "parts").glob("*/part.json"))
    assert kept
    assert not (tmp_path / "certificate.json").exists()
    monkeypatch.setattr(NullCheapPart, "run", run)
    prove(*command)
    assert certificate(tmp_path)["markets"][0]["name"] == "null"


def test_unknown_markets_and_languages_are_refused(tmp_path: Path) -> None:
    assert prove("nowhere").exit_code == 2
    result = prove("regime", "--lang", "fr", "--output-dir", str(tmp_path))
    assert isinstance(result.exception, UsageError)
    assert not (tmp_path / "parts").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    result = prove("regime", "--output-dir", str(path))
    assert isinstance(result.exception, EchelonError)
    assert "is a file" in str(result.exception)


def test_the_full_proof_meets_the_sizes_it_promises() -> None:
    """400 null draws of which 20 train agents; 16 unseen draws; at most a million steps."""
    config = load_config(CONFIGS / "qtmrl-fast.yaml")
    planned = plan(config, PROOF_MARKETS, FULL)
    agents = [part for part in planned.parts["null"] if part.steps]
    cheap = [part for part in planned.parts["null"] if isinstance(part, NullCheapPart)]
    assert len(agents) >= 20
    assert len(agents) + sum(len(part.draws) for part in cheap) == 400
    assert all(part.steps <= 1_000_000 for part in planned.trend)
    assert (FULL.n_draws, QUICK.n_draws) == (16, 16)
    assert FULL.claim_draws >= 20
    assert QUICK.claim_draws >= 20
    signals = {part.market.signal for part in planned.parts["planted"]}  # type: ignore[attr-defined]
    assert signals == {"trend", "reversion", "cross_section"}


def test_null_alone_brings_the_agents_its_power_needs() -> None:
    config = load_config(CONFIGS / "qtmrl-fast.yaml")
    planned = plan(config, ["null"], QUICK)
    assert list(planned.parts) == ["null"]
    keys = {part.key for part in planned.first}
    assert {f"planted-trend-{config.seed + k}" for k in range(QUICK.planted_seeds)} < keys


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({}, "full"),
        ({"planted_seeds": 5, "n_draws": 20}, "full"),
        ({"planted_seeds": 4}, "reduced"),
        ({"n_bars": 1000, "planted_seeds": 9}, "reduced"),
        ({"null_draws": 10}, "reduced"),
    ],
)
def test_a_proof_with_less_than_its_mode_has_is_a_reduced_one(
    values: dict[str, int], mode: str
) -> None:
    sizes = FULL.adjust(**values)
    assert sizes.mode == mode
    assert sizes.null_agents == min(FULL.null_agents, sizes.null_draws)
    assert QUICK.adjust(planted_seeds=None) == QUICK


def test_what_is_hurried_is_never_made_slower() -> None:
    slow = load_config(CONFIGS / "hierarchical.yaml")
    quick = at_pace(slow, QUICK_HIERARCHY)
    pace = QUICK_HIERARCHY.pace
    assert pace is not None
    assert (quick.pretrain.epochs, quick.pretrain.pass_rows) == (pace.epochs, pace.pass_rows)
    assert quick.expert.warmup_updates == pace.warmup
    assert quick.expert.updates_per_step == pace.updates_per_step
    assert quick.train.lr_actor == quick.train.lr_critic == pace.lr
    assert quick.train.gamma == slow.train.gamma
    for section in ("experts", "meta_router", "trainer", "lora", "risk", "model", "reward"):
        assert getattr(quick, section) == getattr(slow, section), section
    fast = [
        "train.lr_actor=0.01",
        "train.lr_critic=0.01",
        "pretrain.epochs=1",
        "pretrain.pass_rows=100",
        "expert.warmup_updates=0",
    ]
    given = load_config(CONFIGS / "hierarchical.yaml", [*fast, "expert.updates_per_step=1.0"])
    assert at_pace(given, QUICK_HIERARCHY) == given
