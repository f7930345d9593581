"""Read, override, check, fingerprint and write the configuration.

1. YAML is loaded safely; a key given twice is refused.
2. `a.b=value` overrides are applied, the value read as YAML.
3. The tree is validated; every problem is reported at once, with the key it concerns.
4. `fingerprint` identifies the resolved tree; `to_yaml` writes it into every run directory.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from echelon.config.tree import Config
from echelon.errors import ConfigError


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice: YAML would silently keep the last.

    What plain YAML answers with a bare Python error (a day that does not exist, a list as a key)
    is an error with a place here.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401
        try:
            return super().construct_object(node, deep=deep)
        except ValueError as error:
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value!r} cannot be read ({error})", node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} cannot be a key; write a name", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in `path` (defaults without one) with `overrides` applied."""
    tree = read_yaml(path) if path is not None else {}
    return _checked(tree, overrides, str(path) if path is not None else "configuration")


def override_config(config: Config, overrides: Sequence[str]) -> Config:
    """Return `config` with `overrides` applied, checked as if it had been read from a file."""
    return _checked(config.model_dump(mode="json"), overrides, "configuration")


def _checked(tree: dict[str, Any], overrides: Sequence[str], where: str) -> Config:
    for item in overrides:
        _override(tree, item)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, where)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Name an existing YAML file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory. Name a YAML file in it.") from None
    except (UnicodeDecodeError, PermissionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}). Save it as UTF-8 text.") from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `key: value` pairs, found {type(tree).__name__}.")
    return tree


def _override(tree: dict[str, Any], item: str) -> None:
    key, sep, text = item.partition("=")
    key = key.strip()
    if not sep or not key:
        raise ConfigError(f"override {item!r}: expected key=value, such as train.gamma=0.9.")
    try:
        value = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not readable"
        raise ConfigError(f"override {item!r}: the value is not valid YAML: {problem}.") from None
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {item!r}: {part!r} is a value, not a section.")
        node = child
    node[leaf] = value


def _explain(error: ValidationError, where: str) -> str:
    """Every problem in a line of its own, with the key it concerns."""
    lines = []
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        found = item.get("input")
        if item["type"] == "extra_forbidden":
            message = _unknown_key(loc.pop(), loc)
        elif item["type"] != "value_error" and not isinstance(found, dict):
            message += f" (found {found!r})"
        key = ".".join(loc)
        lines.append(f"{where}: {key + ': ' if key else ''}{message}")
    return "\n".join(lines)


def _unknown_key(key: str, section: Sequence[str]) -> str:
    """What to say of a key its section does not have."""
    model: Any = Config
    for part in section:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field is not None else model
    known = list(getattr(model, "model_fields", {}))
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def to_json(config: Config) -> str:
    """Return the resolved tree as canonical JSON (sorted keys), without mere permissions."""
    tree = config.model_dump(mode="json", exclude={"market": {"preset_confirmed"}})
    return json.dumps(tree, sort_keys=True, ensure_ascii=False)


def fingerprint(config: Config) -> str:
    """Return the SHA-256 of the resolved configuration, as hex; a permission is no part of it."""
    return hashlib.sha256(to_json(config).encode()).hexdigest()


def to_yaml(config: Config) -> str:
    """Return the resolved tree as YAML, in the order in which it is declared."""
    return yaml.safe_dump(
        config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100
    )
