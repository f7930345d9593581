"""Configuration of the execution layer: how parent orders are worked, and by what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from echelon.config._base import Section
from echelon.config.code import CodeSection

Share = Annotated[float, Field(ge=0, le=1)]


class ExecutionOrdersConfig(Section):
    """Parent orders: from a file, or drawn by rule."""

    path: Path | None = None
    """CSV or Parquet file: symbol, date, direction, amount and, optionally, start and end; null:
    drawn by rule."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Of the file: your column name → ours, for columns whose name is not recognised."""
    per_day: PositiveInt = 4
    """Orders a symbol and day."""
    share: tuple[PositiveFloat, PositiveFloat] = (0.002, 0.02)
    """Least and most of the trailing median daily volume that an order asks for."""
    buys: Share = 0.5
    """Share of the orders that buy."""
    window: Literal["day", "random"] = "day"
    """Time of an order: the whole day, or a stretch of it."""
    min_ticks: PositiveInt = 1
    """Fewest ticks of a stretch."""
    lot: NonNegativeFloat = 0.0
    """Amounts are cut to multiples of it; 0: any amount."""

    def _contradictions(self) -> Iterator[str]:
        if self.share[0] > self.share[1]:
            yield f"share {self.share} must be the least and then the most"


class ExecutionRewardConfig(Section):
    """What an order's step is paid: a sum of parts, each times its weight."""

    pa_penalty: NonNegativeFloat = 1.0
    """Weight of price advantage less the penalty on concentration."""
    penalty: NonNegativeFloat = 100.0
    """α: times the sum, over ticks, of the squared share of the order."""
    ratio: NonNegativeFloat = 0.0
    """Weight of the order's VWAP over TWAP, in classes, at its end."""
    thresholds: tuple[float, ...] = (1.0, 1.1)
    """Bounds between the classes, ascending."""
    classes: tuple[float, ...] = (-1.0, 0.0, 1.0)
    """What each class is paid."""
    shortfall: NonNegativeFloat = 0.0
    """Weight of minus the implementation shortfall, in basis points."""
    risk: NonNegativeFloat = 0.0
    """λσ²: times the squared share of the order that is left after each step."""

    def _contradictions(self) -> Iterator[str]:
        if not (self.pa_penalty or self.ratio or self.shortfall):
            yield "one of pa_penalty, ratio and shortfall must have a weight over 0"
        if len(self.classes) != len(self.thresholds) + 1:
            yield f"classes {self.classes} must be one more than {self.thresholds}"
        if list(self.thresholds) != sorted(self.thresholds):
            yield f"thresholds {self.thresholds} must ascend"


class ExecutionLearnerConfig(Section):
    """How an execution policy learns."""

    algo: Literal["PPO", "DQN", "OPD"] = "PPO"
    """PPO; double DQN; or PPO that also listens to a teacher who knows the day's future (OPD)."""
    total_steps: PositiveInt = 400_000
    """Steps of orders to learn from; the teacher of OPD has as many of its own."""
    validate_every: PositiveInt = 50_000
    """Steps between two looks at the validation window, each with a checkpoint."""
    lr: PositiveFloat = 5e-4
    """Learning rate; it falls to 0 at `total_steps`."""
    orders: PositiveInt = 1024
    """Orders worked for an update."""
    copies: PositiveInt = 1
    """PPO: times each of them is worked; the mean of the copies is a baseline."""
    epochs: PositiveInt = 5
    """PPO: passes over them."""
    minibatches: PositiveInt = 4
    """PPO: parts of a pass."""
    clip: PositiveFloat = 0.2
    """PPO: how far the probability of an action may move, as a share."""
    gamma: Share = 1.0
    """Discount of a step."""
    trace: Share = 0.95
    """PPO: λ of the advantages."""
    entropy: NonNegativeFloat = 0.01
    """PPO: weight of the entropy."""
    normalize_rewards: bool = True
    """Divide rewards by the running size of returns."""
    normalize_advantages: bool = True
    """PPO: standardise advantages over the steps of an update."""
    updates: PositiveInt = 8
    """DQN: updates after each batch of orders."""
    memory: PositiveInt = 8192
    """DQN: orders that its memory holds."""
    target_every: PositiveInt = 100
    """DQN: updates after which the target network is renewed."""
    distill: NonNegativeFloat = 0.01
    """OPD: weight of what the teacher says."""
    distill_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """OPD: share of `total_steps` at which that weight, falling linearly, is 0; null: it stays, as
    published."""
    distill_target: Literal["action", "distribution"] = "action"
    """OPD: imitate the teacher's likeliest action, or its whole distribution."""

    def _contradictions(self) -> Iterator[str]:
        if self.copies > self.orders:
            yield f"copies = {self.copies} must be at most orders = {self.orders}"


