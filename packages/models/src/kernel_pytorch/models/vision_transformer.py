"""`VisionTransformer`: classifies images as sequences of patches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .block import TransformerBlock
from .loading import State, load_torchvision, load_vit
from .techniques import Names, TechniqueModule

INITIAL_STD = 0.02


class VisionTransformer(TechniqueModule):
    """A vision transformer: patches, a class token, learned positions, pre-norm blocks, a linear head.

    Parameters are `patches` (a `torch.nn.Conv2d`), `token` `(dim,)`, `positions` `(1 + patches, dim)`, `blocks.N...` as
    in `TransformerBlock`, `norm`, and `head`.

    Args:
        image_size: height and width of images in pixels, or one number for both.
        patch_size: height and width of a patch, or one number for both; must divide image_size.
        num_classes: number of logits; 0 for none: the result is the features of the class token.
        dim: channels of a token.
        num_layers: number of blocks.
        num_heads: heads of attention.
        hidden_dim, activation: as in `FeedForward`.
        in_channels: channels of an image.
        norm_eps: eps of all norms: 1e-6 as in torchvision; transformers has 1e-12.
        techniques, level: as in `TechniqueModule`, with its errors.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, https://arxiv.org/abs/2010.11929.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        num_classes: int = 1000,
        *,
        dim: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        hidden_dim: int | None = None,
        in_channels: int = 3,
        activation: str = "gelu",
        norm_eps: float = 1e-6,
        techniques: Names = None,
        level: str | None = None,
    ) -> None:
        super().__init__(techniques, level)
        self.image_size, patch = _pair(image_size), _pair(patch_size)
        rows, columns = (pixels // size for pixels, size in zip(self.image_size, patch, strict=True))
        if (rows * patch[0], columns * patch[1]) != self.image_size or not rows * columns:
            raise ValueError(f"patch_size: given {patch_size}; it must divide image_size, {image_size}")
        shape: dict[str, Any] = {"norm": "layer", "norm_eps": norm_eps, "mlp": "gelu", "hidden_dim": hidden_dim}
        shape |= {"activation": activation, "bias": True, "causal": False}
        how: dict[str, Any] = {"techniques": self.techniques.names, "level": level}
        self.patches = nn.Conv2d(in_channels, dim, patch, patch)
        self.token = nn.Parameter(torch.empty(dim))
        self.positions = nn.Parameter(torch.empty(1 + rows * columns, dim))
        self.blocks = nn.ModuleList(TransformerBlock(dim, num_heads, **shape, **how) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim, eps=norm_eps)
        self.head = nn.Linear(dim, num_classes) if num_classes else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights: truncated normal, as in transformers and timm; biases 0, norms 1."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=INITIAL_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        nn.init.trunc_normal_(self.token, std=INITIAL_STD)
        nn.init.trunc_normal_(self.positions, std=INITIAL_STD)

    @classmethod
    def from_transformers(
        cls, source: Any, state_dict: State = None, *, techniques: Names = None, level: str | None = None
    ) -> VisionTransformer:
        """Load a ViT of transformers, with the names of its files or those of version 5's modules.

        Dropout, which does nothing in evaluation, is left out, and so is the pooler of a `ViTModel`.

        Args:
            source: a `ViTForImageClassification` or `ViTModel`, or its configuration: a `ViTConfig` or the content of
                its config.json.
            state_dict: of such a model; may be left out where source is a model. Tensors are copied.
            techniques, level: as in the constructor.

        Raises:
            TypeError, ValueError: as in `LanguageModel.from_llama`.
        """
        return load_vit(cls, source, state_dict, techniques=techniques, level=level)

    @classmethod
    def from_torchvision(
        cls, state_dict: Mapping[str, Tensor], num_heads: int, *, techniques: Names = None, level: str | None = None
    ) -> VisionTransformer:
        """Load a `VisionTransformer` of torchvision; also the older names of its feed-forward.

        Args:
            state_dict: of that model; images are square. Tensors are copied.
            num_heads: heads of attention, which no tensor shows: 12 for vit_b, 16 for vit_l and vit_h.
            techniques, level: as in the constructor.

        Raises:
            ValueError: tensors are missing, unknown or of other shapes; the message has the names.
        """
        return load_torchvision(cls, state_dict, num_heads, techniques=techniques, level=level)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute logits `(B, num_classes)` (without classes features `(B, dim)`), or with targets the mean loss, `()`.

        Args:
            images: `(B, in_channels, height, width)`, in the dtype of the parameters.
            targets: `(B,)`, the class of each, or -100 for images without a loss.

        Raises:
            ValueError: images have another size, or targets are given and there are no classes.
        """
        wanted = self.patches.in_channels, *self.image_size
        if images.dim() != 4 or tuple(images.shape[1:]) != wanted:
            raise ValueError(f"images: shape is {tuple(images.shape)}; it must be (B, {', '.join(map(str, wanted))})")
        patches = self.patches(images).flatten(2).transpose(1, 2)
        token = self.token.to(patches.dtype).expand(images.shape[0], 1, -1)
        x, update = torch.cat((token, patches), 1) + self.positions, None
        for block in self.blocks:
            x, update = block(x, update, defer=True)
        x, update = x[:, 0], None if update is None else update[:, 0]
        features, _ = self.techniques.norm(self.norm, x, update)
        if self.head is None:
            if targets is not None:
                raise ValueError("targets: given a tensor; it must be None, for the model has no classes")
            return features
        logits = self.head(features)
        return logits if targets is None else nn.functional.cross_entropy(logits.float(), targets)


def _pair(size: int | Iterable[int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
