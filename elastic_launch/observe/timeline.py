"""What pictures of a run draw on its time axis: its rounds, and when training stood still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_launch.events import types as ev
from elastic_launch.observe.chronicle import Chronicle, RoundTold
from elastic_launch.observe.ledger import Incident


@dataclass(frozen=True, slots=True)
class Bar:
    """A round: when it was there, by its host's clock, and its world size, 0 if the host does not know it."""

    told: RoundTold
    since: float
    until: float
    world: int


def bars(chronicle: Chronicle, told: Sequence[tuple[float, ev.Event]]) -> list[Bar]:
    """Return the rounds of which the host knows when they were formed, in order."""
    heard = {x.round: x.world_size for _, x in told if isinstance(x, ev.OrderReceived) and x.order == "form"}
    worlds = heard | {x.round: x.world_size for _, x in told if isinstance(x, ev.RoundFormed)}
    rounds = [chronicle.rounds[number] for number in sorted(chronicle.rounds)]
    ends = [x.formed or chronicle.until for x in rounds[1:]] + [chronicle.until]
    return [
        Bar(x, x.formed, min(y for y in (x.ended, x.reaped, end) if y is not None), worlds.get(x.number, 0))
        for x, end in zip(rounds, ends, strict=False)
        if x.formed is not None
    ]


def still(chronicle: Chronicle, incidents: Sequence[Incident]) -> list[tuple[Incident, float, float]]:
    """Return since when and until when, by the host's clock, training stood still for each incident."""
    found = []
    for incident in incidents:
        told = chronicle.rounds.get(incident.next_round, RoundTold(0))
        known = [x for x in (told.first, told.started, told.formed) if x is not None]
        end = known[0] if incident.recovered and known else chronicle.until
        found.append((incident, end - incident.still_s, end))
    return found
