"""The cases of TensorFlow's C++ tests of its grappler pass, as torch programs.

Names are those of TensorFlow's tests; its Python tests are in tensorflow_python.py.
What a graph of TensorFlow says with nodes that torch has not is said thus:

* an op on another device, or one whose result is fetched: an op the user keeps in fp32
  (`kept`), since neither may be processed;
* an op in no list (SparseMatMul): `sin`;
* Identity, Enter, Exit: `clone`; ShapeN, which reads floats and makes none: `eq`;
* a list of tensors: a storage written in place, which has one precision too, where it
  is handed on; or `stack` and `unbind`, where elements come and go;
* a function that is not looked into: a custom op;
* a loop: its rounds one after the other, the variable carried in a storage that
  each round writes (`copy_`), so that it has one precision, as at TensorFlow's Merge.

`copy_` converts what it writes, so a cast before one is not needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.conformance.painting import Case, cases

IMAGE = (1, 2, 4, 4)
PIXEL = (2, 2, 1, 1)
OF_CHANNELS = dict.fromkeys(("b", "c", "mean", "var"), (2,))


@torch.library.custom_op("autoamp_tests::push_and_pop", mutates_args=("handle",))
def push_and_pop(handle: Tensor) -> None:
    """Writes to a tensor, where nobody sees how."""
    handle.mul_(2)


@torch.library.custom_op("autoamp_tests::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    """A function that is not looked into."""
    return x * x.sigmoid()


@swish.register_fake
def _swish(x: Tensor) -> Tensor:
    return torch.empty_like(x)


OPAQUE = {"push_and_pop": push_and_pop, "swish": swish}


def simple(name: str, infer: str = "sqrt", **options: object) -> Case:
    """The graph of the tests called Simple."""
    program = f"""
        deny1 = exp(x)
        clr1 = relu(deny1)
        infer1 = sqrt(clr1)
        CLR2 = relu(infer1)
        ALLOW1 = matmul(CLR2, CLR2)
        CLR3 = relu(ALLOW1)
        infer2 = {infer}(CLR3)
        clr4 = relu(infer2)
        unlisted = sin(clr4)
        clr5 = relu(unlisted)
        return clr5
    """
    return Case(name, program, 2, **options)


def already(name: str, precision: str, dtype: str) -> Case:
    """A model that casts to `dtype` and back itself."""
    program = f"""
        cast1 = x.to({dtype})
        _allow1 = matmul(cast1, cast1)
        _clr1 = relu(_allow1)
        cast2 = _clr1.to(float32)
        clr2 = relu(cast2)
        return clr2
    """
    return Case(name, program, 0, precision)


def list_set_get(name: str, precision: str, infer: str) -> Case:
    """A list that products are put in, and one that none is."""
    program = f"""
        LIST1 = zeros(2, 4, 4)
        ALLOW1 = matmul(x, x)
        SLOT0 = LIST1[0]
        SET0 = SLOT0.copy_(x)
        SLOT1 = LIST1[1]
        SET1 = SLOT1.copy_(ALLOW1)
        GET1 = LIST1[1]
        INFER1 = {infer}
        ALLOW2 = matmul(INFER1, INFER1)
        SLOT2 = LIST1[0]
        SET2 = SLOT2.copy_(ALLOW2)
        GET2 = LIST1[0]
        list2 = zeros(2, 4, 4)
        slot3 = list2[0]
        set3 = slot3.copy_(x)
        get3 = list2[0]
        return GET2, get3
    """
    return Case(name, program, 2, precision)


CPP = [
    already("AlreadyFp16", "fp16", "float16"),
    simple("Simple"),
    list_set_get("TensorListSetGet", "fp16", "tanh(GET1)"),
    simple(
        "Cpu.Simple",
        otherwise="TensorFlow emulates fp16 on a CPU, in fp32 with nine casts; torch's "
        "CPU has fp16 kernels, so this is Simple",
    ),
    already("Mkl.AlreadyBf16", "bf16", "bfloat16"),
    simple("Mkl.Simple", "log", precision="bf16"),
    list_set_get("Mkl.TensorListSetGet", "bf16", "mul(GET1, GET1)"),
    *(
        Case(
            f"Mkl.InferFollowUpStreamAllow in {precision}",
            """
            ALLOW = conv2d(x, w)
            INFER = add(ALLOW, b)
            CLR = relu(INFER)
            return CLR
            """,
            4,
            precision,
            sizes={"x": IMAGE, "w": PIXEL, "b": (2, 1, 1)},
        )
        for precision in ("bf16", "fp16")
    ),
]

MORE: dict[str, dict[str, Any]] = {
    "NoInferOp": {"options": {"deny": ["sqrt", "log", "tanh"]}},
    "PreserveFetches": {"kept": frozenset({"allow1", "clr2", "clr3"})},
    "PreserveFetches, fetched and nothing else": {
        "otherwise": "an output keeps its dtype by a cast at the edge, so to look at a "
        "value need not change it"
    },
    "PreserveCPUNodes": {"kept": frozenset({"allow2"})},
    "PreserveIdentityAfterVariable": {
        "otherwise": "an alias of a parameter is a view of it, not a read of a "
        "reference variable; cast before it, the copy kept for the weight serves"
    },
    "FusedBatchNorm": {"sizes": {"x": IMAGE, "w": PIXEL, **OF_CHANNELS}},
    "TensorListFromTensor": {"sizes": {"y": (4,)}},
    "TensorListThroughFunction": {"functions": OPAQUE},
    "BatchMatMul": {"sizes": {"x": (8, 4, 4)}},
    "BatchMatMul, not on the allow list of a CUDA before 9.1": {
        "options": {"deny": ["bmm"]},
        "sizes": {"x": (8, 4, 4)},
    },
    "Cpu.MixedFanout": {
        "otherwise": "painted as TensorFlow does with its emulation of fp16 switched "
        "off, which has ten casts"
    },
    "Mkl.InferFollowUpStreamDeny": {"precision": "bf16"},
}

CPP += cases(
    """
