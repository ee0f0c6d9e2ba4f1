"""A model of exchanges that are confirmed on GPUs, in all interleavings: no rank applies a sum that is not complete.

Nothing of it is built yet: docs/adr/0030-exchanges-on-gpus-are-confirmed.md has what is.

A rank has a stream, whose operations follow each other, and a host, which may abort at any time. What NCCL does to an
exchange that is aborted is taken from its source: a kernel that is cut short skips its waits and copies, and tells its
peers that it is done, so they may end with whatever is in their buffers. A process that dies without an abort is one
that takes no further steps; the peers wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from typing import NamedTuple

import pytest

POISON = 1 << 40
"""What a rank adds to its token once it has seen the flag: no number of ranks makes the sum of these 0."""


@dataclass(frozen=True)
class Rules:
    """How an exchange is confirmed; the defaults are right."""

    communicators: int = 1  # of gradients; the token has another one
    attempts: int = 2  # of an update, one after the other
    fresh_tokens: bool = True
    flag_first: bool = True  # before anything is aborted
    joined: bool = True  # the flag is read once all exchanges of gradients have ended
    poison_cancels: bool = False
    token: bool = True
    token_last: bool = True  # of the communicators that are aborted; either must be right

    @cached_property
    def stream(self) -> list[tuple[Does, int]]:
        """What a rank's stream does in one attempt; an exchange has a communicator."""
        exchanges = [(Does.EXCHANGE, number) for number in range(self.communicators)]
        checks = [(Does.READ, 0), *([(Does.EXCHANGE, self.communicators)] if self.token else []), (Does.UPDATE, 0)]
        return exchanges + checks if self.joined else [*exchanges[:-1], checks[0], exchanges[-1], *checks[1:]]

    @cached_property
    def abort(self) -> list[int | None]:
        """What a host does to abort, in its order: None sets the flag, a number aborts that communicator."""
        numbers: list[int | None] = list(range(self.communicators + self.token))
        numbers = numbers if self.token_last else numbers[::-1]
        return [None, *numbers] if self.flag_first else [*numbers, None]

    def token_of(self, rank: int, attempt: int) -> int:
        return 1 + rank + (1000 * attempt if self.fresh_tokens else 0)

    def poison_of(self, rank: int) -> int:
        return -POISON if self.poison_cancels and rank % 2 else POISON

    def expected(self, size: int, attempt: int) -> int:
        return sum(self.token_of(rank, attempt) for rank in range(size))


class Does(Enum):
    EXCHANGE = "exchange"
    READ = "read"
    UPDATE = "update"


class Part(IntEnum):
    """What a rank gives to an exchange."""

    NOTHING = 0  # its communicator was aborted before
    OWN = 1
    OLD = 2  # gradients of a model that lacks an update
    POISONED = 3  # a token


class Given(NamedTuple):
    part: Part
    cut: bool = False  # whether its kernel was cut short


class Rank(NamedTuple):
    given: tuple[Given, ...] = ()  # to all exchanges begun so far, in the stream's order
    at: int = 0  # operations done, in all attempts
    runs: bool = False  # whether the kernel of the next one has begun
    aborting: int = 0  # steps of the abort done
    saw_flag: bool = False
    complete: bool = True  # whether the sums of this attempt are
    confirmed: bool = True  # whether the sum of tokens was as expected
    applied: int = 0  # updates
    wrong: bool = False  # whether it has applied a sum that lacks something


World = tuple[Rank, ...]


def next_worlds(rules: Rules, world: World) -> Iterator[World]:
    """All that may happen next."""
    for number, rank in enumerate(world):
        before, after = world[:number], world[number + 1 :]
        if rank.aborting < len(rules.abort):
            yield (*before, rank._replace(aborting=rank.aborting + 1), *after)
        if rank.at < len(rules.stream) * rules.attempts:
            for then in _of_stream(rules, world, number, rank):
                yield (*before, then, *after)


