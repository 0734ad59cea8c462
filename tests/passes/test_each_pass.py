"""What each pass does to tiny programs: golden/<name of the pass>.txt is its text.

Each program below is a function of tensors whose first sentence is a law; `w` and `v`
are weights.  A file holds the source of the program, and the graph before and after
the pass (`texts.py` says how to read a line).  After a change,

    REWRITE_GOLDEN=1 pytest tests/passes/test_each_pass.py

writes the files anew, and `git diff` shows what a pass does otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from tests import golden
from tests.passes.texts import PASSES, Device, Example, document, with_table


@torch.library.custom_op("autoamp_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    """Writes to its argument, and gives nothing back."""
    x.mul_(2)


GOLDEN = Path(__file__).parent / "golden"
EXAMPLES: dict[str, list[Example]] = {each.name: [] for each in PASSES}


def shows(*passes: str, **given: Any) -> Callable[[Any], Any]:
    """Makes an example of each of the passes; what is no tensor is one of its fields.

    What is neither is an option of the conversion.
    """
    tensors = {name: each for name, each in given.items() if torch.is_tensor(each)}
    known = ("scaled", "priced", "device", "on_mesh", "checkpointed")
    fields = {n: given.pop(n) for n in known if n in given}
    options = {name: each for name, each in given.items() if name not in tensors}

    def add(program: Any) -> Any:
        for name in passes:
            example = Example(program, tensors, options=options, **fields)
            EXAMPLES[name].append(example)
        return program

    return add


def weight(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(sizes))


DEVICE = Device("test", 2.0, 100.0, 4.0, 16.0, True)
"""2 bytes/ns, 100 ns for a launch, 4 flops/ns in fp32 and 16 in the low dtype."""
ROWS, IMAGE, HEADS = torch.zeros(2, 8), torch.zeros(4, 3, 64, 64), (1, 2, 4, 8)
ONE: dict[str, Any] = {"x": ROWS, "w": weight(8, 8)}
TWO: dict[str, Any] = {**ONE, "v": weight(8, 8)}
FP16: dict[str, Any] = {"precision": "fp16", "scaled": True}


# -- layers ---------------------------------------------------------------------------


@shows("for compilers", **ONE, **FP16, backend="inductor")
@shows("edge", **ONE, **FP16)
@shows("facts", "classify", "casts", "hoist", **ONE)
@shows("price", "place", **ONE, device=DEVICE)
def layer(x: Tensor, w: Tensor) -> Tensor:
    """A weight and what it is multiplied by are read low; results are fp32."""
    return F.linear(x, w)


@shows("classify", "casts", **TWO)
@shows("price", "place", **TWO, device=DEVICE)
@shows("together", **TWO, **FP16)
def sum_of_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """One cast of a value serves all its readers."""
    return torch.softmax(F.linear(x, w) + F.linear(x, v), -1)


@shows("casts", "hoist", **ONE)
def twice(x: Tensor, w: Tensor) -> Tensor:
    """A weight that is used twice is cast once, and each use has its own gradient."""
    return F.linear(F.linear(x, w), w)


@shows("low inputs", **ONE, checkpointed=True)
def run_again(x: Tensor, w: Tensor) -> Tensor:
    """A body that reads an input low alone is given it low, and keeps half of it."""
    return F.linear(x, w)


@shows("casts", **ONE)
@shows("casts", **ONE, priced=True)
def turned_once(x: Tensor, w: Tensor) -> Tensor:
    """A view of a weight is repeated for each use, whose gradients meet in fp32."""
    turned = w.t()
    return x @ turned + x @ turned


@shows("casts", **ONE)
def pieces_of_a_weight(x: Tensor, w: Tensor) -> Tensor:
    """Uses of a piece of a view of a weight go back to uses of the weight."""
    piece = w.t().chunk(2, 1)[0]
    return x @ piece + x @ piece


@shows("casts", x=ROWS.clone().requires_grad_(), w=weight(8, 8), v=weight(8, 8))
def read_by_two(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The gradients of two to eight low reads of a value meet in fp32, in one node."""
    return F.linear(x, w) + F.linear(x, v)


