"""What a graph's facts and verdicts become: the problem, the choices, the words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoamp.errors import PlacementError
from tests.passes.decide.door import (
    FP32,
    POLICIES,
    Assignment,
    Classified,
    Facts,
    Group,
    Mode,
    Operand,
    Problem,
    Verdict,
    assign,
    build_problem,
    energy,
    project,
)
from tests.passes.decide.small_facts import fact, facts, graph_of, prices, verdict
from tests.says import says

Verdicts = dict[str, Verdict]


def written(text: str) -> tuple[Facts, Verdicts]:
    """The facts and the verdicts of `graph_of(text)`, for tests that change one."""
    graph = graph_of(text)
    return graph.facts, dict(graph.verdicts)


def problem_of(graph: Facts, verdicts: Verdicts) -> Problem:
    costs = dict.fromkeys(verdicts, (4, 2))
    return build_problem(Classified(graph, verdicts), prices(graph, costs))


def groups(graph: Facts, verdicts: Verdicts) -> dict[tuple[str, int, int], Group]:
    return {group.key: group for group in problem_of(graph, verdicts).groups}


def ends(problem: Problem) -> set[str]:
    """What is pinned to fp32, but for the reader after the graph."""
    return {*problem.at_sink} - {FP32}


def pairs(told: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    assert all(why for *_, why in told)
    return [(a, b) for a, b, _ in told]


# -- the problem -----------------------------------------------------------------------


def test_ops_have_their_prices_and_what_comes_in_is_fp32() -> None:
    graph = facts(fact("x"), fact("conv", "x"), constants=["x"])
    problem = problem_of(graph, {"conv": verdict("allow")})
    assert problem.unary == {"conv": (4, 2), "x": (0, 0), FP32: (0, 0)}
    assert problem.at_sink.keys() == {"x", FP32}
    assert all(problem.at_sink.values())
    assert problem.at_source == {}
    (group,) = problem.groups
    assert group == Group(("x", 0, 0), "x", ("conv",), 3, 5, group.why)
    says(group.why, op="x")


def test_a_pinned_node_keeps_its_reason() -> None:
    problem = problem_of(*written("deny exp; allow conv exp"))
    assert problem.at_sink["exp"] == "deny because"
    assert "conv" not in problem.at_sink


def test_readers_share_a_cast_within_a_region_and_between_writes() -> None:
    late = Operand("x", "self", False, 1)
    graph = facts(
        fact("x"),
        fact("a", "x"),
        fact("b", "x", "x"),
        fact("c", late),
        fact("d", "x", region=1),
    )
    verdicts = {n: verdict("allow", ["same"] * (1 + (n == "b"))) for n in "abcd"}
    assert {n: g.readers for n, g in groups(graph, verdicts).items()} == {
        ("x", 0, 0): ("a", "b"),
        ("x", 0, 1): ("c",),
        ("x", 1, 0): ("d",),
    }


def test_operands_by_their_modes() -> None:
    graph = facts(fact("x"), fact("y"), fact("z"), fact("op", "x", "y", "z"))
    verdicts = {"op": verdict("allow", ("any", "high", "follow"))}
    assert {n: g.readers for n, g in groups(graph, verdicts).items()} == {
        ("y", 0, 0): (FP32,),
        ("z", 0, 0): ("op",),
    }
    assert pairs(problem_of(graph, verdicts).follows) == [("op", "z")]


def test_an_element_of_a_tuple_is_as_its_maker_is() -> None:
    graph = facts(
        fact("split", is_value=False),
        fact("part", "split"),
        fact("op", "part"),
        returned=["part"],
        element_of={"part": "split"},
    )
    verdicts = {"split": verdict("infer", ()), "op": verdict("allow", ("follow",))}
    problem = problem_of(graph, verdicts)
    assert [g.value for g in problem.groups] == ["split", "split"]
    assert pairs(problem.follows) == [("op", "split")]


def test_a_result_is_read_in_fp32_after_the_graph() -> None:
    graph = facts(
        fact("a"), fact("b"), fact("ids", is_value=False), returned=["b", "a", "ids"]
    )
    found = groups(graph, {n: verdict("allow", ()) for n in "ab"})
    assert [*found.values()] == [
        Group((n, -1, -1), n, (FP32,), 3, 5, found[n, -1, -1].why) for n in "ab"
    ]


def test_what_is_moved_low_is_never_widened() -> None:
    graph, verdicts = written("allow conv; clear view conv; deny exp view")
    assert [g.to_sink for g in groups(graph, verdicts).values()] == [5, 5]
    verdicts["view"] = verdict("clear", moves=True)
    assert [g.to_sink for g in groups(graph, verdicts).values()] == [5, None]


@pytest.mark.parametrize("mode", ["any", "follow", "high"])
def test_what_shows_the_bits_of_a_move_reads_them_in_fp32(mode: Mode) -> None:
    graph, verdicts = written("infer x; clear view x; infer reader view")
    verdicts["view"] = verdict("clear", moves=True)
    verdicts["reader"] = verdict("infer", [mode])
    group = groups(graph, verdicts)["view", 0, 0]
    assert (group.readers, group.to_sink) == ((FP32,), None)


@pytest.mark.parametrize(("trained", "price"), [(False, None), (True, 0)])
def test_readers_of_a_returned_value_share_its_cast(
    trained: bool, price: int | None
) -> None:
    verdicts = {"conv": verdict("allow", (), moves=True), "exp": verdict("deny")}
    conv = fact("conv", requires_grad=trained)
    found = groups(facts(conv, fact("exp", "conv"), returned=["conv"]), verdicts)
    inside, after = ("conv", 0, 0), ("conv", -1, -1)
    assert {n: g.to_sink for n, g in found.items()} == {inside: price, after: None}


WIDE = {
    "all in one group": ("allow p; deny a p; infer b p", {}, 4),
    "through a view": ("allow p; clear view p; deny a view", {}, 4),
    "returned": ("allow p", {"returned": ["p"]}, 4),
    "returned and read": ("allow p; deny a p", {"returned": ["p"]}, None),
    "returned and read, trained": ("allow p; deny a p", {"returned": ["p"]}, 4),
    "read after a write": ("allow p; deny a p; deny late p", {}, None),
    "read as it comes": ("allow p; deny a p; infer as_it_comes p", {}, None),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_product_has_a_price_in_fp32_where_one_group_holds_its_readers(
    name: str,
) -> None:
    text, changed, made = WIDE[name]
    written = graph_of(text, **changed)
    nodes, verdicts = dict(written.facts.nodes), dict(written.verdicts)
    nodes["p"] = replace(nodes["p"], requires_grad="trained" in name)
    if "late" in nodes:
        nodes["late"] = fact("late", Operand("p", "self", False, 1))
    if "as_it_comes" in nodes:
        verdicts["as_it_comes"] = verdict("infer", ["any"])
    graph = replace(written.facts, nodes=nodes)
    costs = prices(graph, dict.fromkeys(verdicts, (9, 2)), wide={"p": 4})
    problem = build_problem(Classified(graph, verdicts), costs)
    assert {g.made for g in problem.groups if g.value == "p"} == {made}
    assert {g.made for g in problem.groups if g.value != "p"} <= {None}


@pytest.mark.parametrize(("wide", "made"), [(1, 2), (2, 2), (4, 4), (5, 5), (6, 5)])
def test_a_measured_price_in_fp32_is_kept_where_the_cut_is_exact(
    wide: int, made: int
) -> None:
    graph, verdicts = written("allow p; deny a p")
    costs = prices(graph, dict.fromkeys(verdicts, (9, 2)), wide={"p": wide})
    (group,) = build_problem(Classified(graph, verdicts), costs).groups
    assert (group.to_source, group.made, group.to_sink) == (3, made, 5)


def test_a_product_is_low_that_a_cast_would_have_kept_in_fp32() -> None:
    written = graph_of("allow p; deny a p")
    costs = {"p": (6, 2), "a": (1, 1)}
    for wide, low, cost in (({}, set(), 7), ({"p": 3}, {"p"}, 6)):
        found = assign(written, prices(written.facts, costs, wide=wide), "optimal")
        assert (found.low, found.cost) == (low, cost)


def test_views_of_a_storage_that_is_written_are_tied() -> None:
    graph = facts(
        fact("x", storage=1),
        fact("other", storage=2),
        fact("view", "x", storage=1),
        fact("mask", "x", storage=1, is_value=False),
        fact("write", "view", storage=1),
        fact("unread", "other", storage=2),
        constants=["x", "other"],
        mutated=[1],
    )
    verdicts = {n: verdict("infer") for n in graph.nodes if graph.nodes[n].operands}
    ties = pairs(problem_of(graph, verdicts).ties)
    assert ties == [("x", "view"), ("view", "write")]


def test_elements_of_one_tuple_are_not_tied_to_their_maker() -> None:
    graph = facts(
        fact("split", storage=-1, is_value=False),
        fact("left", storage=1),
        fact("right", storage=1),
        mutated=[1],
        element_of={"left": "split", "right": "split"},
    )
    assert problem_of(graph, {"split": verdict("clear", ())}).ties == []


@pytest.mark.parametrize("outside", [True, False])
def test_a_returned_view_of_another_tensor_keeps_its_dtype(outside: bool) -> None:
    """The caller sees one storage through two tensors; a cast would part them."""
    graph = facts(
        fact("a", storage=1),
        fact("b", storage=1),
        fact("c", storage=2),
        returned=["a", "c"] if outside else ["a", "b", "c"],
        outside=[1] if outside else [],
    )
    problem = problem_of(graph, {n: verdict("infer", ()) for n in "abc"})
    assert ends(problem) == ({"a"} if outside else {"a", "b"})


def test_a_pin_of_what_has_no_label_is_left_out() -> None:
    """An input that is handed back: no op of ours, its dtype is the caller's."""
    graph = facts(fact("x", storage=1), returned=["x"], outside=[1])
    assert ends(problem_of(graph, {})) == set()


