"""What is there to stay until the last test is kept from garbage collection.

A million objects of PyTorch, transformers and all collected tests take half a second in each collection; compilers and
measurements of memory ask for many.
"""

import gc
import sys

frozen = 0  # modules whose objects are frozen


def pytest_collection_finish():
    """Freeze what is imported by now, where that is more than before."""
    global frozen
    if len(sys.modules) > frozen + 100:
        gc.collect()
        gc.freeze()
        frozen = len(sys.modules)


def pytest_runtest_logfinish():
    """Do so after the first test that needs Dynamo, Inductor or transformers, too."""
    pytest_collection_finish()
    if "torch._dynamo.guards" in sys.modules:
        # It flushes the processor's caches to time the guards of each compiled function, for a line in a debug log.
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *arguments: 0.0
