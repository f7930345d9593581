"""The members as the coordinator calls them: whoever fails is replaced, and the phase goes on.

- A process that dies: its members are made anew, put back to how they stood at the beginning of the
  phase, and do it again. So the numbers are the same as if nothing had happened.
- A member whose numbers are no longer finite: quarantine. It begins anew, as evolution says, and
  the others go on with what they have.
- All of them at once: the run stops, for then it is the data or the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.agents.mfpbt import Decision
from echelon.errors import TrainingError
from echelon.population.crew import Crew, Failure
from echelon.population.evolution import Evolution
from echelon.population.shared_replay import SharedReplay

Calls = Mapping[int, tuple[Any, ...]]
Note = Callable[[str, str, str], None]
"""Writes down what befell the population: kind, who, what was done."""

_CHANGING = ("collect", "learn")
"""What members do that changes them."""


class Members:
    """A crew that goes on."""

    def __init__(self, host: Crew, evolution: Evolution, replay: SharedReplay, note: Note) -> None:
        self.host = host
        self._evolution = evolution
        self._replay = replay
        self._note = note
        self._snapshots: dict[int, Any] = {}
        self.remember()

    def __len__(self) -> int:
        return self.host.members

    def each(self, method: str, calls: Calls) -> dict[int, Any]:
        """Answers of members; there is no `Failure` among them."""
        answers = self._answers(method, calls)
        failed = [m for m, a in answers.items() if isinstance(a, Failure)]
        if failed:
            answers |= self._quarantine(method, failed, answers, calls)
        if method in _CHANGING:
            self._remember(method, calls, answers)
        return answers

    def act_out(self, decisions: Sequence[Decision]) -> None:
        """Carry evolution's decisions out, and write them down."""
        for d in decisions:
            self._note(d.kind, self._name(d.member), d.reason)
        for failure in self._evolution.apply(decisions, self.host).values():
            raise failure.error
        self.remember()

    def remember(self) -> None:
        """Keep the members' states for the case that a process dies in the next phase."""
        self._remember("state", {}, {})

    def _answers(self, method: str, calls: Calls) -> dict[int, Any]:
        """Answers of members; those whose process died begin the phase again, in a new one."""
        answers = self.host.each(method, calls)
        while lost := _lost(answers):
            again = self._recover(lost[0])
            answers |= self.host.each(method, {m: calls[m] for m in again if m in calls})
        return answers

    def _recover(self, member: int) -> list[int]:
        """Members anew, of a process that died, as they stood at the beginning of the phase."""
        again = self.host.rebuild(member)
        self._note("worker lost", f"members {again}", "made anew, and the phase done again")
        marks = self._replay.snapshot()
        for m in again:
            self.host.one(m, "stand", marks)
            self.host.one(m, "restore", self._snapshots[m])
        return again

    def _remember(self, method: str, calls: Calls, answers: dict[int, Any]) -> None:
        """Keep states; a process that dies while it is asked does the phase again first."""
        if self.host.alone:
            return
        everybody: dict[int, tuple[Any, ...]] = dict.fromkeys(range(len(self)), ())
        states = self.host.each("state", everybody)
        while lost := _lost(states):
            again = self._recover(lost[0])
            answers |= self._answers(method, {m: calls[m] for m in again if m in calls})
            states |= self.host.each("state", dict.fromkeys(again, ()))
        self._snapshots = states

    def _quarantine(
        self, method: str, failed: list[int], answers: Mapping[int, Any], calls: Calls
    ) -> dict[int, Any]:
        """Begin members anew whose numbers are no longer finite, and call them again."""
        for m in failed:
            if not isinstance(answers[m].error, TrainingError):
                raise answers[m].error
            self._note("quarantine", self._name(m), str(answers[m].error))
        if len(failed) == len(calls):
            raise answers[failed[0]].error
        self.act_out(self._evolution.quarantined(failed))
        again = self.host.each(method, {m: calls[m] for m in failed})
        for answer in again.values():
            if isinstance(answer, Failure):
                raise answer.error
        return again

    def _name(self, member: int) -> str:
        return f"expert {self._evolution.plan.niche_of(member)}"


def _lost(answers: Mapping[int, Any]) -> list[int]:
    """Members whose process died."""
    return [m for m, a in answers.items() if isinstance(a, Failure) and a.lost]