# -- the assignment --------------------------------------------------------------------


def assigned(
    graph: Facts,
    verdicts: Verdicts,
    ops: dict[str, tuple[int, int]],
    placement: str = "optimal",
    reward: int = 0,
) -> Assignment:
    return assign(Classified(graph, verdicts), prices(graph, ops, reward), placement)


CONV_ADD = "allow conv; infer add conv; deny exp add"


def test_what_an_assignment_costs() -> None:
    graph, verdicts = written(CONV_ADD)
    ops = {"conv": (20, 5), "add": (4, 2), "exp": (6, 6)}
    found = assigned(graph, verdicts, ops)
    assert found.low == {"conv", "add"}
    assert found.cost == found.optimal_cost == 5 + 2 + 5 + 6
    assert found.all_high_cost == 20 + 4 + 6
    classified, problem = Classified(graph, verdicts), found.problem
    assert {
        name: energy(problem, project(problem, policy(classified)))
        for name, policy in POLICIES.items()
    } == {"tensorflow": 18, "promote": 18, "forced": 20}
    forced = assigned(graph, verdicts, ops, "forced")
    assert forced.low == {"conv"}
    assert (forced.cost, forced.optimal_cost) == (5 + 5 + 4 + 6, 18)
    assert not forced.decisions["add"].low


