"""What a learner takes beside its networks: weights of an adapter, bytes of a replay.

    SEED_DIR/learner.json    for displays and the report, which have no learner to ask

Learners that have neither leave no such file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from echelon.agents.expert import ExpertLearner
from echelon.files import read_json, write_json
from echelon.models.lora import Trainable, trainable

FILE = "learner.json"


class ReplaySize(NamedTuple):
    """Of a replay buffer: bytes of one transition, and how many it has room for."""

    transition_bytes: int
    capacity: int

    @property
    def whole(self) -> str:
        """All of it, in the unit that fits."""
        size = float(self.transition_bytes * self.capacity)
        unit = next(
            (u for u in (_Unit("GB", 1e9), _Unit("MB", 1e6), _Unit("kB", 1e3)) if size >= u.bytes),
            _Unit("bytes", 1.0),
        )
        return f"{size / unit.bytes:.4g} {unit.name}"


class _Unit(NamedTuple):
    name: str
    bytes: float


class LearnerFacts(NamedTuple):
    """What is known of a learner; None: it has none."""

    adapter: Trainable | None
    replay: ReplaySize | None

    @staticmethod
    def of(learner: object) -> LearnerFacts:
        """Ask a learner."""
        if not isinstance(learner, ExpertLearner):
            return LearnerFacts(None, None)
        replay = ReplaySize(learner.replay.bytes_per_transition, learner.replay.capacity)
        adapter = learner.adapter
        return LearnerFacts(None if adapter is None else trainable(adapter.encoder), replay)

    def lines(self) -> list[str]:
        """In words."""
        told = []
        if self.adapter is not None:
            trained, whole = self.adapter
            share = 100 * self.adapter.share
            told.append(f"adapter: {trained:,} of {whole:,} encoder weights train ({share:.1f} %)")
        if self.replay is not None:
            size, capacity = self.replay
            told.append(
                f"replay: {size:,} bytes a transition, {self.replay.whole} for {capacity:,}"
            )
        return told


def write_learner_facts(directory: Path, learner: object) -> None:
    """Write them into a seed's directory, if there are any."""
    found = LearnerFacts.of(learner)
    if found == LearnerFacts(None, None):
        return
    tree = {name: part and part._asdict() for name, part in found._asdict().items()}
    write_json(directory / FILE, tree)


def read_learner_facts(directory: Path) -> LearnerFacts:
    """What `write_learner_facts` wrote there; nothing known where there is no file."""
    path = directory / FILE
    if not path.exists():
        return LearnerFacts(None, None)
    return read_json(path, LearnerFacts, "Remove it; going on with the training writes it anew.")
