"""Checkpoints: everything training needs to go on bit-exactly, as plain tensors and JSON.

    checkpoints/step-000123456/tensors.safetensors    name → tensor, any dtype
    checkpoints/step-000123456/state.json             step, counters, generators, hashes
    checkpoints/best/                                 the same two files

Both are whole or an error, and nothing is pickled: see `runs.tensor_files`.

A run directory has one writer; reading (`list_checkpoints`, `latest_checkpoint`,
`load_checkpoint`) changes nothing and may happen meanwhile. torch is imported on use, so that
listing runs stays cheap.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import TypedDict

from echelon.errors import DamagedError, StoreError, shorten
from echelon.files import blaming, check_tree, recover_directory, standing_directory
from echelon.runs.tensor_files import TensorFiles
from echelon.states import below_prefix as below_prefix
from echelon.states import with_prefix as with_prefix

if TYPE_CHECKING:
    import torch

FORMAT = 1
TENSORS = "tensors.safetensors"
STATE = "state.json"
BEST = "best"

_FILES = TensorFiles(TENSORS, STATE, "checkpoint", FORMAT, "start a new run")

_STEP = re.compile(r"step-(\d{9,})")
_NAME = re.compile(r"(step-\d{9,})|\.(step-\d{9,})-[0-9a-f]+\.old")  # the second: set aside
_GENERATORS = frozenset({"PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"})


class Checkpoint(NamedTuple):
    """What was saved: the tensors by name (on the CPU) and the JSON state."""

    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


class _Document(TypedDict):
    step: int
    config_hash: str
    state: dict[str, Any]


class FlatOptimizer(NamedTuple):
    """An optimizer's state as flat tensors and JSON."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


def save_checkpoint(
    directory: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    config_hash: str,
    keep: int,
    drop: str | None = None,
) -> Path:
    """Write the checkpoint of `step` below `directory`, then remove what is no longer needed.

    state: values JSON can hold; NaN and infinities are allowed (Python's dialect of JSON)
    keep: this many of the newest stay, the new one included
    drop: name of another (`step-000000400`) that goes, and does not count among them

    Checkpoints of later steps are removed: the run was resumed from before them, and the one to
    resume from next is this one. Log the metrics of a step and save `best` before its checkpoint,
    so that a resumed run misses neither.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"expected step ≥ 0 and keep ≥ 1, found step={step}, keep={keep}")
    for left in directory.glob(".step-*"):
        recover_directory(directory / left.name[1:].rsplit("-", 1)[0])
    target = directory / f"step-{step:09d}"
    _write(target, step, tensors, state, config_hash)
    paths = list_checkpoints(directory)
    gone = {drop} - {target.name}
    earlier = [path for path in paths if _step_of(path) <= step and path.name not in gone]
    for path in paths:
        if path not in earlier[-keep:]:
            # Renamed first, so that a kill leaves no half one under its name.
            doomed = path.with_name(f".{path.name}-removed")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    return target


def save_best(
    directory: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    config_hash: str,
) -> Path:
    """Write the best checkpoint so far in the place of the one before; retention spares it."""
    target = directory / BEST
    recover_directory(target)
    _write(target, step, tensors, state, config_hash)
    return target


def best_checkpoint(directory: Path) -> Path | None:
    """The best checkpoint, or None where there is none yet."""
    return standing_directory(directory / BEST)


def list_checkpoints(directory: Path) -> list[Path]:
    """The periodic checkpoints, the earliest first; whether they are whole is not looked at."""
    if not directory.is_dir():
        return []
    try:
        matches = [_NAME.fullmatch(path.name) for path in directory.iterdir()]
    except OSError as error:
        what = error.strerror or str(error)
        raise DamagedError(directory, what, "Make it readable, or start the run again.") from None
    names = {match[1] or match[2] for match in matches if match}
    standing = (standing_directory(directory / name) for name in names)
    return sorted((path for path in standing if path is not None), key=_step_of)


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest periodic checkpoint, checked whole: a damaged one is an error, not skipped."""
    paths = list_checkpoints(directory)
    if not paths:
        return None
    _read_whole(paths[-1])
    return paths[-1]


def load_checkpoint(path: Path, *, config_hash: str | None = None) -> Checkpoint:
    """Read a checkpoint, whole and of this configuration; config_hash None reads any."""
    document, data = _read_whole(path)
    if config_hash is not None and document["config_hash"] != config_hash:
        raise StoreError(
            f"{path / STATE}: made with another configuration (hash "
            f"{shorten(document['config_hash'])[:12]}, expected {config_hash[:12]}). Give the "
            "configuration it was made with (config.yaml in its run directory), or start a new run."
        )
    try:
        tensors = _FILES.unpack(data, path, "")
    except DamagedError as damage:
        raise DamagedError(damage.path, damage.what, _advice(path)) from None
    return Checkpoint(document["step"], tensors, document["state"])


