"""The moves random graphs are made of: ways to go on from the values so far.

A move is a line `name kinds: code`; what is indented below goes on with it.  The kinds
are those of its operands, as in `graphs.Move`, "-" where it has none.  The code is
Python that adds nodes:

* an ATen op is called by its name: `add.Tensor(x, y)` is a node of `aten.add.Tensor`;
* `x`, `y`, `z`, `u` are the operands, `k` is the variant;
* `w` is the square weight of the variant, `p` holds every parameter and buffer;
* `cut(...)` keeps whole numbers within `MOST`, `parts(...)` are the tensors of a list,
  `packed(...)` is contiguous;
* `writable(x)` may be written to, `apart(y, x)` shares no memory with `x`.
"""

from __future__ import annotations

import re
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import fx

from tests.conformance import graphs
from tests.conformance.graphs import ATEN, Builder, Move

BF16, F32, F64, I32 = torch.bfloat16, torch.float32, torch.float64, torch.int32
CPU = torch.device("cpu")
LOWEST = torch.finfo(F32).min
NUMBERS = (1e-6, 1e3, 1e4, 6e4, 100.0, -1e3)

KNOWN = {name: value for name, value in vars(graphs).items() if name.isupper()}
KNOWN |= {name: value for name, value in globals().items() if name.isupper()}
KNOWN["torch"] = torch

EXACT_AND_SMOOTH = """
linear t: cut(linear(x, w, p.bias if k % 2 else None))
linear_pooled p: cut(linear(x, w, p.bias if k % 2 else None))
residual t=: cut(add.Tensor(x, linear(relu(y), w, None)))
residual_pooled p=: cut(add.Tensor(x, linear(relu(y), w, None)))
turned_weight t: turned = t(w); matmul(matmul(x, turned), turned)
cut_weight t: left, right = parts(chunk(t(w) if k % 2 else w, 2))
    one, two, three = linear(x, left, None), linear(x, right, None), linear(x, left)
    cat([two, three], -1)
mm p: mm(x, w)
mv v: mv(w, x)
addmm p: cut(addmm(p.bias, x, w))
einsum t: einsum("bld,de->ble", [x, w])
conv m: cut(conv2d(x, p.kernel, p.shift if k % 2 else None, [1, 1], [1, 1]))
conv1d t: transpose.int(conv1d(transpose.int(x, 1, 2), p.taps), 1, 2)

relu *: relu(x)
neg *: neg(x)
abs *: abs(x)
maximum *=: maximum(x, y)
minimum *=: minimum(x, y)
hardtanh *: hardtanh(x, -3.0, 3.0)
add *=: cut(add.Tensor(x, y))
sub *=: cut(sub.Tensor(x, y))
mul *=: cut(mul.Tensor(x, y))
add_one *: cut(add.Scalar(x, 1))
twice *: cut(mul.Scalar(x, 2))
add_scalar *0: cut(add.Tensor(x, y))
mul_scalar *0: cut(mul.Tensor(x, y))
add_vector tv: cut(add.Tensor(x, y))
addcmul *==: cut(addcmul(x, y, z))

sum t: cut(sum.dim_IntList(x, [1]))
cumsum p: cut(cumsum(x, -1))
amax t: amax(x, [1])
max_pool m: max_pool2d(x, [3, 3], [1, 1], [1, 1])

clone *: clone(x)
alias *: alias(x)
contiguous *: contiguous(x)
split_heads t: by_head = reshape(x, [BATCH, LENGTH, HEADS, WIDTH // HEADS])
    transpose.int(by_head, 1, 2)
merge_heads h: reshape(transpose.int(x, 1, 2), [BATCH, LENGTH, WIDTH])
halves t: left, right = parts(chunk(x, 2, -1)); cat([right, left], -1)
unbind t: stack(parts(unbind.int(x, 1))[::-1], 1)
flip t: flip(x, [0, 1])
roll t: roll(x, [2], [1])
select t: select.int(x, 1, k % LENGTH)
element v: select.int(x, 0, k % WIDTH)
row p: select.int(x, 0, k % BATCH)
spread p: expand(unsqueeze(x, 1), [BATCH, LENGTH, WIDTH])
turn_image m: permute(x, [0, 1, 3, 2])
pad m: constant_pad_nd(slice.Tensor(x, 3, 1, SIDE), [1, 0])
upsample m: quarter = slice.Tensor(slice.Tensor(x, 2, 0, 3), 3, 0, 3)
    upsample_nearest2d.vec(quarter, [SIDE, SIDE], None)
tril s: tril(x)

where qt=: where.self(x, y, z)
masked_fill tq: masked_fill.Scalar(x, y, 1.0)
embedding i: embedding(p.table, remainder.Scalar(x, WORDS))
next_word i: remainder.Scalar(add.Scalar(x, 1), WORDS)
gather ti: places = remainder.Scalar(unsqueeze(y, -1), LENGTH)
    gather(x, 1, expand(places, [BATCH, LENGTH, WIDTH]))
user_float *: to.dtype(x, F32)
mask_to_float q: to.dtype(x, F32)
remember p: copy_(p.last, apart(x, p.last)); add_.Scalar(p.seen, 1)
    cut(add.Tensor(x, p.last))
"""

