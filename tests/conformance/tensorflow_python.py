"""The cases of TensorFlow's Python tests of its grappler pass, as torch programs.

How they are said is told in tensorflow_cpp.py.  Their tolerances are for graphs with
gradients; here autograd makes those, in the dtypes of what it differentiates.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.painting import Case, cases
from tests.conformance.tensorflow_cpp import IMAGE, OF_CHANNELS, OPAQUE, PIXEL

VOLUME = (1, 2, 4, 4, 4)
POINT = (2, 2, 1, 1, 1)
UNROLLED = "a loop unrolled has other nodes in each round: "


def conv_bn(conv: str, image: tuple[int, ...], kernel: tuple[int, ...]) -> Case:
    """Twice: reshape, convolve, normalise."""
    program = f"""
        SHAPE1 = reshape(x, {image})
        ALLOW1 = {conv}(SHAPE1, w)
        BN1 = batch_norm(ALLOW1, mean, var, b, c)
        ID1 = clone(BN1)
        SHAPE2 = reshape(ID1, {image})
        ALLOW2 = {conv}(SHAPE2, v)
        BN2 = batch_norm(ALLOW2, mean, var, b, c)
        ID2 = clone(BN2)
        return ID2
    """
    flat = torch.Size(image).numel()
    sizes = {"x": (flat,), "w": kernel, "v": kernel, **OF_CHANNELS}
    name = "test_conv_bn" if conv == "conv2d" else "test_conv3d_bn"
    return Case(name, program, 4, sizes=sizes)


def conv_pool(source: str, result: str, suffix: str = "") -> list[str]:
    """Twice: convolve, add the bias, activate, pool."""
    return [
        f"CONV1{suffix} = conv2d({source}, w)",
        f"BIAS1{suffix} = add(CONV1{suffix}, b)",
        f"RELU1{suffix} = relu(BIAS1{suffix})",
        f"POOL1{suffix} = max_pool2d(RELU1{suffix}, 2)",
        f"CONV2{suffix} = conv2d(POOL1{suffix}, v)",
        f"BIAS2{suffix} = add(CONV2{suffix}, c)",
        f"RELU2{suffix} = relu(BIAS2{suffix})",
        f"{result} = max_pool2d(RELU2{suffix}, 2)",
    ]


LSTM_ROUND = """
    CAT{i} = cat([{x}, {h}], 1)
    MATMUL{i} = matmul(CAT{i}, w)
    SPLIT{i} = chunk(MATMUL{i}, 4, 1)
    {I}{i} = sigmoid(SPLIT{i}[0])
    {F}{i} = sigmoid(SPLIT{i}[1])
    {O}{i} = sigmoid(SPLIT{i}[2])
    {J}{i} = tanh(SPLIT{i}[3])
    {FC}{i} = mul({F}{i}, {c})
    {IJ}{i} = mul({I}{i}, {J}{i})
    {C}{i} = add({FC}{i}, {IJ}{i})
    {TC}{i} = tanh({C}{i})
    {H}{i} = mul({O}{i}, {TC}{i})
"""


def lstm() -> str:
    """A hand-written LSTM cell, twice; the last round's gates are fp32."""
    names = ("I", "F", "O", "J", "FC", "IJ", "C", "TC", "H")
    first = LSTM_ROUND.format(i=1, x="x", h="y", c="z", **{n: n for n in names})
    fp32 = {n: n.lower() for n in ("I", "F", "O", "J", "IJ")}
    given = {"i": 2, "x": "x", "h": "H1", "c": "C1"}
    second = LSTM_ROUND.format(**given, **{n: n for n in names} | fp32)
    return f"{first.strip()}\n{second.strip()}\nreturn H2"


OPS = {
    # Of TensorFlow's loop tests: allow, infer, clear and deny.
    "w": ("{n} = matmul({x}, {weight})",),
    "g": ("{n} = add({x}, 0.1)",),
    "c": ("{n} = relu({x})",),
    "b": ("{n} = pow({x}, 2)", "{n}_root = sqrt({n})"),
}
ROUNDS = 4


def loop(number: int, spelt: str, merge: str, casts: int, **differs: str) -> Case:
    """`spelt` is TensorFlow's: before, body and after, capitals low.

    Args:
        merge: the name of the carried variable, in capitals if it is low.
        differs: name of a line to its name as it is painted here, with the reason under
            `otherwise`.
    """
    otherwise = differs.pop("otherwise", "")
    before, body, after = spelt.split("|")
    lines: list[str] = []

    def line(text: str) -> str:
        name = text.partition(" = ")[0]
        lines.append(text)
        return name

    def run(letters: str, at: str, where: str, weight: str) -> str:
        for i, letter in enumerate(letters.strip()):
            for op in OPS[letter.lower()]:
                name = f"{letter}{i}{where}"
                name = name.upper() if letter.isupper() else name.lower()
                name = differs.get(name.lower(), name)
                at = line(op.format(n=name, x=at, weight=weight))
        return at

    at = run(before, "x", "_before", "w")
    at = line(f"{differs.get('enter', 'ENTER')} = clone({at})")
    at = line(f"{merge} = clone({at})")
    for turn in range(ROUNDS):
        done = run(body, merge, f"_{turn}", "v")
        line(f"{'NEXT' if merge.isupper() else 'next'}{turn} = {merge}.copy_({done})")
    at = line(f"{differs.get('exit', 'EXIT')} = clone({merge})")
    at = run(after, at, "_after", "u")
    program = "\n".join([*lines, f"return {at}"])
    name = f"test_propagation_through_simple_loop_{number}"
    return Case(name, program, casts, otherwise=otherwise)


