"""What a learner takes besides its networks: weights of an adapter, bytes of a replay.

    SEED_DIR/learner.json    for displays and the report, which have no learner to ask

Learners that have neither leave no such file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from echelon.files import read_json

LEARNER_FACTS = "learner.json"


class ReplaySize(NamedTuple):
    """Of a replay buffer: bytes of one transition, and how many it has room for."""

    transition_bytes: int
    capacity: int

    @property
    def whole(self) -> str:
        """All of it, in the unit that fits."""
        size = float(self.transition_bytes * self.capacity)
        units = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
        unit = next((name for name, least in units.items() if size >= least), "bytes")
        return f"{size / units.get(unit, 1.0):.4g} {unit}"


class AdapterSize(NamedTuple):
    """Weights of an encoder with an adapter: those that train, and all it computes with."""

    trained: int
    whole: int

    @property
    def share(self) -> float:
        """0.12: an expert trains 12 % of what it computes with."""
        return self.trained / self.whole


class LearnerFacts(NamedTuple):
    """What is known of a learner; None: it has none."""

    adapter: AdapterSize | None
    replay: ReplaySize | None

    def lines(self) -> list[str]:
        """In words."""
        lines = []
        if self.adapter is not None:
            trained, whole = self.adapter
            share = 100 * self.adapter.share
            lines.append(f"adapter: {trained:,} of {whole:,} encoder weights train ({share:.1f} %)")
        if self.replay is not None:
            size, capacity = self.replay
            lines.append(
                f"replay: {size:,} bytes a transition, {self.replay.whole} for {capacity:,}"
            )
        return lines


def read_learner_facts(directory: Path) -> LearnerFacts:
    """What `Learner.facts` said when training began; nothing known where there is no file."""
    path = directory / LEARNER_FACTS
    if not path.exists():
        return LearnerFacts(None, None)
    return read_json(path, LearnerFacts, "Remove it; going on with the training writes it again.")
