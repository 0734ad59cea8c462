"""The min-cut is exact: cost, labels, tie-breaking and the chain of a contradiction."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoamp.errors import PlacementError
from tests.passes.decide.door import (
    Again,
    ContradictionError,
    Group,
    Problem,
    energy,
    least_cost,
    solve,
)
from tests.quick import explored
from tests.says import says
from tests.strategies import problems


def brute_force(problem: Problem) -> tuple[int, frozenset[str]] | None:
    """The least cost, and the variables low in every labelling that has it.

    Labellings of least cost are closed under intersection (the energy is submodular),
    so the second is itself one of them, and the one with the fewest low variables.
    """
    best: list[frozenset[str]] = []
    least: int | None = None
    names = sorted(problem.unary)
    for size in range(len(names) + 1):
        for labels in itertools.combinations(names, size):
            cost = _count(problem, set(labels))
            if cost is None or (least is not None and cost > least):
                continue
            if cost != least:
                best.clear()
            least = cost
            best.append(frozenset(labels))
    if least is None:
        return None
    return least, frozenset.intersection(*best)


def _count(problem: Problem, low: set[str]) -> int | None:
    """The energy in the words of the design, written again for this test."""
    wrong = (
        low & problem.at_sink.keys()
        or problem.at_source.keys() - low
        or any(len({a, b} & low) == 1 and a != b for a, b, _ in problem.ties)
        or any(a in low and b not in low for a, b, _ in problem.follows)
    )
    if wrong:
        return None
    total = sum(c[1] if v in low else c[0] for v, c in problem.unary.items())
    for group in problem.groups:
        lows = low & set(group.readers)
        if group.value in low and not lows and group.made is not None:
            price = group.made
        elif group.value in low and lows != set(group.readers):
            price = group.to_sink
        elif group.value not in low and lows:
            price = group.to_source
        else:
            continue
        if price is None:
            return None
        total += price
    for share in problem.shares:
        members = set(share.members)
        total += share.at_source if members & low else 0
        total += share.at_sink if members - low else 0
    return total


def solved(problem: Problem) -> Any:
    try:
        return solve(problem)
    except ContradictionError:
        return None


def check_optimum(problem: Problem) -> None:
    expected, found = brute_force(problem), solved(problem)
    assert (None if found is None else (found.cost, found.source)) == expected
    if found is not None:
        assert energy(problem, found.source) == found.cost


@settings(max_examples=100)
@given(problems())
def test_solve_finds_the_optimum_with_the_fewest_low(problem: Problem) -> None:
    check_optimum(problem)


@explored(50, 1000, lambda most: (problems(most), st.sets(st.integers(0, 8))))
def test_energy_is_the_design_s_formula(problem: Problem, labels: set[int]) -> None:
    low = frozenset(f"v{i}" for i in labels) & problem.unary.keys()
    assert energy(problem, low) == _count(problem, set(low))


def plain_cut(problem: Problem) -> int | None:
    """The least cost by networkx's own minimum cut on the textbook network.

    Every gadget in full: no collapsed groups, nothing settled beforehand.
    """
    never = 1000
    graph = nx.DiGraph()
    graph.add_nodes_from(["s", "t"])

    def add(a: str, b: str, capacity: int | None) -> None:
        capacity = never if capacity is None else capacity
        had = graph.edges.get((a, b), {"capacity": 0})["capacity"]
        graph.add_edge(a, b, capacity=had + capacity)

    for variable, (high, low) in problem.unary.items():
        add("s", variable, high)
        add(variable, "t", low)
    for variable in problem.at_sink:
        add(variable, "t", None)
    for variable in problem.at_source:
        add("s", variable, None)
    for a, b, _ in problem.ties:
        add(a, b, None)
        add(b, a, None)
    for a, b, _ in problem.follows:
        add(a, b, None)
    for group in problem.groups:
        for reader in group.readers:
            add(reader, f"low {group.key}", None)
            add(f"high {group.key}", reader, None)
        if group.made is None:
            add(f"low {group.key}", group.value, group.to_source)
            add(group.value, f"high {group.key}", group.to_sink)
            continue
        both = group.to_sink - group.made
        add(group.value, f"high {group.key}", group.made)
        add(f"low {group.key}", f"high {group.key}", both)
        add(f"low {group.key}", group.value, group.to_source - both)
        add(f"high {group.key}", group.value, None)
    for at, share in enumerate(problem.shares):
        add(f"any low {at}", "t", share.at_source)
        add("s", f"any high {at}", share.at_sink)
        for member in share.members:
            add(member, f"any low {at}", None)
            add(f"any high {at}", member, None)
    cost, _ = nx.minimum_cut(graph, "s", "t")
    return None if cost >= never else int(cost)


@settings(max_examples=100)
@given(problems(14))
def test_cost_is_that_of_the_textbook_network(problem: Problem) -> None:
    found = solved(problem)
    assert (found.cost if found else None) == plain_cut(problem)


@pytest.mark.parametrize("readers", ["a", "ab", "abc", "av"])
def test_a_value_made_for_the_sink_side_has_its_price_in_every_labelling(
    readers: str,
) -> None:
    for down, up in itertools.product(range(4), repeat=2):
        for made in range(max(0, up - down), up + 1):
            group = Group(("v", 0, 0), "v", tuple(readers), down, up, made=made)
            free = Problem(dict.fromkeys("vabc", (0, 0)), groups=[group])
            for bits in itertools.product([False, True], repeat=4):
                low = {name for name, bit in zip("vabc", bits, strict=True) if bit}
                held = replace(
                    free,
                    at_source=dict.fromkeys(low, "is low"),
                    at_sink=dict.fromkeys(set("vabc") - low, "is high"),
                )
                cost = _count(held, low)
                assert solve(held).cost == energy(held, frozenset(low)) == cost


def casts_down(problem: Problem, low: frozenset[str], index: int) -> bool:
    group = problem.groups[index]
    return group.value not in low and bool(low & set(group.readers))


@explored(40, 1000, lambda most: (problems(most), st.data()))
def test_dearer_down_casts_are_never_made_more_often(
    problem: Problem, data: st.DataObject
) -> None:
    before = solved(problem)
    assume(before is not None and problem.groups)
    index = data.draw(st.integers(0, len(problem.groups) - 1))
    group = problem.groups[index]
    assume(group.to_source is not None)
    groups = list(problem.groups)
    groups[index] = replace(
        group, to_source=group.to_source + data.draw(st.integers(1, 9))
    )
    after = solved(replace(problem, groups=groups))
    assert after.cost >= before.cost
    assert casts_down(problem, after.source, index) <= casts_down(
        problem, before.source, index
    )


@explored(50, 1000, lambda most: (problems(most), st.data()))
def test_another_deny_never_lowers_the_cost(
    problem: Problem, data: st.DataObject
) -> None:
    before = solved(problem)
    name = data.draw(st.sampled_from(sorted(problem.unary)))
    after = solved(replace(problem, at_sink={**problem.at_sink, name: "denied"}))
    if before is None:
        assert after is None
    elif after is not None:
        assert after.cost >= before.cost
        assert after.cost > before.cost or name not in before.source


# -- contradictions --------------------------------------------------------------------

ALLOWED = {"conv": "the user allows conv2d"}
DENIED = {"exp": "the user denies exp"}
CHAINS: dict[str, tuple[Problem, list[str]]] = {
    "a write, what follows it, and a cast down": (
        Problem(
            unary=dict.fromkeys(["conv", "relu_", "view", "argmax", "exp"], (1, 1)),
            at_source=ALLOWED,
            at_sink=DENIED,
            ties=[("relu_", "conv", "is written")],
            groups=[Group(("v", 0, 0), "exp", ("view", "argmax"), None, 3, "no down")],
            follows=[("relu_", "view", "reads it")],
        ),
        [
            "conv",
            "relu_ as well (is written)",
            "view as well (reads it)",
            "exp as well (no down)",
        ],
    ),
    "ties both ways and a cast up": (
        Problem(
            unary=dict.fromkeys(["conv", "view", "relu_", "exp"], (1, 1)),
            at_source=ALLOWED,
            at_sink=DENIED,
            groups=[Group(("c", 0, 0), "conv", ("view",), 3, None, "no up")],
            ties=[("view", "relu_", "is written"), ("exp", "relu_", "views it")],
        ),
        [
            "conv",
            "view as well (no up)",
            "relu_ as well (is written)",
            "exp as well (views it)",
        ],
    ),
    "pinned both ways": (
        Problem({"exp": (1, 1)}, DENIED, {"exp": ALLOWED["conv"]}),
        ["exp"],
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_contradiction_is_told_as_the_chain(name: str) -> None:
    problem, chain = CHAINS[name]
    with pytest.raises(PlacementError) as raised:
        least_cost(problem)
    first, last = (f"({held})" for held in (ALLOWED["conv"], DENIED["exp"]))
    says(raised, *chain, first, last)
    at = [str(raised.value).index(each) for each in (*chain, last)]
    assert at == sorted(at)


@settings(max_examples=100)
@given(problems())
def test_every_contradiction_has_a_chain(problem: Problem) -> None:
    if brute_force(problem) is None:
        with pytest.raises(PlacementError):
            least_cost(problem)


# -- size ------------------------------------------------------------------------------


def stack(layers: int) -> Problem:
    """Placement of a stack of transformer layers: 46 ops each, residuals, weights."""
    unary: dict[str, tuple[int, int]] = {"x": (0, 0)}
    pinned = {"x": "an input"}
    readers: dict[str, list[str]] = {}
    stream = "x"
    for layer in range(layers):
        chain = stream
        for i in range(46):
            name = f"op{layer}.{i}"
            heavy = i % 8 == 2
            unary[name] = (900, 200) if heavy else (30 + i % 7, 20 + i % 11)
            readers.setdefault(chain, []).append(name)
            if heavy:
                unary[f"w{name}"] = (0, 0)
                pinned[f"w{name}"] = "a weight"
                readers.setdefault(f"w{name}", []).append(name)
            if i % 15 == 7:
                pinned[name] = "a softmax"
            if i % 23 == 22:
                readers.setdefault(stream, []).append(name)
                stream = name
            chain = name
    groups = [
        Group((value, 0, 0), value, tuple(r), 17 + len(value), 19 + len(value))
        for value, r in readers.items()
    ]
    return Problem(unary, pinned, groups=groups)


def test_eight_thousand_ops_are_placed_in_a_second() -> None:
    problem = stack(175)
    assert sum(not name.startswith("w") for name in problem.unary) > 8000
    start = time.perf_counter()
    found = solve(problem)
    seconds = time.perf_counter() - start
    assert energy(problem, found.source) == found.cost
    assert found.source
    assert seconds < 5  # 1 s is the aim; the rest is for a machine shared with others


@explored(
    80,
    1000,
    lambda most: (
        problems(most),
        st.sets(st.integers(0, 8), min_size=1, max_size=3),
        st.booleans(),
    ),
)
def test_a_problem_solved_again_has_the_whole_solution(
    problem: Problem, labels: set[int], at_source: bool
) -> None:
    names = [n for n in problem.unary if int(n[1:]) in labels]
    assume(solved(problem) is not None)
    held = "at_source" if at_source else "at_sink"
    again = Again(problem)
    for asked in (names, names[:1], []):  # no answer must change a later one
        more = {**getattr(problem, held), **dict.fromkeys(asked, "asked for")}
        found = again.held(asked, at_source=at_source)
        assert found == solved(replace(problem, **{held: more}))