@shows("casts", x=ROWS.clone().requires_grad_(), w=torch.zeros(8, 8), deny=["exp"])
def read_by_nine(x: Tensor, w: Tensor) -> Tensor:
    """More than eight low reads of a value have a node each."""
    y = x.exp()
    return sum(y @ w for _ in range(9))


@shows("casts", **ONE)
def turned_again(x: Tensor, w: Tensor) -> Tensor:
    """A repeated view takes no name that another node of the program has."""
    for _ in range(2):
        turned = w.t()
        x = x @ turned @ turned
        first, second = w.chunk(2)
        x = torch.cat([x @ first.t(), x @ second.t()], -1)
    return x


@shows("casts", **ONE)
def turned_in_two_regions(x: Tensor, w: Tensor) -> Tensor:
    """Views of a weight are repeated behind a region without gradients too."""
    turned = w.t()
    first = x @ turned + x @ turned
    with torch.no_grad():
        constant = x @ turned
    return first + constant + x @ turned + x @ turned


# -- what is returned, written, and made in regions -----------------------------------


@shows("casts", **ONE)
def returned_and_read(x: Tensor, w: Tensor) -> Any:
    """A result that is read inside too is cast up once; its reader reads the result."""
    hidden = F.linear(x, w)
    return F.linear(hidden.relu(), w), hidden, hidden, x


@shows("casts", **ONE)
def returned_twice(x: Tensor, w: Tensor) -> Any:
    """A result that is returned twice is cast once, and stays one tensor."""
    hidden = F.linear(x, w)
    return hidden, hidden


@shows("facts", "casts", **ONE, deny=["exp"])
def written_between(x: Tensor, w: Tensor) -> Tensor:
    """After a write to a value its cast is made anew."""
    hidden = x.exp()
    first = F.linear(hidden, w)
    hidden.view(-1)[0:3].zero_()
    return first + F.linear(hidden, w)


@shows("casts", **ONE)
def written_weight(x: Tensor, w: Tensor) -> Tensor:
    """A weight that the graph writes to has no copy from outside: casts of its own."""
    first = F.linear(x, w)
    with torch.no_grad():
        w.neg_()
    return first + F.linear(x, w)


@shows("casts", **ONE, allow=["reshape", "neg_", "slice"])
def written_copy(x: Tensor, w: Tensor) -> Any:
    """A copy that `reshape` makes for its gaps is a copy of the cast too."""
    left = x[:, :4]
    flat = left.reshape(-1).neg_()
    return F.linear(left, w[:, :4]), F.linear(flat.view(2, 4), w[:, :4])


@shows("casts", **ONE, allow=["clone", "relu", "neg_", "slice"])
def copied_anyway(x: Tensor, w: Tensor) -> Tensor:
    """An op that gives a tensor of its own is not copied again."""
    left = x[:, :4]
    low = F.linear(left, w[:, :4])
    return low + F.linear(left.clone().neg_() + left.relu().neg_(), w[:, :4])


@shows("facts", "casts", **ONE)
def written_beside(x: Tensor, w: Tensor) -> Tensor:
    """What an op writes to beside its result stays fp32: no cast loses the write."""
    made = F.linear(x, w)
    torch.ops.autoamp_tests.double_(made)
    return F.linear(made, w)


@shows("facts", "casts", "clean up", **ONE)
def frozen_twice(x: Tensor, w: Tensor) -> Tensor:
    """A cast is not shared between regions; switches of the mode that do nothing go."""
    for _ in range(2):
        with torch.no_grad():
            x = F.linear(x, w)
    return x


