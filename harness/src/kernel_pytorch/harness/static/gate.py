"""Holding compiled kernels against their contracts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.static.compiled import MOST, Compiled
from kernel_pytorch.harness.static.limits import ARCHITECTURES, SHARED_DECLARED
from kernel_pytorch.harness.technique import Technique

# A float64 scalar is converted once. Any other float64 instruction is arithmetic, at half the speed of float32 or less.
F64_PER_SCALAR = 1
HALF = re.compile(r"(fp16|bf16)$|tensordesc<(fp16|bf16)")


@dataclass(frozen=True)
class Violation:
    """One promise that was broken.

    Attributes:
        technique: whose kernel it is.
        kernel: its name; empty where no kernel is to blame.
        arch: the architecture.
        configuration: types, warps, constants and case.
        rule: what was promised.
        allowed: the bound.
        found: what the code has.
    """

    technique: str
    kernel: str
    arch: str
    configuration: str
    rule: str
    allowed: str
    found: str

    def __str__(self) -> str:
        where = " ".join(part for part in (self.technique, self.kernel, self.arch) if part)
        configuration = f" ({self.configuration})" if self.configuration else ""
        return f"{where}{configuration}: {self.rule}: allowed {self.allowed}, found {self.found}"


def violations(technique: Technique, found: Iterable[Compiled], *, complete: bool = True) -> list[Violation]:
    """Everything that breaks a contract, and contracts for kernels that are never launched.

    Args:
        technique: whose contracts they are.
        found: its kernels.
        complete: whether these are all; otherwise a contract may be for a kernel that could not be compiled here.
    """
    unused, broken = set(technique.contracts), []
    for compiled in found:
        names = _contracts(technique, compiled)
        unused -= {*names}
        where = (technique.name, compiled.kernel, compiled.arch, f"{compiled.configuration}; {compiled.case}")
        contract = technique.contracts[names[0]] if names else KernelContract()
        broken += [Violation(*where, *rule) for rule in _broken_rules(compiled, contract)]
    if complete:
        broken += [Violation(technique.name, name, "", "", "launches", "some", "none") for name in sorted(unused)]
    return broken


def _contracts(technique: Technique, compiled: Compiled) -> list[str]:
    """Names of the contracts that speak of a kernel: patterns of its constants first, then its bare name."""
    constants = " ".join(f"{name}={value}" for name, value in compiled.constants.items())
    instantiation = f"{compiled.kernel}<{compiled.constants.get('template', constants)}>"
    patterns = [key for key in technique.contracts if "<" in key and fnmatchcase(instantiation, key)]
    return patterns + [key for key in technique.contracts if key == compiled.kernel]


def _broken_rules(c: Compiled, contract: KernelContract) -> list[tuple[str, str, str]]:
    """Rule, what is allowed, what was found."""
    if c.error:
        return [("compiles", "no error", c.error)]
    has_float64 = any("fp64" in kind for kind in c.arguments.values())
    f64 = None if has_float64 else contract.max_f64 + F64_PER_SCALAR * len(c.float64_scalars)
    bounds: dict[str, tuple[int, int | None]] = {}
    in_cuda = c.language == "CUDA"
    if not c.float64_scalars:  # the rest has been said about the same kernel with float32 scalars
        # ptxas refuses what is too much for sm_80, and lets it pass for sm_90.
        shared = SHARED_DECLARED if in_cuda else ARCHITECTURES[c.arch].shared_bytes_per_block
        bounds["shared memory in bytes"] = c.shared_bytes, shared
        bounds["spilled bytes"] = c.spill_bytes, contract.max_spill_bytes
        bounds["registers"] = c.registers, contract.max_registers
        bounds["tf32 instructions"] = c.tf32, None if contract.allow_tf32 else 0
    bounds["float64 instructions"] = c.f64, f64
    broken = [
        (rule, f"{most}", f"{found}") for rule, (found, most) in bounds.items() if most is not None and found > most
    ]
    if c.float64_scalars or in_cuda or not c.bench:
        return broken
    for what, traffic, bits in (
        ("loads", c.loads, contract.min_load_bits),
        ("stores", c.stores, contract.min_store_bits),
    ):
        if (share := traffic.share(bits)) < MOST:
            counts = ", ".join(f"{n} of {width} bit" for width, n in sorted(traffic.accesses.items(), reverse=True))
            allowed = f"{MOST:.0%} of the bytes by {bits} bit or more"
            broken.append((f"width of {what}", allowed, f"{share:.0%} ({counts})"))
    expected = contract.matrix_instructions.get(c.arch)
    if expected and any(map(HALF.search, c.arguments.values())) and set(c.matrix) != {expected}:
        kinds = ", ".join(f"{count} {kind}" for kind, count in c.matrix.items())
        broken.append(("tensor-core instructions", f"{expected} alone", kinds or "none"))
    return broken
