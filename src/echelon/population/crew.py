"""Members of a population, each an object that lives on in some process and is called by name.

    with Crew(make, members=5, workers=2) as crew:
        done = crew.each("train", {0: (1000,), 3: (1000,)})       # both at the same time
        weights = crew.one(3, "copy_state")

`make(member)` is called in the process that hosts the member, which then keeps its state from call
to call. With one worker all members live in this process. Members of one process work one after
the other, in the order they are named; processes work side by side. Values travel as copies, in
one process too, so results do not depend on the number of workers as long as members share nothing
that changes and draw chance from generators of their own.

What goes wrong:

- A member raises an `EchelonError`: a `Failure` in its place, the others go on. Any other
  exception is a bug and is raised here, once all have answered.
- A process dies, killed or out of memory: a `Failure`, with `lost`, for each of its members, until
  `rebuild` has made them anew; their states are for the caller to restore.
- Ctrl-C and SIGTERM: workers are deaf to them. A call that is under way is finished and whoever
  made it asks its own `should_stop` then, with all members equally far. Where the signal raises
  instead (a second one, see `echelon.stopping`), the processes are ended.
- This process is killed: the workers see it end and leave at once, in the middle of a call too.

`Host` is what the rest of the population knows of all this. Members on Ray would be another `Host`
(an actor for each member, `each` as one `ray.get`); nothing else would change.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from echelon.agents.processes import hire
from echelon.errors import EchelonError, TrainingError
from echelon.files import Closing

Make = Callable[[int], object]
"""Makes a member from its number, in the process that hosts it; pickled to get there."""
_PATIENCE_SECONDS = 5.0
"""That a process is given to leave when asked, before it is ended."""


@dataclass(frozen=True)
class Failure:
    """A call that came to nothing.

    error: what the member raised, its number in the message; lost: its process died, and its state
    with it
    """

    member: int
    error: EchelonError
    lost: bool = False


class Host(Protocol):
    """Where members live."""

    def each(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call `method` of each member named, with its arguments; its result or a `Failure`."""
        ...

    def one(self, member: int, method: str, *args: object) -> Any:  # noqa: ANN401 (of any method)
        """Call `method` of one member; raises where `each` gives a `Failure`."""
        ...

    def rebuild(self, member: int) -> list[int]:
        """Make a member anew, and those that were lost with it; all their numbers, rising."""
        ...

    def close(self) -> None:
        """Let all members go."""
        ...


