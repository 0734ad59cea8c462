"""What a graph's facts and verdicts become: the problem, the choices, the words."""

from __future__ import annotations

from typing import Any

import pytest

from autoamp.analyse.facts import FP32, Facts, Operand
from autoamp.analyse.verdict import Classified, Mode, Verdict
from autoamp.errors import PlacementError
from autoamp.place import assign as assign_module
from autoamp.place.assign import Assignment, assign
from autoamp.place.mincut import Group, Problem, energy
from autoamp.place.policies import POLICIES, project
from autoamp.place.problem import build_problem
from tests.place.small_facts import fact, facts, graph_of, prices, verdict


def written(text: str) -> tuple[Facts, dict[str, Verdict]]:
    """The facts and the verdicts of `graph_of(text)`, for tests that change one."""
    graph = graph_of(text)
    return graph.facts, dict(graph.verdicts)


def problem_of(graph: Facts, verdicts: dict[str, Verdict]) -> Problem:
    costs = dict.fromkeys(verdicts, (4, 2))
    classified = Classified(graph, verdicts)
    return build_problem(classified, prices(graph, costs))


def groups(problem: Problem) -> dict[tuple[str, int, int], Group]:
    return {group.key: group for group in problem.groups}


# -- the problem -----------------------------------------------------------------------


def test_ops_have_their_prices_and_what_comes_in_is_fp32() -> None:
    graph = facts(fact("x"), fact("conv", "x"), constants=["x"])
    problem = problem_of(graph, {"conv": verdict("allow")})
    assert problem.unary == {"conv": (4, 2), "x": (0, 0), FP32: (0, 0)}
    assert problem.at_sink == {
        "x": "comes from outside the graph in fp32",
        FP32: "is read in fp32 outside the graph",
    }
    assert problem.at_source == {}
    assert groups(problem) == {
        ("x", 0, 0): Group(("x", 0, 0), "x", ("conv",), 3, 5, "x must not be cast up")
    }


def test_a_pinned_node_keeps_its_reason() -> None:
    graph, verdicts = written("deny exp; allow conv exp")
    problem = problem_of(graph, verdicts)
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
    verdicts = {n: verdict("allow") for n in "acd"}
    verdicts["b"] = verdict("allow", ("same", "same"))
    assert {n: g.readers for n, g in groups(problem_of(graph, verdicts)).items()} == {
        ("x", 0, 0): ("a", "b"),
        ("x", 0, 1): ("c",),
        ("x", 1, 0): ("d",),
    }


def test_operands_by_their_modes() -> None:
    graph = facts(fact("x"), fact("y"), fact("z"), fact("op", "x", "y", "z"))
    verdicts = {"op": verdict("allow", ("any", "high", "follow"))}
    problem = problem_of(graph, verdicts)
    assert {n: g.readers for n, g in groups(problem).items()} == {
        ("y", 0, 0): (FP32,),
        ("z", 0, 0): ("op",),
    }
    assert problem.follows == [("op", "z", "reads the value at its own precision")]


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
    assert problem.follows == [("op", "split", "reads the value at its own precision")]


def test_a_result_is_read_in_fp32_after_the_graph() -> None:
    graph = facts(
        fact("a"), fact("b"), fact("ids", is_value=False), returned=["b", "a", "ids"]
    )
    verdicts = {n: verdict("allow", ()) for n in "ab"}
    assert list(groups(problem_of(graph, verdicts)).values()) == [
        Group(("a", -1, -1), "a", (FP32,), 3, 5, "a must not be cast up"),
        Group(("b", -1, -1), "b", (FP32,), 3, 5, "b must not be cast up"),
    ]


def test_what_is_moved_low_is_never_widened() -> None:
    graph, verdicts = written("allow conv; clear view conv; deny exp view")
    assert [g.to_sink for g in problem_of(graph, verdicts).groups] == [5, 5]
    verdicts["view"] = verdict("clear", moves=True)
    assert [g.to_sink for g in problem_of(graph, verdicts).groups] == [5, None]


@pytest.mark.parametrize("mode", ["any", "follow", "high"])
def test_what_shows_the_bits_of_a_move_reads_them_in_fp32(mode: Mode) -> None:
    graph, verdicts = written("infer x; clear view x; infer reader view")
    verdicts["view"] = verdict("clear", moves=True)
    verdicts["reader"] = verdict("infer", [mode])
    group = groups(problem_of(graph, verdicts))[("view", 0, 0)]
    assert (group.readers, group.to_sink) == ((FP32,), None)


