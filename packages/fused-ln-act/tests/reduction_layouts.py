"""How the kernels of norms lay out the rows that they sum up, of few and of many, as compiled for 9.0: lines of JSON.

    python reduction_layouts.py COLUMNS [unlooked]

A program of its own, because where Triton interprets its kernels nothing is compiled. `unlooked`: few rows get programs
of their own without a look at how they are shared.
"""

import json
import re
import sys

import torch

from kernel_pytorch.fused_ln_act.kernels import rows as triton_rows
from kernel_pytorch.fused_ln_act.norm.kernels import backward as triton_backward
from kernel_pytorch.fused_ln_act.norm.kernels import forward as triton_forward
from kernel_pytorch.harness.static import launches

ROWS = (3, 4000)  # few, and many, to what stands in for a GPU
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
WITH_ROWS = ("_forward_kernel", "_backward_kernel")
SUMMED = re.compile(r"\}\) : \(tensor<(\S+)x(?:f32|f64), (#\w+)>")  # the end of a tt.reduce


def recorded(rows, columns, dtype, of_parameters, has_residual):
    """The launches of one forward and backward."""
    x, weight = torch.empty(rows, columns, dtype=dtype), torch.empty(columns, dtype=of_parameters)
    residual, statistics = x if has_residual else None, torch.empty(2, rows)
    found = []

    def record(kernel, key, signature, device, constants, options, attributes, warmup):
        about = (), "", "", False, False  # its grid, implementation and case are of no interest here
        found.append(launches.Launch(kernel, key, signature, device, constants, options, attributes, *about))

    with launches._in_place_of_compile(record, []):
        triton_forward.norm_act(x, residual, weight, weight, None, 1e-5, 0.0, "layer", "gelu")
        dtypes = (str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch.") if has_residual else "")
        needs = (True, False, True, True)
        triton_backward.norm_act_backward(
            x, residual, x, weight, weight, None, statistics, 1e-5, 0.0, "layer", "gelu", *dtypes, *needs
        )
    return [launch for launch in found if launch.function.__name__ in WITH_ROWS]


def layouts(launch):
    """Of every sum over a row: which lanes and warps have which columns."""
    code = launch.compile().asm["ttgir"]
    named = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    sums = SUMMED.findall(code)
    # Those of the backward over rows follow the loop; of one row there are none.
    return [named[name] for _, name in sums][: 2 if launch.function.__name__ == "_forward_kernel" else 1]


def main(columns, unlooked=""):
    """Write what is found, by the dtypes of x and the parameters and by what there is."""
    launches.use_architecture(90)
    if unlooked:
        triton_forward.are_shared_alike = triton_rows.are_shared_alike = lambda *arguments: True
    for dtype, of_parameters in ((BFLOAT16, BFLOAT16), (FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32)):
        for has_residual in (False, True):
            pairs = zip(*(recorded(rows, columns, dtype, of_parameters, has_residual) for rows in ROWS), strict=True)
            for few, many in pairs:
                what = f"{few.function.__name__} {dtype}, {of_parameters}, {'with' if has_residual else 'no'} residual"
                sys.stdout.write(json.dumps([what, layouts(few), layouts(many)]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
