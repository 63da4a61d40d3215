"""Holding compiled kernels against their contracts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.static.compiled import MOST, Compiled, Traffic
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
    found = list(found)
    broken = []
    for compiled in found:
        contract = next((technique.contracts[key] for key in _contracts(technique, compiled)), KernelContract())
        where = f"{compiled.configuration}; {compiled.case}"
        broken += [
            Violation(technique.name, compiled.kernel, compiled.arch, where, *rule)
            for rule in _broken_rules(compiled, contract)
        ]
    if not complete:
        return broken
    unknown = sorted(set(technique.contracts) - {key for compiled in found for key in _contracts(technique, compiled)})
    return broken + [Violation(technique.name, name, "", "", "launches", "some", "none") for name in unknown]


def _contracts(technique: Technique, compiled: Compiled) -> list[str]:
    """Names of the contracts that speak of a kernel: patterns of its constants first, then its bare name."""
    constants = " ".join(f"{name}={value}" for name, value in compiled.constants.items())
    instantiation = f"{compiled.kernel}<{compiled.constants.get('template', constants)}>"
    patterns = [key for key in technique.contracts if "<" in key and fnmatchcase(instantiation, key)]
    return patterns + [key for key in technique.contracts if key == compiled.kernel]


def _broken_rules(compiled: Compiled, contract: KernelContract) -> Iterator[tuple[str, str, str]]:
    """Rule, what is allowed, what was found."""
    if compiled.error:
        yield "compiles", "no error", compiled.error
    elif compiled.float64_scalars:
        # The rest has been said about the same kernel with float32 scalars.
        yield from _above("float64 instructions", compiled.f64, _allowed_f64(compiled, contract))
    else:
        in_cuda = compiled.language == "CUDA"  # ptxas refuses what is too much for sm_80, and lets it pass for sm_90
        limit = SHARED_DECLARED if in_cuda else ARCHITECTURES[compiled.arch].shared_bytes_per_block
        yield from _above("shared memory in bytes", compiled.shared_bytes, limit)
        yield from _above("spilled bytes", compiled.spill_bytes, contract.max_spill_bytes)
        yield from _above("registers", compiled.registers, contract.max_registers)
        yield from _above("tf32 instructions", compiled.tf32, None if contract.allow_tf32 else 0)
        yield from _above("float64 instructions", compiled.f64, _allowed_f64(compiled, contract))
        if compiled.bench and not in_cuda:
            yield from _narrow("loads", compiled.loads, contract.min_load_bits)
            yield from _narrow("stores", compiled.stores, contract.min_store_bits)
            yield from _matrix(compiled, contract)


def _allowed_f64(compiled: Compiled, contract: KernelContract) -> int | None:
    if any("fp64" in kind for kind in compiled.arguments.values()):
        return None
    return contract.max_f64 + F64_PER_SCALAR * len(compiled.float64_scalars)


def _above(rule: str, found: int, allowed: int | None) -> Iterator[tuple[str, str, str]]:
    if allowed is not None and found > allowed:
        yield rule, f"{allowed}", f"{found}"


def _narrow(what: str, traffic: Traffic, bits: int) -> Iterator[tuple[str, str, str]]:
    share = traffic.share(bits)
    if share < MOST:
        counts = ", ".join(f"{count} of {width} bit" for width, count in sorted(traffic.accesses.items(), reverse=True))
        yield f"width of {what}", f"{MOST:.0%} of the bytes by {bits} bit or more", f"{share:.0%} ({counts})"


def _matrix(compiled: Compiled, contract: KernelContract) -> Iterator[tuple[str, str, str]]:
    expected = contract.matrix_instructions.get(compiled.arch)
    half = any(HALF.search(kind) for kind in compiled.arguments.values())
    if expected is not None and half and set(compiled.matrix) != {expected}:
        found = ", ".join(f"{count} {kind}" for kind, count in compiled.matrix.items())
        yield "tensor-core instructions", f"{expected} alone", found or "none"
