"""What is known of a worker's failure: facts, of which :mod:`elastic_launch.events.sentences` makes the text."""

from __future__ import annotations

from elastic_launch.values import Value


class Suspect(Value):
    """A node to which the end of a round is put down, or one of its ranks."""

    node: str
    rank: int | None = None


class StallPlace(Value):
    """Where a worker stands still.

    Attributes:
        state: ``stopped`` by a signal; in an ``exchange`` with other ranks; waiting for its data ``loader``; elsewhere
            in its ``code``; or ``unknown``.
        frame: the innermost frame of the user's code, as ``file:line in function``; empty if unknown.
        collective: what it waits for in an exchange, such as ``all_reduce of Float[1]``; empty if unknown.
    """

    state: str
    frame: str = ""
    collective: str = ""


class BegunInstead(Value):
    """Another collective than that in which ranks wait, and the ranks that have begun it."""

    what: str
    ranks: tuple[int, ...]


class SplitCollective(Value):
    """Some ranks of a process group wait in a collective that others have not begun, or began as another one.

    Attributes:
        what: such as ``all_reduce of Float[1024]``.
        number: it is the group's collective of this number.
        group: the name of the process group.
        there: the ranks that wait in it.
        behind: those that have not begun it.
        instead: those that have begun another one in its place.
    """

    what: str
    number: int
    group: str
    there: tuple[int, ...]
    behind: tuple[int, ...] = ()
    instead: tuple[BegunInstead, ...] = ()

    @property
    def awaited(self) -> set[int]:
        """The ranks that the others wait for."""
        return {*self.behind, *(rank for other in self.instead for rank in other.ranks)}


class Doing(Value):
    """What a worker does: its script, as long as nothing else is known.

    Attributes:
        activity: an :class:`elastic_launch.shared_progress.Activity`.
        step: optimizer steps done.
        pause: what an announced pause is for, in a few words.
        ends: whether its script is at its end.
    """

    activity: int = 0
    step: int = 0
    pause: str = ""
    ends: bool = False


class Hang(Value):
    """How a worker hangs.

    Attributes:
        doing: what it is late with.
        seconds: for how long it has made no progress.
        at: where it stands.
        others, there: ranks that stand elsewhere, and where, if it waits for others itself.
    """

    doing: Doing
    seconds: float
    at: StallPlace
    others: tuple[int, ...] = ()
    there: StallPlace | None = None


class Mistake(Value):
    """An exception that says that the script itself is wrong, so that a restarted worker may well raise it again.

    Attributes:
        exception: its type, such as ``KeyError``.
        frame: the innermost frame of the user's code, as ``file:line in function``.
    """

    exception: str
    frame: str


class Failure(Value):
    """One worker's failure, as its node saw it.

    Attributes:
        kind: ``crash``, ``hang``, ``out of memory``, ``preemption``, ``startup`` or ``fatal``.
        rank: None if it was started ahead of a round, and had no place in one.
        exit_code: as in ``subprocess``: -N for signal N.
        error: the first line of its exception, ``Type: text``, or what else it said last; empty if unknown.
        detail: the traceback, or the last lines of stderr.
        ran: seconds from the worker's start to its end.
        ago: seconds from the failure to this report, by the node's clock. The time of failure is when its exception
            reached the top level, or else when it exited.
        log: the location of its log files on its node.
        symptom: evidence that it failed because another rank had: ``broken connection`` or ``time-out``; else empty.
        ended_before: ranks that had ended with 0 before, if it is a symptom.
        trained: optimizer steps that the round had done, as far as the node knows; None if it knows of none.
        stopped: whether it had failed before it was stopped; the exit code tells nothing then.
        supposed: whether it may not have failed: the last output before it was stopped was a traceback, which may be
            that of a handled exception.
        named: whether ``--fatal-exit-codes`` names its exit code.
        timer: the name of its timer that had expired; empty if none had.
        hang: how it hangs, if it was found to.
        repeats: where it failed, if a restart computes the same numbers there again; else empty.
        mistake: the exception that ended it, if that says that the script is wrong.
        alive: whether the worker goes on: its connection to another rank broke, and it waits for a place.
        alike: for each rank of the round, the lowest rank with the same arguments, if the ranks compared them and they
            differ; else empty.
        restoring: whether it failed as it restored a state in a round of live workers.
        corrupt: whether it has computed wrong, as other ranks have found.
    """

    node_id: str
    kind: str
    rank: int | None
    local_rank: int
    pid: int
    exit_code: int
    error: str = ""
    detail: tuple[str, ...] = ()
    ran: float = 0.0
    ago: float = 0.0
    log: str = ""
    round: int = 0
    host: str = ""
    symptom: str = ""
    ended_before: tuple[int, ...] = ()
    trained: int | None = None
    stopped: bool = False
    supposed: bool = False
    named: bool = False
    timer: str = ""
    hang: Hang | None = None
    repeats: str = ""
    mistake: Mistake | None = None
    alive: bool = False
    alike: tuple[int, ...] = ()
    restoring: bool = False
    corrupt: bool = False
