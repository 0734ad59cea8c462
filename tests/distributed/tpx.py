from __future__ import annotations
import contextlib, traceback
from typing import Any
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import *
from torch.utils.checkpoint import checkpoint
import autoamp
from tests.distributed.test_tensor_parallel import parallel, PLANS
from tests.distributed.training import *
from tests.small_models import BF16


def full(p):
    p = p.detach()
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def run(rank, world, case, mixed, precision="bf16", **options):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    out = {}
    net, call, xs, loss_of, region = CASES[case](mesh)
    if mixed == "ours":
        autoamp.convert(net, **{**BF16, "precision": precision, **options})
    opt = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    losses = []
    for i, x in enumerate(xs):
        with region():
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed == "autocast"):
                y = net(x)
            loss = loss_of(y, x)
            if i == options.get("bad", -1):
                loss = loss * 1e36
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(full(loss)))
    rep = []
    if mixed == "ours":
        r = autoamp.report(net)
        rep = [
            [w for _, w in r.skipped],
            r.coverage.low_flops / max(r.coverage.flops, 1),
            len(r.graphs),
            getattr(opt, "step_was_skipped", None),
        ]
    with (
        region(),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed == "autocast"),
    ):
        net.eval()
        z = full(net(xs[0])).float()
    return (
        losses,
        [float(full(p).double().sum()) for p in net.parameters()],
        rep,
        float(z.double().sum()),
    )


def xs(n=4, rows=8):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=g) for _ in range(n)]


def sq(y, x):
    return ((y - x[:, :4]) ** 2).mean()


class Ck(nn.Module):
    def __init__(self, mesh, reentrant):
        super().__init__()
        self.net = Net()
        self.re = reentrant
        for b in self.net.blocks:
            parallelize_module(b, mesh, PLANS["columns and rows"])

    def forward(self, x):
        n = self.net
        x = n.first(x)
        for b in n.blocks:
            x = checkpoint(b, x, use_reentrant=self.re)
        return n.last(x)


def ck(mesh):
    return Ck(mesh, False), None, xs(), sq, contextlib.nullcontext


def ckr(mesh):
    return Ck(mesh, True), None, xs(), sq, contextlib.nullcontext


def dyn(mesh):
    return (
        PN(mesh),
        None,
        [
            torch.randn(r, WIDTH, generator=torch.Generator().manual_seed(r))
            for r in (8, 6, 10, 4, 12)
        ],
        sq,
        contextlib.nullcontext,
    )


class PN(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.net = Net()
        for b in self.net.blocks:
            parallelize_module(b, mesh, PLANS["columns and rows"])

    def forward(self, x):
        return self.net(x)


def uneven(mesh):
    class U(nn.Module):
        def __init__(s):
            super().__init__()
            s.a = nn.Linear(WIDTH, 7)
            s.b = nn.Linear(7, 4)
            parallelize_module(
                s,
                mesh,
                {"a": ColwiseParallel(use_local_output=False), "b": RowwiseParallel()},
            )

        def forward(s, x):
            return s.b(torch.relu(s.a(x)))

    return U(), None, xs(), sq, contextlib.nullcontext


def dt_all(mesh):
    """All DTensors: inputs, weights and outputs."""
    from torch.distributed.tensor import distribute_module

    net = Net()

    def part(name, m, mesh):
        for k, p in list(m.named_parameters(recurse=False)):
            pl = [Shard(0)] if p.dim() == 2 and p.shape[0] % 2 == 0 else [Replicate()]
            m.register_parameter(k, nn.Parameter(distribute_tensor(p.data, mesh, pl)))

    distribute_module(net, mesh, part)
    data = [distribute_tensor(x, mesh, [Replicate()]) for x in xs()]
    return (
        net,
        None,
        data,
        lambda y, x: ((y - x[:, :4]) ** 2).mean(),
        contextlib.nullcontext,
    )


def dt_bwd(mesh):
    n, a, d, l, r = dt_all(mesh)
    return n, a, d, lambda y, x: l(y, x).full_tensor(), r


def vocab(mesh):
    class V(nn.Module):
        def __init__(s):
            super().__init__()
            s.emb = nn.Embedding(16, 32)
            s.up = nn.Linear(32, 64)
            s.down = nn.Linear(64, 32)
            s.head = nn.Linear(32, 16)
            parallelize_module(
                s,
                mesh,
                {
                    "emb": RowwiseParallel(input_layouts=Replicate()),
                    "up": ColwiseParallel(),
                    "down": RowwiseParallel(),
                    "head": ColwiseParallel(
                        output_layouts=Shard(-1), use_local_output=False
                    ),
                },
            )

        def forward(s, i):
            h = s.emb(i)
            h = h + s.down(torch.relu(s.up(h)))
            return s.head(h)

    g = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 16, (12,), generator=g) for _ in range(4)]
    return (
        V(),
        None,
        data,
        lambda y, i: nn.functional.cross_entropy(y, i),
        loss_parallel,
    )


def vocab_in(mesh):
    net, a, data, loss, region = vocab(mesh)

    class L(nn.Module):
        def __init__(s):
            super().__init__()
            s.net = net

        def forward(s, i):
            return nn.functional.cross_entropy(s.net(i), i)

    return L(), a, data, lambda y, i: y, region


def hf(mesh):
    import transformers as t

    c = t.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=32,
    )
    m = t.LlamaForCausalLM(c)
    for l in m.model.layers:
        parallelize_module(
            l,
            mesh,
            {
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )

    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.m = m

        def forward(s, i):
            return s.m(input_ids=i, use_cache=False).logits

    g = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 32, (2, 12), generator=g) for _ in range(4)]
    return (
        M(),
        None,
        data,
        lambda y, i: nn.functional.cross_entropy(
            y[:, :-1].flatten(0, 1), i[:, 1:].flatten()
        ),
        contextlib.nullcontext,
    )


def conv(mesh):
    class C(nn.Module):
        def __init__(s):
            super().__init__()
            s.c = nn.Conv2d(3, 8, 3, padding=1)
            s.p = nn.Linear(8, 16)
            s.q = nn.Linear(16, 4)
            s.d = nn.Dropout(0.1)
            parallelize_module(
                s, mesh, {"p": ColwiseParallel(), "q": RowwiseParallel()}
            )

        def forward(s, x):
            h = s.c(x).relu().mean((2, 3))
            return s.q(s.d(s.p(h).relu()))

    g = torch.Generator().manual_seed(1)
    return (
        C(),
        None,
        [torch.randn(4, 3, 8, 8, generator=g) for _ in range(4)],
        lambda y, x: (y**2).mean(),
        contextlib.nullcontext,
    )


CASES = dict(
    ck=ck,
    ckr=ckr,
    dyn=dyn,
    uneven=uneven,
    dt_all=dt_all,
    dt_bwd=dt_bwd,
    vocab=vocab,
    vocab_in=vocab_in,
    hf=hf,
    conv=conv,
)


def main(names):
    from tests.distributed.ranks import Ranks, RankError

    two = Ranks(2)
    for case in names or CASES:
        for args in (("no",), ("autocast",), ("ours", "bf16"), ("ours", "fp16")):
            try:
                r = two.run(run, 2, case, *args, deadline=100)
                print(
                    case,
                    args,
                    [f"{x:.5f}" for x in r[0][0]],
                    f"{r[0][3]:.4f}",
                    r[0][2],
                    "same" if r[0][1] == r[1][1] else "WEIGHTS DIFFER",
                    flush=True,
                )
            except RankError as e:
                print(case, args, "ERROR", str(e)[-700:], flush=True)
    two.close()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
