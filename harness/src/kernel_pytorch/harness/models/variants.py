"""How a model is run: as it comes, compiled, with another library, with the techniques that are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch.harness.clock.cuda import graph_of
from kernel_pytorch.harness.implementation import imported
from kernel_pytorch.harness.models.plain import PlainDecoder
from kernel_pytorch.harness.models.works import Step, Work
from kernel_pytorch.harness.models.zoo import Model
from kernel_pytorch.harness.technique import Technique

DECODED = ("llama", "qwen3", "gemma2")
"""Models that decoders and Liger-Kernel cover."""
CAUSAL = "kernel_pytorch_causal"
"""Name under which attention that keeps its causal flag is registered with transformers."""


@dataclass(frozen=True)
class Variant:
    """A way to run a model."""

    name: str  # as in `--variant`
    title: str  # for tables
    compiled: str | None = None  # how it is compiled: a mode of torch.compile, or None: not at all
    causal: bool = False  # whether attention keeps its causal flag, see `register_causal`
    ours: bool = False  # whether techniques are patched in, by the lines that docs/models.md shows and no others
    gpu_bound: bool = False  # whether parts are replaced too that only pay where the GPU is the limit
    liger: bool = False  # whether Liger-Kernel is patched in
    graph: bool = False  # whether the step is captured as a CUDA graph
    decoder: str | None = None  # what decodes instead of the model: "plain", see `PlainDecoder`, or "ours"

    def why_not(
        self, spec: Model, work: Work, device: torch.device, techniques: Sequence[Technique] = ()
    ) -> str | None:
        """Why a model cannot be run so for this work, or None if it can."""
        graphs = self.graph or self.compiled == "reduce-overhead"
        on_gpu = device.type == "cuda"
        decodes = bool(work.cached or work.new)
        decoded = ("llama",) if self.decoder == "plain" else DECODED
        reasons = {
            "liger-kernel is not installed": self.liger and importlib.util.find_spec("liger_kernel") is None,
            "Liger-Kernel does not cover this model": self.liger and spec.family not in DECODED,
            "Liger-Kernel needs a GPU": self.liger and not on_gpu,
            "attention needs more than a causal flag": self.causal and (work.cached or spec.attention is not None),
            "nothing more is replaced: its norms are not those of PyTorch": self.gpu_bound
            and spec.family not in ("gpt2", "bert", "vit"),
            "its steps are timed by works that decode; ours generates with our decoder": self.decoder
            and not work.cached,
            "the decoder does not cover this model": self.decoder and spec.family not in decoded,
            "takes minutes, and is for works that decode": self.compiled == "max-autotune" and not decodes,
            "generation is compiled by transformers, or captured by our patch": work.new
            and (self.graph or self.causal or (self.ours and self.compiled)),
            "transformers compiles generation on a GPU alone": work.new and self.compiled and not on_gpu,
            "CUDA graphs of inference alone": graphs and (work.training or not on_gpu),
            "nothing to gain: the GPU is busy": self.graph and work.name == "prefill",
            "no technique is installed": self.ours and not techniques,
            "no technique that is installed, or named with --only, has a decoder": self.decoder == "ours"
            and not any(each.decoder for each in techniques),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def prepare(self, spec: Model, work: Work, model: Any, techniques: Sequence[Technique]) -> tuple[Any, list[str]]:
        """The callable that replaces the model, and the parts of the model that were patched."""
        if self.decoder == "plain":
            return PlainDecoder, []
        if self.decoder is not None:
            return next(imported(technique.decoder) for technique in techniques if technique.decoder), []
        if self.causal:
            register_causal()
            model.config._attn_implementation = CAUSAL
        if self.liger:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        patched = techniques if self.ours else ()
        replaced = [path for each in patched for path in each.patch(model, gpu_bound=self.gpu_bound).replaced]
        if self.compiled is None or work.new:
            return model, replaced
        return torch.compile(model, mode=self.compiled), replaced


STOCK = Variant("stock", "stock")
OURS = Variant("ours", "ours", ours=True)
VARIANTS = (
    STOCK,
    Variant("compiled", "torch.compile", compiled="default"),
    Variant("best", "torch.compile, causal flag kept", compiled="default", causal=True),
    Variant("graphs", "torch.compile, reduce-overhead", compiled="reduce-overhead"),
    Variant("autotune", "torch.compile, max-autotune", compiled="max-autotune"),
    Variant("plain", "plain decoder, torch.compile", decoder="plain"),
    OURS,
    Variant("ours-gpu-bound", "ours, gpu_bound", ours=True, gpu_bound=True),
    Variant("ours-compiled", "ours, torch.compile", compiled="default", ours=True),
    Variant("ours-best", "ours, torch.compile, causal flag kept", compiled="default", causal=True, ours=True),
    Variant("ours-graph", "ours, CUDA graph", ours=True, graph=True),
    Variant("ours-graphs", "ours, torch.compile, reduce-overhead", compiled="reduce-overhead", ours=True),
    Variant("decoder", "our decoder", decoder="ours"),
)
LIGER = Variant("liger", "Liger-Kernel", liger=True)
"""Runs in another process with stock beside it, since it changes the classes of transformers."""


def captured(step: Step) -> Step:
    """The step as a CUDA graph, which returns the same tensor each time."""
    graph, result = graph_of(step)

    def replay(kept: Step = step) -> Any:  # the graph reads the memory of what the step holds: model, inputs, cache
        graph.replay()
        return result

    return replay


def register_causal() -> None:
    """Let transformers know attention that hands `is_causal` to PyTorch instead of a mask, for inputs without padding.

    What a careful user does today: under torch.compile transformers makes a mask of the flag, and PyTorch's fastest
    kernels take none.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(CAUSAL, _causal_attention)
    AttentionMaskInterface.register(CAUSAL, lambda *args, **kwargs: None)


def _causal_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    scaling: float | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    causal = bool(getattr(module, "is_causal", False)) and query.shape[2] > 1
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=causal, scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
