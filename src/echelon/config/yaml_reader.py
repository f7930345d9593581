"""The one reader of YAML: configurations, overrides, files of variants.

A stranger may have written what is read, so all of it is bounded before anything is made of it:

- a file's size, the number of its values and how deep they nest;
- no aliases (`*name`) and no merge keys: a few hundred bytes of them stand for gigabytes;
- no tags (`!!python/…`): a value is a text, a number, a truth value, a date or nothing;
- keys are names, each given once; numbers fit into 64 bits; texts hold no control characters;
- numbers are decimal, or say what they are (0x, 0b): `010` and `1:30` are texts, of which YAML 1.1
  would make 8 and 90.

Whatever is wrong is a ConfigError with the line it is in.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from echelon.errors import ConfigError, shorten

MAX_BYTES = 256 * 1024
"""Of a file or an override; the longest of ours has 5 KB."""
MAX_VALUES = 20_000
MAX_DEPTH = 20
_STRANGE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What no path, symbol or name holds: a control character, half a surrogate pair."""
_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(
        r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)\Z",
    ),
    "tag:yaml.org,2002:float": re.compile(
        r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""What is a number: YAML 1.1's patterns but for octal and sexagesimal ones."""


class _StrictLoader(yaml.SafeLoader):
    """Safe loader within the bounds above; a key given twice is refused, YAML keeps the last."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            raise _problem(event, f"*{event.anchor} is an alias; write the value itself")
        if getattr(event, "tag", None) is not None:
            raise _problem(event, f"{event.tag} is a tag; write the value alone")
        self._values += 1
        if self._values > MAX_VALUES:
            raise _problem(event, f"more than {MAX_VALUES:,} values")
        if self._depth >= MAX_DEPTH:
            raise _problem(event, f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep=deep)
        # 64 bits have 20 digits, a float 25 characters.
        if node.tag in _NUMBERS and len(node.value) > 40:
            raise _problem(node, f"{_quote(node.value)} is too long for a number")
        try:
            value = super().construct_object(node)
        except (ValueError, OverflowError) as error:  # a day that does not exist, 0x_
            raise _problem(node, f"{_quote(node.value)} cannot be read ({error})") from None
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise _problem(node, f"{_quote(node.value)} does not fit into 64 bits")
        if isinstance(value, str) and (strange := _STRANGE.search(value)):
            character = f"the character U+{ord(strange[0]):04X}"
            raise _problem(node, f"{_quote(value)} holds {character}, which no setting can")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise _problem(key_node, "<< merges mappings; write the keys themselves")
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                written = key_node.value if isinstance(key_node, yaml.ScalarNode) else key
                raise _problem(
                    key_node,
                    f"{_quote(written)} cannot be a key; write a name, in quotes if it looks like "
                    "a number, a date or yes/no/on/off",
                )
            if key in seen:
                raise _problem(key_node, f"key {_quote(key)} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, _NUMBERS.get(tag, pattern)) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_yaml(path: Path) -> dict[str, Any]:
    tree = parse_yaml(read_text(path), str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `key: value` pairs, found {type(tree).__name__}.")
    return tree


def read_text(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            data = handle.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Name an existing YAML file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory. Name a YAML file in it.") from None
    except (OSError, ValueError) as error:  # ValueError: a name with NUL
        what = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({what}). Name a readable YAML file.") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{path}: larger than {MAX_BYTES >> 10} KiB. A configuration is a few KB; name one."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Save it as UTF-8 text.") from None


def parse_yaml(text: str, where: str) -> Any:  # noqa: ANN401 (what YAML holds)
    """Return what YAML text holds, None if nothing; `where` it is from goes into the error."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where}: longer than {MAX_BYTES >> 10} KiB.")
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise ConfigError(
            f"{where}{line}: not valid YAML: {shorten(problem or 'not readable')}."
        ) from None


def _problem(place: Any, what: str) -> yaml.YAMLError:  # noqa: ANN401 (an event or a node)
    return yaml.constructor.ConstructorError(None, None, what, place.start_mark)


def _quote(value: object) -> str:
    return repr(shorten(value, 60)) if isinstance(value, str) else shorten(repr(value), 60)
