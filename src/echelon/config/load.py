"""Read, override, check, fingerprint and write the configuration.

1. YAML is read within bounds (`yaml_reader`); a key given twice is refused.
2. `a.b=value` overrides are applied, the value read as YAML.
3. The tree is validated; every problem is reported at once, with the key it concerns.
4. `fingerprint` identifies the resolved tree; `to_yaml` writes it into every run directory.

The configuration of a run directory may be a stranger's. Its code is `echelon.config.code`'s to
judge; where it writes, `refuse_places`': store, cache and registry lie outside of the run, and a
directory that it names for them is written to only if it is the default, if it is Echelon's
already, or if it is new and lies below the current directory or next to the run.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from echelon.config._base import Section, types_in
from echelon.config.code import RunCode, real_path
from echelon.config.tree import Config
from echelon.config.yaml_reader import MAX_DEPTH, parse_yaml, read_yaml
from echelon.errors import ConfigError, UsageError, shorten

S = TypeVar("S", bound=Section)
_SHOWN = 20
"""Problems of a configuration that a message lists."""
REGISTRY = "logging.registry"
PLACES: Mapping[str, Sequence[str]] = {
    "data.store": ("*/CURRENT.json",),
    "data.cache.dir": ("*/entry.json",),
    "data.ticks.parquet_dir": ("*.parquet",),
    REGISTRY: ("trials.json", "reads.json"),
}
"""Key of a directory that is written to → what is in it where it is Echelon's already."""
_CODE_KEYS = (("features", "modules"), ("execution", "extensions"))
"""Where a configuration names Python files: section and key."""


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the user's configuration in `path` (defaults without one), `overrides` applied."""
    tree = read_yaml(path) if path is not None else {}
    where = str(path) if path is not None else "configuration"
    return _validate_tree(tree, overrides, where, Config)


def load_section(kind: type[S], path: Path | None, overrides: Sequence[str] = ()) -> S:
    """A tree of settings that is not the configuration's, read and checked in the same way."""
    tree = read_yaml(path) if path is not None else {}
    return _validate_tree(tree, overrides, str(path) if path is not None else "settings", kind)


def load_run_config(
    path: Path, overrides: Sequence[str] = (), trust_code: Sequence[Path] = ()
) -> Config:
    """Return the configuration that a run directory holds, perhaps a stranger's, in `path`.

    It is read as any other, but the code that it names does not run, unless `trust_code` or an
    override names the same file (see `echelon.config.code`).
    """
    for file in trust_code:
        if not file.is_file():
            raise UsageError(f"--trust-code {file}: no such file.")
    config = load_config(path, overrides)
    named: dict[str, Any] = {}
    for item in overrides:
        _override(named, item)
    files = [file for name, key in _CODE_KEYS for file in (named.get(name) or {}).get(key) or ()]
    run_code = RunCode(path.parent, tuple(real_path(Path(f)) for f in (*trust_code, *files)))
    return _with_code(config, {name: run_code for name, _ in _CODE_KEYS})


def override_config(config: Config, overrides: Sequence[str]) -> Config:
    """Return `config` with `overrides`, checked; code that it names is still whose it was."""
    changed = _validate_tree(config.model_dump(mode="json"), overrides, "configuration", Config)
    return _with_code(changed, {name: getattr(config, name).run_code for name, _ in _CODE_KEYS})


def user_code(config: Config) -> tuple[Path, ...]:
    """Files of code that the user has named: all of them in a configuration of the user's own."""
    files: list[Path] = []
    for name, key in _CODE_KEYS:
        section = getattr(config, name)
        named = getattr(section, key)
        files += map(Path, named if section.run_code is None else section.run_code.trusted)
    return tuple(files)


def _with_code(config: Config, codes: Mapping[str, RunCode | None]) -> Config:
    marked = {name: getattr(config, name).read_from(code) for name, code in codes.items()}
    return config.model_copy(update=marked)


def _validate_tree(tree: dict[str, Any], overrides: Sequence[str], where: str, kind: type[S]) -> S:
    for item in overrides:
        _override(tree, item)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, where, kind)) from None


