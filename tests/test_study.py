"""The study: its variants, its facts and verdicts by hand, and the whole of it on tiny sizes."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from test_prove_hierarchies import TINY
from typer.testing import CliRunner
from worlds import make_config

from echelon.agents.mfpbt import Life
from echelon.cli import app
from echelon.config import Config, to_yaml
from echelon.errors import ConfigError, Stopped, UsageError
from echelon.population.record import PopulationHistory, Round
from echelon.proving import study
from echelon.proving.parts import Done
from echelon.proving.regime import PairCounts, RegimeMarket, RegimeSetting
from echelon.proving.study import (
    ONE,
    UNWEIGHTED,
    VARIANTS,
    WEIGHTED,
    StudyDifference,
    StudyPairs,
    StudyPart,
    StudyResult,
    assess_study,
    changes_of,
    plan_study,
    population_facts,
    study_markdown,
)
from echelon.runs.metrics import MetricLog

MARKET = RegimeMarket(n_assets=3, n_bars=90)
DRAWS = StudyPairs(train=2, valid=1, test=1, valid_bars=60)
OVERRIDES = (*TINY, "trainer.training_schedule.population.freq=2", "trainer.evolution.windows=2")
NAMES = [
    *("m1", "m2", "m3", "m3-mfpbt"),
    *("m2-unweighted", "m3-unweighted", "m3-mfpbt-unweighted"),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_variants_are_m1_to_m3_with_mfpbt_and_each_hierarchy_twice() -> None:
    assert [one.name for one in VARIANTS] == NAMES
    config = make_config("train.algo=HIERARCHY", "trainer.workers=2")
    parts = {part.key: part for part in plan_study(config, 2)}
    assert list(parts) == ["references", *(f"{n}-{s}" for s in (42, 43) for n in NAMES)]
    switches = {}
    for name in NAMES:
        part = parts[f"{name}-42"]
        assert isinstance(part, StudyPart)
        found = part.config
        assert found.trainer.workers == 1
        assert part.steps == config.train.total_env_steps
        switches[name] = (
            *(found.train.algo, found.experts.mi_reward_weight, found.meta_router.kl_lambda),
            *(found.meta_router.kl_lambda_max, found.trainer.evolution.enabled),
            found.experts.responsibility,
        )
    assert switches.pop("m1")[0] == "SAC"
    assert switches == {
        "m2": ("HIERARCHY", 0.0, 0.0, 0.0, False, True),
        "m3": ("HIERARCHY", 0.5, 0.1, 0.2, False, True),
        "m3-mfpbt": ("HIERARCHY", 0.5, 0.1, 0.2, True, True),
        "m2-unweighted": ("HIERARCHY", 0.0, 0.0, 0.0, False, False),
        "m3-unweighted": ("HIERARCHY", 0.5, 0.1, 0.2, False, False),
        "m3-mfpbt-unweighted": ("HIERARCHY", 0.5, 0.1, 0.2, True, False),
    }


def test_a_configuration_without_bonuses_gets_the_designs_where_a_variant_has_them() -> None:
    none = ("experts.mi_reward_weight=0", "meta_router.kl_lambda=0", "meta_router.kl_lambda_max=0")
    m2, m3 = WEIGHTED[:2]
    told = changes_of(m3, make_config("train.algo=HIERARCHY", *none))
    assert told[2:] == (
        *("experts.mi_reward_weight=0.5", "meta_router.kl_lambda=0.1"),
        "meta_router.kl_lambda_max=0.2",
    )
    own = make_config("train.algo=HIERARCHY", "experts.mi_reward_weight=0.3")
    assert changes_of(m3, own) == (
        *("experts.responsibility=true", "trainer.evolution.enabled=false"),
    )
    assert changes_of(m2, own)[2:] == none


def test_only_a_hierarchy_is_studied() -> None:
    with pytest.raises(ConfigError, match=r"train.algo = SAC: the study is of a hierarchy"):
        plan_study(make_config("train.algo=SAC"), 1)


def test_draws_are_neither_the_proofs_nor_changed_for_it() -> None:
    config = make_config(*TINY)
    proof, own = (
        RegimeSetting.from_counts(config, MARKET, kind(1, 1, 1, valid_bars=60), 3)
        for kind in (PairCounts, StudyPairs)
    )
    for kind in ("train", "valid", "test"):
        assert not np.array_equal(getattr(proof, kind)[0].x, getattr(own, kind)[0].x)
    np.testing.assert_array_equal(proof.test[0].x, MARKET.pairs(1, "test")[0].x)
    np.testing.assert_array_equal(proof.train[0].x, MARKET.pairs(1, "trains", 3000)[0].x)
    # Parts of proofs are known by this: it must not change below trainings that are under way.
    assert repr(PairCounts(1, 2, 3, 4)) == "PairCounts(train=1, valid=2, test=3, valid_bars=4)"


def life(number: int, member: int, kind: str) -> Life:
    parent = None if kind in ("founder", "reseed") else member
    return Life(number, member, member, int(number > 1), kind, parent, None, {})


def leave_behind(directory: Path, mapds: Sequence[float], log: Sequence[float]) -> None:
    """A training's files: MAPD at checks after 100, 200, … steps, and in the log after 50, …"""
    lives = (life(0, 0, "founder"), life(1, 1, "founder"), life(2, 0, "reseed"))
    rounds = tuple(
        Round(k, 100 * k, mapd, 0.2 * k, 0.5 * math.log(2), (1.0, 2.0), ({}, {}))
        for k, mapd in enumerate(mapds, start=1)
    )
    PopulationHistory(("a", "b"), np.eye(2), lives, rounds, ()).write(directory)
    with MetricLog(directory, resume_step=None) as writing:
        for k, mapd in enumerate(log, start=1):
            writing.write(50 * k, {"population/mapd": mapd})
            writing.write(50 * k, {"valid/sharpe_annual": 1.0})


