"""The public functions of all groups."""

from .bias.functional import bias_act, bias_dropout_add
from .gated.functional import geglu, reglu, swiglu
from .linear.functional import gated_mlp, linear_act
from .norm.functional import (
    add_layer_norm,
    add_layer_norm_act,
    add_rms_norm_act,
    layer_norm,
    layer_norm_act,
    rms_norm_act,
)
from .softmax.functional import softmax

__all__ = [
    "add_layer_norm",
    "add_layer_norm_act",
    "add_rms_norm_act",
    "bias_act",
    "bias_dropout_add",
    "gated_mlp",
    "geglu",
    "layer_norm",
    "layer_norm_act",
    "linear_act",
    "reglu",
    "rms_norm_act",
    "softmax",
    "swiglu",
]