EXACT = """
sign *: sign(x)
floor *: floor(x)
zeros_like *: zeros_like(x)
ones_like *: ones_like(x)
square *: cut(pow.Tensor_Scalar(x, 2))
sum_all p: cut(sum(x))
max t: parts(max.dim(x, 1))
topk t: parts(topk(x, 3))
sort p: parts(sort(x))
argmax t: remainder.Scalar(argmax(x, -1), WORDS)
detach *: detach(x)
greater t=: gt.Tensor(x, y)
not q: logical_not(x)
index_add t=i: rows = remainder.Scalar(select.int(z, 0, 0), LENGTH)
    cut(index_add(x, 1, rows, y))
index_put t=: row = full([1], k % LENGTH, dtype=torch.int64); copy = clone(x)
    index_put_(copy, [None, row], slice.Tensor(y, 1, 0, 1))

user_low *: to.dtype(to.dtype(x, BF16), F32)
user_int t: to.dtype(to.dtype(x, I32), F32)
user_double *: cut(to.dtype(add.Scalar(to.dtype(x, F64), 1), F32))
user_mixed *: cut(add.Tensor(x, to.dtype(x, BF16)))

relu_ *: relu_(writable(x))
neg_ *: neg_(writable(x))
add_ *=: x = writable(x); clamp_(add_.Tensor(x, apart(y, x)), -MOST, MOST)
copy_ *=: x = writable(x); copy_(x, apart(y, x))
masked_fill_ tq: masked_fill_.Scalar(writable(x), y, -1.0)
write_part t=: x = writable(x); part = slice.Tensor(x, -1, 0, 4)
    copy_(part, slice.Tensor(apart(y, x), -1, 4, 8))
write_row t: neg_(select.int(writable(x), 1, k % LENGTH))
write_flat *: zero_(slice.Tensor(view(packed(x), [-1]), 0, k, 60))
write_piece t: pieces = parts(split.Tensor(writable(x), 2, -1)); neg_(pieces[k % 4])
read_write_read t: x = writable(x); before = linear(x, w, None); neg_(x)
    cut(add.Tensor(before, linear(x, w, None)))

switch_grad -: b.switch_grad()
switch_autocast -: b.switch_autocast()
"""