def test_readers_of_a_returned_value_share_its_cast() -> None:
    verdicts = {"conv": verdict("allow", (), moves=True), "exp": verdict("deny")}
    inside, after = ("conv", 0, 0), ("conv", -1, -1)
    for trained, price in ((False, None), (True, 0)):
        conv = fact("conv", requires_grad=trained)
        graph = facts(conv, fact("exp", "conv"), returned=["conv"])
        found = groups(problem_of(graph, verdicts))
        assert {n: g.to_sink for n, g in found.items()} == {inside: price, after: None}


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
    why = "shares storage that is written in place"
    assert problem_of(graph, verdicts).ties == [
        ("x", "view", why),
        ("view", "write", why),
    ]


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
    verdicts = {n: verdict("infer", ()) for n in "abc"}
    pinned = dict(problem_of(graph, verdicts).at_sink)
    del pinned[FP32]
    why = "is returned, or viewed by what is, and shares memory with another tensor"
    assert pinned == ({"a": why} if outside else {"a": why, "b": why})


def test_a_pin_of_what_has_no_label_is_left_out() -> None:
    """An input that is handed back: no op of ours, its dtype is the caller's."""
    graph = facts(fact("x", storage=1), returned=["x"], outside=[1])
    assert problem_of(graph, {}).at_sink.keys() == {FP32}


# -- the assignment --------------------------------------------------------------------


def assigned(
    graph: Facts,
    verdicts: dict[str, Verdict],
    ops: dict[str, tuple[int, int]],
    placement: str = "optimal",
    reward: int = 0,
) -> Assignment:
    return assign(Classified(graph, verdicts), prices(graph, ops, reward), placement)


CONV_ADD = "allow conv; infer add conv; deny exp add"


def test_what_an_assignment_costs() -> None:
    graph, verdicts = written(CONV_ADD)
    found = assigned(graph, verdicts, {"conv": (20, 5), "add": (4, 2), "exp": (6, 6)})
    assert found.low == {"conv", "add"}
    assert found.cost == found.optimal_cost == 5 + 2 + 5 + 6
    assert found.all_high_cost == 20 + 4 + 6
    assert {
        name: energy(
            found.problem, project(found.problem, policy(Classified(graph, verdicts)))
        )
        for name, policy in POLICIES.items()
    } == {"tensorflow": 18, "promote": 18, "forced": 20}
    forced = assigned(
        graph, verdicts, {"conv": (20, 5), "add": (4, 2), "exp": (6, 6)}, "forced"
    )
    assert forced.low == {"conv"}
    assert (forced.cost, forced.optimal_cost) == (5 + 5 + 4 + 6, 18)
    assert forced.decisions["add"].low is False


@pytest.mark.parametrize(
    ("ops", "reward", "choices"),
    [
        (
            {"conv": (20, 5), "add": (4, 2)},
            0,
            [
                "predicted to gain more than its casts cost",
                "its neighbours are low",
                "",
            ],
        ),
        (
            {"conv": (20, 5), "add": (2, 9)},
            0,
            [
                "predicted to gain more than its casts cost",
                "going low would cost more casts than it saves",
                "",
            ],
        ),
        (
            {"conv": (2, 1), "add": (2, 9)},
            0,
            [
                "predicted to gain nothing here",
                "going low would cost more casts than it saves",
                "",
            ],
        ),
        (
            {"conv": (99, 5), "add": (4, 2)},
            90,
            [
                "without do-no-harm it is converted wherever it may be",
                "its neighbours are low",
                "",
            ],
        ),
    ],
)
def test_choices_are_told_in_words(
    ops: dict[str, tuple[int, int]], reward: int, choices: list[str]
) -> None:
    found = assigned(*written(CONV_ADD), {**ops, "exp": (1, 1)}, reward=reward)
    assert [d.choice for d in found.decisions.values()] == choices


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
    def inside(**changed: Any) -> frozenset[str]:
        plain = {"requires_grad": True, "storage": 1}
        own = plain | {k: v for k, v in changed.items() if k in plain}
        reads = ["conv"] if changed.get("read", True) else []
        graph = facts(
            fact("conv", **own),
            fact("exp", *reads),
            returned=changed.get("returned", ["conv"]),
            constants=changed.get("constants", []),
            mutated=[7],
        )
        verdicts = {"exp": verdict("deny", ["same"] * len(reads))}
        if "constants" not in changed:
            verdicts = {"conv": verdict("allow", ()), **verdicts}
        ops = dict.fromkeys(verdicts, (4, 2))
        return assigned(graph, verdicts, ops).returned_inside

    assert inside() == {"conv"}
    assert inside(**changed) == set()


def test_a_placement_that_breaks_its_own_rules_is_refused(monkeypatch) -> None:
    graph, verdicts = written("; ".join(f"deny n{i}" for i in range(10)))
    broken = frozenset(verdicts), 0
    monkeypatch.setattr(assign_module, "least_cost", lambda problem: broken)
    with pytest.raises(PlacementError) as caught:
        assigned(graph, verdicts, dict.fromkeys(verdicts, (1, 1)))
    assert str(caught.value) == (
        "a placement broke its own constraints; this is a bug in autoamp, please "
        "report it with the graph (low nodes: n0, n1, n2, n3, n4, n5, n6, n7 ...)"
    )
