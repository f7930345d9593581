"""Cases side by side: lanes are forked processes, each of which runs its share in turn."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from reliability._processes import Running, fork

C = TypeVar("C")
Row = Mapping[str, Any]


def run_in_lanes(
    work: Path,
    cases: Sequence[C],
    run: Callable[[C], Row],
    jobs: int,
    show: Callable[[C, Row], None],
) -> list[Row]:
    """What `run` gave for each case, in order of their ends; as JSON, with the case's `number`.

    show: called for each as it ends. Ctrl-C ends the lanes, and gives what there is.
    """
    files = [work / f"lane-{lane}.jsonl" for lane in range(jobs)]
    for file in files:
        file.unlink(missing_ok=True)
    parent = os.getpid()

    def drive(lane: int) -> int:
        with files[lane].open("a", encoding="utf-8") as handle:
            # Rotated, for cases of two kinds often take turns, and one kind takes longer.
            for place in (k for k in range(len(cases)) if (k + k // jobs) % jobs == lane):
                if os.getppid() != parent:  # nobody waits for the rest
                    return 1
                handle.write(json.dumps({**run(cases[place]), "place": place}) + "\n")
                handle.flush()
        return 0

    lanes = [
        Running(fork(lambda lane=lane: drive(lane), work / f"lane-{lane}.log"))  # type: ignore[misc]
        for lane in range(jobs)
    ]
    rows: dict[int, Row] = {}
    try:
        while True:
            ended = [lane.ended() for lane in lanes]  # each is asked
            for row in (row for file in files for row in _rows(file)):
                place = row.pop("place")
                if place not in rows:
                    rows[place] = row
                    show(cases[place], row)
            if all(ended):
                break
            time.sleep(0.3)
    except KeyboardInterrupt:
        for running in lanes:
            running.end_all()
        return list(rows.values())
    for k, running in enumerate(lanes):
        if running.code != 0:
            log = (work / f"lane-{k}.log").read_text(encoding="utf-8")
            raise RuntimeError(f"the harness itself failed:\n{log[-4000:]}")
    return list(rows.values())


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
