"""Blocks of timm 1.0.31, labelled by reading its sources, before a finder ran on them; see `blocks`.

Where the code stands is said by file and line of timm's package. What a label means where pictures differ from text:

- A norm that is one call of PyTorch (`F.layer_norm`, `F.rms_norm`) is a label only as the norm of a residual sum, also
  where views lie between (windows, channels first). It is none of a concatenation, of merged patches, or of tokens plus
  a position embedding that is broadcast.
- Attention is what calls of `scaled_dot_product_attention` compute, with a bias, over windows, channels or one query.
  Heads that are mixed before the softmax ("talking heads") and weights that are no product of queries and keys
  ("outlook") are none.
- A bias and an activation are those of a linear layer, also of the gate of a gated unit: what both save adds up. A
  convolution, or a batch norm between, makes it none.
"""

import torch
from blocks import ACT, ACT_BY_HAND, AFTER_SUM, ATTENTION, GATED, TURNED, spread_parameters

NONE, SHARED = set(), {"attention", "shared_linear"}
ROPE, PACKED, BIASED = {"attention", "rotary"}, {"gated_mlp", "bias_act"}, GATED | ACT

SIZES = {"img_size": 32, "num_classes": 10}
VIT = SIZES | {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
MIXER = SIZES | {"patch_size": 8, "embed_dim": 64, "num_blocks": 2}
SWIN = SIZES | {"window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
CONVNEXT = {"num_classes": 10, "depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)}


def vit_like(block="blocks.1", **changes):
    found = {f"{block}.norm1": AFTER_SUM, f"{block}.attn": ATTENTION, f"{block}.norm2": AFTER_SUM, f"{block}.mlp": ACT}
    return found | {f"{block}.{name}" if name in ("attn", "mlp") else name: kinds for name, kinds in changes.items()}


TIMM = {
    # models/vision_transformer.py:250 and 251, layers/attention.py:119-145, layers/mlp.py:48-49
    "vit_base_patch16_224": (VIT, vit_like(norm=AFTER_SUM) | {"blocks.0.norm1": NONE}),
    # layers/mlp.py:102-104: one linear layer, halved; LayerScale is a product
    "vit_giant_patch14_reg4_dinov2": (VIT | {"mlp_ratio": 4}, vit_like(mlp=PACKED, norm=AFTER_SUM) | {
        "blocks.1.ls1": NONE,
    }),
    # layers/activations.py:163: x * sigmoid(1.702 * x)
    "vit_base_patch16_clip_quickgelu_224": (VIT, vit_like(mlp=ACT_BY_HAND, norm_pre=NONE)),
    # layers/attention_pool.py:113-131: one learned query
    "vit_base_patch16_siglip_224": (VIT, vit_like(attn_pool={"attention", "bias_act"}) | {"attn_pool.norm": NONE}),
    # layers/mlp.py:158-160 without biases, layers/norm.py:247: F.rms_norm
    "aimv2_large_patch14_224": (VIT, vit_like(mlp=GATED, norm=AFTER_SUM) | {"patch_embed.norm": NONE}),
    # models/vision_transformer.py:417-458: one linear layer before both, and a bias of its own for the part of the MLP
    "vit_base_patch16_xp_224": (VIT, {
        "blocks.1": {"attention", "residual_norm", "bias_act"}, "blocks.1.q_norm": NONE, "norm": AFTER_SUM,
    }),
    # models/vision_transformer.py:718 and 719: branches stacked and summed
    "vit_small_patch16_18x2_224": (VIT, {
        "blocks.1.attns.0.norm": AFTER_SUM, "blocks.1.attns.1.attn": ATTENTION, "blocks.1.ffns.0.norm": AFTER_SUM,
        "blocks.1.ffns.1.mlp": ACT,
    }),
    # layers/diff_attention.py:158-168: the difference of two, which the fused path computes by two calls
    "vit_dwee_patch16_reg1_gap_256": (VIT | {"num_heads": 2}, vit_like(fc_norm=NONE)),
    # models/naflexvit.py builds the blocks of models/vision_transformer.py
    "naflexvit_base_patch16_gap": ({"num_classes": 10, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
                                   vit_like()),
    # models/eva.py:250-303 with layers apart, layers/pos_embed_sincos.py:467: pairs side by side
    "eva02_base_patch14_224": (VIT, vit_like(attn=TURNED, mlp=BIASED, fc_norm=NONE)),
    "eva02_tiny_patch14_224": (VIT, vit_like(attn=ROPE, mlp=PACKED)),
    # layers/pos_embed_sincos.py:462: halves; patches alone are turned, not the tokens before them
    "vit_small_patch16_dinov3": (VIT, vit_like(attn=ROPE, norm=AFTER_SUM)),
    # angles that each head has learned
    "vit_small_patch16_rope_mixed_224": (VIT, vit_like(attn=ROPE)),
    # layers/attention.py:262-301: fewer keys than queries, norms of both
    "Eva": (VIT | {
        "num_kv_heads": 2, "attn_type": "rope", "qkv_fused": False, "qk_norm": True, "swiglu_mlp": True,
        "swiglu_align_to": 8, "use_rot_pos_emb": True, "rope_type": "dinov3", "rope_rotate_half": True,
    }, vit_like(attn=TURNED, mlp=BIASED)),
    # models/qwen3_vit.py:112 and 113: the norm is of the last block's sum
    "Qwen3VitEncoder": ({"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 2,
                         "pos_embed_grid_size": 4, "out_features": 32},
                        vit_like(attn=ROPE, merger={"residual_norm", "bias_act"})),
    # models/gemma4_vit.py:416-460, 488 and 549-561, 107-130: each half is turned by one axis
    "Gemma4VitEncoder": ({"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "head_dim": 16,
                          "intermediate_size": 128, "position_embedding_size": 64, "pooling_kernel_size": 2}, {
        "blocks.0.norm1": AFTER_SUM, "blocks.1.norm1": AFTER_SUM, "blocks.1.attn": TURNED, "blocks.1.norm2": NONE,
        "blocks.1.norm3": AFTER_SUM, "blocks.1.mlp": GATED, "blocks.1.norm4": NONE,
    }),
    # models/beit.py:220-254: a bias of each pair of positions
    "beit_base_patch16_224": (VIT, vit_like(fc_norm=NONE)),
    # models/cait.py:166-180: heads mixed before and after the softmax; 58-77: one query, two layers of one input
    "cait_xxs24_224": (VIT, vit_like(attn=NONE, norm=NONE) | {
        "blocks_token_only.0.norm1": NONE, "blocks_token_only.0.attn": SHARED,
        "blocks_token_only.0.norm2": AFTER_SUM, "blocks_token_only.0.mlp": ACT,
    }),
    # models/xcit.py:269-292: attention of channels by cosines; 162-170: convolutions
    "xcit_nano_12_p16_224": (VIT, vit_like(norm=AFTER_SUM) | {
        "blocks.1.norm3": AFTER_SUM, "blocks.1.local_mp": NONE, "cls_attn_blocks.0.norm1": NONE,
        "cls_attn_blocks.0.attn": SHARED, "cls_attn_blocks.0.mlp": ACT,
    }),
    # models/swin_transformer.py:341-375 and 602-607; 650-658: the norm is of four patches side by side
    "swin_tiny_patch4_window7_224": (SWIN, vit_like("layers.0.blocks.1") | {
        "layers.0.blocks.0.attn": ATTENTION, "layers.1.downsample": NONE, "layers.1.blocks.1.norm2": AFTER_SUM,
        "norm": AFTER_SUM,
    }),
    # models/swin_transformer_v2.py:252-291: cosines, and an MLP that computes the bias; 541 and 543: norms of branches
    "swinv2_tiny_window8_256": (SWIN, {
        "layers.0.blocks.1.attn": {"attention", "bias_act"}, "layers.0.blocks.1.norm1": NONE,
        "layers.0.blocks.1.mlp": ACT, "layers.0.blocks.1.norm2": NONE, "layers.1.downsample": NONE,
        "norm": AFTER_SUM,
    }),
    # models/gcvit.py:214-240 and 312-313: queries of the whole picture; 86-92: convolutions
    "GlobalContextVit": (SIZES | {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}, {
        "stages.0.blocks.0.norm1": NONE, "stages.0.blocks.0.attn": ATTENTION, "stages.0.blocks.1.attn": ATTENTION,
        "stages.0.blocks.1.norm2": AFTER_SUM, "stages.0.blocks.1.mlp": ACT, "stages.0.global_block": NONE,
        "stages.1.norm": AFTER_SUM,
    }),
    # models/maxxvit.py:303-334 and 887-889, 634-654: convolutions, whose sum the next norm is of
    "test_maxvit": (SIZES | {"img_size": 128}, {
        "stages.0.blocks.0.conv": NONE, "stages.0.blocks.0.attn_block.norm1": AFTER_SUM,
        "stages.0.blocks.0.attn_block.attn": ATTENTION, "stages.0.blocks.0.attn_block.mlp": ACT,
        "stages.0.blocks.0.attn_grid.attn": ATTENTION, "stages.0.blocks.0.attn_grid.norm2": AFTER_SUM,
    }),
    # models/maxxvit.py:217-251: channels first, and the values on the left; layers/mlp.py:243: convolutions
    "test_coatnet": (SIZES | {"img_size": 64}, {
        "stages.2.blocks.1.attn": ATTENTION, "stages.2.blocks.1.norm2": AFTER_SUM, "stages.2.blocks.1.mlp": NONE,
    }),
    # models/pvt_v2.py:121-154: keys of a coarser picture in stage 0 alone; 61-71: a convolution before the activation
    "pvt_v2_b0": ({"num_classes": 10, "depths": (1, 1), "embed_dims": (32, 64), "num_heads": (1, 2),
                   "sr_ratios": (2, 1), "mlp_ratios": (4, 4)}, {
        "stages.0.blocks.0.attn": ATTENTION, "stages.1.blocks.0.norm1": NONE, "stages.1.blocks.0.attn": SHARED,
        "stages.1.blocks.0.norm2": AFTER_SUM, "stages.1.blocks.0.mlp": NONE, "stages.1.norm": AFTER_SUM,
    }),
    # models/volo.py:96-119: weights from one linear layer; 238-259 and 363-376
    "VOLO": ({"img_size": 64, "num_classes": 10, "layers": (1, 1), "embed_dims": (32, 64), "num_heads": (2, 4),
              "downsamples": (True, False), "outlook_attention": (True, False), "stem_hidden_dim": 16}, {
        "network.0.0.attn": NONE, "network.0.0.norm2": AFTER_SUM, "network.0.0.mlp": ACT, "network.2.0.norm1": NONE,
        "network.2.0.attn": ATTENTION, "network.2.0.norm2": AFTER_SUM, "post_network.0.attn": ATTENTION,
    }),
    # models/levit.py:320-331 and 454-465: layers without biases, batch norms after them
    "Levit": ({"img_size": 64, "num_classes": 10, "embed_dim": (32, 48), "key_dim": 16, "depth": (1, 1),
               "num_heads": (2, 3)}, {
        "stages.0.blocks.0.attn": ATTENTION, "stages.0.blocks.0.mlp": NONE,
        "stages.1.downsample.attn_downsample": ATTENTION, "head": NONE,
    }),
    # models/efficientformer.py:112-124 and 276-277, 313-315: pooling and convolutions; 603: two heads of one input
    "efficientformer_l1": ({"img_size": 56, "num_classes": 10, "depths": (1, 2), "embed_dims": (16, 64)}, {
        "stages.1.blocks.0.mlp": NONE, "stages.1.blocks.2.norm1": AFTER_SUM,
        "stages.1.blocks.2.token_mixer": ATTENTION, "stages.1.blocks.2.norm2": AFTER_SUM,
        "stages.1.blocks.2.mlp": ACT, "norm": AFTER_SUM, "head": {"shared_linear"},
    }),
    # models/metaformer.py:232-252 and 416-428; 190: a ReLU with two parameters; 163 and 362: the square of a ReLU
    "MetaFormer": (lambda timm: {
        "num_classes": 10, "depths": (1, 1), "dims": (32, 64), "res_scale_init_values": (None, 1.0),
        "token_mixers": (timm.models.metaformer.SepConv, timm.models.metaformer.Attention),
        "norm_layers": (timm.models.metaformer.LayerNorm2dNoBias, timm.models.metaformer.LayerNormNoBias),
    }, {
        "stages.0.blocks.0.token_mixer": NONE, "stages.1.blocks.0.token_mixer": ATTENTION,
        "stages.1.blocks.0.norm2": AFTER_SUM, "stages.1.blocks.0.mlp": NONE, "head.fc": ACT,
    }),
    # models/mlp_mixer.py:107 and 108: the first MLP is along the tokens
    "MlpMixer": (MIXER, {
        "blocks.1.norm1": AFTER_SUM, "blocks.1.mlp_tokens": ACT, "blocks.1.norm2": AFTER_SUM,
        "blocks.1.mlp_channels": ACT, "norm": AFTER_SUM,
    }),
    # layers/mlp.py:104: the gate is the second half
    "MlpMixer, gated": (lambda timm: MIXER | {"mlp_layer": timm.layers.GluMlp, "act_layer": torch.nn.SiLU}, {
        "blocks.1.mlp_tokens": PACKED, "blocks.1.mlp_channels": PACKED,
    }),
    # models/mlp_mixer.py:126 and 177-178: no norm, but a scale and a shift
    "MlpMixer, of residual blocks": (lambda timm: MIXER | {
        "mlp_ratio": 4, "block_layer": timm.models.mlp_mixer.ResBlock, "norm_layer": timm.models.mlp_mixer.Affine,
    }, {"blocks.1.norm1": NONE, "blocks.1.mlp_channels": ACT, "norm": NONE}),
    # models/mlp_mixer.py:214-219 and 269, layers/mlp.py:205: the gate is a linear layer along the tokens
    "MlpMixer, with a gate along tokens": (lambda timm: MIXER | {
        "mlp_ratio": 4, "block_layer": timm.models.mlp_mixer.SpatialGatingBlock, "mlp_layer": timm.layers.GatedMlp,
    }, {"blocks.1.norm": AFTER_SUM, "blocks.1.mlp_channels": ACT, "norm": AFTER_SUM}),
    # models/convnext.py:203-219 and 308: channels last inside a block; the next stage's norm is of the block's sum
    "convnext_tiny": (CONVNEXT, {
        "stages.0.blocks.0.norm": NONE, "stages.0.blocks.0.mlp": ACT, "stages.1.downsample.0": AFTER_SUM,
        "stages.1.blocks.0.mlp": ACT, "head.norm": NONE,
    }),
    # layers/grn.py:44-47: sizes over the picture, divided by their mean
    "convnextv2_tiny": (CONVNEXT, {"stages.0.blocks.0.mlp": ACT, "stages.0.blocks.0.mlp.grn": NONE}),
    # layers/fast_norm.py:219-239: divided by the deviation from the mean, which is kept
    "ConvNeXt": (CONVNEXT | {"norm_layer": "simplenorm"}, {
        "stages.0.blocks.0.norm": NONE, "stages.0.blocks.0.mlp": ACT,
    }),
}  # fmt: skip

TWO_NORMS = "two norms of one sum are one finding, in the last of them: the sum is computed once"
MISSED = {
    ("vit_small_patch16_18x2_224", "blocks.1.attns.0.norm"): (AFTER_SUM, TWO_NORMS),
    ("vit_small_patch16_18x2_224", "blocks.1.ffns.0.norm"): (AFTER_SUM, TWO_NORMS),
    ("swinv2_tiny_window8_256", "layers.0.blocks.1.attn"): (
        ACT, "its layer reads a buffer: what depends on parameters and buffers alone is no layer of data",
    ),
}  # fmt: skip
"""What is labelled and not found, with the reason; by (model, path)."""


def build(timm, name, config):
    """A model and its input by name, which is that of a class or of a function before a comma."""
    torch.manual_seed(0)
    config = config(timm) if callable(config) else config
    model = getattr(timm.models, name.split(",")[0])(**config).eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    spread_parameters(model)
    size = config.get("img_size", 32)
    return model, {"x": torch.randn(2, 3, size, size)}
