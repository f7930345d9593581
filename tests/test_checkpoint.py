"""Checkpoints: bit-exact, whole or absent, and never silently wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echelon.errors import StoreError
from echelon.files import sha256_file
from echelon.rng import stream
from echelon.runs import tensor_files
from echelon.runs.checkpoint import (
    STATE,
    TENSORS,
    Checkpoint,
    below_prefix,
    best_checkpoint,
    flatten_optimizer,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    pack_generator,
    restore_optimizer,
    save_best,
    save_checkpoint,
    unpack_generator,
    with_prefix,
)
from echelon.workers import start_worker


def _save(directory: Path, step: int, keep: int = 10, **options: Any) -> Path:
    tensors = {"w": torch.full((3,), float(step))}
    return save_checkpoint(
        directory, step, tensors, {"step": step}, config_hash="c" * 64, keep=keep, **options
    )


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_dtype_and_shape_returns_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "weights/float32": torch.randn(4, 5, generator=torch.Generator().manual_seed(1)),
        "money/float64": torch.tensor([0.1, -0.0, float("nan"), float("inf"), 1e300]).double() / 3,
        "rng/uint8": torch.Generator().manual_seed(7).get_state(),
        "mask/bool": torch.tensor([True, False]),
        "count/int64": torch.tensor(2**62),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
    path = save_checkpoint(tmp_path, 12, tensors, {}, config_hash="c", keep=1)
    loaded = load_checkpoint(path).tensors
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        raw, expected = (t.contiguous().flatten().view(torch.uint8) for t in (loaded[name], tensor))
        assert torch.equal(raw, expected), name


def test_shared_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    tensors = {"actor.encoder": shared, "critic.encoder": shared, "tail": shared[2:]}
    loaded = load_checkpoint(
        save_checkpoint(tmp_path, 1, tensors, {}, config_hash="c", keep=1)
    ).tensors
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_state_returns_with_big_integers_and_non_finite_numbers(tmp_path: Path) -> None:
    state = {"big": 2**127 + 1, "best": -float("inf"), "third": 1 / 3, "list": [None, True, "ü"]}
    path = save_checkpoint(tmp_path, 5, {}, state, config_hash="c", keep=1)
    assert load_checkpoint(path) == Checkpoint(5, {}, state)
    assert path == tmp_path / "step-000000005"
    assert _names(path) == [STATE, TENSORS]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": (1, 2)}, r"state\.a is tuple"),
        ({"a": [{1: 2}]}, r"state\.a\[0\]: key 1 is not a string"),
        ({"a": np.float64(1.0)}, r"state\.a is float64"),
    ],
)
def test_state_that_json_would_change_is_refused(
    state: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path, 1, {}, state, config_hash="c", keep=1)
    assert _names(tmp_path) == []


def test_newest_stay_and_best_is_spared(tmp_path: Path) -> None:
    save_best(tmp_path, 1, {}, {}, config_hash="c")
    for step in (100, 200, 300, 400, 500):
        _save(tmp_path, step, keep=2)
    assert _names(tmp_path) == ["best", "step-000000400", "step-000000500"]
    assert [p.name for p in list_checkpoints(tmp_path)] == _names(tmp_path)[1:]


def test_checkpoints_sort_by_step_beyond_nine_digits(tmp_path: Path) -> None:
    for step in (999_999_999, 1_000_000_000):
        _save(tmp_path, step)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert load_checkpoint(newest).step == 1_000_000_000


def test_foreign_files_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "step-000000001").write_text("a file")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "notes").mkdir()
    assert list_checkpoints(tmp_path) == []
    assert latest_checkpoint(tmp_path) is None
    assert list_checkpoints(tmp_path / "none") == []
    assert best_checkpoint(tmp_path) is None


def test_run_resumed_from_earlier_checkpoint_loses_the_later_ones(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        _save(tmp_path, step)
    (tmp_path / "step-000000300" / TENSORS).write_bytes(b"")
    _save(tmp_path, 150, keep=2)
    assert _names(tmp_path) == ["step-000000100", "step-000000150"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000150"


def test_same_step_saved_again_replaces_the_first(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        save_checkpoint(tmp_path, 9, {"w": torch.tensor(value)}, {}, config_hash="c", keep=1)
    assert load_checkpoint(tmp_path / "step-000000009").tensors["w"].item() == 2.0
    assert _names(tmp_path) == ["step-000000009"]


def _truncate(path: Path) -> None:
    os.truncate(path / TENSORS, (path / TENSORS).stat().st_size - 4)


def _flip(path: Path) -> None:
    data = bytearray((path / TENSORS).read_bytes())
    data[-1] ^= 1
    (path / TENSORS).write_bytes(data)


def _rewrite(path: Path, **changes: Any) -> None:
    tree = json.loads((path / STATE).read_text()) | changes
    (path / STATE).write_text(json.dumps(tree))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated tensors": (_truncate, TENSORS),
    "one bit of a weight": (_flip, TENSORS),
    "no tensors": (lambda p: (p / TENSORS).unlink(), TENSORS),
    "no state": (lambda p: (p / STATE).unlink(), STATE),
    "half a state": (lambda p: os.truncate(p / STATE, 40), STATE),
    "state is a list": (lambda p: (p / STATE).write_text("[1]"), STATE),
    "state is not text": (lambda p: (p / STATE).write_bytes(b"\xff\x00"), STATE),
    "another counter": (lambda p: _rewrite(p, state={"step": 301}), STATE),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_is_an_error_that_names_the_way_out(kind: str, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        _save(tmp_path, step)
    harm, file = DAMAGE[kind]
    _truncate(tmp_path / "step-000000200")  # not a way out either
    harm(tmp_path / "step-000000300")
    newest, earlier = tmp_path / "step-000000300", tmp_path / "step-000000100"
    for attempt in (lambda: latest_checkpoint(tmp_path), lambda: load_checkpoint(newest)):
        with pytest.raises(StoreError) as caught:
            attempt()
        assert str(caught.value).startswith(f"{newest / file}: missing or damaged (")
        assert str(caught.value).endswith(f"Resume from an earlier one: --resume {earlier}")
    assert load_checkpoint(earlier).step == 100


def test_damaged_only_checkpoint_says_to_start_anew(tmp_path: Path) -> None:
    path = _save(tmp_path, 100)
    _flip(path)
    with pytest.raises(
        StoreError, match="No earlier checkpoint next to it is whole: start the run"
    ):
        latest_checkpoint(tmp_path)


def test_damaged_best_says_that_it_cannot_be_had_again(tmp_path: Path) -> None:
    _save(tmp_path, 100)
    best = save_best(tmp_path, 50, {"w": torch.ones(2)}, {}, config_hash="c")
    _flip(best)
    with pytest.raises(StoreError, match=rf"best/{TENSORS}: .*train the run again"):
        load_checkpoint(best)


def test_tensor_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, 100)
    (path / TENSORS).write_bytes(b"x" * 64)
    tree = json.loads((path / STATE).read_text()) | {"tensors_sha256": sha256_file(path / TENSORS)}
    del tree["sha256"]
    (path / STATE).write_text(json.dumps(tree | {"sha256": tensor_files._digest(tree)}))
    with pytest.raises(StoreError, match=rf"{TENSORS}: missing or damaged"):
        load_checkpoint(path)


def test_other_format_version_is_refused_and_named(tmp_path: Path) -> None:
    path = _save(tmp_path, 100)
    _rewrite(path, format=99, echelon="9.9")
    for attempt in (lambda: load_checkpoint(path), lambda: latest_checkpoint(tmp_path)):
        with pytest.raises(StoreError, match=rf"{STATE}: .*format 99 of Echelon 9.9.*reads format"):
            attempt()


def test_other_configuration_is_refused_unless_any_will_do(tmp_path: Path) -> None:
    path = _save(tmp_path, 100)
    with pytest.raises(StoreError, match=r"another configuration \(hash c{12}, expected d{12}\)"):
        load_checkpoint(path, config_hash="d" * 64)
    assert load_checkpoint(path, config_hash="c" * 64).step == load_checkpoint(path).step == 100


@pytest.mark.parametrize("call", range(4))
def test_full_disk_leaves_the_earlier_checkpoints_and_no_half_one(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fsync of a save in turn is told that the disk is full: two files, then their names."""
    _save(tmp_path, 100, keep=1)
    best = save_best(tmp_path, 100, {}, {"n": 1}, config_hash="c")
    real, calls = os.fsync, iter(range(100))

    def full(handle: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"step-000000200: .*No space left on device.*resume"):
        _save(tmp_path, 200, keep=1)
    monkeypatch.undo()
    whole = {"best", "step-000000100"} | ({"step-000000200"} if call == 3 else set())
    assert set(_names(tmp_path)) == whole
    assert load_checkpoint(tmp_path / "step-000000100").step == 100
    assert load_checkpoint(best).state == {"n": 1}
    _save(tmp_path, 200, keep=1)
    assert _names(tmp_path) == ["best", "step-000000200"]


