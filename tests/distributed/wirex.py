import torch, sys
from tests.distributed.ranks import Ranks
from tests.distributed.traffic import wire
from tests.distributed.test_tensor_parallel import *


def w(rank, plan, mixed, precision="bf16", **options):
    net = parallel(plan, 2)
    if mixed == "ours":
        autoamp.convert(net, **{**BF16, "precision": precision, **options})
    adam = torch.optim.SGD(net.parameters(), 1e-2, foreach=False)
    for i in range(3):
        x, y = batch(i, 0)
        with wire(2) as sent:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed == "autocast"):
                loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
        adam.step()
        adam.zero_grad()
    return (
        sum(s for _, s in sent),
        sent,
        float(loss),
        [
            float((p.full_tensor() if hasattr(p, "full_tensor") else p).double().sum())
            for p in net.parameters()
        ],
    )


if __name__ == "__main__":
    two = Ranks(2)
    for plan in PLANS:
        for m in (("no",), ("autocast",), ("ours",)):
            r = two.run(w, plan, *m)
            print(plan, m, r[0][0], r[0][2], sum(r[0][3]))
            print([(n[:12], s) for n, s in r[0][1]])
        r = two.run(
            w, plan, "ours", allow=["autoamp::from_local", "autoamp::redistribute"]
        )
        print("allow", r[0][0], r[0][2], sum(r[0][3]))
        r = two.run(w, plan, "ours", deny=["autoamp::redistribute"])
        print("deny", r[0][0], r[0][2], sum(r[0][3]))
    two.close()
