"""Rounds of many members on the wire: each node gets its own place in the round, and of the others only the numbers.

A list of all members sent to all of them would grow with the square of their number: 36 GB for 16,384 nodes. What a
node needs is the number of workers before and after its own, by role, and the member whose worker store is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from elastic_launch.errors import ProtocolError
from elastic_launch.rendezvous.record import Member, Round
from elastic_launch.rendezvous.wire import messages as m

MOST_LISTED = 512
"""Most members of a round that the order to form it lists. In a larger one, a node cannot name the others."""

MOST_MEMBERS = 1_000_000
"""Most members that a node believes a round to have."""

UNLISTED = "#"
"""A node knows a member that is not listed by this and its rank among the members, instead of its id."""


def outlined(form: m.Form, leader: str) -> m.Form:
    """Return the order for members of a large round, without a place; of a small round the same order.

    Args:
        leader: incarnation of the leader's node. It is listed: a node that is cut off must know whether the leader's
            node is a member.
    """
    members = form.round.members
    if len(members) <= MOST_LISTED or any(member.node_id.startswith(UNLISTED) for member in members):
        return form
    listed = tuple(index for index, member in enumerate(members) if index == 0 or member.incarnation == leader)
    alike = groupby(members, lambda member: (member.workers, member.role))
    runs = tuple(m.MembersAlike(len([*run]), workers, role) for (workers, role), run in alike)
    return replace(
        form,
        round=Round(form.round.number, tuple(members[index] for index in listed)),
        outline=m.RoundOutline(runs, listed),
    )


def completed(form: m.Form, hello: m.NodeHello) -> m.Form:
    """Return the order as if it listed all members; those that it does not list have made-up ids, and no address.

    Raises:
        ProtocolError: if it contradicts itself.
    """
    outline = form.outline
    if outline is None:
        return form
    size = sum(max(0, run.count) for run in outline.runs)
    known = (*outline.listed, form.index)
    if not (0 < size <= MOST_MEMBERS and all(0 <= index < size for index in known)):
        raise ProtocolError(f"The order to form round {form.round.number} names members that the round does not have.")
    if len(outline.listed) != len(form.round.members) or 0 not in outline.listed:
        raise ProtocolError(f"The order to form round {form.round.number} does not name its first member.")
    members: list[Member] = []
    for run in outline.runs:
        for _ in range(run.count):
            name = f"{UNLISTED}{len(members)}"
            members.append(Member(name, name, run.workers, "", 0, run.role))
    members[form.index] = Member(
        hello.node_id,
        hello.incarnation,
        members[form.index].workers,
        hello.address,
        hello.store_port,
        members[form.index].role,
        form.slots,
    )
    for index, member in zip(outline.listed, form.round.members, strict=True):
        members[index] = member
    return replace(form, round=Round(form.round.number, tuple(members)))


class OrderEncoder:
    """Encodes a leader's orders: what goes to many nodes one after the other, only once."""

    def __init__(self) -> None:
        self._last: tuple[m.Order | None, bytes] = (None, b"")
        self._outline: tuple[m.RoundOutline | None, bytes] = (None, b"")

    def encode(self, order: m.Order) -> bytes:
        """Return an order as one line."""
        if isinstance(order, m.Form) and order.outline is not None:
            return self._placed(order, order.outline)
        if self._last[0] is not order:
            self._last = order, m.pack(order)
        return self._last[1]

    def _placed(self, form: m.Form, outline: m.RoundOutline) -> bytes:
        """Encode an order that differs from others of its round only in the place, which is encoded last."""
        if self._outline[0] is not outline:
            self._outline = outline, m.pack(replace(form, slots=(), index=0)).removesuffix(_place((), 0))
        return self._outline[1] + _place(form.slots, form.index)


def _place(slots: Sequence[int], index: int) -> bytes:
    return b'"slots":[%s],"index":%d}\n' % (",".join(map(str, slots)).encode(), index)
