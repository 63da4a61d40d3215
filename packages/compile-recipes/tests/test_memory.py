"""Saved bytes by line, what checkpointing saves, and padding: predicted and measured."""

import torch
import torch.nn.functional as F
from torch import nn

from kernel_pytorch.compile_recipes import memory


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))  # the line


class Blocks(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.blocks, self.checkpointed = nn.ModuleList(Block(32) for _ in range(4)), checkpointed

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.sum()


def allocated(model, x):
    """Bytes alive between forward and backward, by the allocator."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as p:
        loss = model(x)
    events = [e.nbytes() for e in p.profiler.kineto_results.events() if e.name() == "[memory]"]
    return sum(events) - loss.nbytes


def test_saved_bytes_are_those_that_the_allocator_holds():
    model, x = Blocks(), torch.randn(64, 32)
    kept = memory.saved(model, (x,))
    groups = memory.by_line(kept)
    total = sum(k.bytes for k in kept)
    assert len(groups) == 1
    assert next(iter(groups)).startswith(f"{__file__}:")
    assert abs(total - allocated(model, x)) < 0.05 * total


def test_what_checkpointing_keeps_is_predicted():
    x = torch.randn(64, 32)
    (found,) = memory.checkpointing(Blocks(), memory.saved(Blocks(), (x,)))
    assert (found.path, found.blocks) == ("blocks", 4)
    assert found.then < found.now / 4
    # The first block's input is the caller's; the rest is what blocks hand on.
    measured = sum(k.bytes for k in memory.saved(Blocks(checkpointed=True), (x,)))
    assert abs(found.then - measured) <= 4 * x.nbytes


def test_the_share_of_padding():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    assert memory.padding_share((), {"attention_mask": mask}) == 3 / 8
    assert memory.padding_share((), {}) == 0.0