def test_the_lowest_mapd_is_since_it_was_reached_and_between_checks_too(tmp_path: Path) -> None:
    leave_behind(tmp_path, [0.5, 0.4], [0.0, 0.01, 0.2, 0.3])
    assert population_facts(tmp_path) == {
        "mapd": [[100, 0.5], [200, 0.4]],
        "mapd_end": 0.4,
        "mapd_lowest": 0.2,
        "volume": 0.4,
        "usage_entropy": pytest.approx(0.5),
        "begun_anew": 1,
    }


def test_mapd_that_was_never_reached_is_the_highest_there_was(tmp_path: Path) -> None:
    leave_behind(tmp_path, [0.1, 0.2], [0.0, 0.1, 0.22])
    assert population_facts(tmp_path)["mapd_lowest"] == 0.22


def test_without_a_check_nothing_is_known_of_diversity(tmp_path: Path) -> None:
    facts = population_facts(tmp_path)
    assert facts.pop("mapd") == []
    assert set(facts.values()) == {None}


def hierarchy(seed: int, ours: float, lowest: float) -> dict[str, Any]:
    return {
        "seed": seed,
        "steps": 1000,
        "sharpes": {
            "hierarchy": [ours - 0.5, ours + 0.5],
            "hedge": [1.0, 1.0],
            "oracle": [3.0, 3.0],
            "expert 0": [0.2, 0.4],
            "expert 1": [0.5, -0.5],
        },
        "information": {"information": 0.25, "of": 1.0},
        "usage": [0.4, 0.4, 0.2],
        "population": {
            "mapd": [[100, lowest]],
            "mapd_end": 0.5,
            "mapd_lowest": lowest,
            "volume": 0.1,
            "usage_entropy": 0.9,
            "begun_anew": 2,
        },
    }


def made(config: Config, sharpes: dict[str, list[float]], lowest: list[float]) -> StudyResult:
    """A study of seeds 42, … whose variants have these Sharpe ratios by seed."""
    pair = {"equal weight": [0.0, 0.0], "regime filter": [2.0, 3.0]}
    done = {"references": Done("references", {"sharpes": pair}, 1.0, 1.0, "code")}
    for name, values in sharpes.items():
        for k, value in enumerate(values):
            found: dict[str, Any] = hierarchy(42 + k, value, lowest[k])
            if name == ONE.name:
                found = {"seed": 42 + k, "steps": 1000, "sharpes": [value, value]}
            done[f"{name}-{42 + k}"] = Done(f"{name}-{42 + k}", found, 1.0, 3600.0, "code")
    about = {"config_hash": "0" * 64, "cpu_seconds": 3600.0, "finished": "now", "command": "here"}
    return assess_study(done, range(42, 42 + len(lowest)), config, about)