LIMITED = """
import resource, sys
from multiprocessing.connection import Connection
from pathlib import Path
import torch
from echelon.workers import start_worker
from echelon.errors import StoreError
from echelon.runs.checkpoint import save_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save_checkpoint(Path({root!r}), 200, {{"w": torch.zeros(9_000)}}, {{}}, config_hash="c", keep=1)
except StoreError as error:
    sys.exit("refused: " + str(error))
"""


def test_write_the_kernel_refuses_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 100)
    script = LIMITED.format(root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.startswith("refused: "), done.stderr
    assert "File too large" in done.stderr
    assert _names(tmp_path) == ["step-000000100"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000100"


def _die_replacing(_pipe: Connection, kind: str, stage: str, root: Path) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if stage == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        renamed = real(self, target)
        if stage == "between" or not str(target).endswith(".old"):
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed

    Path.rename = rename  # type: ignore[method-assign, assignment]
    new = {"w": torch.ones(2)}
    if kind == "best":
        save_best(root, 200, new, {"new": True}, config_hash="c")
    else:
        save_checkpoint(root, 100, new, {"new": True}, config_hash="c", keep=1)


@pytest.mark.parametrize("stage", ["before", "between", "after"])
@pytest.mark.parametrize("kind", ["best", "periodic"])
def test_kill_during_replacement_leaves_the_old_or_the_new_one(
    kind: str, stage: str, tmp_path: Path
) -> None:
    save_best(tmp_path, 100, {}, {"new": False}, config_hash="c")
    save_checkpoint(tmp_path, 100, {}, {"new": False}, config_hash="c", keep=1)
    worker = start_worker(_die_replacing, kind, stage, tmp_path)
    worker.process.join(120)
    worker.pipe.close()
    assert worker.process.exitcode == -signal.SIGKILL
    find = best_checkpoint if kind == "best" else latest_checkpoint
    path = find(tmp_path)
    assert path is not None
    assert load_checkpoint(path).state == {"new": stage == "after"}
    for step in (200, 300):
        save_best(tmp_path, step, {}, {"step": step}, config_hash="c")
        save_checkpoint(tmp_path, step, {}, {}, config_hash="c", keep=3)
    kept = ["step-000000100", "step-000000200", "step-000000300"]
    assert _names(tmp_path) == ["best", *kept]  # nothing is left lying about
    assert load_checkpoint(tmp_path / "best").state == {"step": 300}


class _Learner:
    """A small network, fed from a numpy and from a torch generator."""

    def __init__(self, kind: type[torch.optim.Adam]) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.unused = nn.Parameter(torch.zeros(2))
        last = [*self.net[2].parameters(), self.unused]
        groups: list[dict[str, Any]] = [
            {"params": [*self.net[0].parameters()], "lr": 1e-2},
            {"params": last, "lr": 3e-3, "weight_decay": 0.1},
        ]
        self.optimizer = kind(groups, betas=(0.8, 0.95), eps=1e-7)
        self.data = stream(1, "data")
        self.noise = torch.Generator().manual_seed(5)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.from_numpy(self.data.standard_normal((8, 5), dtype=np.float32))
            y = torch.rand(8, 1, generator=self.noise)
            loss = ((self.net(x) - y) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.99
            losses.append(loss.item())
        return losses

    def save(self, directory: Path) -> Path:
        flat = flatten_optimizer(self.optimizer)
        tensors = with_prefix("net/", self.net.state_dict())
        tensors |= with_prefix("optimizer/", flat.tensors)
        tensors["noise"] = self.noise.get_state()
        state = {"optimizer": flat.state, "data": pack_generator(self.data)}
        return save_checkpoint(directory, 40, tensors, state, config_hash="c", keep=1)

    def load(self, path: Path) -> None:
        _, tensors, state = load_checkpoint(path)
        self.net.load_state_dict(below_prefix("net/", tensors))
        restore_optimizer(self.optimizer, below_prefix("optimizer/", tensors), state["optimizer"])
        self.noise.set_state(tensors["noise"])
        self.data = unpack_generator(state["data"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_training_after_restore_equals_uninterrupted_bit_for_bit(
    kind: type[torch.optim.Adam], tmp_path: Path
) -> None:
    uninterrupted = _Learner(kind)
    uninterrupted.train(40)
    path = uninterrupted.save(tmp_path)
    expected = uninterrupted.train(60)

    resumed = _Learner(kind)
    resumed.train(3)  # whatever it was before must not matter
    resumed.load(path)
    assert resumed.train(60) == expected
    for ours, theirs in zip(resumed.net.parameters(), uninterrupted.net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = (flatten_optimizer(one.optimizer) for one in (resumed, uninterrupted))
    assert ours.state == theirs.state
    assert ours.state["groups"][0]["lr"] == pytest.approx(1e-2 * 0.99**100)
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)
    assert resumed.optimizer.param_groups[0]["betas"] == (0.8, 0.95)


def test_restored_optimizer_leaves_the_loaded_tensors_alone(tmp_path: Path) -> None:
    learner = _Learner(torch.optim.Adam)
    learner.train(2)
    loaded = load_checkpoint(learner.save(tmp_path))
    before = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    state = below_prefix("optimizer/", loaded.tensors)
    restore_optimizer(learner.optimizer, state, loaded.state["optimizer"])
    learner.train(2)
    assert all(torch.equal(loaded.tensors[name], before[name]) for name in before)


def test_optimizer_state_of_other_parameters_is_refused_untouched() -> None:
    learner = _Learner(torch.optim.Adam)
    learner.train(1)
    tensors, state = flatten_optimizer(learner.optimizer)
    fresh = torch.optim.Adam([torch.zeros(2, requires_grad=True)])
    with pytest.raises(StoreError, match=r"groups of \[2, 3\] parameters, expected \[1\]"):
        restore_optimizer(fresh, tensors, state)
    wide = torch.optim.Adam(
        [{"params": [torch.zeros(9, 9, requires_grad=True) for _ in range(n)]} for n in (2, 3)]
    )
    with pytest.raises(StoreError, match=r"state\.0\.exp_avg of shape \(7, 5\), expected \(9, 9\)"):
        restore_optimizer(wide, tensors, state)
    with pytest.raises(StoreError, match="holds Adam state, not SGD"):
        restore_optimizer(torch.optim.SGD([torch.zeros(2, requires_grad=True)]), tensors, state)
    with pytest.raises(StoreError, match=r"not those it lists: state\.0\.exp_avg"):
        restore_optimizer(learner.optimizer, {}, state)
    assert not fresh.state
    assert not wide.state


def test_learning_rate_held_as_a_tensor_returns() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.25), foreach=False)
    tensors, state = flatten_optimizer(optimizer)
    assert set(tensors) == {"group.0.lr"}
    other = torch.optim.Adam([parameter], lr=0.5)
    restore_optimizer(other, tensors, state)
    assert torch.equal(torch.as_tensor(other.param_groups[0]["lr"]), torch.tensor(0.25))


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_numpy_generator_continues_after_json(kind: str) -> None:
    generator = np.random.Generator(getattr(np.random, kind)(11))
    generator.integers(0, 10, 3, dtype=np.uint32)  # leaves half a word unused
    again = unpack_generator(json.loads(json.dumps(pack_generator(generator))))
    assert again.integers(0, 1000, 5, dtype=np.uint32).tolist() == (
        generator.integers(0, 1000, 5, dtype=np.uint32).tolist()
    )
    assert again.standard_normal(9).tolist() == generator.standard_normal(9).tolist()


def test_generator_of_unknown_kind_is_refused() -> None:
    with pytest.raises(StoreError, match="kind 'RandomState' was saved; known are MT19937"):
        unpack_generator({"bit_generator": "RandomState"})


def test_listing_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import echelon.runs; "
        "from echelon.runs.checkpoint import list_checkpoints; "
        f"assert list_checkpoints(Path({str(tmp_path)!r})) == []; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == 0
