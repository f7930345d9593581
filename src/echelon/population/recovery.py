"""The members as the coordinator calls them: whoever fails is replaced, and the phase goes on.

- A process that dies: its members are made again, put back to how they stood at the beginning of
  the phase, and do it again. So the numbers are the same as if nothing had happened. One that dies
  again and again in the same phase stops the run: more of the same would not help it.
- A member whose numbers are no longer finite: quarantine. It restarts, as evolution says, and the
  others go on with what they have.
- All of them at once: the run stops, for then it is the data or the settings.

A phase ends where members' states are kept, `snapshots`: after everything that changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from echelon.agents.mfpbt import Decision
from echelon.agents.replay import RingMark
from echelon.errors import TrainingError, WorkersLostError
from echelon.population.evolution import Evolution
from echelon.population.member import Member
from echelon.population.shared_replay import SharedReplay
from echelon.workers import Failure, Pool

_A = TypeVar("_A")
_P = ParamSpec("_P")
_R = TypeVar("_R")

Note = Callable[[str, str, str, Mapping[str, float | str]], None]
"""Records an event of the population: kind, who, code, values."""
Answers = dict[int, Any]
"""By number of the member; some may be a `Failure`."""
Phase = Callable[[Sequence[int]], Answers]
"""Has the members of these numbers do something."""
MOST_DEATHS = 3
"""Times that processes may die in one phase before the run is given up."""


class Members:
    """A pool of members that goes on."""

    def __init__(
        self, pool: Pool[Member], evolution: Evolution, replay: SharedReplay, note: Note
    ) -> None:
        self.pool = pool
        self.numbers = range(evolution.plan.members)
        self._evolution = evolution
        self._replay = replay
        self._note = note
        self._snapshots: dict[int, Any] = {}
        """By member; none of one that stands at its very beginning."""
        self._deaths = 0
        self._ahead: Answers | None = None
        """Of those who were sent ahead, as far as they have come; None: nobody was."""
        self._under_way = False
        self._keep_states(lambda _: {}, (), {})

    def __len__(self) -> int:
        return len(self.numbers)

    def ask(
        self,
        method: Callable[Concatenate[Member, _P], _R],
        numbers: Iterable[int] | None = None,
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> dict[int, _R]:
        """Answers of members, None: of all, to what does not change them."""
        self._wait()
        asked = list(self.numbers if numbers is None else numbers)
        return self._answers(lambda due: self.pool.call(method, due, *args, **kwargs), asked)

    def advance(
        self, method: Callable[[Member, _A], _R], arguments: Mapping[int, _A]
    ) -> dict[int, _R]:
        """Answers of members to what changes them, each with its own argument."""
        self._wait()

        def phase(due: Sequence[int]) -> Answers:
            ahead = self._ahead or {}
            known: Answers = {m: ahead.pop(m) for m in due if m in ahead}
            rest = {m: arguments[m] for m in due if m not in known}
            return known | (self.pool.call_each(method, rest) if rest else {})

        answers = self._answers(phase, list(arguments), changes=True)
        self._ahead = None
        return answers

    def send_ahead(
        self, method: Callable[[Member, _A], object], arguments: Mapping[int, _A]
    ) -> None:
        """Have members begin what `advance` will ask for next, with the same arguments.

        Until then they count as not having begun: `states` are those of before, and who dies
        begins again. What they are asked meanwhile must not depend on it.
        """
        assert self.pool.away, "members that map our files would write into what is saved"
        assert self._ahead is None, "they are ahead already"
        self.pool.begin_each(method, arguments)
        self._ahead, self._under_way = {}, True

    def states(self) -> list[Any]:
        """All that members would go on from, but for the replay."""
        if not self.pool.remote:
            return [state for _, state in sorted(self.ask(Member.state).items())]
        return [self._snapshots[m] for m in self.numbers]

    def close(self) -> None:
        """Let members go."""
        self._wait()
        self.pool.call(Member.close, self.numbers)
        self.pool.close()

    def _wait(self) -> None:
        """Take in the answers of those who are ahead."""
        if self._under_way:
            self._under_way, self._ahead = False, dict(self.pool.finish())

    def carry_out(self, decisions: Sequence[Decision]) -> None:
        assert not self._ahead, "their states would be others"
        for d in decisions:
            self._note(d.kind, self._name(d.member), *d.cause)
        while True:
            answers: Answers = dict(self._evolution.apply(decisions, self.pool))
            if not _lost_members(answers):
                for failure in answers.values():
                    raise failure.error
                answers = self._take_snapshots()
            if not _lost_members(answers):
                return
            # Sources may be overwritten by now: all go back, and all is done again.
            self._recover(answers, everybody=True)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._wait()
        self._ahead = None
        self._snapshots = dict(enumerate(states))
        answers = self._put_back(self.numbers)
        if _lost_members(answers):
            self._recover(answers, everybody=True)
        self._keep_states(lambda _: {}, (), {})

    def _answers(self, phase: Phase, numbers: Sequence[int], *, changes: bool = False) -> Answers:
        """Answers of members; there is no `Failure` among them."""
        answers = self._repeat_where_lost(phase, numbers)
        due = numbers
        if _failed_members(answers):
            # Whoever dies from here on is to keep what the phase made of it.
            self._keep_states(phase, numbers, answers)
            due = _failed_members(answers)
            for m in due:
                if not isinstance(answers[m].error, TrainingError):
                    raise answers[m].error
                values = {"error": str(answers[m].error)}
                self._note("quarantine", self._name(m), "quarantine", values)
            if len(due) == len(numbers):
                raise answers[due[0]].error
            self.carry_out(self._evolution.quarantine(due))
            answers |= self._repeat_where_lost(phase, due)
            for m in _failed_members(answers):
                raise answers[m].error
        if changes:
            self._keep_states(phase, due, answers)
        return answers

    def _repeat_where_lost(self, phase: Phase, numbers: Sequence[int]) -> Answers:
        """Answers of members; those whose process died begin the phase again, in a new one."""
        answers = phase(numbers)
        while _lost_members(answers):
            again = self._recover(answers)
            answers |= phase([m for m in again if m in numbers])
        return answers

    def _recover(self, answers: Answers, *, everybody: bool = False) -> list[int]:
        """Make members again whose process died, as they stood at the beginning of the phase.

        everybody: the others go back there too. The numbers of all that went back.
        """
        again = set(self.numbers) if everybody else set()
        while lost := _lost_members(answers):
            self._deaths += 1
            if self._deaths >= MOST_DEATHS:
                raise WorkersLostError(
                    f"given up after processes of the experts died {self._deaths} times in one "
                    f"phase of training; the last time {answers[lost[0]].error}"
                )
            while lost:
                rebuilt = self.pool.rebuild(lost[0])
                self._note("worker_lost", f"members {rebuilt}", "worker_lost", {})
                again.update(rebuilt)
                lost = [m for m in lost if m not in rebuilt]
            answers = self._put_back(sorted(again))
        for m in again:
            (self._ahead or {}).pop(m, None)
        return sorted(again)

    def _put_back(self, numbers: Sequence[int]) -> Answers:
        """Put members to where they stood when states were kept; failures of the lost."""
        marks = list(self._replay.snapshot())
        for m, kept in self._snapshots.items():
            if "mark" in kept:
                marks[m] = RingMark(*kept["mark"])
        # Whoever maps no file of ours needs what is in it, too.
        content = self._replay.state() if self.pool.away else None
        answers: Answers = dict(self.pool.call(Member.stand, numbers, tuple(marks), content))
        states = {m: self._snapshots[m] for m in numbers if m in self._snapshots}
        answers |= self.pool.call_each(Member.restore, states)
        for m in _failed_members(answers):
            if not answers[m].lost:
                raise answers[m].error
        return answers

    def _take_snapshots(self) -> Answers:
        """Keep everybody's state, or say who is lost."""
        if not self.pool.remote:  # then nobody can be lost
            self._snapshots = {}
            return {}
        states: Answers = dict(self.pool.call(Member.state, self.numbers))
        if not _lost_members(states):
            self._snapshots, self._deaths = states, 0
        return states

    def _keep_states(self, phase: Phase, numbers: Sequence[int], answers: Answers) -> None:
        """Keep states; a process that dies while it is asked does the phase again first."""
        while _lost_members(states := self._take_snapshots()):
            again = self._recover(states)
            answers |= self._repeat_where_lost(phase, [m for m in again if m in numbers])

    def _name(self, member: int) -> str:
        plan = self._evolution.plan
        name = f"expert {plan.niche_of(member)}"
        return name if plan.per_niche == 1 else f"{name} · {member % plan.per_niche + 1}"


def _failed_members(answers: Answers) -> list[int]:
    return [m for m, answer in answers.items() if isinstance(answer, Failure)]


def _lost_members(answers: Answers) -> list[int]:
    return [m for m in _failed_members(answers) if answers[m].lost]
