"""Configuration of the walk-forward: which windows, and how far apart."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, model_validator

from echelon.config._base import Section

Length = Annotated[int, Field(gt=0, le=1_200)]


class WalkForwardConfig(Section):
    """Folds that move through the data, each with its own train, validation and test window.

    By default a test year at a time from 2008 to 2025, as far as the data reach (seed 002), after
    six years to train and two to validate: data from 2000 on just reach 2008.
    """

    scheme: Literal["rolling", "expanding"] = "rolling"
    """rolling: every train window is as long as `train`. expanding: each begins with the data, the
    first one being at least as long as `train`."""
    unit: Literal["year", "month"] = "year"
    """What lengths are counted in. Windows begin on the first of a calendar year or month."""
    train: Length = 6
    """Length of the train window."""
    valid: Length = 2
    """Length of the validation window, which chooses the checkpoint."""
    test: Length = 1
    """Length of the test window; the next fold's begins where it ends."""
    first_test: date | None = date(2008, 1, 1)
    """No test window begins before this day; null: as early as the data allow."""
    last_test: date | None = date(2025, 12, 31)
    """No test window ends after this day; null: as late as the data allow."""
    purge_bars: NonNegativeInt = 1
    """Bars dropped between train and validation. A reward reaches one bar ahead."""
    embargo_bars: NonNegativeInt = 5
    """Bars dropped between validation and test, so that the days a checkpoint was chosen on are
    not in the same turmoil as those it is judged on."""
    partial: bool = False
    """Also test on a last window that the data, or `last_test`, end within."""

    @model_validator(mode="after")
    def _first_before_last(self) -> WalkForwardConfig:
        first, last = self.first_test, self.last_test
        if first is not None and last is not None and first > last:
            raise ValueError(
                f"walk_forward.last_test ({last}) is before walk_forward.first_test ({first})"
            )
        return self
