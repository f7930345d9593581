"""Metrics of trainings, read from what they write when Prometheus asks; they know nothing of it.

    RUN/seeds/SEED/metrics.jsonl       the training log (`runs.metrics`)
    RUN/seeds/SEED/population.json     of a hierarchy: its events, among them processes that died
    RUN/seeds/SEED/result.json         how the training ended

RUN is the directory itself, or one two levels below it, as of an ablation or a walk-forward. With
workers elsewhere these files come here too. How many jobs wait, run and are done is counted by
`workers`, wherever they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from echelon.files import read_json
from echelon.monitoring.metrics import Metrics
from echelon.runs.metrics import LOG, LogTail
from echelon.workers import job_counts

_NAMES: Mapping[str, str] = {
    "step": "steps",
    "time/steps_per_second": "steps_per_second",
    "charts/reward": "reward",
    "population/mapd": "mapd",
    "router/kl_lambda": "kl_lambda",
    "router/entropy": "router_entropy",
    "router/usage_entropy": "usage_entropy",
}
_GROUPS: Mapping[str, str] = {
    "losses": "loss",
    "valid": "valid",
    "responsibility": "responsibility",
}
"""Group of names in the log → the metric that has the rest of the name as a label."""


def training_metrics(directory: Path) -> Metrics:
    """Metrics of all trainings in a directory, those included that begin later."""
    metrics = Metrics("training")
    seeds: dict[Path, _Seed] = {}
    before = job_counts()

    def look() -> None:
        for pattern in (f"seeds/*/{LOG}", f"*/*/seeds/*/{LOG}"):
            for log in directory.resolve().glob(pattern):
                place = log.parent
                if place.name.isdecimal():
                    with suppress(FileNotFoundError):  # training begins again just now
                        seeds.setdefault(place, _Seed(place, directory)).fill(metrics)
        for state, number, earlier in zip(before._fields, job_counts(), before, strict=True):
            if state == "deaths":
                metrics.reach("training_job_deaths_total", number - earlier)
            else:
                metrics.set("training_jobs", number - earlier, state)

    metrics.refresh.append(look)
    return metrics


class _Seed:
    def __init__(self, place: Path, directory: Path) -> None:
        whole, run = directory.resolve(), place.parents[1]
        self._labels = str(Path(whole.name, run.relative_to(whole))), place.name
        self._place, self._log = place, LogTail(place)

    def fill(self, metrics: Metrics) -> None:
        for name, value in self._log.read().items():
            group, _, rest = name.partition("/")
            if name in _NAMES:
                metrics.set(f"training_{_NAMES[name]}", value, *self._labels)
            elif group in _GROUPS:
                metrics.set(f"training_{_GROUPS[group]}", value, *self._labels, rest)
        events = self._document("population.json").get("events", ())
        deaths = sum(event["kind"] == "worker_lost" for event in events)
        metrics.reach("training_worker_deaths_total", deaths, *self._labels)
        ending = self._document("result.json").get("ending", "stopped")
        metrics.set("training_finished", float(ending != "stopped"), *self._labels)

    def _document(self, name: str) -> dict[str, Any]:
        """A file of the training; {}: there is none yet."""
        path = self._place / name
        return read_json(path, dict[str, Any], "Train again.") if path.exists() else {}