def _override(tree: dict[str, Any], item: str) -> None:
    where = f"override {shorten(item, 80)!r}"
    key, sep, text = item.partition("=")
    key = key.strip()
    if not sep or not key:
        raise ConfigError(f"{where}: expected key=value, such as train.gamma=0.9.")
    value = parse_yaml(text, where)
    *parents, leaf = key.split(".")
    if len(parents) > MAX_DEPTH:
        raise ConfigError(f"{where}: nested deeper than {MAX_DEPTH} levels.")
    node = tree
    for part in parents:
        child = node.setdefault(part, {})
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{where}: {shorten(part)!r} is a value, not a section.")
        node = child
    node[leaf] = value


def _explain(error: ValidationError, where: str, root: type[Section]) -> str:
    problems = error.errors(include_url=False)
    lines: list[str] = []
    model: Any
    for item in problems[:_SHOWN]:
        loc = [shorten(part, 60) for part in item["loc"]]
        message = item["msg"].removeprefix("Value error, ")
        given = item.get("input")
        if item["type"] == "extra_forbidden":
            key, model = loc.pop(), root
            for part in loc:
                field = getattr(model, "model_fields", {}).get(part)
                inner = [] if field is None else types_in(field.annotation)
                model = next((kind for kind in inner if hasattr(kind, "model_fields")), model)
            known = list(getattr(model, "model_fields", {}))
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            message = f"unknown key {key!r}; {hint}"
        elif item["type"] == "model_type":
            what = "nothing: remove the key or fill it in" if given is None else repr(given)
            message = f"expected a mapping of settings, found {shorten(what, 80)}"
        elif item["type"] != "value_error" and not isinstance(given, dict):
            message += f" (found {shorten(repr(given), 80)})"
        place = ": ".join([where, *([".".join(loc)] if loc else [])])
        lines.append(f"{place}: {shorten(message, 500)}")
    if len(problems) > len(lines):
        lines.append(f"… and {len(problems) - len(lines):,} more")
    return "\n".join(lines)


def to_json(config: Config) -> str:
    """Return the resolved tree as canonical JSON (sorted keys), without permissions and alerts."""
    tree = config.model_dump(mode="json", exclude={"market": {"preset_confirmed"}, "alerts": True})
    return json.dumps(tree, sort_keys=True, ensure_ascii=False)


def fingerprint(config: Config) -> str:
    """Return the SHA-256 of the resolved configuration, as hex; see `to_json` for what is in it."""
    return hashlib.sha256(to_json(config).encode()).hexdigest()


def to_yaml(config: Config) -> str:
    tree = config.model_dump(mode="json")
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def refuse_places(
    config: Config, run: Path, overrides: Sequence[str] = (), keys: Iterable[str] = tuple(PLACES)
) -> None:
    """Refuse directories of a run's configuration that are somebody's own; see the module."""
    defaults = type(config)()
    for key in keys:
        value = attrgetter(key)
        place: Path | None = value(config)
        named = any(item.partition("=")[0].strip() == key for item in overrides)
        if place is None or named or place == value(defaults):
            continue
        if not _is_ours(place, PLACES[key]) and not _is_new(place, run):
            raise UsageError(
                f"{run}: its {key} is {place}, outside of the current directory and not a "
                "directory that Echelon made, and a run directory may be a stranger's. Nothing is "
                f"written there unless you name it: add -o {key}={place}, or change to the "
                "directory above it."
            )


def _is_ours(place: Path, marks: Sequence[str]) -> bool:
    try:
        return any(any(place.glob(mark)) for mark in marks)
    except (OSError, ValueError):
        return False


def _is_new(place: Path, run: Path) -> bool:
    real = real_path(place)
    homes = (real_path(Path.cwd()), real_path(run.parent))
    if not any(os.path.commonpath([real, home]) == home for home in homes):
        return False
    try:
        return not os.path.lexists(real) or not any(Path(real).iterdir())
    except OSError:
        return False
