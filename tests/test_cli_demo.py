"""The demo with a hierarchy: both runs, their comparison, and what is refused before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from markets import CONFIGS
from shells import Shell, tiny

from echelon.errors import StoreError
from echelon.report.run.gather import gather
from echelon.report.run.page import render
from echelon.report.texts import Words

HIERARCHY: dict[str, Any] = {
    "train": {"algo": "HIERARCHY", "episode_steps": 20},
    "model": {"encoder": "TimeCNN"},
    "pretrain": {"epochs": 1},
    "expert": {
        **{"hidden": 8, "batch_size": 16, "learning_starts": 40},
        **{"updates_per_step": 0.25, "warmup_updates": 0},
    },
    "experts": {
        **{"n_experts": 2, "skill_dim": 2},
        "sharing": {"buffer_size": 2000, "sequence_steps": 3},
    },
    "meta_router": {"n_steps": 32, "n_envs": 4, "batch_size": 16, "episode_decisions": 4},
    "trainer": {
        **{"round_steps": 20, "probe_states": 8},
        "evolution": {"windows": 2, "lr": [1e-4, 1e-1], "gamma": [0.5, 0.999]},
        "training_schedule": {
            "experts": {"freq": 2, "steps": 16},
            "router": {"freq": 2, "steps": 32},
            "population": {"freq": 2},
        },
    },
}


def hierarchy_file(path: Path, **more: dict[str, Any]) -> str:
    """qtmrl.yaml with a hierarchy instead of its agent, and `more` sections."""
    tree = yaml.safe_load((CONFIGS / "qtmrl.yaml").read_text(encoding="utf-8"))
    for section, values in {**HIERARCHY, **more}.items():
        tree[section] = {**tree.get(section, {}), **values}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


def test_demo_ends_with_the_hierarchy_beside_the_agents(shell: Shell, bars_file: Path) -> None:
    words = tiny(bars_file, "train.total_env_steps=240", "train.algo=A2C")
    file = hierarchy_file(Path("small.yaml"))
    left = Path("demo-hierarchy/seeds/7/checkpoints")  # of an earlier demo, which is run anew
    left.mkdir(parents=True)
    Path("demo-hierarchy/comparison.json").write_text('{"kind": "runs"}')
    out, _ = shell.works("demo", *words, "--hierarchy", file, "--output-dir", "demo")
    assert not left.exists()
    first, second, _, replayed, bundle = out.strip().splitlines()[-5:]
    assert (first, second, bundle) == (
        "report: demo/report/report.html",
        "report: demo-hierarchy/report/report.html",
        "bundle: demo-bundle",
    )
    assert "decisions, fills and equity equal the backtest bit for bit" in replayed
    tree = json.loads(Path("demo-hierarchy/comparison.json").read_text())
    assert [(run["name"], run["algo"]) for run in tree["runs"]] == [
        ("demo", "A2C"),
        ("demo-hierarchy", "HIERARCHY"),
    ]
    assert tree["split"] == "test"
    assert "Sharpe ratio a year vs demo" in out
    page = Path("demo-hierarchy/report/report.html").read_text(encoding="utf-8")
    for key in ("other_runs", "command", "attribution", "population"):
        assert f">{Words('en')(key)}</h2>" in page, key
    assert "demo · A2C, " in page
    assert f">{Words('en')('other_runs')}</h2>" not in Path("demo/report/report.html").read_text(
        encoding="utf-8"
    )
    _chinese_and_stale_pages(Path("demo-hierarchy"), tree)


def _chinese_and_stale_pages(run: Path, tree: dict[str, Any]) -> None:
    words = Words("zh")
    page = render(gather(run, ["test"]), words, "")
    assert f">{words('other_runs')}</h2>" in page
    assert words("other_runs_stale") not in page
    own = next(one for one in tree["runs"] if one["name"] == run.name)
    own["best_steps"] = {seed: step + 1 for seed, step in own["best_steps"].items()}
    (run / "comparison.json").write_text(json.dumps(tree))
    assert words("other_runs_stale") in render(gather(run, ["test"]), words, "")
    (run / "comparison.json").write_text(json.dumps(tree | {"split": "valid"}))
    assert f">{words('other_runs')}</h2>" not in render(gather(run, ["test"]), words, "")
    (run / "comparison.json").write_text('{"kind": "runs", "split": "test"}')
    with pytest.raises(StoreError, match=r"comparison.json: missing or damaged"):
        render(gather(run, ["test"]), words, "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"train": {"algo": "SAC"}}, "expected train.algo: HIERARCHY, found SAC"),
        ({"market": {"preset": "us"}}, "its `market` is not that of --config"),
    ],
)
def test_hierarchy_that_could_not_be_compared_is_refused_before_training(
    shell: Shell, bars_file: Path, more: dict[str, dict[str, Any]], said: str
) -> None:
    file = hierarchy_file(Path("small.yaml"), **more)
    code, _, err = shell("demo", *tiny(bars_file), "--hierarchy", file, "--output-dir", "demo")
    assert code == 2
    assert said in " ".join(err.split())
    assert not Path("demo").exists()