class Crew(Closing):
    """The host of this machine: members in a few processes, or in this one."""

    def __init__(self, make: Make, members: int, workers: int = 1, threads: int = 1) -> None:
        """threads: of torch, in each process; in this one for the time of a call"""
        assert members >= 1, f"members should be ≥ 1, are {members}"
        assert workers >= 1, f"workers should be ≥ 1, are {workers}"
        self.members = members
        workers = min(workers, members)
        self._groups = [list(range(w, members, workers)) for w in range(workers)]
        self._teams: list[_Here | _There] = []
        self._closed = False
        try:
            for _ in self._groups:
                self._teams.append(_Here(make, threads) if workers == 1 else _There(make, threads))
            for failure in self._make(range(members)):
                raise failure.error
        except BaseException:
            self.close()
            raise

    @property
    def alone(self) -> bool:
        """Whether all members live in this process: then none can be lost."""
        return isinstance(self._teams[0], _Here)

    def each(self, method: str, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Result or `Failure` of each member named, in their order; see `Host`."""
        unknown = [m for m in calls if not 0 <= m < self.members]
        assert not unknown, f"members are numbered 0 to {self.members - 1}, found {unknown}"
        answers = self._ask({m: _Call(m, method, _pack(args)) for m, args in calls.items()})
        return {m: self._result(answers[m]) for m in calls}

    def one(self, member: int, method: str, *args: object) -> Any:  # noqa: ANN401 (of any method)
        """Result of one member; raises where `each` gives a `Failure`."""
        result = self.each(method, {member: args})[member]
        if isinstance(result, Failure):
            raise result.error
        return result

    def rebuild(self, member: int) -> list[int]:
        """Make a member anew; where its process died, its mates too, in a new process.

        Their numbers, rising: what state they are to have is the caller's to say. Raises what
        `make` raises; where the new process dies too, they are lost still, as the next call says.
        """
        where = member % len(self._teams)
        team = self._teams[where]
        lost = team.lost is not None
        if isinstance(team, _There) and lost:
            self._teams[where] = _There(team.make, team.threads)
        anew = self._groups[where] if lost else [member]
        for failure in self._make(anew):
            if not failure.lost:
                raise failure.error
        return list(anew)

    def close(self) -> None:
        """Let the members go and end their processes; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        for team in self._teams:
            team.dismiss()
        for team in self._teams:
            team.end()

    def _make(self, members: Sequence[int]) -> list[Failure]:
        answers = self._ask({m: _Call(m, None, b"") for m in members})
        results = [self._result(answers[m]) for m in members]
        return [result for result in results if isinstance(result, Failure)]

    def _ask(self, calls: Mapping[int, _Call]) -> dict[int, _Answer]:
        """Answers of all members called; all processes work at the same time."""
        if self._closed:
            raise RuntimeError("the crew is closed: its members are gone")
        groups = [[calls[m] for m in calls if m % len(self._teams) == w] for w in self._workers()]
        try:
            answers: dict[int, _Answer] = {}
            for team, group in zip(self._teams, groups, strict=True):
                if group:
                    answers |= team.ask(group)
            while busy := {team.pipe: team for team in self._teams if team.waiting}:
                for pipe in wait([pipe for pipe in busy if pipe is not None]):
                    assert isinstance(pipe, Connection), "nothing else is waited for"
                    answers |= busy[pipe].listen()
        except BaseException:
            # Answers that nobody has read would be taken for those of the next call.
            self.close()
            raise
        return answers

    def _workers(self) -> range:
        return range(len(self._teams))

    def _result(self, answer: _Answer) -> Any:  # noqa: ANN401 (of any method)
        member, kind, content = answer
        if kind == "result":
            return _unpack(content)
        if kind == "error":
            error_class, text = content
            error: EchelonError = EchelonError.__new__(error_class)
            Exception.__init__(error, f"member {member}: {text}")
            return Failure(member, error)
        if kind == "lost":
            mates = ", ".join(map(str, self._groups[member % len(self._teams)]))
            text = (
                f"member {member}: its process (members {mates}) ended unexpectedly ({content}), "
                "perhaps for want of memory. Resume the run with fewer trainer.workers."
            )
            return Failure(member, TrainingError(text), lost=True)
        if kind == "os":
            raise OSError(*content)
        raise RuntimeError(f"member {member}:\n{content}")


class _Call(NamedTuple):
    """What a member is to do; method None: to be made.

    args: packed by themselves, since what is packed together arrives as one object for all: two
    members of a process that are given the same array would change it for each other
    """

    member: int
    method: str | None
    args: bytes


class _Answer(NamedTuple):
    """What came of it.

    kind: result, error, os, bug, lost; content: as `_done` gives it, or how the process ended
    """

    member: int
    kind: str
    content: Any


class _Here:
    """Members in this process; the same steps as in another, without the way there."""

    pipe: Connection | None = None
    waiting: tuple[int, ...] = ()
    lost: str | None = None

    def __init__(self, make: Make, threads: int) -> None:
        self.make = make
        self.threads = threads
        self._members: dict[int, object] = {}

    def ask(self, calls: Sequence[_Call]) -> dict[int, _Answer]:
        """All answers at once."""
        with _threads(self.threads):
            return {c.member: _done(self._members, self.make, c) for c in calls}

    def listen(self) -> dict[int, _Answer]:
        """Nothing: all has been said."""
        return {}

    def dismiss(self) -> None:
        """Let the members go."""
        self._members.clear()

    def end(self) -> None:
        """Nothing to end."""


class _There:
    """Members in a process of their own, and our end of the pipe to it.

    It is given a list of calls, or None where it is to leave; it answers call by call.
    """

    def __init__(self, make: Make, threads: int) -> None:
        self.make = make
        self.threads = threads
        self.waiting: tuple[int, ...] = ()
        self.lost: str | None = None
        self._asked: tuple[int, ...] = ()
        self._process, self.pipe = hire(_work, threads, daemon=True)
        self._send(make)

    def ask(self, calls: Sequence[_Call]) -> dict[int, _Answer]:
        """Send the calls; the answers of those whose process is gone."""
        self._asked = self.waiting = tuple(c.member for c in calls)
        self._send(list(calls))
        return self._gone() if self.lost else {}

    def listen(self) -> dict[int, _Answer]:
        """The next answer; where the process has ended, one for each that was asked.

        Those that had answered before count as lost too: the state they speak of is gone.
        """
        try:
            answer: _Answer = _unpack(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self._bury()
            return self._gone()
        self.waiting = tuple(m for m in self.waiting if m != answer.member)
        return {answer.member: answer}

    def dismiss(self) -> None:
        """Ask the process to leave; end it where it is at work and would not hear."""
        if self.waiting and self.lost is None:
            self._process.kill()  # deaf to anything less
        else:
            self._send(None)

    def end(self) -> None:
        """Wait until it has left, not for ever."""
        self._process.join(_PATIENCE_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self.pipe.close()

    def _send(self, message: object) -> None:
        if self.lost is not None:
            return
        data = _pack(message)
        try:
            self.pipe.send_bytes(data)
        except OSError:  # nobody reads any more
            self._bury()

    def _bury(self) -> None:
        self._process.join()
        code = self._process.exitcode
        assert code is not None, "the process has been waited for"
        self.lost = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _gone(self) -> dict[int, _Answer]:
        self.waiting = ()
        return {m: _Answer(m, "lost", self.lost) for m in self._asked}


def _work(pipe: Connection, threads: int) -> None:
    """Host members in a process of their own, until told to leave."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    members: dict[int, object] = {}
    with suppress(EOFError, OSError):  # the parent has gone
        make: Make = _unpack(pipe.recv_bytes())
        while (calls := _unpack(pipe.recv_bytes())) is not None:
            for call in calls:
                pipe.send_bytes(_pack(_done(members, make, call)))
    pipe.close()


def _leave_with_parent() -> None:
    """End this process when the one that started it ends, however it does."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers watch"
    wait([parent.sentinel])
    os._exit(1)


def _done(members: dict[int, object], make: Make, call: _Call) -> _Answer:
    """Make a member or call it, and say what came of it, such that it can be sent."""
    try:
        if call.method is None:
            members.pop(call.member, None)
            members[call.member] = make(call.member)
            return _Answer(call.member, "result", _pack(None))
        if call.member not in members:
            raise TrainingError("it could not be made anew when it was last tried: rebuild it")
        result = getattr(members[call.member], call.method)(*_unpack(call.args))
        return _Answer(call.member, "result", _pack(result))
    except EchelonError as error:
        return _Answer(call.member, "error", (type(error), str(error)))
    except OSError as error:
        content = (error.errno, error.strerror or str(error), error.filename)
        return _Answer(call.member, "os", content)
    except Exception:  # noqa: BLE001 (carried to the parent, which raises it as a bug)
        return _Answer(call.member, "bug", traceback.format_exc())


class _Pickler(ForkingPickler):
    """What pipes between processes use, but that tensors go as arrays, by value.

    torch would have them share memory by file descriptors, which die with the process.
    """

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401 (of pickle's making)
        if isinstance(value, torch.Tensor):
            return _tensor, (value.detach().cpu().numpy(),)
        return NotImplemented


def _tensor(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values if values.flags.writeable else np.array(values))


def _pack(value: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _unpack(data: bytes) -> Any:  # noqa: ANN401 (whatever was packed)
    return ForkingPickler.loads(data)  # between our own processes only


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
