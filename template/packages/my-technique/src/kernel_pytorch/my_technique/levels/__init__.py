"""The ladder, from the definition up, and which level is the default where."""

from kernel_pytorch.my_technique._core.levels import Ladder

LADDER = Ladder(
    {"my_technique": __name__},
    [],  # native everywhere; a row that names another level names the committed record that it rests on, too
    cuda=None,
    absent={"my_technique": ("triton", "cuda")},
)