NoOp: 0
    deny1 = exp(x)
    clr1 = relu(deny1)
    infer1 = sqrt(clr1)
    clr2 = relu(infer1)
    return clr2

NoInferOp: 4
    deny1 = exp(x)
    clr1 = relu(deny1)
    infer1 = sqrt(clr1)
    CLR2 = relu(infer1)
    ALLOW1 = matmul(CLR2, CLR2)
    CLR3 = relu(ALLOW1)
    infer2 = log(CLR3)
    CLR4 = relu(infer2)
    ALLOW2 = matmul(CLR4, CLR4)
    infer3 = tanh(ALLOW2)
    return infer3

NoInferOp, the level not set: 2
    deny1 = exp(x)
    clr1 = relu(deny1)
    infer1 = sqrt(clr1)
    CLR2 = relu(infer1)
    ALLOW1 = matmul(CLR2, CLR2)
    CLR3 = relu(ALLOW1)
    INFER2 = log(CLR3)
    CLR4 = relu(INFER2)
    ALLOW2 = matmul(CLR4, CLR4)
    INFER3 = tanh(ALLOW2)
    return INFER3

BidirectionalClearChain: 3
    CLR1 = relu(x)
    CLR2 = relu(x)
    ALLOW1 = matmul(CLR1, CLR1)
    CLR3 = eq(CLR1, CLR2)
    CLR4 = relu(CLR2)
    return ALLOW1, CLR3, CLR4

PreserveFetches: 2
    allow1 = matmul(x, x)
    clr1 = relu(allow1)
    infer1 = sqrt(clr1)
    deny1 = exp(infer1)
    clr2 = relu(deny1)
    ALLOW2 = matmul(clr2, clr2)
    clr3 = relu(ALLOW2)
    deny2 = exp(clr3)
    clr4 = relu(deny2)
    return allow1, clr2, clr3, clr4

PreserveFetches, fetched and nothing else: 7
    ALLOW1 = matmul(x, x)
    CLR1 = relu(ALLOW1)
    infer1 = sqrt(CLR1)
    deny1 = exp(infer1)
    CLR2 = relu(deny1)
    ALLOW2 = matmul(CLR2, CLR2)
    CLR3 = relu(ALLOW2)
    deny2 = exp(CLR3)
    clr4 = relu(deny2)
    return ALLOW1, CLR2, CLR3, clr4

PreserveCPUNodes: 2
    CLR1 = relu(x)
    ALLOW1 = matmul(CLR1, CLR1)
    INFER1 = tanh(ALLOW1)
    allow2 = matmul(INFER1, INFER1)
    clr2 = relu(allow2)
    return clr2

PreserveIdentityAfterVariable: 5
    CLR1 = alias(w)
    ALLOW1 = matmul(x, CLR1)
    CLR2 = clone(y)
    ALLOW2 = matmul(x, CLR2)
    return ALLOW1, ALLOW2

FusedBatchNorm: 3
    ALLOW1 = conv2d(x, w)
    FBN1 = batch_norm(ALLOW1, mean, var, b, c)
    FBN2 = batch_norm(ALLOW1, mean, var, b, c)
    INFER1 = add(FBN1, FBN2)
    ALLOW2 = conv2d(INFER1, w)
    return ALLOW2

RepeatedAndListTypeAttrs: 2
    ALLOW1 = matmul(x, x)
    CLR1 = chunk(ALLOW1, 2)
    INFER1 = add(CLR1[0], CLR1[1])
    ALLOW2 = matmul(INFER1, ALLOW1)
    return ALLOW2

