"""Mutators: pure functions of a random generator and something valid, which return it damaged.

What a stranger, a broken disk, a spreadsheet or an editor does to a file: bytes cut and flipped,
text in another encoding, a number where a list was, a column twice, a header that lies. The same
state of the generator gives the same damage, so a case is known by its seed.

`Tree` is what JSON and YAML hold; `Table` the rows of a file of bars, the header first.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import yaml

Rng = random.Random
Tree = Any
Table = list[list[str]]

MARKER = "FUZZ_MARKER"
"""Name of the environment variable that holds the path which code of an input would create."""
CODE = f"import os, pathlib\npathlib.Path(os.environ[{MARKER!r}]).touch()\n"
"""What a hostile input would have run; the harness looks for the file it leaves."""

WORDS = (
    *(
        "",
        " ",
        "\x00",
        "a\x00b",
        "\x1b[31mred\x1b[0m",
        "\r",
        "\b\b\b",
        "\x9b2J",
        "\ud800",
        "é\u0301",
    ),
    *("=HYPERLINK(1)", "+1", "-1", "@x", "'", '"', "`", "$(id)", "%s%n", "{0}", "[bold]", "\\"),
    *("../../../outside", "/dev/null/x", "x/../../../outside", "x/", "~"),
    *("con.csv", "a" * 300, "b" * 30_000, "名字", "💥", "\u202eabc", "\u200b", "ﬀ", "NaN", "inf"),
    *("null", "true", "off", "no", "0x10", "1e5", "1_000", "1:30", "2020-02-30", "2020-01-01"),
    *(
        "9999-12-31",
        "0001-01-01",
        "2020-01-01T25:00:00",
        "<<",
        "!!binary",
        "*x",
        "&x",
        "? a",
        "- -",
    ),
    *("42 copy", "42.", "-0", "1/2", "٣", "１２", "AAA,BBB", "a\nb", "a\tb", "XSHG", "UTC", "1d"),
)
"""Text that has broken somebody's program. Paths lead nowhere but where the harness looks."""
NUMBERS = (
    *(0, 1, -1, 2, 7, 255, 65_536, -(2**31), 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64),
    *(
        10**12,
        10**30,
        10**400,
        -(10**18),
        0.0,
        -0.0,
        0.1,
        1e-320,
        1e-12,
        1e16,
        1e300,
        1e308,
        -1e308,
    ),
    *(math.nan, math.inf, -math.inf, 0.5, 1.0000001, 100_000, 1_000_000),
)
ODD: tuple[Tree, ...] = (
    *(None, True, False, [], {}, [None], [[]], {"": None}, [1, "a"], {"a": {"b": {"c": 1}}}),
    *([0] * 2000, {str(k): k for k in range(500)}, ["x"] * 3, {"rows": [5, 1]}, [1, 2, 3, 4]),
)
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "gbk", "cp1252", "utf-7")


def some(rng: Rng, choices: Sequence[Callable[..., Any]], value: Any, most: int = 3) -> Any:
    """`value` after one to `most` of the mutators, the first of which are the likelier."""
    for _ in range(min(rng.randint(1, most), rng.randint(1, most))):
        value = rng.choice(choices)(rng, value)
        if not value:  # nothing is left to damage
            break
    return value


# --- bytes


def mutate_bytes(rng: Rng, data: bytes) -> bytes:
    """Bytes that were cut, flipped, moved, doubled or overwritten."""
    return bytes(some(rng, _BYTES, data))


def _span(rng: Rng, data: bytes) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + rng.choice((1, 2, 4, 8, 64, 1024, len(data))))


