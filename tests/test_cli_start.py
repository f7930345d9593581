"""Commands that only look at something start at once: they do not load what they do not use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.config import load_config
from echelon.data.datasets import ensure_dataset

CONFIGS = Path(__file__).parents[1] / "configs"
HEAVY = frozenset(
    {
        *("torch", "scipy", "sklearn", "numba", "pandas", "pyarrow"),
        *("arch", "ffn", "skfolio", "peft", "safetensors"),
        *("stable_baselines3", "gymnasium", "matplotlib", "plotly"),
    }
)
"""What only learning, trading and drawing need."""
TABLES = HEAVY | {"polars"}
NOTHING = TABLES | {"numpy", "echelon.config"}
MOST_MODULES = 600
"""Of a command that prints its help: Typer and Rich take 400 of them."""
_PROBE = """
import json, sys
from echelon.cli import main
sys.argv = ["echelon", *json.loads(sys.argv[1])]
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps({"code": code or 0, "modules": sorted(sys.modules)}), file=sys.stderr)
"""


def _loaded(*words: str, where: Path) -> tuple[int, set[str]]:
    """(exit code, modules that are loaded at the end) of a command."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(words)],
        capture_output=True,
        text=True,
        cwd=where,
        env=os.environ,
        check=False,
    )
    facts = json.loads(done.stderr.splitlines()[-1])
    return facts["code"], set(facts["modules"])


@pytest.mark.parametrize(
    ("words", "code", "forbidden"),
    [
        (["--help"], 0, NOTHING),
        (["report", "--help"], 0, NOTHING),
        (["train", "--no-such-option"], 2, NOTHING),
        (["data", "import", "--no-such-option"], 2, NOTHING),
        (["runs", "list", "."], 0, TABLES),
        (["config", "show"], 0, TABLES),
        (["config", "show", "-o", "no.such=1"], 3, TABLES),
        (
            ["config", "validate", *(str(CONFIGS / f"{n}.yaml") for n in ("sac", "qtmrl"))],
            0,
            TABLES,
        ),
        (["config", "validate", str(CONFIGS / "hierarchical.yaml")], 0, TABLES),
        (["data", "show"], 0, TABLES | {"numpy"}),
        (["data", "show", "no-such"], 5, TABLES | {"numpy"}),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else None,
)
def test_command_loads_only_what_it_uses(
    words: list[str], code: int, forbidden: frozenset[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    facts = {"command": "train", "data": {"name": "toy", "content_hash": "0"}}
    outcomes = [{"seed": seed, "best_score": 1.0 + seed} for seed in range(2)]
    (run / "run.json").write_text(json.dumps(facts | {"outcomes": outcomes}))
    ended, modules = _loaded(*words, where=tmp_path)
    assert ended == code
    assert not modules & forbidden
    if forbidden is NOTHING:
        assert len(modules) < MOST_MODULES


def test_data_show_lists_a_store_without_reading_its_tables(tmp_path: Path) -> None:
    config = load_config(overrides=[f"data.store={tmp_path}", "data.source=sample"])
    dataset = ensure_dataset(config).name
    tables = TABLES | {"numpy"}
    ended, modules = _loaded("data", "show", "--store", ".", where=tmp_path)
    assert ended == 0
    assert not modules & tables
    # One dataset is shown with its symbols, which are a Parquet file.
    ended, modules = _loaded("data", "show", dataset, "--store", ".", where=tmp_path)
    assert ended == 0
    assert not modules & HEAVY


def test_training_does_not_wait_for_what_only_statistics_and_other_agents_need() -> None:
    unused = ["arch", "ffn", "sklearn", "statsmodels", "exchange_calendars", "skfolio"]
    unused += ["matplotlib", "plotly", "stable_baselines3", "peft"]
    script = f"import sys, echelon.training.run; print(set({unused}) & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.strip() == "set()"


_LIVE = """
import json, sys
import echelon.backtest.baselines, echelon.market, echelon.risk.cvar, echelon.risk.portfolio
from echelon.backtest.run import run_backtest
from echelon.population.policy import HierarchyPolicy
assert HierarchyPolicy and run_backtest
print(json.dumps(sorted(sys.modules)))
"""


def test_a_hierarchy_and_its_backtest_are_imported_without_what_learns_or_draws() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIVE], capture_output=True, text=True, env=os.environ, check=True
    )
    heavy = {"torch", "stable_baselines3", "sb3_contrib", "peft", "matplotlib", "arch", "skfolio"}
    assert heavy & set(json.loads(done.stdout)) == set()
