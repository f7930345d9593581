"""Secrets come from the environment only and never show in print."""

from pathlib import Path

import pytest

from echelon.config.secrets import Secrets
from echelon.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TUSHARE_TOKEN", "ECHELON_REDIS_URL", "ECHELON_CACHE_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_environment_variable_is_read_and_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUSHARE_TOKEN", "abc123")
    assert Secrets().require("tushare_token").get_secret_value() == "abc123"


def test_values_never_appear_in_repr_str_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUSHARE_TOKEN", "abc123")
    monkeypatch.setenv("ECHELON_REDIS_URL", "redis://:hunter2@localhost:6379/0")
    read = Secrets()
    for text in (repr(read), str(read), read.model_dump_json(), str(read.model_dump())):
        assert "abc123" not in text
        assert "hunter2" not in text


@pytest.mark.parametrize("name", ["tushare_token", "echelon_redis_url", "echelon_cache_key"])
@pytest.mark.parametrize("value", [None, "", "   "])
def test_missing_or_blank_secret_is_an_error_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None
) -> None:
    variable = name.upper()
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"{variable} is not set.*export {variable}="):
        Secrets().require(name)  # type: ignore[arg-type]


def test_dotenv_in_the_working_directory_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("TUSHARE_TOKEN=from_file\n")
    monkeypatch.chdir(tmp_path)
    assert Secrets().tushare_token is None


def test_secrets_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUSHARE_TOKEN", "abc123")
    read = Secrets()
    with pytest.raises(ValueError, match="frozen"):
        read.tushare_token = None
    assert isinstance(read, Secrets)
