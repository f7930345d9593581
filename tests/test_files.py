"""Files: what `read_json` and `read_array` make of files that were damaged or never ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from echelon.errors import DamagedError, shorten
from echelon.files import read_array, read_json, write_json

REMEDY = "Make it again."


@dataclass(frozen=True)
class _Note:
    seed: int
    value: float
    names: tuple[str, ...] = ()


def test_written_json_is_read_as_its_class(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    write_json(path, {"seed": 3, "value": 2, "names": ["沪深", "b"], "later": 1})
    assert read_json(path, _Note, REMEDY) == _Note(3, 2.0, ("沪深", "b"))


def test_infinity_is_written_only_where_it_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"value": -math.inf})
    assert not path.exists()
    write_json(path, {"seed": 1, "value": -math.inf}, allow_nan=True)
    assert read_json(path, _Note, REMEDY).value == -math.inf


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe",
        b"[]",
        b"null",
        b'"text"',
        b"{",
        b'{"seed": 1}',
        b'{"seed": true, "value": 1}',
        b'{"seed": "1", "value": 1}',
        b'{"seed": 1.5, "value": 1}',
        b'{"seed": 1, "value": null}',
        b'{"seed": 1, "value": 1, "names": ["\\ud800"]}',
        b'{"seed": 1, "value": 1, "names": {"a": 1}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"seed": ' + b"9" * 10_000 + b', "value": 1}',
    ],
)
def test_odd_json_is_damaged_and_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(content)
    with pytest.raises(DamagedError) as caught:
        read_json(path, _Note, REMEDY)
    assert str(caught.value).startswith(f"{path}: missing or damaged (")
    assert str(caught.value).endswith(REMEDY)
    assert len(str(caught.value)) < 600


def test_missing_json_and_a_directory_are_damaged(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, Path("a\x00b")):
        with pytest.raises(DamagedError):
            read_json(path, _Note, REMEDY)


def test_array_is_read_back_without_being_writable(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6.0).reshape(2, 3))
    x = read_array(path, REMEDY)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not x.flags.writeable


def test_every_flipped_byte_of_an_array_header_is_an_array_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6.0).reshape(2, 3))
    whole = path.read_bytes()
    damaged = 0
    for place in range(len(whole) - 48):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
            try:
                read_array(path, REMEDY)
            except DamagedError:
                damaged += 1
    assert damaged > 100


@pytest.mark.parametrize("length", [0, 1, 6, 60, 130])
def test_cut_array_is_damaged(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6.0))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedError, match=r"x\.npy"):
        read_array(path, REMEDY)


def test_what_a_stranger_wrote_is_shortened_to_a_printable_line() -> None:
    assert (
        shorten("a\x1b[31mb\nc" + "d" * 1000)
        == "a\N{REPLACEMENT CHARACTER}[31mb c" + "d" * 290 + "…"
    )
