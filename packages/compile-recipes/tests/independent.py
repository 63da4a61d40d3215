"""Checks every change of `optimize` on inputs that it never saw; shares no code with the assistant but what it calls.

python independent.py changes       # each change of a small model, alone
python independent.py ranks         # two processes train a changed model, and get the gradients of the stock one
"""

import copy
import datetime
import gc
import os
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kernel_pytorch.compile_recipes import optimize


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(32, eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down_proj = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 8**-0.5, dim=-1)
        x = x + self.o_proj(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


def results(model, x):
    """Output and gradients by the place of a parameter's first element in the stock order; names may differ."""
    model.zero_grad()
    y = model(x)
    y.cos().sum().backward()
    return y.detach(), sum(float(p.grad.double().square().sum()) for p in model.parameters())


def compare(changed, stock, seed):
    torch.manual_seed(seed)
    x = torch.randn(3, 3, 16, 24)  # another batch, and another size
    (y, g), (expected, h) = results(changed, x), results(stock, x)
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5), float((y - expected).abs().max())
    assert abs(g - h) < 1e-4 * h, (g, h)


def changes():
    torch.manual_seed(0)
    stock, x = Model(), torch.randn(2, 3, 16, 16)
    made = set()
    for name in ("rewrite attention", "patch rmsnorm", "patch fused-ln-act", "fuse", "channels_last", "checkpointing"):
        model = copy.deepcopy(stock.train())
        before = {key: value.clone() for key, value in model.state_dict().items()}
        try:
            result = optimize(model, x, apply=[name], rounds=0)
        except ValueError:  # a package that is not installed
            continue
        made |= {*result.applied}
        for training in (True, False):
            compare(model.train(training), stock.train(training), 7)
        compare(copy.deepcopy(model), stock, 8)
        assert list(model.state_dict()) == list(before), name
        result.revert()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
        torch.manual_seed(9)
        fresh = torch.randn(2, 3, 16, 16)
        assert torch.equal(model(fresh), stock(fresh)), name
    assert {"rewrite attention", "channels_last", "checkpointing"} <= made, made
    print("changes hold:", ", ".join(sorted(made)))  # noqa: T201


def rank(index, file):
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)  # the processes share the machine
    patience = datetime.timedelta(seconds=120)  # less than that of the test, so that an error says what did not come
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=index, world_size=2, timeout=patience
    )
    torch.manual_seed(0)
    stock = Model()
    changed = copy.deepcopy(stock)
    assert optimize(changed, torch.randn(2, 3, 16, 16), apply=["rewrite attention"], rounds=0).applied
    torch.manual_seed(index)
    x = torch.randn(2, 3, 16, 16)
    for model in (stock, changed):
        DistributedDataParallel(model)(x).square().mean().backward()
    for a, b in zip(stock.parameters(), changed.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6)
    gc.collect()  # a reducer of DDP that ends after the group waits for threads of gloo that wait for the interpreter
    torch.distributed.destroy_process_group()


def main():
    if sys.argv[1] == "changes":
        return changes()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (f"{folder}/store",), nprocs=2)
    print("ranks agree")  # noqa: T201
    return None


if __name__ == "__main__":
    main()
