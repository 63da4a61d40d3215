"""Reading PTX: how wide the accesses are, what rounds to tf32, what touches float64, what the tensor cores do."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from typing import Any

from kernel_pytorch.harness.static.compiled import Traffic

DEBUG_SECTIONS = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{[^}]*\}", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Directives, declarations and labels start otherwise; the predicate is left out.
INSTRUCTION = re.compile(r"(?:^|[;{}])\s*(?:@!?%?\w+\s+)?([a-z]\w*\.[^;]*)", re.MULTILINE)
ACCESS = re.compile(r"(?P<verb>ld|st)(?P<suffix>(?:\.[\w:]+)+)\s")
ELSEWHERE = re.compile(r"\.(?:shared|local|param|const)\b")  # an access that names no memory is to global memory
VECTOR = re.compile(r"\.v(\d)")
TYPE = re.compile(r"\.[bfsu](\d+)")
ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\S*global\S*\s.*?,.*?,\s*(?P<bytes>0x[0-9a-f]+|\d+)")
BULK_COPY = re.compile(r"cp\.(?:reduce\.)?async\.bulk\.(?:tensor\S*?\.)?(?P<target>shared|global)")
TF32 = re.compile(r"[.:]tf32\b")
F64 = re.compile(r"\.f64\b")
MATRIX = {
    "mma": re.compile(r"mma\.s|wmma\.mma"),
    "wgmma": re.compile(r"wgmma\.mma_async"),
    "tcgen05": re.compile(r"tcgen05\.mma"),
}


def count_instructions(ptx: str) -> dict[str, Any]:
    """Count what the contract speaks of in the PTX of one kernel; the keys are fields of `Compiled`."""
    accesses: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    bulk: Counter[str] = Counter()
    matrix: Counter[str] = Counter()
    tf32 = f64 = async_copies = 0
    for code in INSTRUCTION.findall(COMMENT.sub("", ptx)):
        instruction = " ".join(code.split())
        if found := ACCESS.match(instruction):
            vector, kind = VECTOR.search(found["suffix"]), TYPE.findall(found["suffix"])  # of `.v4.b32` and the like
            bits = (int(vector[1]) if vector else 1) * (int(kind[-1]) if kind else 0)
            accesses[found["verb"]][bits] += not ELSEWHERE.search(found["suffix"])
        elif found := ASYNC_COPY.match(instruction):
            async_copies += 1
            accesses["ld"][8 * int(found["bytes"], 0)] += 1
        elif found := BULK_COPY.match(instruction):
            bulk[found["target"]] += 1
        matrix.update(kind for kind, pattern in MATRIX.items() if pattern.match(instruction))
        tf32 += bool(TF32.search(instruction))
        f64 += bool(F64.search(instruction)) and not instruction.startswith("ld.param")
    return {
        "loads": Traffic(accesses=dict(+accesses["ld"]), bulk=bulk["shared"]),
        "stores": Traffic(accesses=dict(+accesses["st"]), bulk=bulk["global"]),
        "tf32": tf32,
        "f64": f64,
        "matrix": dict(matrix),
        "async_copies": async_copies,
    }


def code_digest(ptx: str, name: str) -> str:
    """The digest of the code of the kernel of that name: of every line but those that only debuggers read."""
    code = DEBUG_SECTIONS.sub("", COMMENT.sub("", ptx)).replace(name, "kernel")
    lines = (line.strip() for line in code.splitlines())
    kept = [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func"))]
    return short_digest("\n".join(kept))


def short_digest(value: Any) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a value as Python prints it."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
