"""Makes members in whichever process is to host them.

Pickled to get there: configuration, world and encoder go along, once per process. Replay and tables
are opened there, as files that all processes map; in this process they are handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon.agents.tables import EmbeddingTable
from echelon.config import Config
from echelon.envs.world import World
from echelon.models import Encoder
from echelon.population.member import Member, Place
from echelon.population.shared_replay import SharedReplay
from echelon.types import Floats32


@dataclass
class MemberFactory:
    """What members are made from.

    world: the experts' part of the train window; skills[K,Z]; hyperparameters[M]
    directory: of replay and tables
    """

    config: Config
    world: World
    valid: World
    encoder: Encoder
    directory: Path
    seed: int
    skills: Floats32
    hyperparameters: tuple[dict[str, float], ...]
    n_members: int
    replay: SharedReplay | None = field(default=None, repr=False)
    tables: tuple[EmbeddingTable, ...] = field(default=(), repr=False)

    def within(self, replay: SharedReplay, tables: tuple[EmbeddingTable, ...]) -> MemberFactory:
        """The same, for this process: what is open here is used."""
        return replace(self, replay=replay, tables=tables)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open here."""
        return self.__dict__ | {"replay": None, "tables": ()}

    def __call__(self, number: int) -> Member:
        """The member of that number, as it begins."""
        sharing = self.config.experts.sharing
        if self.replay is None:
            self.replay = SharedReplay(
                sharing.buffer_size,
                self.n_members,
                self.world.n_assets,
                self.directory / "replay",
            )
        if not self.tables:
            self.tables = self._attached()
        niche = number // (self.n_members // len(self.skills))
        return Member(
            self.config,
            self.world,
            self.valid,
            self.encoder,
            self.replay,
            self.tables,
            Place(number, niche),
            self.skills[niche],
            self.hyperparameters[number],
            self.seed,
            self.directory,
        )

    def _attached(self) -> tuple[EmbeddingTable, ...]:
        """The tables that the coordinator has written."""
        tables = [EmbeddingTable(self.world, self.encoder.d_model, self.directory / "train.npy")]
        if not tables[0].covers(self.valid):
            valid = self.directory / "valid.npy"
            tables.append(EmbeddingTable(self.valid, self.encoder.d_model, valid))
        for table in tables:
            table.attach(version=1)
        return tuple(tables)
