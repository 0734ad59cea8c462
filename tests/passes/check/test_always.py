"""No pass may wait for the device, set a state, or let results share memory anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from autoamp.errors import VerificationError
from tests.passes.check.door import check_always, footprint, normalise
from tests.says import says
from tests.small_models import Of
from tests.strategies import capture

ATEN = torch.ops.aten
Edit = Callable[[fx.Graph, fx.Node, fx.Node], None]


def program(m: Of, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = x.exp()
    return hidden, hidden[1:], x.sin()


def waits(graph: fx.Graph, first: fx.Node, last: fx.Node) -> None:
    graph.call_function(ATEN._local_scalar_dense.default, (last,))


def has_a_size_of_its_numbers(graph: fx.Graph, first: fx.Node, last: fx.Node) -> None:
    graph.call_function(ATEN.nonzero.default, (last,))


def sets_grad_mode(graph: fx.Graph, first: fx.Node, last: fx.Node) -> None:
    graph.call_function(torch._C._set_grad_enabled, (False,))


def gives_one_twice(graph: fx.Graph, first: fx.Node, last: fx.Node) -> None:
    graph.output_node().args = ((first, graph.output_node().args[0][1], first),)


def gives_an_input(graph: fx.Graph, first: fx.Node, last: fx.Node) -> None:
    x = next(iter(graph.nodes))
    graph.output_node().args = ((*graph.output_node().args[0][:2], x),)


def gives_less(graph: fx.Graph, first: fx.Node, last: fx.Node) -> None:
    graph.output_node().args = (graph.output_node().args[0][:2],)


WRONG = [
    (waits, "waits"),
    (has_a_size_of_its_numbers, "waits"),
    (sets_grad_mode, "sets"),
    (gives_one_twice, "memory"),
    (gives_an_input, "memory"),
    (gives_less, "results"),
]


def changed(edit: Edit | None) -> tuple[fx.GraphModule, fx.GraphModule]:
    before = normalise(capture(Of(program), 1), [torch.randn(4, 8)]).gm
    after = fx.GraphModule(before, fx.Graph())
    after.graph.output(after.graph.graph_copy(before.graph, {}))
    if edit is not None:
        first, _, last = after.graph.output_node().args[0]
        with after.graph.inserting_before(after.graph.output_node()):
            edit(after.graph, first, last)
    return before, after


def test_what_does_nothing_new_passes() -> None:
    before, after = changed(None)
    check_always(after, footprint(before), footprint(after))


@pytest.mark.parametrize(("edit", "told"), WRONG)
def test_what_no_pass_may_do_is_found(edit: Edit, told: str) -> None:
    before, after = changed(edit)
    with pytest.raises(VerificationError) as raised:
        check_always(after, footprint(before), footprint(after))
    says(raised, told)
