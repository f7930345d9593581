"""The agent learns where the answer is known: a market with planted momentum.

The whole proof is `echelon prove`; docs/results.md has its numbers. Here fewer seeds and steps
show that learning still works.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echelon.config import load_config
from echelon.config.algorithms import FLAT_SETTINGS
from echelon.proving.parts import run_all
from echelon.proving.planted import PlantedMarket, PlantedPart, assess_planted
from echelon.proving.worlds import proof_config, with_steps


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qtmrl_fast_captures_most_of_what_the_bayes_filter_earns(tmp_path: Path) -> None:
    config = with_steps(proof_config(load_config(None, FLAT_SETTINGS)), 320_000, 5)
    market = PlantedMarket()
    parts = [PlantedPart(config, market, seed, 16, references=seed == 0) for seed in (0, 1)]
    ran = run_all(parts, tmp_path, workers=2)
    result = assess_planted([ran[part.key] for part in parts])
    bayes = result.rows["trend/bayes"]
    shares = {name: np.divide(sharpes, bayes) for name, sharpes in result.rows.items()}
    print(result.facts["best_steps"], shares)  # noqa: T201
    assert (shares["trend/agent"] > 0.80).all()
    assert (np.abs(shares["trend/momentum 10"] - 1.05) < 0.10).all()
    assert result.checks[0].estimate >= 0.85