@shows("facts", "classify", "casts", **ONE)
def own_region(x: Tensor, w: Tensor) -> Any:
    """A region of the model's own autocast is left to it."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = F.linear(x, w)
    return hidden, F.linear(x, w)


@shows("facts", "casts", **ONE)
def gaps_returned(x: Tensor, w: Tensor) -> Tensor:
    """A result that is returned with gaps keeps the strides of fp32."""
    return F.linear(x, w).t()[1:4]


# -- the ops that the rules speak of --------------------------------------------------


@shows("casts", **ONE, allow=["add"])
@shows("classify", "casts", **ONE)
@shows("price", "place", **ONE, device=DEVICE)
def residual(x: Tensor, w: Tensor) -> Tensor:
    """The sums of a residual stream stay fp32, and the branches are low."""
    for _ in range(2):
        x = x + F.linear(x, w).relu()
    return F.linear(x, w)


@shows("classify", "casts", ids=torch.zeros(4, dtype=torch.long), **ONE)
def table(ids: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A table that is trained is read in fp32, where gradients of rows add up."""
    return F.linear(F.embedding(ids, w), w) * x[0]


@shows(
    "classify",
    "casts",
    ids=torch.zeros(4, dtype=torch.long),
    x=ROWS,
    w=torch.zeros(8, 8),
)
def frozen_table(ids: Tensor, x: Tensor, w: Tensor) -> Any:
    """A table that is frozen may be low, unless a residual stream begins with it."""
    stream = F.embedding(ids, w)
    joined = torch.cat([w[:1], F.linear(x, w)])
    begun = F.linear(stream + F.linear(stream, w), w)
    also = F.linear(joined + F.linear(joined, w), w)
    return begun, also, F.linear(F.embedding(ids, w), w)


@shows("classify", "casts", **ONE)
def own_cast(x: Tensor, w: Tensor) -> Any:
    """A cast of the model's own reads what comes, and is a boundary."""
    return F.linear(x, w).half() + 1, F.linear(x.bfloat16().float(), w)


@shows("classify", "casts", **ONE)
def chosen(x: Tensor, w: Tensor) -> Any:
    """Nothing is rounded before it is compared, sorted or cut."""
    best, where = x.topk(2)
    ordered = x.sort(descending=True)[1], x.argmax(-1), x.max(-1, keepdim=True)[1]
    cut = x.floor(), torch.div(x, 0.001, rounding_mode="floor"), x > 1
    return best @ best.t(), where, *ordered, *cut, F.linear(cut[0], w)


@shows("classify", "casts", **ONE)
def split_by_data(x: Tensor, w: Tensor) -> Any:
    """Pieces whose number is data run low: their sizes are those seen in the trace."""
    first, second = torch.tensor_split(F.linear(x, w), torch.tensor(2))
    return F.linear(first, w), second


@shows("casts", **ONE, precision="fp16", allow=["sort", "zeros_like"])
def literals(x: Tensor, w: Tensor) -> Tensor:
    """A filling beyond fp16 is its largest; what is made of nothing is made low."""
    hidden = F.linear(x, w).masked_fill(x > 1, 1e6).masked_fill(x > 2, -math.inf)
    hidden = hidden + torch.zeros_like(hidden) + torch.ones(8, dtype=torch.long)
    return F.linear(F.gelu(hidden.sort(-1)[0], approximate="tanh"), w)


@shows("casts", x=torch.zeros(HEADS), mask=torch.zeros(4, 4), precision="fp16")
def masked(x: Tensor, mask: Tensor) -> Tensor:
    """A mask may hold the lowest number: its cast saturates."""
    return F.scaled_dot_product_attention(x, x, x, mask)


@shows("casts", **ONE)
def statistics(x: Tensor, w: Tensor) -> Any:
    """A norm whose statistics are read stays fp32, and another is low."""
    found = torch.native_layer_norm(F.linear(x, w), [8], None, None, 1e-5)
    other = torch.native_layer_norm(F.linear(x, w), [8], None, None, 1e-5)
    return F.linear(found[0], w) + found[1], F.linear(other[0], w)


# -- the edge -------------------------------------------------------------------------


@shows("edge", x=ROWS, w=weight(8), **FP16)
def product(x: Tensor, w: Tensor) -> Tensor:
    """A weight that is read in fp32 has its gradient unscaled where that leaves."""
    return torch.sum(x * w)


