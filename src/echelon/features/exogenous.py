"""The configured macro and sentiment series, laid beside the panel."""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import polars as pl

from echelon.config import Config
from echelon.data.exogenous import Exogenous, close_offsets, join_as_of, read_exogenous
from echelon.data.panel import Panel
from echelon.errors import ConfigError


def load_exogenous(
    config: Config, panel: Panel, published_until: datetime | None = None
) -> Exogenous | None:
    """Every configured series on the panel's rows, as known then; None without any.

    published_until: pretend that nothing was published after the close of this bar
    """
    if not config.data.exogenous:
        return None
    offsets = timedelta(0)
    if panel.freq == "1d":
        offsets = close_offsets(panel.times, panel.calendar, panel.timezone)  # type: ignore[assignment]
    decisions = panel.times + np.asarray(offsets, dtype="timedelta64[us]")
    joined = []
    for item in config.data.exogenous:
        frame = read_exogenous(item, panel.timezone)
        names = item.series or tuple(frame["series"].unique(maintain_order=True))
        if published_until is not None:
            row = int(np.searchsorted(panel.times, np.datetime64(published_until), "right")) - 1
            frame = frame.filter(pl.col("published") <= decisions[row].item())
        joined.append(
            join_as_of(
                frame,
                panel.times,
                panel.symbols,
                close_offset=offsets,
                max_age_days=item.max_age_days,
                names=names,
            )
        )
    names = tuple(name for part in joined for name in part.names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"data.exogenous: series {', '.join(twice)} in more than one file. Name the series to "
            "use of each file, or rename one."
        )
    return Exogenous(
        names,
        np.concatenate([part.values for part in joined], axis=2),
        np.concatenate([part.known for part in joined], axis=2),
    )
