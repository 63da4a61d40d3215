"""Peak memory and time of a training step: `python packages/linear-cross-entropy/benchmarks/memory.py --help`.

On the CPU, at the size of its defaults, it takes minutes and 6 GB, so it is no test.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.harness.memory import profile_memory, training_step
from kernel_pytorch.linear_cross_entropy import linear_cross_entropy


def composed(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What models do: logits in 16 bits, the loss of them in float32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def composed_in_16_bits(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The least that composing takes, at the price of exponentials of rounded logits."""
    return F.cross_entropy(F.linear(hidden, weight), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 4096), ("words", 128000), ("hidden", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--level", action="append", help="may be given several times; native if omitted")
    options = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, device=options.device, dtype=torch.bfloat16)
    weight = torch.randn(options.words, options.hidden, device=options.device, dtype=torch.bfloat16).mul_(0.03)
    target = torch.randint(options.words, (options.tokens,), device=options.device)
    functions = {"composed": composed, "composed in 16 bits": composed_in_16_bits}
    for level in options.level or ["native"]:
        functions[level] = lambda *tensors, level=level: linear_cross_entropy(*tensors, level=level)
    sizes = f"{options.tokens} tokens x {options.words} words x {options.hidden} features"
    sys.stdout.write(f"{sizes}, bfloat16, {options.device}, torch {torch.__version__}\n")
    least = 0
    for name, function in functions.items():
        use = profile_memory(function, hidden, weight, target)
        step = training_step(function, (hidden, weight, target))
        start = time.perf_counter()
        step()
        if options.device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        least = least or use.training_peak
        sys.stdout.write(
            f"{name:>20}: peak {use.training_peak / 2**20:8.1f} MiB ({use.training_peak / least:.3f} of composed), "
            f"forward {use.forward_peak / 2**20:8.1f} MiB, saved {use.saved_for_backward / 2**20:8.3f} MiB, "
            f"a step {seconds:.3f} s\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