@shows("edge", **ONE, **FP16)
def used_and_returned(x: Tensor, w: Tensor) -> Any:
    """The gradient of a result that is read inside is scaled once."""
    hidden = F.linear(x, w)
    return hidden, F.linear(hidden, w), w * 2


# -- chains that are one kernel -------------------------------------------------------


@shows("kernels", x=ROWS)
def gelu(x: Tensor) -> Tensor:
    """A chain that is one of torch's functions is one call."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@shows("kernels", x=ROWS, w=weight(8))
def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """A norm that is written out is one call, with its weight."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


@shows("kernels", q=weight(*HEADS))
def causal_mask(q: Tensor) -> Tensor:
    """Attention is told that it is causal, and its mask is not made."""
    mask = torch.arange(4)[None] <= torch.arange(4)[:, None]
    return F.scaled_dot_product_attention(q, q, q, mask)


@shows("softmax", **ONE)
def softmax(x: Tensor, w: Tensor) -> Tensor:
    """A softmax that stands for a chain has gradients as true as the chain's."""
    shares = torch.exp(F.linear(x, w))
    return F.linear(shares / shares.sum(-1, keepdim=True), w)


@shows("attention", q=weight(*HEADS), k=torch.zeros(HEADS), v=torch.zeros(HEADS))
@shows(
    "attention",
    q=weight(*HEADS),
    k=torch.zeros(HEADS),
    v=torch.zeros(HEADS),
    backend="inductor",
)
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The backward of low attention computes in fp32."""
    return F.scaled_dot_product_attention(q, k, v)


@shows("norms", **ONE, scale=weight(8), bias=weight(8))
def normed(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A low norm is one of ours, with its parameters in fp32."""
    return F.layer_norm(F.linear(x, w), (8,), scale, bias)


@shows("index adds", **ONE, at=torch.tensor([0, 1, 0]))
def messages(x: Tensor, w: Tensor, at: Tensor) -> Tensor:
    """The messages that are added up are not kept for the backward."""
    sent = F.linear(x, w)[at]
    return torch.zeros(2, 8).index_add(0, at, sent.float())