def _of_stream(rules: Rules, world: World, number: int, rank: Rank) -> Iterator[Rank]:
    attempt, at = divmod(rank.at, len(rules.stream))
    does, communicator = rules.stream[at]
    aborted = rules.abort[: rank.aborting]
    after = rank._replace(at=rank.at + 1, runs=False)
    if does is Does.READ:
        yield after._replace(saw_flag=rank.saw_flag or None in aborted)
    elif does is Does.UPDATE:
        fresh = after._replace(complete=True, confirmed=True)
        if rank.confirmed and not rank.saw_flag:
            fresh = fresh._replace(applied=rank.applied + 1, wrong=rank.wrong or not rank.complete)
        yield fresh
    elif not rank.runs:
        part = Part.OWN if rank.applied == attempt else Part.OLD
        if communicator == rules.communicators:
            part = Part.POISONED if rank.saw_flag else Part.OWN
        given = Given(Part.NOTHING, cut=True) if communicator in aborted else Given(part)
        yield rank._replace(runs=True, given=(*rank.given, given))
    else:
        if communicator in aborted:
            after = after._replace(given=(*rank.given[:-1], Given(rank.given[-1].part, cut=True)))
        index = len(rank.given) - 1
        parts = [each.given[index] if index < len(each.given) else None for each in (*world[:number], after)]
        parts += [each.given[index] if index < len(each.given) else None for each in world[number + 1 :]]
        if communicator == rules.communicators:
            for total in _totals(rules, parts, number, attempt):
                yield after._replace(confirmed=total == rules.expected(len(world), attempt))
        else:
            if all(each is not None and each.part is Part.OWN for each in parts):
                yield after
            if any(each is not None and (each.cut or each.part is Part.OLD) for each in parts):
                yield after._replace(complete=False)


def _totals(rules: Rules, parts: list[Given | None], number: int, attempt: int) -> set[int]:
    """The sums of tokens that a rank may get; none while it waits for another rank."""
    found = set()
    if all(each is not None and each.part is not Part.NOTHING for each in parts):
        own = sum(rules.token_of(rank, attempt) for rank in range(len(parts)))
        poison = sum(rules.poison_of(n) for n, each in enumerate(parts) if each and each.part is Part.POISONED)
        found.add(own + poison)
    if any(each is not None and each.cut for each in parts):
        # Anything may be in the buffers: the sum of an earlier attempt, also of another round, or a part of this one.
        found |= {rules.expected(len(parts), earlier) for earlier in range(-1, attempt)}
        found.add(rules.token_of(number, attempt))
    return found


def explored(rules: Rules, size: int, *, alike: bool = True) -> tuple[int, bool]:
    """Return how many worlds can be reached, and whether one of them is wrong.

    Args:
        alike: whether the ranks can be exchanged with each other.
    """
    start: World = (Rank(),) * size
    seen, todo = {start}, [start]
    while todo:
        for world in next_worlds(rules, todo.pop()):
            if any(rank.wrong for rank in world):
                return len(seen), True
            name = tuple(sorted(world)) if alike else world
            if name not in seen:
                seen.add(name)
                todo.append(name)
    return len(seen), False


@pytest.mark.parametrize("token_last", [True, False])
@pytest.mark.parametrize(
    ("size", "communicators", "attempts"),
    [
        (2, 1, 2),
        (2, 2, 1),
        (3, 1, 1),
        pytest.param(2, 2, 2, marks=pytest.mark.soak),
        pytest.param(3, 1, 2, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_no_rank_applies_an_incomplete_sum(size: int, communicators: int, attempts: int, token_last: bool) -> None:
    worlds, wrong = explored(Rules(communicators, attempts, token_last=token_last), size)
    assert not wrong
    assert worlds > 1000


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(fresh_tokens=False), id="tokens that are used again"),
        pytest.param(Rules(flag_first=False), id="the flag is set after the abort"),
        pytest.param(Rules(2, 1, joined=False), id="the flag is read before an exchange has ended"),
        pytest.param(Rules(attempts=1, poison_cancels=True), id="a poison that cancels another one"),
        pytest.param(Rules(token=False), id="each rank decides by its own flag"),
    ],
)
def test_a_rule_that_is_left_out_is_found(rules: Rules) -> None:
    assert any(explored(rules, size, alike=not rules.poison_cancels)[1] for size in (2, 3))
