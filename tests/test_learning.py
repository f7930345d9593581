"""The agent learns where the answer is known: a market with planted momentum.

The whole proof is `echelon prove`; docs/results.md has its numbers. Here fewer seeds and steps
show that learning still works.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from markets import CONFIGS

from echelon.config import load_config
from echelon.proving.parts import run_parts
from echelon.proving.planted import PlantedMarket
from echelon.proving.planted_proof import PlantedPart, SeedScore, assess_planted
from echelon.proving.trial import proof_config, with_steps


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qtmrl_fast_captures_most_of_what_the_bayes_filter_earns(tmp_path: Path) -> None:
    config = with_steps(proof_config(load_config(CONFIGS / "qtmrl-fast.yaml")), 320_000, 5)
    market = PlantedMarket()
    parts = [PlantedPart(config, market, seed, 16, references=seed == 0) for seed in (0, 1)]
    ran = run_parts(parts, tmp_path, workers=2)
    done = [part for part in ran.parts if part is not None]
    scores = SeedScore.from_parts(done)
    assert [score.seed for score in scores] == [0, 1]
    for score in scores:
        shown = {name: round(score.share(name), 3) for name in score.sharpes}
        print(f"seed {score.seed}, best at {score.best_step:,}: {shown}")  # noqa: T201
        assert score.share() > 0.80
        assert 0.95 < score.share("momentum 10") < 1.15
    assert np.mean([score.share() for score in scores]) >= 0.85
    assert assess_planted(done).checks[0].estimate >= 0.85