@shows("made again", **TWO, objective="memory")
def cheap(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What a product would keep is made again of what a GELU keeps."""
    return F.linear(F.gelu(F.linear(x, w)), v)


@shows("rotary", **ONE, cos=torch.zeros(2, 8), sin=torch.zeros(2, 8))
def rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Both products, the turn, the sum and the cast after it are one call."""
    queries = F.linear(x, w)
    first, second = queries[..., :4], queries[..., 4:]
    turned = torch.cat((-second, first), -1)
    return F.linear(queries * cos + turned * sin, w)


@shows("unbind", **ONE)
def halves(x: Tensor, w: Tensor) -> Tensor:
    """Selects that show all of a tensor are one `unbind`, with one gradient."""
    parts = F.linear(x, w).view(2, 2, 4)
    return parts.select(1, 0) * parts.select(1, 1)


# -- products -------------------------------------------------------------------------


@shows("sums", x=ROWS, w=torch.zeros(8, 8))
@shows("sums", **ONE, **FP16)
def head(x: Tensor, w: Tensor) -> Tensor:
    """A product that only a cast to fp32 reads gives fp32 itself."""
    return F.linear(x, w)


@shows("sums", **ONE)
def scores(x: Tensor, w: Tensor) -> Any:
    """Where sums are read low as well, or a bias is added, a product stays low."""
    hidden = F.linear(x, w)
    return F.linear(hidden, w, w[0]), hidden, hidden @ hidden.t()


@shows("weight gradients", **ONE, v=weight(8))
@shows("weight gradients", **ONE, v=weight(8), **FP16)
def layer_with_bias(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The gradients of weights and biases are the sums of products, in fp32."""
    return F.linear(x, w, v).relu() @ w.t()


# -- layouts --------------------------------------------------------------------------


@shows("layouts", x=IMAGE, w=weight(8, 3, 3, 3), v=weight(8, 8, 3, 3))
def convolutions(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """What lies between two convolutions has its channels last; results do not."""
    x = F.conv2d(x, w, padding=1).relu()
    return F.adaptive_avg_pool2d(F.conv2d(x, v, padding=1), 1)


@shows("layouts", x=IMAGE, w=weight(8, 3, 4, 4), v=weight(8))
def rows_of_an_image(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A norm reads the channels as rows, where they lie already."""
    places = F.conv2d(x, w, stride=4).flatten(2).transpose(1, 2)
    return F.layer_norm(places, (8,), v)


@shows("layouts", x=IMAGE.to(memory_format=torch.channels_last), w=weight(8, 3, 3, 3))
def layout_of_the_users(x: Tensor, w: Tensor) -> Tensor:
    """The weight is laid out as the image that it meets, and nothing else."""
    return F.conv2d(x, w)


@shows("layouts", x=IMAGE, w=weight(8, 3, 3, 3), backend="inductor")
def convolution(x: Tensor, w: Tensor) -> Tensor:
    """For inductor the copy of the weight alone is laid out."""
    return F.conv2d(x, w, padding=1)


@shows("depthwise", x=IMAGE, w=weight(3, 1, 7, 7), v=weight(3, 1, 3, 3))
def depthwise(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The gradients of filters that are wider than 3 are computed in parts."""
    return F.conv2d(F.conv2d(x, w, padding=3, groups=3), v, groups=3)


# -- meshes ---------------------------------------------------------------------------


@shows("calls once", **ONE, on_mesh={"x": Shard(0), "w": Replicate()})
def handed_twice(x: Tensor, w: Tensor) -> Tensor:
    """What two readers want of the mesh is asked of it once."""
    one = x.redistribute(placements=(Replicate(),))
    return F.linear(one, w) * x.redistribute(placements=(Replicate(),))


@shows("gathers", **ONE, on_mesh={"x": Shard(0), "w": Replicate()})
def gathered(x: Tensor, w: Tensor) -> Tensor:
    """A part is cast before it is gathered, so that half the bytes travel."""
    return F.linear(x.redistribute(placements=(Replicate(),)), w)


@shows("meshes", **ONE, on_mesh={"x": Replicate(), "w": Shard(0)})
def handed_on(x: Tensor, w: Tensor) -> Tensor:
    """The calls on the mesh are the model's own."""
    return F.linear(x, w).to_local()


# -- the code that is run -------------------------------------------------------------


@shows("bindings", **ONE)
def mean_of_layer(x: Tensor, w: Tensor) -> Tensor:
    """Torch's functions are called where they call the same op."""
    return F.linear(x, w).relu().mean()


@shows("for compilers", **ONE, backend="inductor")
def logits(x: Tensor, w: Tensor) -> Any:
    """A result that is read inside is given by a cast that inductor cannot fold."""
    result = F.linear(x, w)
    return result, torch.logsumexp(result, -1)


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_graph_before_and_after(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes of the list are shown, as on a CPU for which bf16 has units."""
    monkeypatch.setattr("autoamp.compat.inductor_permutes", lambda: True)
    monkeypatch.setattr(Device, "starts_kernels", name == "together")
    keeps = name in {"sums", "weight gradients"}
    monkeypatch.setattr(Device, "keeps_sums", keeps)
    monkeypatch.setattr("autoamp.passes.decide.sums.PYTHON_NS", 0.0)
    (shown,) = (each for each in PASSES if each.name == name)
    if torch.__version__.startswith("2.11.") and name in ("calls once", "gathers"):
        pytest.skip("torch 2.11 puts no placement of a mesh into a graph")
    path = GOLDEN / f"{name.replace(' ', '_')}.txt"
    assert EXAMPLES[name], "no example shows the pass"
    golden.check(document(shown, EXAMPLES[name]), path)


def test_no_text_is_of_a_pass_that_is_gone() -> None:
    names = {name.replace(" ", "_") for name in EXAMPLES}
    assert {path.stem for path in GOLDEN.iterdir()} == names


def test_the_documentation_lists_the_passes() -> None:
    page = Path(__file__).parents[2] / "CONTRIBUTING.md"
    golden.check(with_table(page.read_text("utf-8")), page)
