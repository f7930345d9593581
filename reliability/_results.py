"""What a command left in its directory: the values in it, whether all of it opens, and leftovers.

`fingerprint` reduces a directory to one digest a file, of values: a JSON document without what
clocks say (`IGNORED_KEYS`), a table without its timing columns, arrays and tensors bit for bit.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

IGNORED_KEYS = frozenset(
    {
        "finished",  # when a run or proof ended
        "evaluated",  # when a backtest was made
        "when",  # of a line in the registry of trials
        "seconds",
        "cpu_seconds",
        "time/",
        "router/seconds",
        "charts/steps_per_second",
        "sha256",  # of a checkpoint's own document, which tells seconds; what it covers is compared
    }
)
"""Keys, and beginnings of keys where they end in /, whose values are a clock's."""
LOOK_KEYS = frozenset({"after_looks", "deflation", "active_deflation", "reads", "looks"})
"""Keys that tell how often the test window was looked at: a killed look counts, so these grow."""
LOOK_PAGES = ("runs/walk-forward/report/report.html",)
"""Pages that show what these keys say; they differ where the number of looks does."""
IGNORED_FILES = ("cache/*/entry.json", "registry/returns/*.parquet")
"""Sizes and times of a cache entry's files; returns by the number of the look."""
HIDDEN = "."
TEMPORARY = "tmp"
"""Directory of temporary files in a case: TMPDIR of its processes."""
LEFTOVERS = re.compile(r"\.staging-.*|\..*\.tmp|\..*\.old|\..*-removed|\..+-[0-9a-f]{12}")
"""Names that only a killed process leaves behind."""
TEMPORARY_LEFTOVERS = re.compile(r"pymp-.*|tmp.*|torch_.*|echelon-.*")
_CLOCK = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z| UTC)?"
    r"|(?:[\w ]{1,20} in all, )?\b[\d,.]{1,12} CPU seconds"
)
"""Times and durations in pages."""


def is_ignored(key: str) -> bool:
    """Whether a clock gave the values of this key, or a count of looks."""
    return key in IGNORED_KEYS | LOOK_KEYS or any(
        part.endswith("/") and key.startswith(part) for part in IGNORED_KEYS
    )


def plain(value: Any, root: str) -> Any:
    """JSON without timing keys; the directory's own path is written <root>."""
    if isinstance(value, Mapping):
        return {k: plain(v, root) for k, v in sorted(value.items()) if not is_ignored(k)}
    if isinstance(value, list):
        return [plain(item, root) for item in value if not _is_loss(item)]
    return value.replace(root, "<root>") if isinstance(value, str) else value


def _is_loss(item: object) -> bool:
    """The hierarchy tells of workers that died; what it learned must not differ by it."""
    return isinstance(item, Mapping) and item.get("kind") == "worker_lost"


def files_of(root: Path) -> Iterator[tuple[str, Path]]:
    """Finished files by name, in order: no hidden part, nothing temporary.

    Of a dataset the current version is named `current`, whatever its directory's name: a kill
    between publishing and the end makes the next import publish the same content again. Versions
    that are not current are kept for readers, and are nobody's result.
    """
    current = {path.parent: _version(path) for path in root.glob("store/*/CURRENT.json")}
    for path in sorted(root.rglob("*")):
        parts = list(path.relative_to(root).parts)
        if not path.is_file() or path.is_symlink() or parts[0] == TEMPORARY:
            continue
        if any(part.startswith(HIDDEN) for part in parts):
            continue
        if parts[0] == "store" and parts[2].startswith("v-"):
            if parts[2] != current.get(root / parts[0] / parts[1]):
                continue
            parts[2] = "current"
        if not any(path.match(pattern) for pattern in IGNORED_FILES):
            yield "/".join(parts), path


def _version(manifest: Path) -> str:
    try:
        return str(json.loads(manifest.read_bytes())["version"])
    except (ValueError, KeyError):  # half written: `read_values` will say so
        return ""


def read_values(path: Path, root: Path) -> bytes:
    """The values of a file, as bytes that are equal where they are; raises where it is damaged."""
    kind = path.suffix
    if kind == ".json":
        tree = json.loads(path.read_bytes())
        if path.name == "reads.json":
            tree = _windows(tree)
        if path.name == "CURRENT.json":
            del tree["version"]  # see `files_of`
        return json.dumps(plain(tree, str(root)), sort_keys=True).encode()
    if kind == ".jsonl":
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return json.dumps(plain(lines, str(root)), sort_keys=True).encode()
    if kind == ".parquet":
        return _table(path)
    if kind == ".npy":
        import numpy as np

        array: np.ndarray = np.load(path, allow_pickle=False)
        return f"{array.dtype}{array.shape}".encode() + bytes(array.tobytes())
    if kind == ".safetensors":
        from safetensors.numpy import load

        tensors = load(path.read_bytes())
        return b"".join(
            f"{n}{a.dtype}{a.shape}".encode() + a.tobytes() for n, a in sorted(tensors.items())
        )
    if kind == ".csv":
        return _columns(path)
    if kind in (".yaml", ".html", ".md", ".txt", ""):
        text = path.read_text(encoding="utf-8").replace(str(root), "<root>")
        return _CLOCK.sub("<time>", text).encode()
    return path.read_bytes()


def _windows(registry: Mapping[str, Any]) -> list[str]:
    """Which windows were looked at, and by what; how often depends on the kills."""
    return sorted(
        {f"{line['run']} {line['config_hash']} {line['window']}" for line in registry["lines"]}
    )


def count_looks(root: Path) -> int:
    """How often test windows were looked at."""
    reads = root / "runs" / "registry" / "reads.json"
    return len(json.loads(reads.read_bytes())["lines"]) if reads.exists() else 0


def _columns(path: Path) -> bytes:
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle, strict=True))
    kept = [{k: v for k, v in row.items() if not is_ignored(k)} for row in rows]
    return json.dumps(kept).encode()


def _table(path: Path) -> bytes:
    import polars as pl

    frame = pl.read_parquet(path, glob=False)
    frame = frame.drop([name for name in frame.columns if is_ignored(name)])
    return frame.write_ndjson().encode()


def digest_values(path: Path, root: Path) -> str:
    """Hash of a file's values; raises where it is damaged."""
    return hashlib.sha256(read_values(path, root)).hexdigest()


def fingerprint(root: Path) -> dict[str, str]:
    """Name → hash of the file's values, of all finished files below a directory."""
    return {name: digest_values(path, root) for name, path in files_of(root)}


def leftovers(root: Path) -> list[str]:
    """Names below `root` that a killed process left, the outermost only."""
    names: list[str] = []
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if any(name.startswith(outer + "/") for outer in names):
            continue
        temporary = name.startswith(f"{TEMPORARY}/")
        pattern = TEMPORARY_LEFTOVERS if temporary else LEFTOVERS
        if pattern.fullmatch(path.name):
            names.append(name)
    return names
