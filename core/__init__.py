"""What every package needs: levels, operators, launches, checks.

This folder is linked into each package as `_core` and travels in its wheel; it is never installed on its own. Two
packages may carry different versions of it in one process, so no state of it is seen by another copy, what it registers
has the name of a package, and none of its classes crosses packages.
"""
