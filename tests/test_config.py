"""The configuration: the two source files load as written, typos are caught, keys take effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from echelon.config import Config, fingerprint, load_config, to_yaml
from echelon.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"


def test_every_shipped_config_loads() -> None:
    files = sorted(CONFIGS.glob("*.yaml"))
    assert {f.stem for f in files} >= {"qtmrl", "hierarchical", "demo"}
    for file in files:
        assert isinstance(load_config(file), Config)


def test_qtmrl_loads_with_the_values_of_its_source() -> None:
    config = load_config(CONFIGS / "qtmrl.yaml")
    assert config.seed == 42
    assert len(config.assets) == 16
    assert (config.window, config.fee_rate, config.buy_pct, config.sell_pct) == (
        20,
        0.0005,
        0.20,
        0.50,
    )
    assert str(config.split.test[0]) == "2019-01-02"
    indicators = config.features.indicators
    assert indicators.sma == (10, 20, 50)
    assert indicators.bbands == (20, 2.0)
    assert indicators.supertrend == (10, 3.0)
    assert config.train.lr_actor == 1e-5
    assert config.train.total_env_steps == 1_000_000
    assert config.eval.metrics == ("total_return", "sharpe", "volatility", "max_drawdown")


def test_hierarchical_loads_with_the_values_of_its_source() -> None:
    config = load_config(CONFIGS / "hierarchical.yaml")
    assert (config.experts.n_experts, config.experts.skill_dim) == (5, 10)
    assert config.experts.mi_reward_weight == 0.5
    assert (config.meta_router.kl_lambda, config.meta_router.ent_coef) == (0.1, 0.01)
    schedule = config.trainer.training_schedule
    assert (schedule.router.freq, schedule.router.steps) == (10, 10_000)
    assert (schedule.experts.freq, schedule.experts.steps) == (5, 5_000)
    assert (schedule.population.freq, schedule.population.mutation_rate) == (20, 0.1)
    assert config.trainer.diversity_threshold == 0.25


def test_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"train: unknown key 'gama'; did you mean 'gamma'\?"):
        load_config(overrides=["train.gama=0.9"])


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("windo: 1\nwindow: -1\ntrain: {gama: 1}\nsplit: {train: [2001-01-01]}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    text = str(caught.value)
    assert text.count(str(file)) >= 4
    assert "unknown key 'windo'; did you mean 'window'?" in text
    assert "window" in text
    assert "gama" in text
    assert "split.train" in text


def test_override_wins_over_the_file() -> None:
    config = load_config(CONFIGS / "qtmrl.yaml", ["train.gamma=0.9", "assets=[AAPL]"])
    assert config.train.gamma == 0.9
    assert config.assets == ("AAPL",)
    assert config.train.entropy_coef == 0.05


@pytest.mark.parametrize("item", ["train.gamma", "=1", "seed.x=1", "a: b=[", "train.gamma={"])
def test_bad_override_is_refused(item: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("seed: 1\n")
    with pytest.raises(ConfigError):
        load_config(file, [item])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", "given twice"),
        ("- a\n- b\n", "expected `key: value` pairs"),
        ("seed: [1\n", "not valid YAML"),
        ("seed: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_bad_yaml_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("split:\n  train: [2015-02-30, 2016-01-29]\n", 2, "'2015-02-30' cannot be read"),
        ("seed: 1\n? [a, b]\n: 1\n", 2, "['a', 'b'] cannot be a key"),
        ("seed: 0x_\n", 1, "'0x_' cannot be read"),
    ],
)
def test_value_that_yaml_chokes_on_is_named_with_its_line(
    text: str, line: int, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path}, line {line}: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("data.start=2020-13-45", "month must be in 1..12"),
        ("data={[a]: 1}", "cannot be a key"),
        ("data={path: a, path: b}", "'path' is given twice"),
    ],
)
def test_override_that_yaml_chokes_on_is_named(item: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[item])
    assert f"override {item!r}" in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("zone", "hint"),
    [
        ("America/NewYork", "did you mean 'America/New_York'?"),
        ("asia/shanghai", "did you mean 'Asia/Shanghai'?"),
        ("Tokyo", "did you mean 'Asia/Tokyo'?"),
        ("Mars/Olympus", "use an IANA name"),
    ],
)
def test_unknown_time_zone_is_refused_with_a_suggestion(zone: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[f"data.timezone={zone}"])
    assert f"data.timezone: unknown time zone {zone!r}; {hint}" in str(caught.value)
    assert load_config(overrides=["data.timezone=Asia/Tokyo"]).data.timezone == "Asia/Tokyo"


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file"):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)


def test_overlapping_splits_are_refused() -> None:
    spans = "{train: [2000-01-01, 2001-01-01], valid: [2000-06-01, 2002-01-01]}"
    with pytest.raises(ConfigError, match="must follow one another"):
        load_config(overrides=[f"split={spans}"])


def test_scaler_fitted_elsewhere_than_on_train_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"normalization\.fit_on"):
        load_config(overrides=["normalization.fit_on=all"])


def test_bare_on_and_off_are_understood_as_limits() -> None:
    assert load_config(overrides=["data.limits=on"]).data.limits == "on"
    assert load_config(overrides=["data.limits=off"]).data.limits == "off"


def _numeric_settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys of all settings that are a number and nothing else, or several of them."""
    for name, field in model.model_fields.items():
        hint = field.annotation
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            yield from _numeric_settings(hint, f"{prefix}{name}.")
        elif re.search(r"\b(int|float)\b", text := str(hint)) and not re.search(r"bool|str", text):
            yield prefix + name


