"""The members as the coordinator calls them: whoever fails is replaced, and the phase goes on.

- A process that dies: its members are made anew, put back to how they stood at the beginning of the
  phase, and do it again. So the numbers are the same as if nothing had happened. One that dies
  again and again in the same phase stops the run: more of the same would not help it.
- A member whose numbers are no longer finite: quarantine. It begins anew, as evolution says, and
  the others go on with what they have.
- All of them at once: the run stops, for then it is the data or the settings.

A phase ends where members' states are kept, `snapshots`: after everything that changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from echelon.agents.mfpbt import Decision
from echelon.agents.replay import RingMark
from echelon.errors import TrainingError
from echelon.population.crew import Crew, Failure
from echelon.population.evolution import Evolution
from echelon.population.shared_replay import SharedReplay

Calls = Mapping[int, tuple[Any, ...]]
Note = Callable[[str, str, str, Mapping[str, float | str]], None]
"""Records an event of the population: kind, who, code, values."""

MOST_DEATHS = 3
"""Times that processes may die in one phase before the run is given up."""
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
        """By member; none of one that stands at its very beginning."""
        self._deaths = 0
        self._remember("snapshot", {}, {})

    def __len__(self) -> int:
        return self.host.members

    def each(self, method: str, calls: Calls) -> dict[int, Any]:
        """Answers of members; there is no `Failure` among them."""
        answers = self._answers(method, calls)
        due = calls
        if _failed(answers):
            # Whoever dies from here on is to keep what the phase made of it.
            self._remember(method, calls, answers)
            due = {m: calls[m] for m in _failed(answers)}
            self._quarantine(answers, everybody=len(due) == len(calls))
            answers |= self._answers(method, due)
            for m in _failed(answers):
                raise answers[m].error
        if method in _CHANGING:
            self._remember(method, due, answers)
        return answers

    def act_out(self, decisions: Sequence[Decision]) -> None:
        """Carry evolution's decisions out, and write them down."""
        for d in decisions:
            self._note(d.kind, self._name(d.member), *d.cause)
        while True:
            found: dict[int, Any] = dict(self._evolution.apply(decisions, self.host))
            if not _lost(found):
                for failure in found.values():
                    raise failure.error
                found = self._kept()
            if not _lost(found):
                return
            # Sources may be overwritten by now: all go back, and all is done again.
            self._recover(found, everybody=True)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from each member's state."""
        self._snapshots = dict(enumerate(states))
        found = self._put_back(range(len(self)))
        if _lost(found):
            self._recover(found, everybody=True)
        self._remember("snapshot", {}, {})

    def _answers(self, method: str, calls: Calls) -> dict[int, Any]:
        """Answers of members; those whose process died begin the phase again, in a new one."""
        answers = self.host.each(method, calls)
        while _lost(answers):
            again = self._recover(answers)
            answers |= self.host.each(method, {m: calls[m] for m in again if m in calls})
        return answers

    def _recover(self, found: Mapping[int, Any], *, everybody: bool = False) -> list[int]:
        """Make members anew whose process died, as they stood at the beginning of the phase.

        found: answers, with some `lost`; everybody: the others go back there too. The numbers of
        all that went back.
        """
        again = set(range(len(self))) if everybody else set()
        while lost := _lost(found):
            self._deaths += 1
            if self._deaths >= MOST_DEATHS:
                raise TrainingError(
                    f"given up after processes of the experts died {self._deaths} times in one "
                    f"phase of training; the last time {found[lost[0]].error}"
                )
            while lost:
                anew = self.host.rebuild(lost[0])
                self._note("worker_lost", f"members {anew}", "worker_lost", {})
                again.update(anew)
                lost = [m for m in lost if m not in anew]
            found = self._put_back(sorted(again))
        return sorted(again)

    def _put_back(self, members: Sequence[int]) -> dict[int, Any]:
        """Put members to where they stood when states were kept; failures of the lost."""
        marks = list(self._replay.snapshot())
        for m, kept in self._snapshots.items():
            if "mark" in kept:
                marks[m] = RingMark(*kept["mark"])
        found = self.host.each("stand", dict.fromkeys(members, (tuple(marks),)))
        found |= self.host.each(
            "restore",
            {m: (self._snapshots[m],) for m in members if m in self._snapshots},
        )
        for m in _failed(found):
            if not found[m].lost:
                raise found[m].error
        return found

    def _kept(self) -> dict[int, Any]:
        """Keep everybody's state, or say who is lost."""
        if self.host.alone:  # then nobody can be lost
            self._snapshots = {}
            return {}
        everybody: Calls = dict.fromkeys(range(len(self)), ())
        states = self.host.each("snapshot", everybody)
        if not _lost(states):
            self._snapshots, self._deaths = states, 0
        return states

    def _remember(self, method: str, calls: Calls, answers: dict[int, Any]) -> None:
        """Keep states; a process that dies while it is asked does the phase again first."""
        while _lost(states := self._kept()):
            again = self._recover(states)
            answers |= self._answers(method, {m: calls[m] for m in again if m in calls})

    def _quarantine(self, answers: Mapping[int, Any], *, everybody: bool) -> None:
        """Begin members anew whose numbers are no longer finite."""
        failed = _failed(answers)
        for m in failed:
            if not isinstance(answers[m].error, TrainingError):
                raise answers[m].error
            values = {"error": str(answers[m].error)}
            self._note("quarantine", self._name(m), "quarantine", values)
        if everybody:
            raise answers[failed[0]].error
        self.act_out(self._evolution.quarantined(failed))

    def _name(self, member: int) -> str:
        plan = self._evolution.plan
        name = f"expert {plan.niche_of(member)}"
        return name if plan.per_niche == 1 else f"{name} · {member % plan.per_niche + 1}"


def _failed(answers: Mapping[int, Any]) -> list[int]:
    """Members whose call came to nothing."""
    return [m for m, a in answers.items() if isinstance(a, Failure)]


def _lost(answers: Mapping[int, Any]) -> list[int]:
    """Members whose process died."""
    return [m for m in _failed(answers) if answers[m].lost]