def blaming_checkpoint(path: Path) -> AbstractContextManager[None]:
    """What goes wrong inside is the fault of a checkpoint's content, whose hashes are right."""
    return blaming(path / STATE, _advice(path))


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> FlatOptimizer:
    """Take an optimizer's state apart: tensors `state.{parameter}.{name}` and the rest as JSON.

    Parameters are numbered in the order of the groups. A tensor in a group (a capturable learning
    rate) is `group.{group}.{name}`. The tensors are the optimizer's own, not copies.
    """
    import torch

    tree = optimizer.state_dict()
    tensors: dict[str, torch.Tensor] = {}

    def part(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
        plain = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{where}.{name}"] = value
            else:
                plain[name] = list(value) if isinstance(value, tuple) else value
        return plain

    state = {
        "class": type(optimizer).__name__,
        "groups": [part(f"group.{k}", group) for k, group in enumerate(tree["param_groups"])],
        "state": {str(k): part(f"state.{k}", values) for k, values in tree["state"].items()},
    }
    state["tensors"] = sorted(tensors)
    _require_plain(state, "optimizer")
    return FlatOptimizer(tensors, state)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Put a flattened state back, bit for bit; one of another optimizer changes nothing."""
    advice = "Resume with the model and optimizer settings the checkpoint was made with."
    name = type(optimizer).__name__
    if state["class"] != name:
        raise StoreError(f"the checkpoint holds {state['class']} state, not {name}. {advice}")
    if sorted(tensors) != state["tensors"]:
        missing = sorted(set(state["tensors"]) ^ set(tensors))
        raise StoreError(
            f"the checkpoint's optimizer tensors are not those it lists: {', '.join(missing[:5])}. "
            + advice
        )
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state["groups"]]
    if sizes != saved:
        raise StoreError(
            f"the checkpoint's optimizer has groups of {saved} parameters, expected {sizes}. "
            + advice
        )
    for key, tensor in tensors.items():
        kind, number, part = key.split(".", 2)
        if kind == "state" and part != "step" and tensor.shape != shapes[int(number)]:
            raise StoreError(
                f"the checkpoint's optimizer has {key} of shape {tuple(tensor.shape)}, expected "
                f"{tuple(shapes[int(number)])}. {advice}"
            )
    groups: list[dict[str, Any]] = [
        {n: tuple(v) if n == "betas" else v for n, v in group.items()} for group in state["groups"]
    ]
    values: dict[int, dict[str, Any]] = {int(k): dict(v) for k, v in state["state"].items()}
    for name, tensor in tensors.items():
        kind, number, key = name.split(".", 2)
        # torch keeps the tensor it is given; a copy leaves the caller's checkpoint as it was read.
        place = groups[int(number)] if kind == "group" else values[int(number)]
        place[key] = tensor.clone()
    optimizer.load_state_dict({"param_groups": groups, "state": values})


def pack_generator(generator: np.random.Generator) -> dict[str, Any]:
    """A numpy generator's state as JSON can hold it (its integers have up to 128 bits)."""
    packed: dict[str, Any] = _lists(generator.bit_generator.state)
    return packed


def unpack_generator(packed: Mapping[str, Any]) -> np.random.Generator:
    """The generator that continues where the packed one was; what it spawns is another."""
    kind = packed.get("bit_generator")
    if not isinstance(kind, str) or kind not in _GENERATORS:
        raise StoreError(
            f"a random generator of kind {shorten(repr(kind), 40)} was saved; known are "
            f"{', '.join(sorted(_GENERATORS))}. Resume with the version that saved it."
        )
    bits = getattr(np.random, kind)(0)
    bits.state = _arrays(packed)
    return np.random.Generator(bits)


def _write(
    target: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    config_hash: str,
) -> None:
    _require_plain(state, "state")
    facts = {"step": step, "config_hash": config_hash, "state": dict(state)}
    try:
        _FILES.write(target, tensors, facts)
    except OSError as error:
        raise StoreError(
            f"{target}: the checkpoint cannot be written ({error.strerror or error}). Those before "
            "it are intact: make room or mend the disk, then resume."
        ) from error


def _read_whole(path: Path) -> tuple[_Document, bytes]:
    try:
        document, data = _FILES.read(path, "")
        return check_tree(document, _Document, path / STATE, ""), data
    except DamagedError as damage:
        raise DamagedError(damage.path, damage.what, _advice(path)) from None


def _advice(path: Path) -> str:
    if not _STEP.search(path.name):
        return "The best weights are kept nowhere else: train the run again (--overwrite)."
    periodic = list_checkpoints(path.parent)
    for saved in reversed([saved for saved in periodic if _step_of(saved) < _step_of(path)]):
        with suppress(StoreError):
            _FILES.read(saved, "")
            return f"Resume from an earlier one: --resume {saved}"
    return "No earlier checkpoint next to it is whole: start the run again."


def _require_plain(value: object, where: str) -> None:
    """Refuse what JSON would lose or change: tuples, integer keys, numpy scalars."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a string; JSON would make it one")
            _require_plain(item, f"{where}.{key}")
    elif isinstance(value, list):
        for k, item in enumerate(value):
            _require_plain(item, f"{where}[{k}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(
            f"{where} is {type(value).__name__}; a checkpoint's state holds dict, list, str, int, "
            "float, bool and None. Convert it, or save it among the tensors."
        )


def _lists(value: Any) -> Any:  # noqa: ANN401 (the state of any bit generator)
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:  # noqa: ANN401 (the state of any bit generator)
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return {key: _arrays(item) for key, item in value.items()}


def _step_of(path: Path) -> int:
    match = _STEP.search(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not the name of a periodic checkpoint")
    return int(match[1])
