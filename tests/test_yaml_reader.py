"""YAML from strangers: bounded before anything is made of it; faults are ConfigErrors."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import BaseModel

from echelon.config import Config, load_config
from echelon.config.yaml_reader import MAX_BYTES, MAX_VALUES, parse_yaml, read_yaml
from echelon.errors import ConfigError, EchelonError, InvalidDataError, Problem, bound_message

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 9)
)


def _refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "here")
    assert len(str(caught.value)) < 1_000
    return str(caught.value)


def test_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB)
    assert len(BOMB) < 500
    begin = time.perf_counter()
    with pytest.raises(ConfigError, match=r"line 2: .*\*a0 is an alias; write the value itself"):
        load_config(path)
    with pytest.raises(ConfigError, match="is an alias"):
        load_config(overrides=[f"data={{{BOMB.strip()}}}".replace("\n", ", ")])
    assert time.perf_counter() - begin < 2.0


def test_numbers_are_decimal_or_say_what_they_are() -> None:
    text = "[10, -3, 1_000, 0x10, 0b11, 0, 2.5, 1.0e+3, .5, 010, 1:30, 1:30.5, 1e3]"
    numbers = [10, -3, 1000, 16, 3, 0, 2.5, 1000.0, 0.5]
    assert parse_yaml(text, "here") == [*numbers, "010", "1:30", "1:30.5", "1e3"]


@pytest.mark.parametrize("deep", ["[" * 100_000, "{a: " * 60_000, "a:\n" + "- " * 50_000])
def test_deep_nesting_is_refused(deep: str) -> None:
    begin = time.perf_counter()
    assert "nested deeper than 20 levels" in _refusal(deep)
    assert time.perf_counter() - begin < 5.0
    with pytest.raises(ConfigError, match="nested deeper"):
        load_config(overrides=[f"data={deep}"])
    with pytest.raises(ConfigError, match="nested deeper"):
        load_config(overrides=["a." * 5_000 + "b=1"])


def test_size_and_number_of_values_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("# " + "x" * MAX_BYTES)
    with pytest.raises(ConfigError, match="larger than 256 KiB"):
        read_yaml(path)
    assert "longer than 256 KiB" in _refusal("x" * (MAX_BYTES + 1))
    assert f"more than {MAX_VALUES:,} values" in _refusal("[" + "1," * 30_000)
    with pytest.raises(ConfigError, match="larger than"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: !!python/object/apply:os.getcwd []", "is a tag; write the value alone"),
        ("a: !!bool foo", "is a tag"),
        ("a: !!timestamp x", "is a tag"),
        ("a: !!int ''", "is a tag"),
        ("{<<: {a: 1}}", "<< merges mappings"),
        ("on: 1", "'on' cannot be a key"),
        ("1: 1", "'1' cannot be a key"),
        ("null: 1", "'null' cannot be a key"),
        ("~: 1", "'~' cannot be a key"),
        ("2020-01-01: 1", "'2020-01-01' cannot be a key"),
        ("a: " + "9" * 100_000, "is too long for a number"),
        ("a: 0x" + "f" * 10_000, "is too long for a number"),
        ("a: 0x" + "f" * 17, "does not fit into 64 bits"),
        ("a: 2001-12-14 21:59:43 -99:99", "cannot be read"),
        ('a: "\\ud800"', "U+D800"),
        ('a: "\\0"', "U+0000"),
        ('a: "\\e[31m"', "U+001B"),
        ("a: \x00", "not valid YAML"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: =", "not valid YAML"),
    ],
)
def test_odd_values_are_refused_in_bounds(text: str, expected: str) -> None:
    assert expected in _refusal(text)


def test_byte_order_mark_is_read_and_other_encodings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 7\n")
    assert load_config(path).seed == 7
    path.write_bytes("seed: 7\n".encode("utf-16"))
    with pytest.raises(ConfigError, match="Save it as UTF-8 text"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Path("a\0b.yaml"))


def test_thousands_of_problems_are_counted_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("".join(f"unknown_{k}: 1\n" for k in range(5_000)))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "… and 4,980 more"


@pytest.mark.parametrize("item", ["seed=" + "x" * 200_000, "x" * 200_000 + "=1", "x" * 200_000])
def test_long_values_and_names_are_shortened(item: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[item])
    assert len(str(caught.value)) < 2_000


def test_many_assets_are_checked_for_twins_quickly() -> None:
    begin = time.perf_counter()
    names = ", ".join(f"S{k}" for k in range(15_000))
    assert len(load_config(overrides=[f"assets=[{names}]"]).assets) == 15_000
    with pytest.raises(ConfigError, match="listed more than once: S7"):
        load_config(overrides=[f"assets=[{names}, S7]"])
    assert time.perf_counter() - begin < 20.0


def test_every_message_is_bounded_and_printable() -> None:
    text = str(EchelonError("\x1b[31mred\x00 " + "x" * 10**6))
    assert len(text) < 10_100
    assert text.endswith("more characters)")
    rows = str(EchelonError("row\n" * 10**4 + "end")).split("\n")
    assert len(rows) == 61
    assert rows[-1] == "… and 9,941 more lines"
    assert "\x1b" not in text
    assert "\x00" not in text
    assert bound_message("两行\n\tb") == "两行\n b"
    many = InvalidDataError([Problem("f", 1, "close", "x" * 50_000, "mend it")] * 10_000)
    assert len(str(many)) < 100_000


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1.0e+400"])
def test_no_number_is_infinite_or_none(value: str) -> None:
    def keys(model: type[BaseModel], prefix: str = "") -> list[str]:
        names = []
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                names += keys(field.annotation, f"{prefix}{name}.")
            else:
                names.append(prefix + name)
        return names

    for key in keys(Config):
        with pytest.raises(ConfigError):
            load_config(overrides=[f"{key}={value}"])
