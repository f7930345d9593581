"""Ablations: which variants there are, what they share, what comes out, and going on."""

from __future__ import annotations

import json
import math
import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from markets import CONFIGS
from matplotlib.image import imread
from shells import Shell, tiny

from echelon.cli.console import Watch
from echelon.config import Config, load_config
from echelon.errors import ConfigError
from echelon.evaluation.ablation import (
    BASE,
    AblationResult,
    Variant,
    VariantResult,
    VariantSetting,
    full_grid,
    one_at_a_time,
    read_variants,
    unlike_base,
    variant_configs,
)
from echelon.ops.measures import LABELS
from echelon.report.charts.variants import draw_ablation, grid_rows, variant_rows

TWO = "gamma: [train.gamma=0.5]\nfew: ['features.indicators={}', window=6]\n"
"""Two variants: one with the base's features, one with others."""


def _config(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def _names(variants: list[Variant]) -> list[str]:
    return [variant.name for variant in variants]


def test_matrix_moves_one_factor_at_a_time_away_from_the_base() -> None:
    base = _config("qtmrl")
    variants = one_at_a_time(base)
    assert _names(variants) == [
        *(BASE, "window-30", "window-60", "features-ohlcv", "encoder-transformer"),
        *("reward-log_return", "rule-10-30", "entropy-0"),
    ]
    configs = dict(zip(_names(variants), variant_configs(base, variants), strict=True))
    assert configs[BASE] == base
    assert configs["window-60"].window == 60
    assert configs["features-ohlcv"].features.ohlcv
    assert not configs["features-ohlcv"].features.indicators.sma
    assert not configs["features-ohlcv"].features.wants_stationary
    assert configs["encoder-transformer"].model.encoder == "Transformer"
    assert configs["reward-log_return"].reward.kind == "log_return"
    assert (configs["rule-10-30"].buy_pct, configs["rule-10-30"].sell_pct) == (0.1, 0.3)
    assert configs["entropy-0"].train.entropy_coef == 0.0


def test_base_with_a_value_of_its_own_meets_every_level_of_the_matrix() -> None:
    base = _config("qtmrl", "train.entropy_coef=0.003", "window=10", "buy_pct=0.15")
    names = _names(one_at_a_time(base))
    assert {"entropy-0", "entropy-0.05", "window-20", "rule-20-50", "rule-10-30"} <= set(names)
    stationary = _names(one_at_a_time(_config("demo")))
    assert {"features-ohlcv", "features-indicators"} <= set(stationary)
    switched_off = _config("qtmrl", "features.stationary.enabled=false")
    assert "features-indicators" not in _names(one_at_a_time(switched_off))


def test_grid_is_every_combination_once() -> None:
    base = _config("qtmrl", "train.entropy_coef=0.003")
    variants = full_grid(base)
    assert len(variants) == 3 * 2 * 2 * 2 * 2 * 3
    assert variants[0] == Variant(BASE, (), ())
    assert len(set(_names(variants))) == len(variants)
    assert max(map(len, _names(variants))) < 200
    last = variant_configs(base, variants[-1:])[0]
    assert (last.window, last.model.encoder, last.train.entropy_coef) == (60, "Transformer", 0.05)
    assert variants[-1].factor.startswith("window + features + encoder")


def test_file_of_variants_is_read_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "v.yaml"
    file.write_text("wide: [model.d_model=256]\nslow:\n  - train.gamma=0.99\n  - window=30\n")
    variants = read_variants(file)
    assert _names(variants) == [BASE, "wide", "slow"]
    assert variants[1].settings == (VariantSetting("model.d_model", "256"),)
    assert (variants[2].factor, variants[2].value) == ("train.gamma + window", "0.99 + 30")
    assert variant_configs(_config("qtmrl"), variants)[2].train.gamma == 0.99


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("odd: [train.gama=0.9]", "variant 'odd': configuration: train: unknown key 'gama'"),
        ("odd: [train.gamma=nine]", "variant 'odd'"),
        ("odd: [window]", "variant 'odd': override 'window': expected key=value"),
        ("odd: window=30", "variant 'odd': expected a list of key=value"),
        ("odd: [{window: 30}]", "variant 'odd': expected a list of key=value"),
        ("../odd: [window=30]", "'../odd' cannot name a variant"),
        ("30: [window=30]", "'30' cannot be a key"),
        ("base: [window=30]", "variant 'base' is the configuration itself"),
        ("odd: [window=20]", "variant 'odd' is the same configuration as 'base'"),
        ("a: [window=30]\nb: [window=30]", "variant 'b' is the same configuration as 'a'"),
        ("a: [window=30]\na: [window=60]", "'a' is given twice"),
        ("odd: [seed=7]", "variant 'odd' changes seed"),
        ("odd: [train.seeds=7]", "variant 'odd' changes train.seeds"),
        ("odd: ['split.valid=[2011-01-03, 2012-01-03]']", "variant 'odd' changes split.valid"),
        ("base: []", "no variant in it"),
        ("odd: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_bad_file_of_variants_is_refused_with_the_variant(
    text: str, expected: str, tmp_path: Path
) -> None:
    file = tmp_path / "v.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        variant_configs(_config("qtmrl"), read_variants(file))
    assert expected in str(refused.value)


def test_shipped_file_of_variants_fits_the_recommended_configuration() -> None:
    for file in sorted((CONFIGS / "ablations").glob("*.yaml")):
        base = _config("qtmrl-fast")
        assert len(variant_configs(base, unlike_base(base, read_variants(file)))) > 2


def _row(name: str, sharpes: list[float], *settings: VariantSetting) -> VariantResult:
    seeds = {
        42 + k: dict.fromkeys(LABELS, 1.0) | {"sharpe_annual": s} for k, s in enumerate(sharpes)
    }
    variant = Variant(name, settings, ())
    problem = "" if seeds else "why"
    return VariantResult(
        name=name, variant=variant, seeds=seeds, config_hash="hash", problem=problem
    )


def _result(*rows: VariantResult) -> AblationResult:
    return AblationResult("some-ablation", rows, {"first": "2011-01-03", "last": "2016-12-30"})


def test_table_has_mean_std_and_difference_of_every_measure() -> None:
    result = _result(
        _row(BASE, [1.0, 2.0]),
        _row("window-30", [0.5, 0.5], VariantSetting("window", "30")),
        _row("window-60", [], VariantSetting("window", "60")),
    )
    base, thirty, sixty = result.frame().to_dicts()
    assert (base["seeds"], base["sharpe_annual_mean"], base["sharpe_annual_diff"]) == (2, 1.5, 0.0)
    assert base["sharpe_annual_std"] == pytest.approx(math.sqrt(0.5))
    assert (thirty["factor"], thirty["value"]) == ("window", "30")
    assert (thirty["sharpe_annual_std"], thirty["sharpe_annual_diff"]) == (0.0, -1.0)
    assert (sixty["seeds"], sixty["problem"], sixty["sharpe_annual_mean"]) == (0, "why", None)
    for measure in LABELS:
        assert {f"{measure}_{part}" for part in ("mean", "std", "diff")} <= set(base)


def test_picture_groups_variants_by_factor_and_marks_the_base(tmp_path: Path) -> None:
    result = _result(
        _row(BASE, [1.0, 2.0]),
        _row("window-30", [0.5, 0.7], VariantSetting("window", "30")),
        _row("wide", [1.2, 1.3], VariantSetting("model.d_model", "256")),
        _row("window-60", [], VariantSetting("window", "60")),
    )
    base = _config("qtmrl")
    lines = list(variant_rows(result, base))
    assert [(line.group, line.label) for line in lines] == [
        ("", "base"),
        ("window (base: 20)", "30"),
        ("window (base: 20)", "60"),
        ("model.d_model (base: 128)", "wide"),
    ]
    assert [line.is_base for line in lines] == [True, False, False, False]
    assert lines[1].reference == 1.5
    draw_ablation(result, base, tmp_path / "a.png")
    height, width, _ = imread(tmp_path / "a.png").shape
    assert width > height > 300


def test_picture_of_a_grid_shows_levels_over_all_combinations(tmp_path: Path) -> None:
    base = _config("qtmrl")
    rows = [_row(v.name, [float(k), k + 1.0], *v.settings) for k, v in enumerate(full_grid(base))]
    lines = {(line.group, line.label): line for line in grid_rows(_result(*rows), base)}
    own, other = lines["window", "20 (base)"], lines["window", "60"]
    assert len(own.points) == len(other.points) == len(rows) // 3
    # Windows vary slowest: the first third of the rows has the base's, the last third 60.
    assert other.centre.mean - other.reference == pytest.approx(2 * len(rows) / 3)
    draw_ablation(_result(*rows), base, tmp_path / "g.png")
    assert imread(tmp_path / "g.png").shape[1] > 1000


@pytest.fixture
def variants(tmp_path: Path) -> Path:
    file = tmp_path / "variants.yaml"
    file.write_text(TWO)
    return file


def _ablate(shell: Shell, bars: Path, *more: str) -> tuple[int, str, str]:
    return shell(
        *("ablate", *tiny(bars), "--variants", "variants.yaml", "--output-dir", "ab"),
        *("--workers", "1", *more),
    )


def _table(directory: str = "ab") -> dict[str, dict[str, Any]]:
    rows = pl.read_csv(f"{directory}/ablation.csv").to_dicts()
    return {row["variant"]: row for row in rows}


def test_ablation_ends_with_table_picture_and_run_directories(
    shell: Shell, bars_file: Path, variants: Path
) -> None:
    code, out, err = _ablate(shell, bars_file, "--seeds", "2")
    assert code == 0, err
    assert "3 variants × 2 seeds: 6 to train" in err
    assert err.count("rules: ") == 1
    assert "gamma" in out
    table = _table()
    assert [row["seeds"] for row in table.values()] == [2, 2, 2]
    assert pl.read_parquet("ab/ablation.parquet")["variant"].to_list() == [BASE, "gamma", "few"]
    assert imread("ab/ablation.png").shape[1] > 1000
    for name, row in table.items():
        run = Path("ab/variants") / name
        facts = json.loads((run / "run.json").read_text())
        assert facts["command"] == "ablate"
        assert facts["ablation"]["variant"] == name
        assert facts["config_hash"] == row["config_hash"]
        assert [o["seed"] for o in facts["outcomes"]] == [42, 43]
        best = [o["best_score"] for o in facts["outcomes"]]
        assert row["sharpe_annual_mean"] == pytest.approx(sum(best) / 2)
        assert [p.name for p in (run / "evaluations").iterdir()] == ["valid"]
    x = [Path(f"ab/variants/{name}/prepared/X.npy").stat().st_ino for name in table]
    assert x[0] == x[1] != x[2]
    out, _ = shell.works("runs", "list", "ab", columns=80)
    assert "variants/gamma" in out


def test_same_features_are_shared_without_a_cache_too(
    shell: Shell, bars_file: Path, variants: Path
) -> None:
    assert _ablate(shell, bars_file, "-o", "data.cache.enabled=false")[0] == 0
    x = [Path(f"ab/variants/{n}/prepared/X.npy").stat().st_ino for n in (BASE, "gamma", "few")]
    assert x[0] == x[1] != x[2]


def test_ablation_does_not_depend_on_the_test_window(
    shell: Shell, bars_file: Path, variants: Path, tmp_path: Path
) -> None:
    assert _ablate(shell, bars_file)[0] == 0
    expected = pl.read_csv("ab/ablation.csv").drop("config_hash")
    assert expected["turnover_annual_mean"].min() > 0.0
    other = tmp_path / "other.parquet"
    bars = pl.read_parquet(bars_file)
    after = pl.col("date") >= datetime(2016, 7, 1)
    prices = pl.col("open", "high", "low", "close", "adj_close")
    bars.with_columns(pl.when(after).then(prices * 3.0).otherwise(prices)).write_parquet(other)
    assert not pl.read_parquet(other).equals(bars)
    assert _ablate(shell, other, "--overwrite")[0] == 0
    assert pl.read_csv("ab/ablation.csv").drop("config_hash").equals(expected)


def test_resume_trains_only_what_is_missing(shell: Shell, bars_file: Path, variants: Path) -> None:
    assert _ablate(shell, bars_file)[0] == 0
    before = Path("ab/ablation.csv").read_text()
    weights = Path("ab/variants/gamma/seeds/42/checkpoints/best/tensors.safetensors")
    written = weights.stat().st_mtime_ns
    _, err = shell.works("ablate", "--resume", "ab", "--workers", "1")
    assert "0 to train, 3 done before" in err
    assert Path("ab/ablation.csv").read_text() == before
    reads = Path("ab/variants/gamma/evaluations/valid/summary.json").read_text()
    assert json.loads(reads)["reads"] == 1
    _, err = shell.works("ablate", "--resume", "ab", "--workers", "1", "--seeds", "2")
    assert "3 to train, 3 done before" in err
    assert [row["seeds"] for row in _table().values()] == [2, 2, 2]
    assert weights.stat().st_mtime_ns == written


def test_interrupted_ablation_goes_on_to_the_same_result(
    shell: Shell, bars_file: Path, variants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ablate(shell, bars_file)[0] == 0
    expected = _table()
    show = Watch.progress
    seen = []

    def interrupted(self: Watch, k: int, now: Any) -> None:
        show(self, k, now)
        seen.append(k)
        if k == 1 and now.step > 200:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Watch, "progress", interrupted)
        code, _, err = _ablate(shell, bars_file, "--overwrite")
    assert code == 130
    assert "1 of 3 trainings ended" in err
    assert "echelon ablate --resume ab" in err
    assert max(seen) == 1
    assert not Path("ab/ablation.csv").exists()
    _, err = shell.works("ablate", "--resume", "ab", "--workers", "1")
    assert "2 to train, 1 done before" in err
    assert _table() == expected


def test_failing_variants_are_named_and_the_others_go_on(
    shell: Shell, bars_file: Path, variants: Path
) -> None:
    variants.write_text(
        "long: [window=2000]\nwild: [train.lr_actor=1.0e+30]\ngamma: [train.gamma=0.5]\n"
    )
    code, out, err = _ablate(shell, bars_file)
    assert code == 1
    assert "2 of 4 variants failed" in err
    assert "long: split.train has" in err
    assert "wild: seed 42: " in err
    assert "echelon ablate --resume ab" in err
    assert "Traceback" not in err
    table = _table()
    assert [row["seeds"] for row in table.values()] == [1, 0, 0, 1]
    assert "window=2000" in table["long"]["problem"]
    assert not table["gamma"]["problem"]
    assert "failed" in out


def test_processes_side_by_side_give_the_same_result(
    shell: Shell, bars_file: Path, variants: Path
) -> None:
    variants.write_text("gamma: [train.gamma=0.5]\n")
    assert _ablate(shell, bars_file)[0] == 0
    expected = _table()
    code, _, err = _ablate(shell, bars_file, "--workers", "2", "--overwrite")
    assert code == 0, err
    assert _table() == expected


def test_taken_directory_and_odd_options_are_refused(
    shell: Shell, bars_file: Path, variants: Path
) -> None:
    Path("ab").mkdir()
    Path("ab/run.json").write_text("{}")
    code, _, err = _ablate(shell, bars_file)
    assert (code, "holds a run" in err) == (2, True)
    Path("ab/run.json").unlink()
    Path("ab/ablation.json").write_text('{"format": 0, "echelon": "0.0.1"}')
    code, _, err = _ablate(shell, bars_file)
    assert (code, "--resume ab" in err, "--overwrite" in err) == (2, True, True)
    code, _, err = shell("ablate", "--resume", "ab")
    assert (code, "another version" in err) == (5, True)
    Path("ab/ablation.json").write_text("{")
    code, _, err = shell("ablate", "--resume", "ab")
    assert (code, "damaged" in err) == (5, True)
    code, _, err = shell("ablate", "--resume", "nowhere")
    assert (code, "no ablation there" in err) == (2, True)
    code, _, err = shell("ablate", "--resume", "ab", "-o", "window=3")
    assert (code, "only --seeds" in err) == (2, True)
    code, _, err = _ablate(shell, bars_file, "--grid")
    assert (code, "give one of them" in err) == (2, True)
    Path("file").write_text("")
    code, _, err = _ablate(shell, bars_file, "--output-dir", "file")
    assert (code, "is a file" in err) == (5, True)


def test_variant_like_the_base_is_left_out_and_default_directory_is_apart(
    shell: Shell, bars_file: Path
) -> None:
    words = tiny(bars_file, "train.total_env_steps=80", "train.validate_every_steps=40")
    Path("v.yaml").write_text("gamma: [train.gamma=0.5]\nsame: [window=5]\n")
    _, err = shell.works("ablate", *words, "--variants", "v.yaml", "--workers", "1")
    assert "variant 'same' is what the base is already" in err
    assert Path("runs/qtmrl-ablation/ablation.csv").is_file()