PYTHON = [
    conv_bn("conv2d", IMAGE, PIXEL),
    conv_bn("conv3d", VOLUME, POINT),
    Case(
        "test_conv_pool",
        "\n".join([*conv_pool("x", "POOL2"), "return POOL2"]),
        6,
        sizes={"x": IMAGE, "w": PIXEL, "v": PIXEL, "b": (2, 1, 1), "c": (2, 1, 1)},
    ),
    Case(
        "test_multi_paths",
        "\n".join(
            [
                "SPLIT = chunk(x, 3)",
                *conv_pool("SPLIT[0]", "LEFT", "L"),
                *conv_pool("SPLIT[1]", "MIDDLE", "M"),
                *conv_pool("SPLIT[2]", "RIGHT", "R"),
                "CONCAT = cat([LEFT, MIDDLE, RIGHT])",
                "return CONCAT",
            ]
        ),
        6,
        sizes={
            "x": (3, 2, 4, 4),
            "w": PIXEL,
            "v": PIXEL,
            "b": (2, 1, 1),
            "c": (2, 1, 1),
        },
    ),
    Case(
        "test_recurrent_lstm",
        lstm(),
        12,
        sizes={"w": (8, 16)},
        otherwise=UNROLLED
        + "the last round's gates, behind a split, lead to no product; "
        "TensorFlow paints the loop unrolled in the same way",
    ),
    loop(1, "W | C | C", "MERGE", 3),
    loop(2, "C | C | W", "MERGE", 3),
    loop(3, "W | G | W", "MERGE", 4),
    loop(4, "W | gbg | W", "merge", 6),
    loop(5, "b | gWC | c", "merge", 5, enter="enter", exit="exit"),
    loop(
        6,
        "b | CWCG | C",
        "MERGE",
        4,
        g3_3="g3_3",
        otherwise=UNROLLED + "the infer op of the last round leads to no product",
    ),
    loop(
        7,
        "C | GWCG | C",
        "MERGE",
        6,
        g0_0="g0_0",
        g3_3="g3_3",
        otherwise=UNROLLED + "the infer op of the first round is downstream of no "
        "product, and that of the last leads to none",
    ),
    loop(8, "C | CgbgWC | g", "MERGE", 11),
]

MORE: dict[str, dict[str, Any]] = {
    "test_conv3d": {"sizes": {"x": VOLUME, "w": POINT}},
    "test_conv_bn_dropout": {
        "sizes": {"x": IMAGE, "w": PIXEL, "v": PIXEL, **OF_CHANNELS}
    },
    "test_depthwise_conv2d": {"sizes": {"x": IMAGE, "w": (2, 1, 1, 1)}},
    "test_noninlined_funcdef": {"functions": OPAQUE},
}

PYTHON += cases(
    """
test_conv3d: 3
    ALLOW = conv3d(x, w)
    return ALLOW

test_conv_bn_dropout: 4
    ALLOW1 = conv2d(x, w)
    BN1 = batch_norm(ALLOW1, mean, var, b, c)
    DROP = dropout(BN1, 0.5)
    ADD = add(DROP, 1)
    ALLOW2 = conv2d(ADD, v)
    BN2 = batch_norm(ALLOW2, mean, var, b, c)
    return BN2

test_depthwise_conv2d: 3
    ALLOW = conv2d(x, w, groups=2)
    return ALLOW

test_simple_loop: 3
    MATMUL1 = matmul(x, w)
    RELU1 = relu(MATMUL1)
    MATMUL2 = matmul(RELU1, w)
    RELU2 = relu(MATMUL2)
    MATMUL3 = matmul(RELU2, w)
    RELU3 = relu(MATMUL3)
    return RELU3

test_loop_with_vars_intertwined: 6
    MATMUL1 = matmul(x, w)
    RELU1 = relu(MATMUL1)
    MATMUL2 = matmul(y, v)
    RELU2 = relu(MATMUL2)
    MATMUL3 = matmul(RELU2, w)
    RELU3 = relu(MATMUL3)
    MATMUL4 = matmul(RELU1, v)
    RELU4 = relu(MATMUL4)
    return RELU4, RELU3

test_multi_paths_2: 5
    MATMUL1 = matmul(x, w)
    RELU1 = relu(MATMUL1)
    MATMUL2 = matmul(x, v)
    RELU2 = relu(MATMUL2)
    sum1 = add(RELU1, RELU2)
    sum2 = add(sum1, x)
    return sum2

test_noninlined_funcdef: 3
    MATMUL = matmul(x, w)
    RELU = relu(MATMUL)
    function = swish(RELU)
    return function

test_ingraph_train_loop: 7
    MATMUL1 = matmul(x, w)
    RELU1 = relu(MATMUL1)
    loss1 = sum(RELU1)
    scaled1 = mul(loss1, 0.01)
    step1 = var.sub_(scaled1)
    MATMUL2 = matmul(x, var)
    RELU2 = relu(MATMUL2)
    loss2 = sum(RELU2)
    scaled2 = mul(loss2, 0.01)
    step2 = var.sub_(scaled2)
    MATMUL3 = matmul(x, var)
    return MATMUL3
""",
    **MORE,
)
