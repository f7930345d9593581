"""What the Gymnasium and the Stable-Baselines3 environment have in common: spaces, observations,
actions and episodes. Both are thin covers over `Books`; what they show and take is decided here, so
that one book and E books cannot differ.

Observations, all known at the close of the book's row:

- `window`: x[W,N,F], the features of the last W bars; present[N], which assets have any
- `index`: row[1], the number of the bar, for policies that encode each bar once and look it up.
  A float32, since SB3 hands all but images to its networks as such; it is exact up to 2²⁴ rows.
- with both, as `state` asks: weights[N] of the holdings and cash[1], as shares of the value

Actions: `discrete`, HOLD 0, BUY 1 or SELL 2 for each asset; `weights`, a score in [−1, 1] for each
asset and, last, for cash, shared out by `act.weights_of_scores`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import numpy as np
from gymnasium import spaces
from gymnasium.error import InvalidAction
from numpy.typing import NDArray

from echelon.config import Config
from echelon.config.agents import RewardConfig
from echelon.envs.act import Action, ActionKind, ActionRule, Holdings, weights_of_scores
from echelon.envs.books import Books
from echelon.envs.world import World
from echelon.errors import DataError, UsageError
from echelon.market import Rows
from echelon.types import Bools

ObservationKind = Literal["window", "index"]
Observation = dict[str, NDArray[Any]]

_EXACT_ROWS = 2**24  # whole numbers up to here are exact in float32


class EnvOptions(TypedDict, total=False):
    """What an environment can be asked for; defaults are those of `EnvSpec.from_config`."""

    split: str  # whose bars are traded
    actions: ActionKind
    observation: ObservationKind
    random_start: bool | None  # None: in training only
    episode_steps: int | None  # None: `train.episode_steps` in training, else to the split's end


@dataclass(frozen=True)
class EnvSpec:
    """How books on a world are shown and steered, and where their episodes begin and end."""

    world: World
    span: range  # rows a book may stand at
    rule: ActionRule
    reward: RewardConfig
    observation: ObservationKind
    include_pos: bool
    include_cash: bool
    random_start: bool  # episodes begin anywhere in the span, not at its first row
    episode_steps: int | None  # None: to the end of the span
    stretches: tuple[range, ...] = ()  # pieces of the span that no episode may leave, if any

    @staticmethod
    def from_config(
        world: World,
        config: Config,
        *,
        split: str = "train",
        actions: ActionKind = "discrete",
        observation: ObservationKind = "window",
        random_start: bool | None = None,
        episode_steps: int | None = None,
    ) -> EnvSpec:
        _refuse_unknown("split", split, tuple(world.splits))
        _refuse_unknown("actions", actions, ("discrete", "weights"))
        _refuse_unknown("observation", observation, ("window", "index"))
        if observation == "index" and len(world.times) > _EXACT_ROWS:
            raise UsageError(
                f"observation='index' gives row numbers as float32, exact up to {_EXACT_ROWS:,}, "
                f"but the data have {len(world.times):,} rows. Use observation='window'."
            )
        training, pieces = split == "train", world.spans(split)
        if episode_steps is None and training:
            episode_steps = config.train.episode_steps
        first = min(piece.start for piece in pieces)
        spec = EnvSpec(
            world=world,
            span=range(first, max(piece.stop for piece in pieces)),
            rule=ActionRule.from_config(config, actions),
            reward=config.reward,
            observation=observation,
            include_pos=config.state.include_pos,
            include_cash=config.state.include_cash,
            random_start=training if random_start is None else random_start,
            episode_steps=None,
            stretches=pieces,
        )
        return spec.with_episode_steps(episode_steps)

    def with_episode_steps(self, episode_steps: int | None) -> EnvSpec:
        """The same with episodes of another length, which must fit into the span."""
        most = min(len(piece) for piece in self._pieces) - 1
        if episode_steps is not None and not 1 <= episode_steps <= most:
            raise DataError(
                f"episode_steps={episode_steps}, but an episode takes 1 to {most} steps here: the "
                f"split has {most + 1} bars to stand at. Shorten it, or lengthen the split."
            )
        return replace(self, episode_steps=episode_steps)

    def books(self, n_books: int) -> Books:
        return Books(self.world, self.rule, self.reward, n_books, self.span)

    def start(self, rng: np.random.Generator, options: dict[str, Any] | None = None) -> int:
        """The row an episode begins at: pinned by options, or any that leaves room, evenly."""
        last = self.span.stop - 1
        unknown = sorted((options or {}).keys() - {"row"})
        if unknown:
            raise UsageError(f"reset options {', '.join(unknown)}: unknown. The only one is 'row'.")
        if options and "row" in options:
            row = options["row"]
            if not isinstance(row, int | np.integer) or not self.span.start <= row < last:
                raise UsageError(
                    f"reset option row={row!r}: expected a whole number from {self.span.start} to "
                    f"{last - 1}, the rows of the split with a window behind and a bar ahead."
                )
            return int(row)
        if not self.random_start:
            return self.span.start
        # From its last row a book cannot step.
        rooms = [len(piece) - (self.episode_steps or 1) for piece in self._pieces]
        place = int(rng.integers(0, sum(rooms)))
        for piece, room in zip(self._pieces, rooms, strict=True):
            if place < room:
                return piece.start + place
            place -= room
        raise AssertionError("the place is within the rooms")

    @property
    def _pieces(self) -> tuple[range, ...]:
        return self.stretches or (self.span,)

    def steps_from(self, row: int) -> int:
        piece = next((piece for piece in self._pieces if row in piece), self.span)
        left = piece.stop - 1 - row
        return left if self.episode_steps is None else min(self.episode_steps, left)

    def observation_space(self) -> spaces.Dict:
        world = self.world
        n_assets, n_features = world.x.shape[1:]
        parts: dict[str, spaces.Space[Any]] = {}
        if self.observation == "window":
            # No bounds: features have none, and the data's own would tell of the future.
            shape = (world.window, n_assets, n_features)
            parts["x"] = spaces.Box(-np.inf, np.inf, shape, np.float32)
            parts["present"] = spaces.MultiBinary(n_assets)
        else:
            parts["row"] = spaces.Box(0.0, float(len(world.times) - 1), (1,), np.float32)
        if self.include_pos:
            parts["weights"] = spaces.Box(0.0, 1.0, (n_assets,), np.float32)
        if self.include_cash:
            parts["cash"] = spaces.Box(0.0, 1.0, (1,), np.float32)
        return spaces.Dict(parts)

    def action_space(self) -> spaces.MultiDiscrete | spaces.Box:
        if self.rule.kind == "discrete":
            return spaces.MultiDiscrete([len(Action)] * self.world.n_assets)
        return spaces.Box(-1.0, 1.0, (self.world.n_assets + 1,), np.float32)

    def observe(self, row: Rows, held: Holdings) -> Observation:
        """What E books at `row`[E] see; every array has E in front and is the caller's own."""
        seen: Observation = {}
        if self.observation == "window":
            past = np.arange(1 - self.world.window, 1)
            seen["x"] = self.world.x[row[:, None] + past]
            seen["present"] = self.world.present[row].astype(np.int8)
        else:
            seen["row"] = row[:, None].astype(np.float32)
        if self.include_pos:
            seen["weights"] = held.weights.copy()
        if self.include_cash:
            seen["cash"] = held.cash_share[:, None].copy()
        return seen

    def actions(self, raw: NDArray[Any], held: Holdings) -> NDArray[Any]:
        """What `Books.step` takes, from raw actions[E,…]; scores are cut to [−1, 1]."""
        n_books, n_assets = held.weights.shape
        if self.rule.kind == "discrete":
            expected = f"{n_assets} whole numbers, 0 (HOLD), 1 (BUY) or 2 (SELL), one for an asset"
            _refuse_shape(raw, (n_books, n_assets), expected)
            if raw.dtype.kind not in "iu":
                raise InvalidAction(f"expected {expected}; found numbers of type {raw.dtype}.")
            if raw.min() < 0 or raw.max() >= len(Action):
                bad = raw[(raw < 0) | (raw >= len(Action))][0]
                raise InvalidAction(f"expected {expected}; found {bad}.")
            return raw
        expected = f"{n_assets + 1} scores from -1 to 1, one for an asset and the last for cash"
        _refuse_shape(raw, (n_books, n_assets + 1), expected)
        if raw.dtype.kind not in "fiu" or not np.isfinite(raw).all():
            raise InvalidAction(f"expected {expected}; found one that is not a finite number.")
        return weights_of_scores(np.clip(raw.astype(np.float64), -1.0, 1.0), held)

    def masks(self, allowed: Bools) -> Bools:
        """[…,N·3] which actions are allowed, as MaskablePPO takes them, of allowed[…,N,3]."""
        if self.rule.kind != "discrete":
            raise UsageError(
                "action masks are for actions='discrete'; target weights have none: what cannot be "
                "traded keeps its weight."
            )
        return np.array(allowed.reshape(*allowed.shape[:-2], -1))