@pytest.fixture
def three_seeds() -> StudyResult:
    sharpes = {
        "m1": [0.0, 0.1, -0.1],
        "m2": [1.0, 1.2, 0.8],
        "m3": [2.0, 2.3, 1.9],
        "m3-mfpbt": [1.5, 1.9, 1.4],
        "m2-unweighted": [1.0, 1.0, 1.0],
        "m3-unweighted": [1.0, 2.0, 0.0],
        "m3-mfpbt-unweighted": [1.0, 2.0, 0.0],
    }
    return made(make_config("train.algo=HIERARCHY"), sharpes, [0.30, 0.20, 0.40])


def named(found: StudyResult, name: str, of: str) -> StudyDifference:
    (one,) = (d for d in found.differences if d.name == name and d.of == of)
    return one


def test_differences_are_paired_by_seed_and_judged_by_their_interval(
    three_seeds: StudyResult,
) -> None:
    bonuses = named(three_seeds, "the bonuses", "with responsibility weighting")
    assert bonuses.values == pytest.approx((1.0, 1.1, 1.1))
    # Mean 3.2/3; Student's t over 3 values: 4.3027 · 0.057735 / √3 = 0.14342.
    assert bonuses.low == pytest.approx(3.2 / 3 - 0.14342, abs=1e-4)
    assert bonuses.high == pytest.approx(3.2 / 3 + 0.14342, abs=1e-4)
    assert bonuses.verdict == "helps"
    without = named(three_seeds, "the bonuses", "without it")
    assert without.values == pytest.approx((0.0, 1.0, -1.0))
    assert without.verdict == "not resolved"
    both = named(three_seeds, "the bonuses", "over both")
    assert both.values == pytest.approx((0.5, 1.05, 0.05))
    assert named(three_seeds, "MF-PBT", "with responsibility weighting").verdict == "hurts"
    pooled = named(three_seeds, "responsibility weighting", "over all three")
    assert pooled.values == pytest.approx((0.5, 0.4 / 3, (-0.2 + 1.9 + 1.4) / 3))
    flat = named(three_seeds, "the hierarchy", "M3: + KL and MI, over M1: one expert")
    assert flat.values == pytest.approx((2.0, 2.2, 2.0))


def test_measures_are_of_pairs_then_of_seeds(three_seeds: StudyResult) -> None:
    rows = {row.variant: row for row in three_seeds.rows}
    m3 = rows["m3"]
    assert m3.values["sharpe"] == pytest.approx((2.0, 2.3, 1.9))
    assert m3.values["share"] == pytest.approx((2.0 / 2.5, 2.3 / 2.5, 1.9 / 2.5))
    assert m3.values["best expert"] == pytest.approx((0.3, 0.3, 0.3))
    assert m3.values["usage entropy, test"] == pytest.approx((1.0, 1.0, 1.0))
    assert set(rows["m1"].values) == {"sharpe", "share"}
    assert three_seeds.references["regime filter"] == 2.5


def test_the_table_says_what_held_and_what_is_not_resolved(three_seeds: StudyResult) -> None:
    text = study_markdown(three_seeds)
    lines = text.splitlines()
    assert (
        "| M3: + KL and MI | 2.07 [1.55, 2.58] | 83% [62%, 103%] | 0.30 | 1.00 | 3.00 | 0.25 |"
        in (lines)
    )
    assert "| M1: one expert | 0.00 [-0.25, 0.25] | 0% [-10%, 10%] | – | – | – | – |" in lines
    held = next(line for line in lines if line.startswith("| M2: population and router | 0.50"))
    assert (
        held == "| M2: population and router | 0.50 | 0.20 | 2 of 3 | 6 | 0.10 | 90% | 100% | 20% |"
    )
    wanted = "| the bonuses | with responsibility weighting | +1.07 [+0.92, +1.21] | helps |"
    assert wanted in lines
    assert any(line.endswith("| not resolved |") for line in lines)
    assert "reached and held in 2 of 3 seeds (lowest 0.20); 6 experts restarted" in text
    evolves = "trainer.evolution.enabled=true trainer.training_schedule.population.freq=5"
    assert f"`experts.responsibility=false {evolves}`" in text


