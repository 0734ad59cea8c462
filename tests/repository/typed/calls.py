"""Calls as users write them, for type checkers; this file is never run.

`# wrong` ends each line that has to be refused, and all other lines have to pass.
"""

from typing import Any, TypeVar, assert_type

import torch
from torch import fx, nn
from torch.optim import SGD, AdamW, Optimizer

import autoamp


class Net(nn.Module):
    width: int = 8

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x


net, x = Net(), torch.ones(2, 8)
adam, sgd = AdamW(net.parameters()), SGD(net.parameters())
gm = fx.symbolic_trace(net)


Model = TypeVar("Model", bound=nn.Module)


def of_any_class(model: Model) -> Model:
    return autoamp.convert(model)


def dynamo(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    return graph.forward


def right(maybe: Optimizer | None, every: list[Optimizer]) -> None:
    assert_type(autoamp.convert(net), Net)
    assert_type(autoamp.convert(net, None, precision="bf16"), Net)
    assert_type(autoamp.convert(net, adam), tuple[Net, AdamW])
    assert_type(autoamp.convert(net, [adam]), tuple[Net, list[AdamW]])
    assert_type(autoamp.convert(net, (adam, sgd)), tuple[Net, tuple[AdamW, SGD]])
    assert_type(autoamp.convert(net, every), tuple[Net, list[Optimizer]])
    assert_type(autoamp.convert(net, maybe), Net | tuple[Net, Optimizer])
    assert_type(autoamp.revert(net), Net)
    autoamp.convert(net).encode(x)
    autoamp.convert(net, precision=torch.bfloat16, placement="promote")
    autoamp.convert(net, objective="memory", backend="inductor", masters="off")
    autoamp.convert(net, backend=dynamo, weight_copies="every call")
    autoamp.convert(net, keep=["head"], deny=("gelu",), rules="torch-cuda")
    autoamp.convert(net, rules=autoamp.Rules.default("bf16"))
    autoamp.convert(net, loss_scale="dynamic")
    autoamp.convert(net, loss_scale=1024)
    autoamp.convert(net, loss_scale=autoamp.DynamicLossScale())
    autoamp.convert(net, example_inputs=(x,))
    options: autoamp.ConvertOptions = {"precision": "bf16", "do_no_harm": False}
    autoamp.convert(net, **options)
    assert_type(autoamp.explain(net, x, device="cuda:sm_90", **options), autoamp.Report)
    assert_type(autoamp.compare(net, x, kwargs={"y": x}, **options), autoamp.Comparison)
    assert_type(autoamp.find_overflow(net, x, precision="fp16"), autoamp.Overflow)
    assert_type(autoamp.bench(net, x, inference=True, **options), autoamp.Bench)
    autoamp.export(net, (x,), {"y": x}, target="onnx", precision="bf16")
    autoamp.rewrite(gm, (x,), precision="bf16", deny=["gelu"])
    autoamp.enable(precision="bf16", report_dir="reports", hot=False)
    autoamp.bench(net, x, ways=["fp32", "half"], fuse={"gelu": False})


def wrong(options: dict[str, int]) -> None:
    autoamp.convert(net, precision="bf61")  # wrong
    autoamp.convert(net, precision=16)  # wrong
    autoamp.convert(net, precison="bf16")  # wrong
    autoamp.convert(net, placement="optimum")  # wrong
    autoamp.convert(net, objective="speed")  # wrong
    autoamp.convert(net, backend="inducter")  # wrong
    autoamp.convert(net, masters="fp8")  # wrong
    autoamp.convert(net, weight_copies="always")  # wrong
    autoamp.convert(net, loss_scale="dynamik")  # wrong
    autoamp.convert(net, do_no_harm="off")  # wrong
    autoamp.convert(net, keep=[net])  # wrong
    autoamp.convert(net, deny=nn.GELU)  # wrong
    autoamp.convert(net, "bf16")  # wrong
    autoamp.convert(net, adam, sgd)  # wrong
    autoamp.convert(net, net.parameters())  # wrong
    autoamp.convert(lambda y: y)  # wrong
    autoamp.convert(net, adam).encode(x)  # wrong
    autoamp.convert(net).encode(3)  # wrong
    autoamp.convert(net, example_inputs=x)  # wrong
    autoamp.convert(net, **options)  # wrong
    autoamp.revert("net")  # wrong
    autoamp.explain(net, x, precision="fp8")  # wrong
    autoamp.explain(net, x, options={"precision": "bf16"})  # wrong
    autoamp.explain(net, input_ids=x)  # wrong
    autoamp.compare(net, x, placement="best")  # wrong
    autoamp.compare(net, x, tolerance="small")  # wrong
    autoamp.find_overflow(net, x, precision="f16")  # wrong
    autoamp.bench(net, x, infer=True)  # wrong
    autoamp.bench(net, x, precision="half")  # wrong
    autoamp.export(net, (x,), backend="inductor")  # wrong
    autoamp.export(net, x, precision="bf16")  # wrong
    autoamp.rewrite(gm, (x,), loss_scale="dynamic")  # wrong
    autoamp.enable(precision="float")  # wrong
    autoamp.convert(net, fuse=["gelu"])  # wrong
    autoamp.convert(net, unfused=["gelu"])  # wrong
    autoamp.convert(net, loss_scale=None)  # wrong
    autoamp.bench(net, x, ways=["fp64"])  # wrong
    autoamp.export(net, (x,), target="onx")  # wrong


one: autoamp.ConvertOptions = {"precision": "bf61"}  # wrong
two: autoamp.ConvertOptions = {"precison": "bf16"}  # wrong
three: autoamp.ExpertOptions = {"guard": 1}  # wrong
