"""Compatibility with PyTorch's features, such as export and sharding, per operation and level, generated from tests.

An implementation declares what it does not support, with the reason; everything else must work, and what is declared
must not. So the table is never typed: it is what came out.
"""

from kernel_pytorch.harness.support.examination import (
    CAPABILITIES,
    Capability,
    absence,
    capability,
    check_declaration,
    examine,
    examine_technique,
)
from kernel_pytorch.harness.support.processes import Processes, ProcessesError
from kernel_pytorch.harness.support.record import (
    Absent,
    Outcome,
    SupportRecord,
    load,
    load_all,
    markdown,
    problems,
    recorded,
    up_to_date,
)
from kernel_pytorch.harness.support.subject import Shared, Subject

__all__ = [
    "CAPABILITIES",
    "Absent",
    "Capability",
    "Outcome",
    "Processes",
    "ProcessesError",
    "Shared",
    "Subject",
    "SupportRecord",
    "absence",
    "capability",
    "check_declaration",
    "examine",
    "examine_technique",
    "load",
    "load_all",
    "markdown",
    "problems",
    "recorded",
    "up_to_date",
]
