"""Which steps are verified, who computes whose micro-batch again, and which rank is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_launch.batch import slice_of
from elastic_launch.errors import UsageError
from elastic_launch.training.verification import (
    Digests,
    Dispute,
    assigned,
    checked_by,
    compared,
    culprit,
    due,
    groups_of,
    share_of,
)

RIGHT, WRONG = 1, 2


def slices(total: int, world: int) -> list[range]:
    return [range(*slice_of(total, world, rank)) for rank in range(world)]


@pytest.mark.parametrize(("given_", "share"), [("1%", 0.01), ("0.1%", 0.001), ("100%", 1.0), (True, 0.0), (False, 0.0)])
def test_a_share_is_a_percentage(given_: object, share: float) -> None:
    assert share_of(given_, "verify=") == pytest.approx(share)


@pytest.mark.parametrize("wrong", ["1", "0%", "101%", "-1%", "one%", 0.01, None, "1 %"])
def test_what_is_no_percentage_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"verify= is .*"):
        share_of(wrong, "verify=")


def test_the_seed_chooses_about_the_share_of_the_steps() -> None:
    chosen = [step for step in range(20_000) if due(3, step, 0.01)]
    assert 150 < len(chosen) < 250
    assert chosen != [step for step in range(20_000) if due(4, step, 0.01)]
    assert all(due(3, step, 1.0) for step in range(1000))
    assert not any(due(3, step, 0.0) for step in range(1000))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_each_rank_is_checked_once_and_by_another_node_where_that_is_possible(sizes: list[int]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    targets = checked_by(nodes)
    assert sorted(targets) == list(range(len(nodes)))
    if len(nodes) > 1:
        assert all(target != place for place, target in enumerate(targets))
    if 2 * max(sizes) <= len(nodes):
        assert all(nodes[target] != nodes[place] for place, target in enumerate(targets))


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 50))
def test_each_rank_with_micro_batches_has_one_that_is_checked(total: int, world: int, step: int) -> None:
    parts = slices(total, world)
    found = assigned(0, step, parts, [*range(world)], machines=False)
    ranks = {rank for rank in range(world) if parts[rank]}
    if len(ranks) < 2:
        assert not found.authors
        return
    assert found.authors.keys() == {*found.authors.values()} == found.micros.keys() == ranks
    assert all(micro in parts[author] for author, micro in found.micros.items())


def test_at_the_start_all_machines_compute_the_same() -> None:
    found = assigned(0, 7, slices(4, 3), [0, 0, 1], machines=True)
    assert found.authors == {0: 0, 1: 0, 2: 0}
    assert found.micros == {0: 0}


@given(st.integers(2, 6), st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 99))
def test_one_rank_that_computes_wrong_is_the_only_one_that_is_named(
    world: int, liar: int, lasting: bool, in_own: bool, step: int
) -> None:
    liar %= world
    found = assigned(0, step, slices(2 * world, world), [*range(world)], machines=False)
    own = {r: Digests(0, WRONG if r == liar and (lasting or in_own) else RIGHT) for r in found.authors}
    again = {r: Digests(0, WRONG if r == liar and (lasting or not in_own) else RIGHT) for r in found.authors}
    differing = compared(found, own, again)
    assert differing.disputes
    assert not differing.data
    named = set()
    for each in differing.disputes:
        assert len({*each.ranks}) == min(world, 3)
        first = {each.author: own[each.author].result, each.checker: again[each.checker].result}
        second = {rank: WRONG if rank == liar and lasting else RIGHT for rank in each.ranks}
        named.add(culprit(each, first, second))
    assert named == ({None} if world == 2 and lasting else {liar})


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_who_gives_two_results_is_never_a_witness(results: list[int]) -> None:
    a1, c1, a2, c2, third = results
    if a1 == c1:
        return
    found = culprit(Dispute(0, 0, 1, 2), {0: a1, 1: c1}, {0: a2, 1: c2, 2: third})
    if found == 0:
        assert c1 == c2 == third != a1
    elif found == 1:
        assert a1 == a2 == third != c1
    else:
        assert not (c1 == c2 == third) or a1 == third
        assert not (a1 == a2 == third) or c1 == third


def test_other_samples_accuse_the_data_and_not_a_rank() -> None:
    found = assigned(0, 0, slices(3, 3), [0, 1, 2], machines=False)
    own = {rank: Digests(0, RIGHT) for rank in range(3)}
    again = {rank: Digests(5 if rank == 1 else 0, WRONG if rank == 1 else RIGHT) for rank in range(3)}
    differing = compared(found, own, again)
    assert differing.data == (found.micros[found.authors[1]],)
    assert not differing.disputes


def test_machines_are_grouped_by_their_results() -> None:
    results = {0: Digests(0, 4), 1: Digests(0, 5), 2: Digests(0, 4)}
    assert groups_of(results, range(3)) == [[0, 2], [1]]
