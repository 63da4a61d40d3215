"""What levels are set beside: as many bytes, and the same products."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch.harness.cases import Case, Cost
from kernel_pytorch.harness.clock import Timing
from kernel_pytorch.harness.workload import COPY, PRODUCTS, share, yardsticks

CPU = torch.device("cpu")
CASE = Case("a", torch.float16, {"shape": (6, 4)})


def test_a_copy_moves_as_many_bytes_as_the_cost_says():
    (copy,) = yardsticks(Cost(bytes=4096), CASE, 3, 4096, CPU)
    assert (copy.name, copy.sets, copy.bytes_per_set) == (COPY, 3, 4096)
    made = [copy.run(index) for index in range(3)]
    assert all(2 * each.nbytes == 4096 for each in made)
    assert len({each.data_ptr() for each in made}) == 3


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write, and names the operators."""

    def __init__(self):
        super().__init__()
        self.names, self.bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        self.bytes += sum(each.nbytes for each in (*args, result) if isinstance(each, Tensor))
        return result


@pytest.mark.parametrize(("size", "moved"), [(4096, 4096), (4103, 4096), (1_000_008, 1_000_008), (1, 8)])
def test_a_copy_is_one_elementwise_kernel_that_reads_and_writes_as_many_bytes_as_the_cost_says(size, moved):
    (copy,) = yardsticks(Cost(bytes=size), CASE, 2, size, CPU)
    for index in range(2):
        with Traffic() as traffic:
            copy.run(index)
        assert traffic.bytes == moved
        assert traffic.names == ["neg.default"]  # clone and copy_ are a memcpy on a GPU, whose speed jumps


def test_each_set_of_a_copy_has_bytes_of_its_own():
    # Else a copy of few bytes would find in the cache what the levels have to fetch.
    (copy,) = yardsticks(Cost(bytes=4096), CASE, 3, 4096, CPU)
    assert len({tuple(copy.run(index)[:8].tolist()) for index in range(3)}) == 3


def test_products_are_those_of_the_cost():
    _, products = yardsticks(Cost(bytes=8, products=((6, 5, 4), (5, 4, 6))), CASE, 2, 8, CPU)
    assert products.name == PRODUCTS
    for index in range(2):
        first, second = products.run(index)
        assert (tuple(first.shape), tuple(second.shape), first.dtype) == ((6, 5), (5, 4), torch.float16)


def timing(samples, method="wall"):
    return Timing("a", samples, 1, method, 0)


def test_a_share_is_of_the_same_rounds():
    # The machine slows down to half its speed after the second round: that moves no ratio.
    beside, own = timing((1.0, 1.0, 2.0, 2.0, 2.0)), timing((4.0, 4.0, 8.0, 8.0, 8.0))
    assert share(beside, own) == pytest.approx(0.25)


def test_what_was_timed_in_another_way_is_no_yardstick():
    assert share(timing((1.0,), "graph"), timing((1.0,), "wall")) is None
    assert share(None, timing((1.0,))) is None