SMOOTH = """
tanh *: tanh(x)
sigmoid *: sigmoid(x)
gelu *: gelu(x)
silu *: silu(x)
erf *: erf(x)
softplus *: softplus(x)
leaky_relu *: leaky_relu(x)
halve *: div.Scalar(x, 2)
softmax s: softmax.int(x, -1)
log_softmax t: log_softmax.int(x, -1)
causal s: mask = logical_not(tril(ones_like(x, dtype=torch.bool)))
    softmax.int(masked_fill.Scalar(x, mask, LOWEST), -1)
mean t: mean.dim(x, [1])
mean_all *: mean(x)
var t: var.correction(x, [1])
logsumexp t: logsumexp(x, [1])
layer_norm t: layer_norm(x, [WIDTH], p.gain, p.bias)
native_layer_norm t: parts(native_layer_norm(x, [WIDTH], p.gain, p.bias, 1e-5))
group_norm m: group_norm(x, 2)
batch_norm m:
    # For a permuted input torch's kernel and its stand-in give other strides, and a
    # view of the result traces that does not run (torch.compile refuses it as well).
    how = [p.mean, p.variance, k % 2 == 1, 0.1, 1e-5, False]
    batch_norm(packed(x), p.shift, p.shift, *how)
rms_norm t: rms_norm(x, [WIDTH], p.gain)
rms t: square = mean.dim(pow.Tensor_Scalar(x, 2), [-1], True)
    mul.Tensor(mul.Tensor(x, rsqrt(add.Scalar(square, 1e-6))), p.gain)
weight_norm t: length = norm.ScalarOpt_dim(w, 2, [1], True)
    linear(x, div.Tensor(w, length), None)
avg_pool m: avg_pool2d(x, [3, 3], [1, 1], [1, 1])
scores h=: matmul(x, transpose.int(y, -2, -1))
weigh sh: matmul(x, y)
attention h==: scaled_dot_product_attention(x, y, z)
masked_attention h==s: scaled_dot_product_attention(x, y, z, u)
distance t=: square = pow.Tensor_Scalar(sub.Tensor(x, y), 2)
    sqrt(add.Scalar(sum.dim_IntList(square, [1]), 1e-3))
mse *=: mse_loss(x, y)
smooth_l1 *=: smooth_l1_loss(x, y)
cross_entropy t: classes = full([BATCH], k % WIDTH, dtype=torch.int64)
    cross_entropy_loss(select.int(x, 1, 0), classes)
with_logits *=: binary_cross_entropy_with_logits(x, sigmoid(y))
"""

OTHERS = """
exp *: exp(x)
log *: log1p(abs(x))
sin *: sin(x)
divide *=: div.Tensor(x, y)
lerp *=: lerp.Scalar(x, y, 0.3)
cube *: pow.Tensor_Scalar(x, 3)
rand_like *: rand_like(x)
dropout *: dropout(x, 0.3, True)
mul_ *: mul_.Scalar(writable(x), 0.3)
positions t: sin(mul.Tensor(x, arange(WIDTH, dtype=F32, device=CPU)))
"""

