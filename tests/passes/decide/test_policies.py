"""Other people's placements, on graphs small enough to label by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.passes.decide.door import (
    Classified,
    Group,
    Problem,
    forced,
    project,
    promote,
    tensorflow,
)
from tests.passes.decide.small_facts import fact, facts, graph_of, verdict


@pytest.mark.parametrize(
    ("graph", "low"),
    [
        # 1: allow ops, whatever is round them.
        ("allow a; allow b", "a b"),
        ("deny d; allow a d", "a"),
        # 2: deny spreads over infer ops, and over the clear ops that lead to one.
        ("deny d; infer i d; allow a i", "a"),
        ("allow a; deny d a; clear c d; infer i c; allow b i", "a b"),
        ("allow a; infer i a; infer j i; deny d j", "a i j"),
        ("deny d; clear c d; clear e c; infer i e", ""),
        # ... but not over an allow op, and not over clear ops that lead to no danger.
        ("deny d; allow a d; infer i a", "a i"),
        ("deny d; clear c d; allow a c", "c a"),
        # 3: clear and infer ops between two allow ops.
        ("allow a; infer i a; clear c i; infer j c; allow b j", "a i c j b"),
        ("allow a; infer i a; deny d i; infer j d; allow b j", "a i b"),
        # 4: infer ops after an allow op, if nothing dangerous is read as well.
        ("allow a; infer i a", "a i"),
        ("infer j; allow a; infer i a j", "a i"),
        ("allow a; deny d; infer i a d", "a"),
        ("infer i; allow a i", "a"),
        # 5: clear ops next to anything low, on either side.
        ("clear c; allow a c; clear e a; clear f e", "c a e f"),
        ("clear c; infer i c; deny d i", ""),
        ("allow a; clear c a; deny d c", "a c"),
        ("deny d; clear c d; clear e c", ""),
    ],
)
def test_tensorflows_painting(graph: str, low: str) -> None:
    assert tensorflow(graph_of(graph)) == set(low.split())


def test_an_edge_leads_through_the_elements_of_a_tuple() -> None:
    graph = facts(
        fact("conv", is_value=False),
        fact("part", "conv"),
        fact("relu", "part"),
        element_of={"part": "conv"},
    )
    verdicts = {"conv": verdict("allow", ()), "relu": verdict("infer")}
    assert tensorflow(Classified(graph, verdicts)) == {"conv", "relu"}


def test_what_comes_from_outside_is_no_neighbour() -> None:
    graph = facts(fact("x"), fact("relu", "x"), constants=["x"])
    assert tensorflow(Classified(graph, {"relu": verdict("infer")})) == set()


def test_forced_lowers_allow_ops_that_may_be() -> None:
    graph = graph_of("allow a; allow b; infer i a; clear c a; deny d c")
    pinned = {**graph.verdicts, "b": verdict("allow", (), pinned=True)}
    assert forced(replace(graph, verdicts=pinned)) == {"a"}


def test_promote_is_as_wide_as_what_it_reads() -> None:
    graph = graph_of("allow a; infer i a; deny d i; infer j i d; infer k i")
    assert promote(graph) == {"a", "i", "k"}


# -- made legal ------------------------------------------------------------------------

COSTS = dict.fromkeys("abcd", (1, 1))
GROUP = ("g", 0, 0)


@pytest.mark.parametrize(
    ("problem", "low", "legal"),
    [
        (Problem(COSTS), "a c unknown", "a c"),
        (Problem(COSTS, at_sink={"a": "denied"}), "a c", "c"),
        # A tie with one side fp32 raises the other, and what follows from that.
        (Problem(COSTS, ties=[("a", "b", "")]), "a c", "c"),
        (Problem(COSTS, ties=[("b", "a", "")]), "a c", "c"),
        (Problem(COSTS, ties=[("a", "b", "")]), "a b", "a b"),
        (Problem(COSTS, ties=[("a", "b", ""), ("b", "c", "")]), "b c d", "d"),
        # A reader that follows its value is low only where that is.
        (Problem(COSTS, follows=[("a", "b", "")]), "a c", "c"),
        (Problem(COSTS, follows=[("a", "b", "")]), "b", "b"),
        (Problem(COSTS, follows=[("a", "b", "")]), "a b", "a b"),
        # A cast up that is forbidden raises the value, one down its low readers.
        (Problem(COSTS, groups=[Group(GROUP, "a", ("b", "c"), 1, None)]), "a b", "b"),
        (Problem(COSTS, groups=[Group(GROUP, "a", ("b",), 1, None)]), "a b", "a b"),
        (Problem(COSTS, groups=[Group(GROUP, "a", ("b", "c"), None, 1)]), "b d", "d"),
        (Problem(COSTS, groups=[Group(GROUP, "a", ("b",), None, 1)]), "a b", "a b"),
        (Problem(COSTS, groups=[Group(GROUP, "a", ("b", "c"), 1, 1)]), "a b", "a b"),
        (Problem(COSTS, groups=[Group(GROUP, "a", ("b", "c"), 1, 1)]), "b", "b"),
    ],
)
def test_illegal_labels_are_raised(problem: Problem, low: str, legal: str) -> None:
    assert project(problem, low.split()) == set(legal.split())
