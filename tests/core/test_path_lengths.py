"""How many functions of Python run between a public function and the launch of its kernel in a warm call on a GPU.

Each takes the host 50 ns or more, and a small kernel 2 us.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

MOST = {
    "rmsnorm.rms_norm": 5,
    "rmsnorm.add_rms_norm": 5,
    "rmsnorm.head_rms_norm": 5,
    "rmsnorm.add_rms_norm of one tensor twice": 5,
    "fused_ln_act.layer_norm": 5,
    "fused_ln_act.add_layer_norm": 5,
    "fused_ln_act.bias_act": 6,
    "fused_ln_act.swiglu": 6,
    "fused_ln_act.softmax": 5,
    "fused_ln_act.linear_act": 9,
    "qkv_fusion.rotary_embedding": 8,
    "qkv_fusion.qk_norm_rope": 8,
    "flash_attn_triton.flash_attention": 8,
    "flash_attn_triton.flash_attention_with_lse": 8,
    "linear_cross_entropy.cross_entropy": 10,
}
"""The numbers as they are: one function more fails."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By function, the names of the functions that run."""
    cache = str(tmp_path_factory.mktemp("cache"))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, str(Path(__file__).with_name("path_lengths.py"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    return {name: seen for name, *seen in (line.split("\t") for line in done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST)
def test_few_functions_run_before_a_launch(found, name):
    assert len(found[name]) == MOST[name], found[name]