def test_one_seed_resolves_nothing_and_has_no_interval() -> None:
    config = make_config("train.algo=HIERARCHY")
    found = made(config, {name: [1.0 + k] for k, name in enumerate(NAMES)}, [0.3])
    assert {one.verdict for one in found.differences} == {"not resolved"}
    assert {(one.low, one.high) for one in found.differences} == {(None, None)}
    assert "| M1: one expert | 1.00 | 40% |" in study_markdown(found)


# --- the whole of it, from the command line


def run(directory: Path, *words: str) -> Result:
    config = directory / "hierarchy.yaml"
    config.write_text(to_yaml(make_config(*OVERRIDES)), encoding="utf-8")
    command = ["study", "--config", str(config), "--seeds", "1", "--workers", "1"]
    return CliRunner().invoke(app, [*command, "--output-dir", str(directory / "out"), *words])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """(directory, result) of a study that was stopped after its second variant and went on."""
    directory = tmp_path_factory.mktemp("study")
    plain = StudyPart.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "MARKET", MARKET)
        patch.setattr(study, "DRAWS", DRAWS)

        def interrupted(self: StudyPart, *args: Any) -> Any:
            found = plain(self, *args)
            if self.variant == "m2":
                signal.raise_signal(signal.SIGTERM)
            return found

        patch.setattr(StudyPart, "run", interrupted)
        stopped = run(directory)
        assert isinstance(stopped.exception, Stopped), stopped.output
        assert "of 8 parts are done" in str(stopped.exception)
        assert not (directory / "out" / "study.json").exists()
        begun: list[str] = []

        def counted(self: StudyPart, *args: Any) -> Any:
            begun.append(self.variant)
            return plain(self, *args)

        patch.setattr(StudyPart, "run", counted)
        result = run(directory)
        assert begun[-5:] == NAMES[2:]
        assert ONE.name not in begun
    return directory, result


def test_a_stopped_study_goes_on_and_writes_its_tables(whole: tuple[Path, Result]) -> None:
    directory, result = whole
    assert result.exit_code == 0, result.output
    tree = json.loads((directory / "out" / "study.json").read_text(encoding="utf-8"))
    assert [row["variant"] for row in tree["rows"]] == NAMES
    assert tree["seeds"] == [42]
    for row in tree["rows"][1:]:
        values = {name: value[0] for name, value in row["values"].items()}
        assert values["oracle"] is not None
        assert 0.0 <= values["mapd end"] <= 1.0
        # Never reached in so short a training, where the highest stands in its place.
        assert values["mapd end"] <= values["mapd lowest"] < study.HELD
        assert 0.0 <= values["usage entropy, training"] <= 1.0
        assert row["steps"][0] >= 200
    text = (directory / "out" / "study.md").read_text(encoding="utf-8")
    assert text.count("| not resolved |") == len(tree["differences"]) == 13
    assert "the bonuses, over both" in result.output
    assert "rules: " in result.output
    assert (directory / "out" / "config.yaml").is_file()


def test_another_length_in_the_directory_is_refused_and_overwrite_is_named(
    whole: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "MARKET", MARKET)
    monkeypatch.setattr(study, "DRAWS", DRAWS)
    result = run(whole[0], "--steps", "150")
    assert isinstance(result.exception, UsageError)
    assert "--overwrite" in str(result.exception)


def test_every_hierarchy_has_its_unweighted_twin() -> None:
    for on, off in zip(WEIGHTED, UNWEIGHTED, strict=True):
        assert nameless(off._replace(responsibility=True)) == nameless(on)


def nameless(variant: Any) -> Any:
    return variant._replace(name="", title="")