@pytest.mark.parametrize(
    ("ops", "reward", "said"),
    [
        ([(20, 5), (4, 2)], 0, ["gain more", "neighbours are low"]),
        ([(20, 5), (2, 9)], 0, ["gain more", "cost more casts"]),
        ([(2, 1), (2, 9)], 0, ["gain nothing", "cost more casts"]),
        ([(99, 5), (4, 2)], 90, ["without do-no-harm", "neighbours are low"]),
    ],
)
def test_choices_are_told_in_words(
    ops: list[tuple[int, int]], reward: int, said: list[str]
) -> None:
    costs = dict(zip(("conv", "add", "exp"), [*ops, (1, 1)], strict=True))
    found = assigned(*written(CONV_ADD), costs, reward=reward).decisions
    for name, words in zip(("conv", "add"), said, strict=True):
        says(found[name].choice, words)
    assert found["exp"].choice == ""


@pytest.mark.parametrize(
    "changed",
    [
        {"requires_grad": False},
        {"storage": 7},
        {"constants": ["conv"]},
        {"returned": []},
        {"read": False},
    ],
)
def test_only_what_has_a_gradient_is_returned_and_used(changed: dict[str, Any]) -> None:
    def inside(
        read: bool = True,
        returned: Any = ("conv",),
        constants: Any = (),
        **own: Any,
    ) -> frozenset[str]:
        conv = fact("conv", **{"requires_grad": True, "storage": 1, **own})
        reads = ["conv"] * read
        graph = facts(
            *(conv, fact("exp", *reads)),
            returned=returned,
            constants=constants,
            mutated=[7],
        )
        verdicts = {"exp": verdict("deny", ["same"] * len(reads))}
        if not constants:
            verdicts = {"conv": verdict("allow", ()), **verdicts}
        return assigned(
            graph, verdicts, dict.fromkeys(verdicts, (4, 2))
        ).returned_inside

    assert inside() == {"conv"}
    assert inside(**changed) == set()


def test_a_placement_that_breaks_its_own_rules_is_refused(monkeypatch) -> None:
    graph, verdicts = written("; ".join(f"deny n{i}" for i in range(10)))
    broken = frozenset(verdicts), 0
    monkeypatch.setattr(
        "autoamp.passes.decide.assign.least_cost", lambda problem: broken
    )
    with pytest.raises(PlacementError) as raised:
        assigned(graph, verdicts, dict.fromkeys(verdicts, (1, 1)))
    says(raised, "bug in autoamp", "n0, n1, n2, n3, n4, n5, n6, n7 ...")