# What writes does so to a copy, which autograd does not mind.
OF_ACCURACY = """
standardise t: axes = [1 + k % 2]; centred = sub.Tensor(x, mean.dim(x, axes, True))
    div.Tensor(centred, add.Scalar(std.correction(x, axes, keepdim=True), 1e-5))
two_pass t: centre = mean.dim(x, [-1], True)
    square = mean.dim(pow.Tensor_Scalar(x, 2), [-1], True)
    spread = clamp(sub.Tensor(square, pow.Tensor_Scalar(centre, 2)), 1e-3)
    div.Tensor(sub.Tensor(x, centre), sqrt(spread))
differences t: axis = 1 + k % 2
    after, before = slice.Tensor(x, axis, 1, 64), slice.Tensor(x, axis, 0, -1)
    first = [0, 0, 1, 0] if axis == 1 else [1, 0]
    constant_pad_nd(sub.Tensor(after, before), first)
denormalise tvv: add.Tensor(mul.Tensor(linear(x, w, None), y), z)
denormalise_image m: branch = conv2d(x, p.kernel, None, [1, 1], [1, 1])
    centre, spread = view(p.mean, [-1, 1, 1]), view(p.variance, [-1, 1, 1])
    add.Tensor(mul.Tensor(branch, sqrt(spread)), centre)
normalise_by tvv: spread = add.Scalar(abs(z), 0.1)
    linear(div.Tensor(sub.Tensor(x, y), spread), w, None)
unit_rows t: length = norm.ScalarOpt_dim(x, 2, [-1], True)
    div.Tensor(x, clamp(length, 1e-6))
with_parameter t: parameter = p.gain if k % 2 else p.bias
    (mul if k // 2 % 2 else add).Tensor(parameter, linear(x, w, None))
hundredfold t: sub.Tensor(mul.Scalar(x, 100), linear(x, w, None))
masked_scores s: seen = tril(ones([LENGTH, LENGTH], dtype=F32, device=CPU))
    softmax.int(add.Tensor(x, mul.Scalar(rsub.Scalar(seen, 1.0), -1e4)), -1)
raised s: add.Tensor(x, full([LENGTH, LENGTH], NUMBERS[k % 6], dtype=F32))
add_number *: add.Scalar(x, NUMBERS[k % 6])
mul_number *: mul.Scalar(x, NUMBERS[k % 6])
joined t=: both = cat([linear(x, w, None), y], -1); slice.Tensor(both, -1, 4, 4 + WIDTH)
fork t: one, two = linear(x, p.w0, None), linear(x, p.w1, None)
    add.Tensor(mul.Tensor(one, sigmoid(two)), linear(x, p.w2, None))
averaged t=: other = [p.w1, p.w2, p.w0][k % 3]
    lerp.Scalar(linear(x, w, None), linear(y, other, None), 0.3)
gate *=: mul.Tensor(x, sigmoid(y))
clamp *: clamp(x, -2.0, 2.0)
elu *: elu(x)
mish *: mish(x)
prelu m: prelu(x, p.shift)
std t: std.correction(x, [1])
pool_all m: adaptive_avg_pool2d(x, [SIDE, SIDE])
resample m: upsample_bilinear2d.vec(x, [SIDE, SIDE], False, None)
instance_norm m: instance_norm(x, None, None, None, None, True, 0.1, 1e-5, False)
sum_of_products t=: baddbmm(x, y, bmm(transpose.int(x, 1, 2), y))
cosine t=: cosine_similarity(x, y, 1)
decay *: exp(neg(abs(x)))
add_ *=: add_.Tensor(clone(x), y)
copy_ *=: copy_(clone(x), y)
mul_ *: mul_.Scalar(clone(x), 0.3)
"""


class _Op:
    """Adds a node for each call of an ATen op, its default overload or a named one."""

    def __init__(self, builder: Builder, packet: Any) -> None:
        self._builder, self._packet = builder, packet

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Node:
        return self._builder(self._packet.default, *args, **kwargs)

    def __getattr__(self, overload: str) -> Any:
        op = getattr(self._packet, overload)
        return lambda *args, **kwargs: self._builder(op, *args, **kwargs)


class _Names(dict[str, Any]):
    """What a move's code may name; what is not listed is an op of ATen."""

    def __missing__(self, name: str) -> Any:
        return _Op(self["b"], getattr(ATEN, name))


def _made_by(code: CodeType) -> Any:
    def make(b: Builder, k: int, *operands: fx.Node) -> None:
        def packed(x: fx.Node) -> fx.Node:
            kept = x.meta["val"].is_contiguous()
            form = torch.contiguous_format
            return x if kept else b(ATEN.clone.default, x, memory_format=form)

        names = {"b": b, "k": k, "w": b.weights[f"w{k % 3}"], "packed": packed}
        names |= {"cut": b.bound, "parts": b.items, "p": SimpleNamespace(**b.weights)}
        names |= {"writable": b.writable, "apart": b.apart}
        exec(
            code, {}, _Names(KNOWN | names | dict(zip("xyzu", operands, strict=False)))
        )

    return make


def _moves(text: str, exact: bool) -> dict[str, Move]:
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        head, _, body = entry.partition(":")
        name, kinds = head.split()
        lines = "\n".join(line.strip() for line in body.splitlines())
        code = compile(lines, f"move {name}", "exec")
        found[name] = Move(kinds.strip("-"), _made_by(code), exact)
    return found


_BOTH = _moves(EXACT_AND_SMOOTH, exact=True)
_SMOOTH = _moves(SMOOTH, exact=False)

WHOLE = _BOTH | _moves(EXACT, exact=True)
"""The moves that keep whole numbers whole."""

MOVES = WHOLE | _SMOOTH | _moves(OTHERS, exact=False)

ACCURATE = _BOTH | _SMOOTH | _moves(OF_ACCURACY, exact=False)
"""The moves that autocast can run and that rounding moves a little: none cuts off."""
