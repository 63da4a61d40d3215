"""Reading PTX: how wide the accesses are, what rounds to tf32, what touches float64, what the tensor cores do."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from kernel_pytorch.harness.static.compiled import Traffic

DEBUG_SECTIONS = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{[^}]*\}", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
PREDICATE = re.compile(r"^@!?%?\w+\s+")
ACCESS = re.compile(r"^(?P<verb>ld|st)(?P<suffix>(?:\.[\w:]+)+)\s")
ELSEWHERE = {"shared", "local", "param", "const"}
# An access that names no space is to global memory, unless its address was made of another: `mapa` points to the shared
# memory of a neighbour in the cluster.
MADE_ELSEWHERE = re.compile(r"^(?:mapa|cvta\.shared|cvta\.local)[\w.:]*\s+(?P<made>%\w+)")
SUM = re.compile(r"^add[\w.]*\s+(?P<made>%\w+),\s*(?P<of>%\w+)")
ADDRESS = re.compile(r"\[\s*(?P<of>%\w+)")
VECTOR = re.compile(r"\.v(\d)")
TYPE = re.compile(r"\.[bfsu](\d+)")
ASYNC_COPY = re.compile(r"^cp\.async\.c[ag]\.shared\S*global\S*\s.*?,.*?,\s*(?P<bytes>0x[0-9a-f]+|\d+)")
BULK_COPY = re.compile(r"^cp\.(?:reduce\.)?async\.bulk\.(?:tensor\S*?\.)?(?P<target>shared|global)")
TF32 = re.compile(r"[.:]tf32\b")
F64 = re.compile(r"\.f64\b")
MATRIX = {
    "mma": re.compile(r"^(?:mma\.s|wmma\.mma)"),
    "wgmma": re.compile(r"^wgmma\.mma_async"),
    "tcgen05": re.compile(r"^tcgen05\.mma"),
}


@dataclass(frozen=True)
class Instructions:
    """What was counted; the attributes are those of `Compiled`."""

    loads: Traffic
    stores: Traffic
    tf32: int
    f64: int
    matrix: dict[str, int]
    async_copies: int


def count_instructions(ptx: str) -> Instructions:
    """Count what the contract speaks of in the PTX of one kernel."""
    accesses: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    bulk: Counter[str] = Counter()
    matrix: Counter[str] = Counter()
    tf32 = f64 = async_copies = 0
    elsewhere: set[str] = set()
    for statement in _statements(ptx):
        if found := ACCESS.match(statement):
            accesses[found["verb"]][_bits(found["suffix"])] += _is_global(statement, found["suffix"], elsewhere)
        elif register := _made_elsewhere(statement, elsewhere):
            elsewhere.add(register)
        elif found := ASYNC_COPY.match(statement):
            async_copies += 1
            accesses["ld"][8 * int(found["bytes"], 0)] += 1
        elif found := BULK_COPY.match(statement):
            bulk[found["target"]] += 1
        matrix.update(kind for kind, pattern in MATRIX.items() if pattern.match(statement))
        tf32 += bool(TF32.search(statement))
        f64 += bool(F64.search(statement)) and not statement.startswith("ld.param")
    loads = Traffic(accesses=dict(+accesses["ld"]), bulk=bulk["shared"])
    stores = Traffic(accesses=dict(+accesses["st"]), bulk=bulk["global"])
    return Instructions(loads, stores, tf32, f64, dict(matrix), async_copies)


def code_digest(ptx: str, name: str) -> str:
    """The digest of a kernel's code, whatever its name: of every line but those that only debuggers read.

    Args:
        ptx: the code.
        name: of the kernel in it.
    """
    code = DEBUG_SECTIONS.sub("", COMMENT.sub("", ptx)).replace(name, "kernel")
    lines = (line.strip() for line in code.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func"))]
    return short_digest("\n".join(kept))


def short_digest(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a value as Python prints it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _statements(ptx: str) -> list[str]:
    """Instructions without predicate, each in one line; what leads up to one is left out.

    That is directives and declarations, which start with a full stop, labels, and the brackets around them.
    """
    chunks = COMMENT.sub("", ptx).split(";")
    codes = (" ".join(dropwhile(_leads_up, map(str.strip, chunk.splitlines()))) for chunk in chunks)
    return [PREDICATE.sub("", code.lstrip("{} \t")) for code in codes if code]


def _leads_up(line: str) -> bool:
    code = line.lstrip("{}() \t")
    return not code or code.startswith(".") or code.endswith(":")


def _made_elsewhere(statement: str, elsewhere: set[str]) -> str:
    """The register that a statement makes a generic address of shared or local memory; empty if it makes none."""
    if found := MADE_ELSEWHERE.match(statement):
        return found["made"]
    found = SUM.match(statement)
    return found["made"] if found and found["of"] in elsewhere else ""


def _is_global(statement: str, suffix: str, elsewhere: set[str]) -> bool:
    """Whether an access is to global memory; `elsewhere` holds the registers that point to another."""
    spaces = set(re.split(r"\.|::", suffix))
    if "global" in spaces:
        return True
    address = ADDRESS.search(statement)
    return spaces.isdisjoint(ELSEWHERE) and not (address and address["of"] in elsewhere)


def _bits(suffix: str) -> int:
    """Width of `.v4.b32` and the like."""
    vector, kind = VECTOR.search(suffix), TYPE.findall(suffix)
    return (int(vector[1]) if vector else 1) * (int(kind[-1]) if kind else 0)