NUMERIC = list(_numeric_settings(Config))


@pytest.mark.parametrize("key", NUMERIC)
def test_truth_value_is_no_number(key: str) -> None:
    for value in ("yes", "off", "true", "[on, 5]"):
        with pytest.raises(ConfigError, match=rf"{key}: expected a number, found (true|false)"):
            load_config(overrides=[f"{key}={value}"])


def test_settings_that_are_numbers_are_many() -> None:
    assert len(NUMERIC) > 150
    assert {"seed", "window", "buy_pct", "train.books", "features.indicators.sma"} <= set(NUMERIC)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("seed=010", r"seed: '010' may be octal or decimal; write 10"),
        ("train.gamma=00", r"write 0"),
        ("window=1:30", r"window: .*valid integer.*found '1:30'"),
        ("buy_pct=0:30.5", r"buy_pct: .*valid number.*found '0:30.5'"),
        ("train.total_env_steps=1.5e0", r"total_env_steps: .*valid integer.*found '1.5e0'"),
        ("train.total_env_steps=1e30", r"total_env_steps: .*found '1e30'"),
        ("features.indicators.sma=[010]", r"sma: '010' .*write 10"),
        ("walk_forward.first_test=no", r"first_test: expected a date, found false"),
        ("split.train=[off, 2000-01-01]", r"split.train: expected a date, found false"),
    ],
)
def test_number_that_yaml_reads_in_its_own_way_is_refused(item: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(overrides=[item])


@pytest.mark.parametrize(
    "text", ["1e6", "1.0e6", "1.0e+6", "1E6", "1000000", "1_000_000", "1000000.0"]
)
def test_whole_number_can_be_written_as_a_power_of_ten(text: str) -> None:
    assert load_config(overrides=[f"train.total_env_steps={text}"]).train.total_env_steps == 10**6
    assert load_config(overrides=[f"features.indicators.sma=[{text}]"]).features.indicators.sma == (
        10**6,
    )


def test_texts_that_look_like_old_numbers_stay_texts() -> None:
    config = load_config(overrides=["assets=[000001, 600000.SH, 1e6]", "train.lr_actor=1e-3"])
    assert config.assets == ("000001", "600000.SH", "1e6")
    assert config.train.lr_actor == 1e-3


@pytest.mark.parametrize("key", ["data", "market", "trainer.evolution"])
def test_section_without_settings_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: expected a mapping of settings, found nothing"):
        load_config(overrides=[f"{key}=null"])
    with pytest.raises(ConfigError, match=rf"{key}: expected a mapping of settings, found 5"):
        load_config(overrides=[f"{key}=5"])


def test_macd_whose_fast_is_slow_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"features\.indicators\.macd.*fast < slow"):
        load_config(overrides=["features.indicators.macd=[26, 12, 9]"])
    with pytest.raises(ConfigError, match=r"features\.indicators\.macd.*fast < slow"):
        load_config(overrides=["features.indicators.macd=[1, 12, 9]"])


def test_bollinger_bands_of_one_bar_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"features\.indicators\.bbands.*equal to 2"):
        load_config(overrides=["features.indicators.bbands=[1, 2.0]"])


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().seed = 1  # type: ignore[misc]


def test_every_field_is_documented_where_declared() -> None:
    def undocumented(model: type, prefix: str = "") -> list[str]:
        missing = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            if not field.description:
                missing.append(prefix + name)
            if hasattr(field.annotation, "model_fields"):
                missing += undocumented(field.annotation, f"{prefix}{name}.")
        return missing

    assert undocumented(Config) == []


@given(
    seed=st.integers(0, 2**31),
    window=st.integers(1, 500),
    gamma=st.floats(0, 0.999),
    sma=st.lists(st.integers(2, 300), max_size=4),
    assets=st.lists(st.text("ABCDEFGHIJ.0123456789-", min_size=1), max_size=5, unique=True),
)
def test_resolved_yaml_loads_to_the_same_tree(
    seed: int, window: int, gamma: float, sma: list[int], assets: list[str]
) -> None:
    config = Config.model_validate(
        {
            "seed": seed,
            "window": window,
            "train": {"gamma": gamma},
            "assets": assets,
            "features": {"indicators": {"sma": sma}},
        }
    )
    again = Config.model_validate(yaml.safe_load(to_yaml(config)))
    assert again == config
    assert fingerprint(again) == fingerprint(config)


@given(key=st.text("abcdefgh_", min_size=1, max_size=12))
def test_no_unknown_key_is_ever_accepted(key: str) -> None:
    if key in Config.model_fields:
        return
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(overrides=[f"{key}=1"])


def test_fingerprint_sees_every_change() -> None:
    base = fingerprint(load_config())
    assert base == fingerprint(load_config())
    assert base != fingerprint(load_config(overrides=["train.lr_actor=2e-5"]))
