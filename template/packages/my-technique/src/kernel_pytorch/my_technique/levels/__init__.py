"""The ladder, from the definition up, and which level is the default where."""

from kernel_pytorch.my_technique._core.levels import Ladder

# Level "triton" is there as soon as `operators.py` declares the operator of that name. A row of the list makes a level
# the default where it says, and names the committed record that it rests on; elsewhere the default is native.
LADDER = Ladder({"my_technique": __name__}, [], cuda=None)
