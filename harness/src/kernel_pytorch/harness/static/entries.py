"""Taking the PTX of a CUDA source apart into its kernels, and reading what is said about each: name, types, warps."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from dataclasses import dataclass

from kernel_pytorch.harness.static.limits import WARP
from kernel_pytorch.harness.static.resources import ToolMissingError

FUNCTION = re.compile(r"^(?:\.\w+\s+)*\.(?P<kind>entry|func)\s+(?:\([^)]*\)\s*)?(?P<name>[\w$]+)", re.MULTILINE)
WORD = re.compile(r"[\w$]+")
BLOCK = re.compile(r"^\.(?:max|req)ntid\s+(?P<sizes>\d+(?:\s*,\s*\d+)*)", re.MULTILINE)
SIZED_AT_LAUNCH = re.compile(r"^\.extern\s+\.shared\b.*?(?P<name>[\w$]+)\[\s*\]\s*;", re.MULTILINE)
# The last part of a type's name -> the name that Triton gives it. Vectors, as in float4, are what they hold.
TYPES = {
    **dict.fromkeys(("float", "float1", "float2", "float3", "float4"), "fp32"),
    **dict.fromkeys(("double", "double1", "double2", "double3", "double4"), "fp64"),
    **dict.fromkeys(("__half", "__half2", "__half_raw", "Half"), "fp16"),
    **dict.fromkeys(("__nv_bfloat16", "__nv_bfloat162", "__nv_bfloat16_raw", "BFloat16"), "bf16"),
    **dict.fromkeys(("__nv_fp8_e4m3", "Float8_e4m3fn"), "fp8e4nv"),
    **dict.fromkeys(("__nv_fp8_e5m2", "Float8_e5m2"), "fp8e5"),
}
ANONYMOUS = "(anonymous namespace)::"


@dataclass(frozen=True)
class Entry:
    """One kernel in PTX.

    Attributes:
        symbol: its name in PTX and machine code.
        name: of the function with the namespace that it is in, unless that is the outermost: `rms_norm::forward_naive`.
        template: the template arguments, "float, 4"; None if it is no template.
        types: what its data is: types in the template arguments, and those that pointers point to.
        code: its PTX and that of the functions it calls.
        functions: symbols of these functions.
        warps: of the largest block that it may be launched with; None where `__launch_bounds__` does not say.
        dynamic_shared: whether it uses shared memory whose size the launch decides.
    """

    symbol: str
    name: str
    template: str | None
    types: dict[str, str]
    code: str
    functions: tuple[str, ...]
    warps: int | None
    dynamic_shared: bool


def entries(ptx: str) -> list[Entry]:
    """The kernels of a PTX file, in its order."""
    found = list(FUNCTION.finditer(ptx))
    ends = [following.start() for following in found[1:]] + [len(ptx)]
    texts: dict[str, str] = {}
    for function, end in zip(found, ends, strict=False):  # a function may be declared before it is defined
        texts[function["name"]] = texts.get(function["name"], "") + ptx[function.start() : end]
    functions = {function["name"] for function in found if function["kind"] == "func"}
    dynamic = set(SIZED_AT_LAUNCH.findall(ptx))
    symbols = [function["name"] for function in found if function["kind"] == "entry"]
    return [_entry(symbol, texts, functions, dynamic) for symbol in symbols]


def _entry(symbol: str, texts: dict[str, str], functions: set[str], dynamic: set[str]) -> Entry:
    called: list[str] = []
    words = set(WORD.findall(texts[symbol]))
    while new := sorted((words & functions) - set(called)):
        called += new
        words = words.union(*(WORD.findall(texts[name]) for name in new))
    bounds = BLOCK.search(texts[symbol])
    threads = math.prod(int(size) for size in bounds["sizes"].split(",")) if bounds else 0
    name, template, parameters = parse_signature(demangle(symbol))
    return Entry(
        symbol,
        name,
        template,
        types={
            **{f"template {word}": kind for word, kind in _types(template or "")},
            **{f"{i}": f"*{kind}" for i, text in enumerate(parameters) if "*" in text for _, kind in _types(text)},
        },
        code="\n".join(texts[name] for name in (symbol, *called)),
        functions=tuple(called),
        warps=-(-threads // WARP) or None,
        dynamic_shared=not dynamic.isdisjoint(words),
    )


def _types(text: str) -> list[tuple[str, str]]:
    return [(word, TYPES[word]) for word in dict.fromkeys(WORD.findall(text)) if word in TYPES]


@functools.cache
def _cxx_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libstdc++.so.6")
    except OSError as error:
        raise ToolMissingError(
            f"the names of CUDA kernels are read by libstdc++.so.6, not found here: {error}"
        ) from error


def demangle(symbol: str) -> str:
    """A symbol as it was written in C++; unchanged if it is no C++ name.

    By the C++ library that torch itself needs: c++filt and cu++filt are not on every machine, and print differently.
    """
    if not symbol.startswith("_Z"):  # extern "C"; the library would read a name of one letter as a type
        return symbol
    function = _cxx_library().__cxa_demangle
    function.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = function(symbol.encode(), None, None, ctypes.byref(status))
    if not address:
        return symbol
    text = ctypes.string_at(address).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(address)
    return text


def parse_signature(text: str) -> tuple[str, str | None, list[str]]:
    """Name, template arguments (None if there are none) and parameters of a demangled function.

    Of namespaces the innermost stays, unless it is the only one: `void a::b::scale<float, 4>(float const*, int)` gives
    `("b::scale", "float, 4", ["float const*", "int"])`, and `void a::scale(int)` gives `("scale", None, ["int"])`.
    """
    text = text.replace(ANONYMOUS, "").strip()
    parameters: list[str] = []
    if text.endswith(")"):
        start = _opening(text)
        parameters = _split(text[start + 1 : -1])
        text = text[:start]
    template = None
    if text.endswith(">"):
        start = _opening(text)
        template = text[start + 1 : -1].strip()
        text = text[:start]
    path = text.rpartition(" ")[2].split("::")
    return "::".join(path[-2:] if len(path) > 2 else path[-1:]), template, parameters


def _opening(text: str) -> int:
    """Where the bracket opens that the last character closes."""
    depth = 0
    for place in range(len(text) - 1, -1, -1):
        depth += (text[place] in ")>") - (text[place] in "(<")
        if depth == 0:
            return place
    raise ValueError(f"brackets do not match in {text!r}")


def _split(text: str) -> list[str]:
    """Parts between the commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "(<") - (character in ")>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