class ExecutionConfig(CodeSection):
    """The execution layer (`echelon execution`): its bars are those of `data`."""

    ticks_per_step: PositiveInt = 30
    """Bars from one decision to the next; steps lie on the day's grid."""
    price: Literal["close", "vwap", "book"] = "close"
    """What a trade in a bar is priced at; book: the best opposite quote of a snapshot."""
    book: Path | None = None
    """price book: file of snapshots (see `echelon.execution.book_days`); null: those of the
    synthetic source."""
    book_session: PositiveInt | None = None
    """Snapshots from the begin of one session to that of the next, into which `book` is cut; each
    is a day to work orders on."""
    book_split: tuple[Share, Share, Share] | None = None
    """Shares of the sessions for train, valid and test, in order of time; null: by the dates of
    `split`."""
    volume_cap: Annotated[float, Field(gt=0, le=1)] | None = None
    """Most of a bar's volume that an order may take; null: all of it."""
    half_spread: NonNegativeFloat = 0.0
    """Paid by every trade, as a share of the price."""
    temporary: NonNegativeFloat = 0.0
    """Temporary impact at a bar's whole volume, as a share of the price; linear."""
    permanent: NonNegativeFloat = 0.0
    """Permanent impact at a bar's whole volume, as a share of the price; linear."""
    features: tuple[str, ...] = ()
    """Public features by name, yours among them; empty: all that the bars allow, and yours."""
    extensions: tuple[Path, ...] = ()
    """Python files with your own features (`@execution_feature`) and metrics (`@metric`); running
    the command runs these files. Those that a run directory's configuration names run only where
    --trust-code names them too."""
    actions: Literal["fractions", "rate"] = "fractions"
    """Shares of the order to choose from, or a continuous multiple of TWAP's pace."""
    fractions: tuple[Share, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Shares of the order that can be chosen."""
    rate_max: Annotated[float, Field(gt=1)] = 4.0
    """Fastest multiple of TWAP's pace."""
    sequence: Literal["gru", "lstm", "attention"] = "gru"
    """How the day and the order's own steps are read."""
    hidden: Annotated[int, Field(gt=0, multiple_of=4)] = 64
    """Width of the network; a multiple of 4, the attention heads."""
    block: PositiveInt = 1
    """Bars read as one input of the day's sequence: that much faster, with that much older news."""
    kappa: NonNegativeFloat = 2.0
    """Of the Almgren-Chriss baseline, times the longest order's time: its haste; 0: TWAP."""
    orders: ExecutionOrdersConfig = ExecutionOrdersConfig()
    """Parent orders."""
    reward: ExecutionRewardConfig = ExecutionRewardConfig()
    """What a step is paid."""
    learner: ExecutionLearnerConfig = ExecutionLearnerConfig()
    """How the policy learns."""

    def _contradictions(self) -> Iterator[str]:
        if self.actions == "fractions" and len(self.fractions) < 2:
            yield f"fractions {self.fractions} must be two or more shares of the order"
        given = [name for name in ("book", "book_session", "book_split") if getattr(self, name)]
        if given and self.price != "book":
            yield f"{', '.join(given)} is for price book, but price is {self.price}"
        if (self.book is None) != (self.book_session is None):
            yield "book and book_session go together: a file is cut into sessions"
        if self.book_split is not None:
            if self.book is None:
                yield "book_split is for the sessions of a file, and book is not set"
            if abs(sum(self.book_split) - 1.0) > 1e-9 or not min(self.book_split) > 0.0:
                yield f"book_split {self.book_split} must be over 0 and sum to 1"
        if self.book is not None and self.orders.path is not None:
            yield "orders.path names dates, which sessions of a book share: draw orders"
