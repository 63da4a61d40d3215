"""What every package needs: levels, operators, launches, checks.

This folder is linked into each package as `_core` and travels in its wheel; it is never installed on its own. Two
packages may carry different versions of it in one process, so it keeps no process-wide state, registers nothing under
its own name, and none of its classes crosses packages.
"""
