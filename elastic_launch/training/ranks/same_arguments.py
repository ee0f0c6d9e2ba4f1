"""Checks that all ranks were given the same arguments, before anything depends on them.

A rank with another seed or dataset would load samples that are not its own; a rank without a checkpoint would leave the
others waiting. Each rank sees only its own arguments, so nothing else would detect this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from elastic_launch.contract import Differs
from elastic_launch.errors import UsageError
from elastic_launch.training.link import AgentLink
from elastic_launch.training.ranks.exchange import are_same, bytes_of_all
from elastic_launch.training.ranks.replicas import ranks_text
from elastic_launch.training.ranks.world import World

LONGEST = 4096
"""Bytes of arguments up to which they are given to the agent as they are; of longer ones it gets a checksum."""

NOT_COMPARED = "not compared"
"""Value of an argument that must be the same on all ranks, but is not known on this one, or is not to be compared."""

SAMPLE = "sample "
"""How the names of samples begin, among the arguments, whose content is compared by a hash."""

LEAF, APART = ",", "/"
"""Between the parts of a sample's hash, and between the hashes of a part: those of ranks that have one of these in
common count as the same.
"""

SHOWN = 3
"""Most values that an error names besides that of most ranks."""

MOST_RANKS = 8192
"""Most ranks of which the agent learns how they differ: a message to it has a limit."""


class OthersDifferError(RuntimeError):
    """Others of a round were given other arguments than this process, which goes on in the next round."""


def told(given: Mapping[str, object]) -> str:
    """Return arguments as the agents of the ranks compare them."""
    # Without samples: one that differs is read again before it counts, see check_same().
    text = _text({name: value for name, value in given.items() if not name.startswith(SAMPLE)})
    return text if len(text) <= LONGEST else hashlib.sha256(text.encode()).hexdigest()


def _text(given: Mapping[str, object]) -> str:
    return json.dumps({name: str(value) for name, value in given.items()})


def check_same(
    world: World,
    given: Mapping[str, object],
    link: AgentLink | None = None,
    *,
    goes_on: bool = False,
    again: Callable[[], Mapping[str, object]] | None = None,
) -> None:
    """Compare the arguments of all ranks; called by all ranks.

    Args:
        given: arguments by the names used in errors; compared as text.
        link: to the agent, which learns which ranks differ; None: it does not.
        goes_on: whether this process has trained with its arguments, and can go on in another round.
        again: reads the samples among them once more, if one differs; None: they stay as they were.

    Raises:
        UsageError: on all ranks, naming the first difference and the rank that has it.
        OthersDifferError: instead, in a process that goes on.
    """
    if world.world_size == 1:
        return
    text = _text(given).encode()
    if all(are_same([len(text), int.from_bytes(hashlib.sha256(text).digest()[:7], "big")])):
        return
    found = _of_all(world, given)
    if all(one == found[0] for one in found):
        return
    if _difference(found)[0].startswith(SAMPLE):
        found = _of_all(world, given if again is None else again())
        if all(one == found[0] for one in found):
            return
    if link is not None and len(found) <= MOST_RANKS:
        lowest: dict[str, int] = {}
        link.say_noted(Differs(tuple(lowest.setdefault(str(one), rank) for rank, one in enumerate(found))))
    name, difference = _difference(found)
    message = f"The ranks were given different arguments: {difference}."
    if name.startswith(SAMPLE):
        message = f"The ranks have different samples: {difference}."
    if goes_on:
        raise OthersDifferError(message)
    if name.startswith(SAMPLE):
        raise UsageError(
            message,
            "Put the same version of the data on all nodes, and sort directory listings. If the data differ "
            "between ranks by design, give ElasticLoader(compare_samples=False).",
        )
    raise UsageError(
        message,
        "Give all ranks the same arguments. The library gives each rank its part of every global batch, and decides "
        "which ranks read and write checkpoints.",
    )


def _of_all(world: World, given: Mapping[str, object]) -> list[dict[str, str]]:
    """Return what is to be compared of each rank's arguments; of a sample, the hash that the fewest ranks differ in."""
    found: list[dict[str, str]] = [json.loads(one) for one in bytes_of_all(world, _text(given).encode())]
    unknown = {name for one in found for name, value in one.items() if value == NOT_COMPARED}
    found = [{name: value for name, value in one.items() if name not in unknown} for one in found]
    for name in [name for name in found[0] if name.startswith(SAMPLE) and all(name in one for one in found)]:
        for one, value in zip(found, told_apart([one[name] for one in found]), strict=True):
            one[name] = value
    return found


def told_apart(hashes: Sequence[str]) -> list[str]:
    """Return each rank's hash of a sample by which it is compared: of each part, the one that the fewest differ in."""
    parts = [text.split(LEAF) for text in hashes]
    if len({*map(len, parts)}) == 1:
        each = (zip(*(part.split(APART) for part in column), strict=False) for column in zip(*parts, strict=True))
        parts = [*map(list, zip(*(min(ways, key=lambda way: len({*way})) for ways in each), strict=True))]
    return [hashlib.sha256(LEAF.join(row).encode()).hexdigest()[:12] if row[1:] else row[0] for row in parts]


def _difference(found: list[dict[str, str]]) -> tuple[str, str]:
    """Return the first argument that differs, and which ranks have which value; what most have is the last."""
    for name in dict.fromkeys(name for one in found for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(found):
            ranks.setdefault(one.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            usual = max(ranks, key=lambda value: len(ranks[value]))
            others = [value for value in ranks if value != usual][:SHOWN]
            texts = [
                f"{ranks_text(x)} {'has' if len(x) == 1 else 'have'}" for x in map(ranks.__getitem__, [*others, usual])
            ]
            first, *rest = zip(texts, [*others, usual], strict=True)
            return name, ", ".join([f"{first[0]} {name} {first[1]}", *(f"{who} {value}" for who, value in rest)])
    raise AssertionError("they are the same")
