"""Implementations of other libraries: timed in the same rounds as ours, checked by the same oracle, never a dependency.

A package declares them in `benchmarks/peers.py`, which is not installed:

    TECHNIQUE = "rmsnorm"
    PEERS = {"rms_norm": [Peer("peer:liger", Level.PEER, f"{__name__}:liger", requires="liger_kernel", ...)]}

`kernel-pytorch bench --peers FILE` adds them to the technique's operations. Tables show which
are not installed, and the error of those that are wrong.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch

from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.interpreter import complete_interpreter, is_interpreting
from kernel_pytorch.harness.technique import Implementation, Level, Technique

PEER_PREFIX = "peer:"

_added: dict[str, Mapping[str, Sequence[Implementation]]] = {}


@dataclass(frozen=True, kw_only=True)
class Peer(Implementation):
    """An implementation of another library.

    Attributes:
        requires: module that its library is imported as.
        install: requirement for pip.
        capability: the lowest compute capability that its kernels run on; None for Triton kernels, whose results the
            interpreter can check on a CPU.
    """

    partial: ClassVar[bool] = True

    requires: str
    install: str
    capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level is not Level.PEER or not self.name.startswith(PEER_PREFIX):
            raise ValueError(f"{self.name}: a peer is named 'peer:<library>' and has Level.PEER")

    def why_absent(self, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
        """Why it cannot run on that device in that dtype, or None."""
        if self.capability is not None:
            least = ".".join(map(str, self.capability))
            if device.type != "cuda":
                return f"needs a GPU of compute capability {least}"
            if torch.cuda.get_device_capability(device) < self.capability:
                return f"needs compute capability {least}"
        if importlib.util.find_spec(self.requires) is None:
            return f"not installed (pip install {self.install})"
        if device.type != "cuda" and not is_interpreting():
            return "needs a GPU, or TRITON_INTERPRET=1 to check kernels on the CPU"
        if device.type != "cuda" and dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly"
        return None


def load_file(file: Path, name: str) -> ModuleType:
    """The module in a file, under that name in `sys.modules`; what it raises while it is imported is passed on.

    Raises:
        UserError: there is no such Python file.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"{file}: no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: Triton and Dynamo look there for the source of a function
    spec.loader.exec_module(module)
    return module


def add_peers(files: Iterable[Path]) -> None:
    """Load files of peers in this process: techniques that are discovered from now on have them.

    Raises:
        UserError: a file cannot be loaded, or does not declare `TECHNIQUE` and `PEERS`.
    """
    if is_interpreting():
        complete_interpreter()
    for file in files:
        # Not parents[1]: a path directly under the root has one parent alone.
        name = f"kernel_pytorch_peers_{file.resolve().parent.parent.name.replace('-', '_')}"
        try:
            module = load_file(file, name)
            technique, peers = module.TECHNIQUE, module.PEERS
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{file}: {type(error).__name__}: {error}") from error
        _added[technique] = peers


def with_peers(technique: Technique) -> Technique:
    """Return the technique with the peers that were added for it.

    Raises:
        ValueError: peers of an operation that it does not have.
    """
    peers = _added.get(technique.name, {})
    names = [operation.name for operation in technique.operations]
    for name in peers:
        if name not in names:
            raise ValueError(f"peers of {technique.name} name operation {name!r}; there are: {', '.join(names)}")
    operations = [
        dataclasses.replace(o, levels=[*o.levels, *peers[o.name]]) if o.name in peers else o
        for o in technique.operations
    ]
    return dataclasses.replace(technique, operations=operations) if peers else technique


def main(files: list[str]) -> None:
    """Print what pip needs for the peers in these files that run on this machine, one requirement a line."""
    add_peers(map(Path, files))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = [p for peers in _added.values() for each in peers.values() for p in each if isinstance(p, Peer)]
    wanted = {p.install: None for p in found if (p.why_absent(device) or "not installed").startswith("not installed")}
    sys.stdout.write("".join(f"{requirement}\n" for requirement in wanted))


if __name__ == "__main__":
    # The file's own Peer is that of the imported module, not of `__main__`.
    from kernel_pytorch.harness import peers

    peers.main(sys.argv[1:])
