"""Books that an expert trades to learn from: episodes, one bar at a time, as transitions.

Every book stands at a row of its own. Embeddings of the rows are looked up, the actor says one
action per asset, `envs.act` makes target weights of them, the books go one bar on; a book whose
episode is over begins another somewhere in the train window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.agents.expert_core import expert_obs
from echelon.agents.offpolicy import ActionSample, OffPolicy
from echelon.agents.replay import Transitions
from echelon.agents.tables import EmbeddingTable
from echelon.config import Config
from echelon.envs.act import ActionRule, free, weights_of_actions
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.errors import DataError
from echelon.market import Rows
from echelon.rng import stream, torch_generator
from echelon.runs.checkpoint import below_prefix, pack_generator, unpack_generator
from echelon.types import Bools, Floats

_EVEN_LOG_STD = math.log(0.5 * math.pi / math.sqrt(3.0))


class Starts:
    """Draws first and last rows of episodes, every bar of every stretch as likely as another."""

    def __init__(
        self, spans: Sequence[range], episode_steps: int | None, rng: np.random.Generator
    ) -> None:
        """episode_steps: None: from the start to the end of its stretch"""
        shortest = min(len(span) for span in spans)
        if episode_steps is not None and episode_steps + 1 > shortest:
            raise DataError(
                f"train.episode_steps={episode_steps} does not fit into split.train, in which a "
                f"book can take {shortest - 1} steps. Shorten the episode."
            )
        self.rng = rng
        self._steps = episode_steps
        self._first = np.array([span.start for span in spans])
        self._last = np.array([span.stop - 1 for span in spans])
        # From its last row a book cannot step.
        rooms = self._last - self._first + 1 - (1 if episode_steps is None else episode_steps)
        self._until = np.cumsum(rooms)

    @property
    def whole(self) -> range:
        """From the first row of all stretches to the last."""
        return range(int(self._first.min()), int(self._last.max()) + 1)

    def draw(self, count: int) -> tuple[Rows, Rows]:
        """(first[count], last[count]) rows of new episodes."""
        place = self.rng.integers(0, self._until[-1], count)
        which = np.searchsorted(self._until, place, side="right")
        before = np.concatenate([[0], self._until])[which]
        first = self._first[which] + place - before
        last = self._last[which] if self._steps is None else first + self._steps
        return first.astype(np.int64), last.astype(np.int64)


class Collected(NamedTuple):
    """One bar of E books: what is remembered of it, how the actions came about, bar_return[E]."""

    transitions: Transitions
    chosen: ActionSample
    bar_return: Floats


class Collector:
    """E books and where their episodes end."""

    def __init__(self, config: Config, world: World, seed: int) -> None:
        self.present = torch.from_numpy(np.array(world.present))
        self.starts = Starts(
            world.spans("train"), config.train.episode_steps, stream(seed, "starts")
        )
        rule = ActionRule.from_config(config, "weights")
        self.books = Books(world, rule, config.reward, config.train.books, self.starts.whole)
        self.ends = np.empty(config.train.books, dtype=np.int64)
        self._generator = torch_generator(seed, "actions")
        self._begin(np.ones(config.train.books, dtype=bool))

    @property
    def n_books(self) -> int:
        """E."""
        return self.books.n_books

    def step(self, core: OffPolicy, table: EmbeddingTable, *, lot: bool) -> Collected:
        """One bar of every book; lot: actions are drawn evenly, there being no policy yet."""
        row, held, before = self.books.row, self.books.holdings(), self.books.value
        obs = expert_obs(table.look(row), self.present[torch.from_numpy(row)], held)
        chosen = (
            draw_evenly(obs.free, self._generator)
            if lot
            else core.act(obs, self._generator, explore=True)
        )
        result = self.books.step(weights_of_actions(chosen.action.numpy(), held))
        after = self.books.holdings()
        truncated = (self.books.row >= self.ends) & ~result.terminated
        transitions = Transitions(
            row=row.astype(np.int32),
            weights=held.weights,
            cash=held.cash_share,
            free=free(held),
            raw=chosen.raw.numpy(),
            raw_log_prob=chosen.raw_log_prob.numpy(),
            reward=result.reward.astype(np.float32),
            terminated=result.terminated,
            truncated=truncated,
            next_weights=after.weights,
            next_cash=after.cash_share,
            next_free=free(after),
        )
        bar_return = result.value / before - 1.0
        self._begin(truncated | result.terminated)
        return Collected(transitions, chosen, bar_return)

    def _begin(self, which: Bools) -> None:
        """New episodes for the books `which`[E]."""
        if which.any():
            rows, ends = self.starts.draw(int(which.sum()))
            starts = self.books.row.copy()
            starts[which], self.ends[which] = rows, ends
            self.books.reset(starts, which)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) from which `restore` goes on bit for bit."""
        books = self.books.state() | {"ends": self.ends}
        tensors = {f"books.{k}": torch.from_numpy(np.array(v)) for k, v in books.items()}
        tensors["chance.actions"] = self._generator.get_state()
        return tensors, pack_generator(self.starts.rng)

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave; the tensors may be those of the whole learner."""
        books = {k: v.numpy().copy() for k, v in below_prefix("books.", tensors).items()}
        self.ends = books.pop("ends")
        self.books.restore(books)
        self._generator.set_state(tensors["chance.actions"])
        self.starts.rng = unpack_generator(state)


def draw_evenly(free: Tensor, generator: torch.Generator) -> ActionSample:
    """Actions drawn evenly from (−1, 1), for collecting before there is a policy."""
    action = (2.0 * torch.rand(free.shape, generator=generator) - 1.0) * (1.0 - 1e-6) * free
    density = torch.full_like(action, math.log(0.5)) * free
    # Of what comes before the tanh: da/du = 1 − a².
    raw_density = density + torch.log1p(-action.square())
    # Seen from before the tanh these are half a logistic variable, of this mean and deviation.
    mean, log_std = torch.zeros_like(action), torch.full_like(action, _EVEN_LOG_STD)
    return ActionSample(
        action, torch.atanh(action), density.sum(-1), raw_density.sum(-1), mean, log_std
    )
