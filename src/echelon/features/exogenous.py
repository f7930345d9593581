"""The configured macro and sentiment series, laid beside the panel."""

from __future__ import annotations

import logging
from datetime import datetime

from echelon.config import Config
from echelon.data.exogenous import Exogenous, join_all
from echelon.data.panel import Panel

log = logging.getLogger(__name__)


def load_exogenous(
    config: Config, panel: Panel, published_until: datetime | None = None
) -> Exogenous | None:
    """Every configured series on the panel's rows, as known then; None without any.

    published_until: a bar's time; pretend that nothing was published after that bar's close
    """
    if not config.data.exogenous:
        return None
    joined = join_all(
        config.data.exogenous,
        panel.times,
        panel.symbols,
        panel.calendar,
        panel.timezone,
        published_until,
    )
    for k, name in enumerate(joined.names):
        if published_until is None and not joined.known[:, :, k].any():
            log.warning(
                "exogenous series %s is known at no bar of these symbols: check its publication "
                "times, its symbols and max_age_days",
                name,
            )
    return joined
