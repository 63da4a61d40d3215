"""Train a small ConvNet and a small vision transformer on handwritten digits, and make both faster for inference.

After reading it you can train either model of kernel-pytorch-models on your own images, fold the norms of a ConvNet,
choose the techniques of a transformer, and measure the gain of each step.

- Needs: the packages of this workspace and scikit-learn, whose package holds the 1,797 images. No network.
- Runs on a CPU or a GPU, with 1 GB of memory: 2 minutes on 2 cores, one with `--quick`.
- Command: `python examples/vision.py`
- Last lines: both models classify more than 95 % of unseen images correctly, and a table of their speed.
"""

# %% Imports
from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.quick import Comparison, compare_implementations
from kernel_pytorch.models import ConvNet, VisionTransformer, fold

Split = tuple[Tensor, Tensor]


# %% What you would write
# A ConvNet is trained with its norms and served without them: `fold` multiplies them into the convolutions. All weights
# are channels_last, so no convolution copies its input into another layout.
# --8<-- [start:use]
def convnet() -> ConvNet:
    """A residual network of two stages for small grey images."""
    return ConvNet(in_channels=1, num_classes=10, widths=(32, 64), depth=1)


def served(model: ConvNet) -> ConvNet:
    """The same function without a single norm, for inference."""
    return fold(model)


# --8<-- [end:use]


def transformer() -> VisionTransformer:
    """Images of 8 x 8 pixels as 16 patches of 2 x 2."""
    return VisionTransformer(8, 2, 10, in_channels=1, dim=64, num_layers=3, num_heads=4)


# %% Digits
# Every fifth image is held out. Pixel values are from 0 to 16.
def digits(device: torch.device) -> tuple[Split, Split]:
    """Images `(n, 1, 8, 8)` and their digits, for training and for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(f"this example needs images: pip install scikit-learn ({error})") from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32, device=device)[:, None] / 8.0 - 1.0
    labels = torch.tensor(found.target, dtype=torch.int64, device=device)
    held = torch.arange(len(labels), device=device) % 5 == 0
    return (images[~held], labels[~held]), (images[held], labels[held])


# %% Training
# AdamW and one cycle of the learning rate. Label smoothing reduces overfitting, since there are few images.
def train(model: nn.Module, data: Split, epochs: int, rate: float) -> float:
    """Train a model; return the mean loss of the last epoch."""
    images, labels = data
    generator, size = torch.Generator().manual_seed(0), 64
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    steps = epochs * (len(labels) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(epochs):
        losses = []
        for part in torch.randperm(len(labels), generator=generator).split(size)[: len(labels) // size]:
            part = part.to(labels.device)
            loss = F.cross_entropy(model(images[part]), labels[part], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
    return float(torch.stack(losses).mean())


@torch.no_grad()
def accuracy(model: nn.Module, data: Split) -> float:
    """The share of images that are classified correctly."""
    return float((model(data[0]).argmax(-1) == data[1]).float().mean())


# %% Before and after
# Before: plain PyTorch on the model as it was trained. After: folded, or with all techniques.
def ways_of_convnet(model: ConvNet) -> dict[str, nn.Module]:
    """The ConvNet as most are written, with channels_last, and folded."""
    plain = copy.deepcopy(model).to(memory_format=torch.contiguous_format).eval()
    ways = {"ConvNet, contiguous": plain, "ConvNet, channels_last": model.eval(), "ConvNet, folded": served(model)}
    return ways | {"ConvNet, folded and compiled": torch.compile(served(model), fullgraph=True)}


def ways_of_transformer(model: VisionTransformer) -> dict[str, nn.Module]:
    """The transformer in plain PyTorch, with all techniques, and both compiled."""
    plain, ours = (copy.deepcopy(model).eval().use(techniques=t) for t in ((), None))
    ways = {"ViT, plain PyTorch": plain, "ViT, our techniques": ours}
    compiled = {f"{name}, compiled": torch.compile(copy.deepcopy(way), fullgraph=True) for name, way in ways.items()}
    return ways | compiled


def show(found: Comparison) -> dict[str, float]:
    """Print times, speedups over the first way and errors; the speedups."""
    first, *rest = found.contenders
    print(f"\n{'':30}{'ms':>8}{'x of before':>24}{'error':>10}")
    print(f"{first.name:30}{first.seconds.median * 1e3:8.2f}{'':24}{first.relative_error:10.1e}")
    speedups, gains = {}, {}
    for c in rest:
        if c.status != "measured":
            print(f"{c.name}: {c.status}, {c.reason}")
            continue
        speedup = compare_paired(first.samples, c.samples).speedup
        speedups[c.name] = speedup.median
        gains |= {c.name: speedup.median} if speedup.low > 1.0 else {}
        ratio = f"{speedup.median:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]"
        print(f"{c.name:30}{c.seconds.median * 1e3:8.2f}{ratio:>24}{c.relative_error:10.1e}")
    best = max(gains, key=lambda name: gains[name], default="")
    print(f"Over {first.name}: {f'{best} gains {gains[best]:.2f}x' if best else 'no gain beyond noise'}.\n")
    return speedups


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, test and time both; return the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs and rounds")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, testing = digits(device)
    accuracies = {}
    for name, make, epochs, rate in (("ConvNet", convnet, 5, 4e-3), ("ViT", transformer, 25, 3e-3)):
        torch.manual_seed(0)
        model = make().to(device)
        begin = time.perf_counter()
        loss = train(model, training, epochs if options.quick else 2 * epochs, rate)
        seconds = time.perf_counter() - begin
        accuracies[name] = accuracy(model.eval(), testing)
        print(f"{name}: loss {loss:.3f} after {seconds:.0f} s, {accuracies[name]:.1%} of unseen images are right")
        ways = ways_of_convnet(model) if isinstance(model, ConvNet) else ways_of_transformer(model)
        show(compare_implementations(ways, testing[0][:256], rounds=8 if options.quick else 30))
    assert min(accuracies.values()) > 0.95, accuracies
    return accuracies


if __name__ == "__main__":
    main(sys.argv[1:])