class OneBook:
    """One book as its environment shows it: where it stands, and what may be set of it."""

    _spec: EnvSpec
    _books: Books
    _index = 0  # which of the books

    @property
    def row(self) -> int:
        return int(self._books.row[self._index])

    @property
    def pv(self) -> float:
        return float(self._books.value[self._index])

    @property
    def episode_steps(self) -> int | None:
        """Steps of an episode; None: to the end of the split. Holds from the next reset on."""
        return self._spec.episode_steps

    @episode_steps.setter
    def episode_steps(self, steps: int | None) -> None:
        self._spec = self._spec.with_episode_steps(steps)

    @property
    def random_start(self) -> bool:
        """Whether episodes begin anywhere in the split, not at its first row."""
        return self._spec.random_start

    @random_start.setter
    def random_start(self, anywhere: bool) -> None:
        self._spec = replace(self._spec, random_start=anywhere)


def zero_if_nan(value: float) -> float:
    """A measure for `info`: 0 while it is unknown, since NaN is not equal to itself."""
    return 0.0 if np.isnan(value) else float(value)


def _refuse_shape(raw: NDArray[Any], shape: tuple[int, ...], expected: str) -> None:
    if raw.shape != shape:
        raise InvalidAction(
            f"expected {expected}, an array of shape {shape[1:]} for each of {shape[0]} book(s); "
            f"found shape {raw.shape[1:]} for {len(raw) if raw.ndim else 0}."
        )


def _refuse_unknown(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name}={value!r}: expected one of {', '.join(known)}.")
