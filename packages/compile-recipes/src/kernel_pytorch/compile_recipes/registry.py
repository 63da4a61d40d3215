"""From a graph break to the recipe that mends it: by PyTorch's id first, then by words of its text.

Ids are stable, names are not: a test compares both with the registry of the torch that is installed.
"""

from __future__ import annotations

BY_ID = {
    "GB0035": ("Data-dependent branching", "branch_on_data"),
    "GB0034": ("Data-dependent assertion", "branch_on_data"),
    "GB0170": ("_gb_type", "branch_on_data"),  # the registry of torch 2.13 has lost the name of this one
    "GB0036": ("Dynamic shape operator", "mask_indexing"),
    "GB0037": ("Dynamic shape operator", "mask_indexing"),
    "GB0109": ("tolist", "item"),
    "GB0124": ("Tensor.item()", "item"),
    "GB0291": ("logging.Logger", "printing"),
    "GB0296": ("reorder", "printing"),
    "GB0029": ("hooks", "backward_hook"),
    "GB0083": ("backwards hooks", "backward_hook"),
    "GB0098": ("torch.compiler.disable", "disabled"),
    "GB0099": ("torch.compiler.disable", "disabled"),
    "GB4841": ("python_type", "nn_buffer"),
    "GB0142": ("context manager", "context_manager"),
    "GB0066": ("GenericContextWrappingVariable", "context_manager"),
    "GB5976": ("Data pointer", "data_ptr"),
    "GB0123": ("Tensor.backward()", "gradients_in_forward"),
    "GB0125": ("requires_grad_", "gradients_in_forward"),
    "GB9186": ("torch.autograd.grad", "gradients_in_forward"),
}
"""By id: a part of the name that the registry has for it, and the recipe."""

BY_WORDS = (
    ("Data-dependent branching", "branch_on_data"),
    ("Tensor.item()", "item"),
    ("tolist", "item"),
    ("Dynamic shape operator", "mask_indexing"),
    ("Data pointer", "data_ptr"),
    ("data_ptr", "data_ptr"),
    ("backward hook", "backward_hook"),
    ("Backwards", "backward_hook"),
    ("torch.compiler.disable", "disabled"),
    ("torch._dynamo.disable", "disabled"),
    ("context manager", "context_manager"),
    ("Tensor.backward", "gradients_in_forward"),
    ("autograd.grad", "gradients_in_forward"),
    ("requires_grad", "gradients_in_forward"),
    ("perf_counter", "timer"),
    ("monotonic(", "timer"),
    ("time.time(", "timer"),
    ("manual_seed", "python_random"),
    ("random.", "python_random"),
    ("print(", "printing"),
    ("logging", "printing"),
    ("warn(", "printing"),
    ("open(", "files"),
    ("numpy", "numpy"),
)
"""Words of the cause, the source line or the explanation of a break, and the recipe; the first that occur decide."""

UNSURE = "GB0033"
"""A data-dependent operator: of a random number, or of a value that leaves the tensor."""

ADVICE = {
    "branch_on_data": "compute both and choose with torch.where, or torch.cond",
    "item": "keep the value in a tensor: without .item(), .tolist() or float()",
    "mask_indexing": "keep the shape: torch.where(mask, x, 0) for x[mask]",
    "printing": "print outside the compiled part, or torch._logging with a hook after the call",
    "backward_hook": "a hook on the parameter or on the output tensor, tensor.register_hook",
    "disabled": "remove torch.compiler.disable, or move the call out of the forward",
    "nn_buffer": "self.register_buffer(name, tensor) for self.name = torch.nn.Buffer(tensor)",
    "context_manager": "torch.profiler.record_function, or open the context around the compiled call",
    "gradients_in_forward": "torch.func.grad, or compute gradients outside the compiled part",
    "python_random": "torch.rand on the device of the data; seed outside the forward",
    "timer": "time outside the forward, or torch.profiler.record_function",
    "data_ptr": "compare shapes or pass a flag: addresses are unknown while tracing",
    "files": "read and write files outside the forward",
    "numpy": "the torch function of the same name",
    "dynamic_shape": "torch._dynamo.mark_dynamic(x, dimension), or torch.compile(..., dynamic=True)",
    "module_counter": "keep the number in a buffer: a tensor, not an int",
    "python_scalar": "pass a tensor: torch.tensor(value)",
}
"""What to do, by recipe, in one line."""


def recipe_of(gb: str, *texts: str) -> str:
    """The recipe for a break; "" if there is none.

    Args:
        gb: PyTorch's id, such as "GB0124"; "" if the text has none.
        *texts: cause, source line, explanation: the first that says something decides.
    """
    if gb in BY_ID:
        return BY_ID[gb][1]
    found = (recipe for text in texts for words, recipe in BY_WORDS if words.lower() in text.lower())
    return next(found, "") or ("item" if gb == UNSURE else "")