def _flip(rng: Rng, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 4, 32)) if data else 0):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(rng: Rng, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    fill = rng.choice((b"\x00", b"\xff", b"\x7f", b" ", b"9", b"[", b"\n"))
    return data[:start] + fill * (stop - start) + data[stop:]


def _cut(rng: Rng, data: bytes) -> bytes:
    return data[
        : rng.choice((0, 1, len(data) // 2, max(0, len(data) - 1), rng.randrange(len(data) + 1)))
    ]


def _remove(rng: Rng, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    return data[:start] + data[stop:]


def _double(rng: Rng, data: bytes) -> bytes:
    start, stop = _span(rng, data)
    return (
        data[:stop]
        + data[start:stop] * rng.choice((1, 2, 50 if stop - start < 2048 else 1))
        + data[stop:]
    )


def _insert(rng: Rng, data: bytes) -> bytes:
    start = rng.randrange(len(data) + 1)
    return (
        data[:start]
        + rng.choice((rng.randbytes(4), rng.randbytes(64), as_bytes(word(rng))))
        + data[start:]
    )


def _replace_all(rng: Rng, data: bytes) -> bytes:
    return rng.choice(
        (
            b"",
            b"\x00" * 1024,
            rng.randbytes(512),
            b"{}",
            b"[]",
            b"null",
            b"PAR1PAR1",
            b"\n",
            as_bytes(word(rng)),
        )
    )


_BYTES = (_flip, _flip, _overwrite, _cut, _remove, _double, _insert, _replace_all)


# --- scalars


def word(rng: Rng) -> str:
    """A string that nobody expected."""
    return rng.choice(WORDS)


def number(rng: Rng) -> float:
    """A number that nobody expected."""
    return rng.choice(NUMBERS)


def as_bytes(text: str) -> bytes:
    """UTF-8, lone surrogates and all."""
    return text.encode("utf-8", "surrogatepass")


def odd(rng: Rng) -> Tree:
    """A value of any kind that JSON or YAML can hold."""
    kind = rng.randrange(10)
    if kind < 4:
        return number(rng)
    if kind < 7:
        return word(rng)
    return (
        copy.deepcopy(rng.choice(ODD))
        if kind < 9
        else nested(rng.choice((3, 3, 50, 50, 50, 1200)), rng)
    )


def nested(depth: int, rng: Rng) -> Tree:
    """Lists or mappings, one in another."""
    tree: Tree = 1
    lists = rng.random() < 0.5
    for _ in range(depth):
        tree = [tree] if lists else {"a": tree}
    return tree


# --- trees


def mutate_tree(rng: Rng, tree: Tree) -> Tree:
    """A copy of a tree with a few nodes replaced, removed, renamed, moved or changed a little."""
    return some(rng, _TREES, copy.deepcopy(tree), most=4)


def _places(tree: Tree) -> list[tuple[Any, Any]]:
    """(container, key or index) of every node, without the root."""
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(places) < 2000:
        node = waiting.pop()
        keys = (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else ()
        )
        places.extend((node, key) for key in keys)
        waiting.extend(node[key] for key in keys)
    return places


def _at_place(change: Callable[[Rng, Any, Any], None]) -> Callable[[Rng, Tree], Tree]:
    def mutate(rng: Rng, tree: Tree) -> Tree:
        places = _places(tree)
        if not places:
            return odd(rng)
        change(rng, *rng.choice(places))
        return tree

    return mutate


def _set_odd(rng: Rng, node: Any, key: Any) -> None:
    node[key] = odd(rng)


def _nudge(rng: Rng, node: Any, key: Any) -> None:
    value = node[key]
    if isinstance(value, bool) or value is None:
        node[key] = rng.choice((True, False, 0, 1, "yes", None))
    elif isinstance(value, int | float):
        node[key] = rng.choice(
            (
                -value,
                value + 1,
                value * 2,
                value * 10**6,
                str(value),
                [value],
                float(value) if abs(value) < 1e300 else 0.0,
            )
        )
    elif isinstance(value, str):
        node[key] = rng.choice(
            (
                value + word(rng),
                word(rng) + value,
                value[:-1],
                value.upper(),
                value * 2,
                [value],
                value.encode()[:3].hex(),
            )
        )
    elif isinstance(value, list):
        node[key] = rng.choice(
            (
                value[::-1],
                value[:-1],
                value + value,
                [*value, odd(rng)],
                dict(enumerate(map(_text, value))),
                _text(value),
            )
        )
    elif isinstance(value, dict):
        node[key] = rng.choice(
            (list(value), list(value.items()), _text(value), {**value, word(rng): odd(rng)})
        )
    else:  # what an earlier change put there: a tuple, a date, bytes
        node[key] = _text(value)


def _text(value: object) -> str:
    """How it prints, cut; an earlier change may have nested it beyond what can be printed."""
    try:
        return str(value)[:200]
    except RecursionError:
        return "[" * 200


def _drop(rng: Rng, node: Any, key: Any) -> None:
    del node[key]


def _rename(rng: Rng, node: Any, key: Any) -> None:
    if isinstance(node, dict):
        node[rng.choice((word(rng), f"{key}s", str(key).upper(), str(key)[:-1], f"{key}."))] = (
            node.pop(key)
        )
    else:
        node.insert(key, odd(rng))


def _swap(rng: Rng, tree: Tree) -> Tree:
    places = _places(tree)
    if len(places) < 2:
        return odd(rng)
    (a, i), (b, j) = rng.sample(places, 2)
    # Copies: a node put below itself would never end.
    a[i], b[j] = copy.deepcopy(b[j]), copy.deepcopy(a[i])
    return tree


def _new_root(rng: Rng, tree: Tree) -> Tree:
    return rng.choice(
        (odd(rng), [tree], {"a": tree}, list(tree) if isinstance(tree, dict) else tree)
    )


_TREES = (
    *(_at_place(_set_odd), _at_place(_set_odd), _at_place(_nudge), _at_place(_nudge)),
    *(_at_place(_drop), _at_place(_rename), _swap, _new_root),
)


def tree_text(tree: Tree) -> str:
    """A tree as JSON, with NaN and lone surrogates as Python writes them; deep ones by hand."""
    try:
        return json.dumps(tree, indent=1)
    except (RecursionError, ValueError):
        return "[" * 5000 + "1" + "]" * 5000


def mutate_json(rng: Rng, data: bytes) -> bytes:
    """A JSON file: its tree mutated, mostly; at times its bytes."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):  # damaged before
        return mutate_bytes(rng, data)
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    try:
        text = tree_text(mutate_tree(rng, tree))
    except RecursionError:  # nested deeply before
        return mutate_bytes(rng, data)
    if rng.random() < 0.08:
        return text.encode(rng.choice(ENCODINGS), "replace")
    return as_bytes(text)


# --- text


def mutate_text(rng: Rng, text: str) -> str:
    """Text whose lines and characters were moved, doubled, removed and replaced."""
    return str(some(rng, _TEXTS, text))


def _lines(change: Callable[[Rng, list[str]], object]) -> Callable[[Rng, str], str]:
    def mutate(rng: Rng, text: str) -> str:
        lines = text.split("\n")
        change(rng, lines)
        return "\n".join(lines)

    return mutate


def _double_line(rng: Rng, lines: list[str]) -> None:
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))


def _drop_line(rng: Rng, lines: list[str]) -> None:
    del lines[rng.randrange(len(lines))]


def _word_line(rng: Rng, lines: list[str]) -> None:
    lines[rng.randrange(len(lines))] = word(rng)


def _indent(rng: Rng, lines: list[str]) -> None:
    k = rng.randrange(len(lines))
    lines[k] = rng.choice((" ", "   ", "\t", "- ", "? ", "#")) + lines[k]


def _splice(rng: Rng, text: str) -> str:
    start = rng.randrange(len(text) + 1)
    return text[:start] + word(rng) + text[start + rng.choice((0, 1, 5, 40)) :]


def _other_character(rng: Rng, text: str) -> str:
    character = rng.choice(":,-.[]{}\"'#&*!|>%@\n 0")
    return text.replace(
        character,
        rng.choice(("", " ", "\t", ":", ";", "，", "\r\n", character * 2)),
        rng.choice((1, -1)),
    )


_TEXTS = (
    *(_lines(_double_line), _lines(_drop_line), _lines(_word_line), _lines(_indent)),
    *(_splice, _splice, _other_character),
)


def encode(rng: Rng, text: str) -> bytes:
    """UTF-8, mostly; at times an encoding that spreadsheets and old editors write, perhaps cut."""
    if rng.random() < 0.85:
        return as_bytes(text)
    data = text.encode(rng.choice(ENCODINGS), "replace")
    return data if rng.random() < 0.5 else data[: rng.randrange(len(data) + 1)]


# --- YAML

_BOMBS = (
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{n}: &{n} [{','.join(['*' + m] * 9)}]\n"
        for m, n in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "window: &a [*a]\n",
    "data: &d\n  <<: *d\n",
    "x: &x {a: 1}\ndata:\n  <<: [*x, *x]\n",
    "assets: " + "[" * 3000 + "]" * 3000 + "\n",
    "assets: " + "{a: " * 1500 + "1" + "}" * 1500 + "\n",
    "".join(" " * k + f"k{k}:\n" for k in range(800)),
    "? [a, b]\n: 1\n",
    "? {a: 1}\n: 1\n",
    "seed: !!python/object/apply:os.system ['touch \"$FUZZ_MARKER\"']\n",
    "seed: !!python/name:os.system\n",
    "seed: !!int abc\n",
    "seed: !!float x\n",
    "seed: !!timestamp x\n",
    "seed: !!binary '$$'\n",
    "seed: !!set {1, 2}\n",
    "seed: !!omap [a: 1]\n",
    "seed: !!pairs [a: 1]\n",
    "seed: !!null x\n",
    "seed: !!bool x\n",
    "seed: 2020-01-01 00:00:00 +25:00\n",
    "seed: 1:99:99\n",
    "seed: 0o9\n",
    "%YAML 9.9\n---\nseed: 1\n",
    "---\nseed: 1\n---\nseed: 2\n",
    "seed: " + "9" * 5000 + "\n",
    "seed: 0x" + "f" * 5000 + "\n",
    "true: 1\n2020-01-01: 2\n",
    "null: 1\n1.5: 2\n",
    "features:\n  modules: [evil.py]\n",
    "execution:\n  extensions: [evil.py]\n",
)
"""YAML that loads, or does not, in unusual ways; some of it would run code in an unsafe loader."""


def mutate_yaml(rng: Rng, text: str) -> bytes:
    """A YAML file: tree, text or encoding changed, or something that only YAML can do added."""
    kind = rng.random()
    if kind < 0.55:
        text = yaml_text(mutate_tree(rng, yaml.safe_load(text)))
    elif kind < 0.8:
        text = mutate_text(rng, text)
    elif kind < 0.93:
        bomb = rng.choice(_BOMBS)
        text = rng.choice((bomb + text, text + "\n" + bomb, bomb, mutate_text(rng, bomb)))
    else:
        return mutate_bytes(rng, as_bytes(text))
    return encode(rng, text)


def yaml_text(tree: Tree) -> str:
    """A tree as YAML; as JSON, which is YAML too, where the writer of YAML would give up."""
    try:
        text = str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        return text.removesuffix("...\n")
    except (RecursionError, yaml.YAMLError, ValueError, UnicodeError):
        return tree_text(tree)


# --- tables


def mutate_table(rng: Rng, table: Table) -> Table:
    """Rows of text with cells, rows and columns that are wrong, absent or there twice."""
    return list(some(rng, _TABLES, [list(row) for row in table], most=4))


def _cell(rng: Rng, table: Table) -> Table:
    for _ in range(rng.choice((1, 1, 3, 20))):
        row = table[rng.randrange(len(table))]
        if row:
            k = rng.randrange(len(row))
            row[k] = rng.choice(
                (
                    word(rng),
                    str(number(rng)),
                    "-" + row[k],
                    row[k] + "0" * 20,
                    row[k] + " ",
                    f'"{row[k]}',
                )
            )
    return table


def _column(rng: Rng, table: Table) -> Table:
    k = rng.randrange(max(1, len(table[0])) if table else 1)
    fill = rng.choice((word(rng), str(number(rng))))
    for row in table[1:]:
        if k < len(row):
            row[k] = fill
    return table


def _drop_column(rng: Rng, table: Table) -> Table:
    k = rng.randrange(max(1, len(table[0])) if table else 1)
    return [row[:k] + row[k + 1 :] for row in table]


def _double_column(rng: Rng, table: Table) -> Table:
    k = rng.randrange(max(1, len(table[0])) if table else 1)
    times = rng.choice((1, 1, 1, 300))
    return [row + row[k : k + 1] * times for row in table]


def _header(rng: Rng, table: Table) -> Table:
    if table and table[0]:
        k = rng.randrange(len(table[0]))
        table[0][k] = rng.choice(
            (
                word(rng),
                table[0][k].upper(),
                table[0][k - 1],
                "adj_close",
                "factor",
                "pre_close",
                "time",
                "代码",
                "is_st",
                "amount",
                "suspended",
            )
        )
    return table


def _double_rows(rng: Rng, table: Table) -> Table:
    start = rng.randrange(len(table) + 1)
    stop = start + rng.choice((1, 3, len(table)))
    return table[:stop] + table[start:stop] * rng.choice((1, 1, 20)) + table[stop:]


def _drop_rows(rng: Rng, table: Table) -> Table:
    start = rng.randrange(len(table) + 1)
    return table[:start] + table[start + rng.choice((1, 3, len(table))) :]


def _shuffle(rng: Rng, table: Table) -> Table:
    body = table[1:]
    rng.shuffle(body)
    return table[:1] + body


def _ragged(rng: Rng, table: Table) -> Table:
    k = rng.randrange(len(table)) if table else 0
    return [
        row[: rng.randrange(len(row) + 1)] if n == k else row for n, row in enumerate(table)
    ] + [["x"] * rng.choice((1, 50))]


_TABLES = (
    _cell,
    _cell,
    _cell,
    _column,
    _drop_column,
    _double_column,
    _header,
    _double_rows,
    _drop_rows,
    _shuffle,
    _ragged,
)


def csv_bytes(rng: Rng, table: Table) -> bytes:
    """A table as text: separators, ends of lines, quotes and encodings as programs write them."""
    separator = rng.choice((",", ",", ",", ",", "\t", ";", "|"))
    end = rng.choice(("\n", "\n", "\n", "\r\n", "\r"))
    quoted = rng.random() < 0.1
    lines = (separator.join(f'"{cell}"' if quoted else cell for cell in row) for row in table)
    return encode(
        rng, rng.choice(("", "", "", "# note\n", "\n\n")) + end.join(lines) + rng.choice((end, ""))
    )


def parquet_bytes(rng: Rng, table: Table) -> bytes:
    """A table as Parquet, with columns of types that bars do not have; at times damaged."""
    import polars as pl

    width = min((len(row) for row in table), default=0)
    names = dict.fromkeys(table[0][:width] if table else [])
    columns: dict[str, Any] = {}
    for k, name in enumerate(names):
        cells = [row[k] for row in table[1:]]
        try:
            columns[name.encode("utf-8", "replace").decode()] = _typed(rng, cells)
        except (ValueError, OverflowError, TypeError, pl.exceptions.PolarsError):
            columns[name.encode("utf-8", "replace").decode()] = pl.Series(
                [c.encode("utf-8", "replace").decode() for c in cells]
            )
    buffer = io.BytesIO()
    pl.DataFrame(columns).write_parquet(buffer, row_group_size=rng.choice((1, 7, 1000)))
    return mutate_bytes(rng, buffer.getvalue()) if rng.random() < 0.25 else buffer.getvalue()


def _typed(rng: Rng, cells: list[str]) -> Any:
    """A column as Parquet would have it: numbers as numbers, days as days; at times as another."""
    import polars as pl

    text = pl.Series([c.encode("utf-8", "replace").decode() for c in cells], dtype=pl.String)
    numbers = text.cast(pl.Float64, strict=False)
    plain = text.str.to_datetime("%Y-%m-%d", strict=False)
    if rng.random() < 0.8:
        if plain.null_count() * 2 < len(text):
            return rng.choice((plain, plain.cast(pl.Date), plain.dt.replace_time_zone("UTC"), text))
        return numbers if numbers.null_count() * 2 < len(text) else text
    kind = rng.randrange(12)
    if kind == 0:
        return text.cast(pl.Binary)
    if kind == 1:
        return numbers.fill_null(0).clip(-1e15, 1e15).cast(pl.Int64)
    if kind == 2:
        return pl.Series([[c] for c in text], dtype=pl.List(pl.String))
    if kind == 3:
        return pl.Series([{"a": c} for c in text], dtype=pl.Struct({"a": pl.String}))
    if kind == 4:
        return text.cast(pl.Categorical)
    if kind == 5:
        return numbers > 0
    if kind == 6:
        return numbers.cast(pl.Float32)
    if kind == 7:
        return pl.Series([None] * len(text), dtype=pl.Null)
    if kind == 8:
        return numbers.fill_null(0).clip(0, 10**9).cast(pl.Int64).cast(pl.Duration("us"))
    if kind == 9:
        return numbers.fill_null(0).clip(0, 86_399 * 10**9).cast(pl.Int64).cast(pl.Time)
    if kind == 10:
        return plain.cast(pl.Datetime("ns")).dt.replace_time_zone("Asia/Shanghai")
    return numbers.fill_null(0).clip(0, 10**9).cast(pl.Decimal(20, 4))


# --- arrays and tensors


class _Touch:
    """A pickle that would run code when it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, (CODE,)


def mutate_npy(rng: Rng, data: bytes) -> bytes:
    """A .npy file: bytes, header or content changed; at times a pickle that would run code."""
    import numpy as np

    kind = rng.random()
    if kind < 0.35:
        return mutate_bytes(rng, data)
    if kind < 0.6:
        length = int.from_bytes(data[8:10], "little")
        header = _splice(rng, data[10 : 10 + length].decode("latin-1"))[:length].ljust(length)
        return data[:10] + header.encode("latin-1", "replace") + data[10 + length :]
    if kind < 0.68:
        payload = pickle.dumps(_Touch())
        head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        head = head.ljust(117) + b"\n"
        return rng.choice(
            (payload, b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + payload)
        )
    out = io.BytesIO()
    np.save(out, mutate_array(rng, np.load(io.BytesIO(data), allow_pickle=False)))
    return out.getvalue()


def mutate_array(rng: Rng, array: Any) -> Any:
    """An array with other values, another shape or another type."""
    import numpy as np

    array = np.array(array)
    flat = array.reshape(-1)
    change = rng.randrange(5)
    if change == 0 and flat.size:
        flat[rng.randrange(flat.size)] = np.asarray(rng.choice((0, 1, 2))).astype(array.dtype)
    elif change == 1 and array.dtype.kind == "f":
        flat[:: rng.choice((1, 2, 97))] = rng.choice((math.nan, math.inf, -1.0, 1e300, 0.0))
    elif change == 2:
        array = array[: rng.randrange(len(array) + 1)] if array.ndim else array
    elif change == 3:
        array = array.astype(
            rng.choice(("f2", "i1", "U8", "?", "c16", ">f8", "M8[D]"))
            if array.dtype.kind != "M"
            else "i8"
        )
    else:
        array = rng.choice((array.T, array[None], flat, np.zeros((0,)), np.asarray(3.0)))
    return array


def mutate_safetensors(rng: Rng, data: bytes) -> bytes:
    """A .safetensors file: bytes or the JSON header changed."""
    if rng.random() < 0.5 or len(data) < 8:
        return mutate_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header = as_bytes(tree_text(mutate_tree(rng, json.loads(data[8 : 8 + length]))))
    size = rng.choice((len(header), length, 0, 2**40, 2**63))
    return size.to_bytes(8, "little") + header + data[8 + length :]


def mutate_onnx(rng: Rng, data: bytes) -> bytes:
    """A graph: bytes changed, or its nodes, weights, inputs and what it points to."""
    import onnx

    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    model = onnx.load_model_from_string(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(_GRAPHS)(rng, model)
    return bytes(model.SerializeToString())


def _other_node(rng: Rng, model: Any) -> None:
    node = rng.choice(model.graph.node)
    node.op_type = rng.choice(
        ("ConstantOfShape", "Loop", "Identity", "Nope", "Tile", "Reshape", "Expand", "NonZero")
    )


def _other_wires(rng: Rng, model: Any) -> None:
    names = [name for node in model.graph.node for name in (*node.input, *node.output)]
    node = rng.choice(model.graph.node)
    kind = rng.randrange(4)
    if kind == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice((*names, "", "nowhere"))
    elif kind == 1 and node.output:
        node.output[0] = rng.choice(names)
    elif kind == 2:
        del node.input[:]
    else:
        model.graph.node.remove(node)


def _other_attribute(rng: Rng, model: Any) -> None:
    attributes = [a for node in model.graph.node for a in node.attribute]
    if not attributes:
        return
    attribute = rng.choice(attributes)
    attribute.i = rng.choice((-1, 0, 7, 2**31, 2**62, -(2**63)))
    attribute.type = rng.choice((attribute.type, attribute.type, 0, 1, 2, 5, 7))
    for k in range(len(attribute.ints)):
        attribute.ints[k] = rng.choice((-1, 0, 1, 2, 10**9))
    if rng.random() < 0.2:
        inner = type(model.graph)()
        inner.CopyFrom(model.graph)  # a message copied into its own part would never end
        attribute.g.CopyFrom(inner)


def _other_weights(rng: Rng, model: Any) -> None:
    tensor = rng.choice(model.graph.initializer)
    kind = rng.randrange(6)
    if kind == 0:
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", rng.choice(("/etc/passwd", "../x", "config.yaml"))
        tensor.data_location = 1
    elif kind == 1:
        tensor.dims.append(rng.choice((0, 1, -1, 10**6, 2**62)))
    elif kind == 2 and tensor.dims:
        tensor.dims[0] = rng.choice((0, 1, -1, 10**12))
    elif kind == 3:
        tensor.data_type = rng.choice((0, 1, 7, 8, 11, 99))
    elif kind == 4:
        tensor.raw_data = mutate_bytes(rng, tensor.raw_data)
    else:
        tensor.raw_data = rng.choice((b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f")) * (
            len(tensor.raw_data) // 4
        )


def _other_face(rng: Rng, model: Any) -> None:
    """Inputs, outputs, versions and names of a graph."""
    graph = model.graph
    value = rng.choice((*graph.input, *graph.output))
    shape = value.type.tensor_type.shape.dim
    kind = rng.randrange(7)
    if kind == 0:
        value.name = word(rng).encode("utf-8", "replace").decode()
    elif kind == 1 and shape:
        shape[rng.randrange(len(shape))].dim_value = rng.choice((-1, 0, 1, 3, 2**40))
    elif kind == 2:
        value.type.tensor_type.elem_type = rng.choice((0, 1, 7, 8, 9, 11))
    elif kind == 3:
        model.ir_version = rng.choice((0, 1, 99, 2**62))
    elif kind == 4:
        model.opset_import[0].version = rng.choice((0, 1, 7, 99, 2**62))
    elif kind == 5:
        rng.choice(graph.node).domain = rng.choice(("com.microsoft", "evil", "ai.onnx.ml"))
    else:
        model.functions.add().name = "f"


_GRAPHS = (_other_node, _other_wires, _other_attribute, _other_weights, _other_weights, _other_face)


def mutate_parquet(rng: Rng, data: bytes) -> bytes:
    """A Parquet file of ours: bytes changed, or the frame in it."""
    import polars as pl

    if rng.random() < 0.5:
        return mutate_bytes(rng, data)
    frame = pl.read_parquet(io.BytesIO(data))
    kind = rng.randrange(6)
    name = rng.choice(frame.columns) if frame.columns else ""
    if kind == 0 and name:
        frame = frame.drop(name)
    elif kind == 1 and name:
        frame = frame.rename({name: f"{name}_"})
    elif kind == 2 and name:
        values = [
            w.encode("utf-8", "replace").decode() for w in (word(rng) for _ in range(frame.height))
        ]
        frame = frame.with_columns(pl.Series(name, values, dtype=pl.String))
    elif kind == 3 and name:
        frame = frame.with_columns(pl.lit(None).alias(name))
    elif kind == 4:
        frame = frame.head(rng.choice((0, 1, frame.height // 2)))
    else:
        frame = pl.concat([frame, frame])
    out = io.BytesIO()
    frame.write_parquet(out)
    return out.getvalue()


def mutate_jsonl(rng: Rng, data: bytes) -> bytes:
    """Lines of JSON: one of them mutated, or the text."""
    lines = data.split(b"\n")
    k = rng.randrange(len(lines))
    if rng.random() < 0.4 or not lines[k].strip():
        return mutate_bytes(rng, data)
    lines[k] = as_bytes(
        json.dumps(mutate_tree(rng, json.loads(lines[k]))) if rng.random() < 0.9 else "[" * 5000
    )
    return b"\n".join(lines)


def mutate_messages(rng: Rng, data: bytes) -> bytes:
    """Lines of messages: some changed, lost, doubled or in another order; at times the bytes."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data)
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        k, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        kind = rng.random()
        if kind < 0.6:
            lines[k] = mutate_json(rng, lines[k]).replace(b"\n", b" ")
        elif kind < 0.7:
            del lines[k]
        elif kind < 0.8:
            lines.insert(other, lines[k])
        elif kind < 0.9:
            lines[k], lines[other] = lines[other], lines[k]
        else:
            lines[k] = rng.choice(
                (as_bytes(word(rng)), b"[" * 70_000, b'{"schema":' * 9_000, b"x" * (1 << 17))
            )
        if not lines:
            break
    return b"\n".join(lines)


def mutate_file(rng: Rng, name: str, data: bytes) -> bytes:
    """A file by the ending of its name; by its bytes where the ending says nothing."""
    by_ending: dict[str, Callable[[Rng, bytes], bytes]] = {
        "json": mutate_json,
        "jsonl": mutate_jsonl,
        "npy": mutate_npy,
        "safetensors": mutate_safetensors,
        "parquet": mutate_parquet,
        "onnx": mutate_onnx,
        "yaml": lambda rng, data: mutate_yaml(rng, data.decode()),
    }
    mutate = by_ending.get(name.rpartition(".")[2], mutate_bytes)
    try:
        return mutate(rng, data)
    except RecursionError:  # a tree so deep that no writer takes it
        return b"[" * 5000