ExistingCast: 1
    CAST1 = m.to(float32)
    ALLOW1 = matmul(CAST1, CAST1)
    return ALLOW1

RecurrentEdgeColorMismatch: 2
    deny1 = exp(x)
    mrg = clone(deny1)
    infer1 = sqrt(mrg)
    ALLOW1 = matmul(infer1, infer1)
    nxt1 = mrg.copy_(ALLOW1)
    infer2 = sqrt(mrg)
    ALLOW2 = matmul(infer2, infer2)
    nxt2 = mrg.copy_(ALLOW2)
    return nxt2

TensorListPushPop: 2
    ALLOW1 = matmul(x, x)
    LIST1 = stack([x, ALLOW1])
    POP1 = unbind(LIST1)
    INFER1 = tanh(POP1[1])
    ALLOW2 = matmul(INFER1, INFER1)
    LIST2 = stack([POP1[0], ALLOW2])
    POP2 = unbind(LIST2)
    list3 = stack([x, x])
    pop3 = unbind(list3)
    return POP2[1], pop3[0]

TensorListFromTensor: 2
    ALLOW1 = matmul(x, x)
    LIST1 = unbind(ALLOW1)
    STACK1 = stack(LIST1)
    INFER1 = tanh(STACK1)
    ALLOW2 = matmul(INFER1, INFER1)
    LIST2 = clone(ALLOW1)
    SLOT = LIST2[0]
    PUSH = SLOT.copy_(y)
    return ALLOW2

TensorListPushBackBatchAndConcatLists: 2
    ALLOW1 = matmul(x, x)
    BATCH = stack([ALLOW1, ALLOW1])
    SPLIT = split(BATCH, 1)
    SHAPE = reshape(SPLIT[0], (4, 4))
    JOIN = cat([SHAPE, ALLOW1])
    POP = chunk(JOIN, 2)
    INFER1 = tanh(POP[1])
    ALLOW2 = matmul(INFER1, INFER1)
    return ALLOW2

TensorListThroughFunction: 3
    ALLOW1 = matmul(x, x)
    INFER1 = tanh(ALLOW1)
    list1 = zeros(1, 4, 4)
    slot1 = list1[0]
    set1 = slot1.copy_(INFER1)
    through = push_and_pop(list1)
    get1 = list1[0]
    LIST2 = zeros(1, 4, 4)
    SLOT2 = LIST2[0]
    SET2 = SLOT2.copy_(INFER1)
    GET2 = LIST2[0]
    ALLOW2 = matmul(get1, GET2)
    return ALLOW2

BatchMatMul: 2
    ALLOW1 = bmm(x, x)
    return ALLOW1

BatchMatMul, not on the allow list of a CUDA before 9.1: 0
    unlisted = bmm(x, x)
    return unlisted

Cpu.MixedFanout: 4
    ALLOW1 = matmul(x, y)
    ALLOW2 = matmul(ALLOW1, y)
    deny = exp(ALLOW1)
    infer = add(deny, ALLOW2)
    return infer

Mkl.InferFollowUpStreamDeny: 0
    deny = pow(x, y)
    infer = add(deny, b)
    clr = relu(infer)
    return clr
""",
    **MORE,
)

UNARY = {
    # op: (call, lowest, highest, absolute and relative tolerance of TensorFlow's test)
    "Elu": ("elu", -5, 5, 1e-3, 1e-3),
    "Erf": ("erf", -5, 5, 1e-3, 0.0),
    "Erfc": ("erfc", -5, 5, 1e-3, 0.0),
    "Inv": ("reciprocal", 0.01, 10, 0.0, 1e-3),
    "Reciprocal": ("reciprocal", 0.01, 10, 0.0, 1e-3),
    "Log": ("log", 0.01, 10, 1e-3, 2e-3),
    "Log1p": ("log1p", -0.99, 9, 1e-3, 5e-3),
    "LogSoftmax": ("log_softmax", -8, 8, 0.0, 1e-2),
    "Sigmoid": ("sigmoid", -5, 5, 1e-3, 0.0),
    "Softmax": ("softmax", -8, 8, 2e-3, 0.0),
    "Softplus": ("softplus", -5, 5, 1e-3, 1e-3),
    "Sqrt": ("sqrt", 0, 10, 1e-3, 1e-3),
    "Tanh": ("tanh", -5, 5, 1e-3, 0.0),
}


def unary(name: str) -> Case:
    """One infer op between two products with the identity."""
    call = UNARY[name][0]
    operands = "ALLOW1, -1" if "softmax" in call else "ALLOW1"
    program = f"""
        ALLOW1 = matmul(x, w)
        OP = {call}({operands})
        ALLOW2 = matmul(OP, w)
        return ALLOW2
    """
    return Case(f"{name}Op", program, 3, sizes={"x": (16, 16), "w": (16, 16)})


CPP += [unary(name) for name in UNARY]
