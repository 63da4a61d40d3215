"""Ship a model four ways, and see what each costs at start-up and under load.

After reading it you can export a model, compile it into a package that needs no Python code of ours or yours, record
the environment that it was made in, and refuse to load it in another.

Needs: the packages of this workspace, a C++ compiler; for the package with our CUDA C++ operators also
`./packages/cuda-ops`. A CPU is enough; a GPU is used where there is one. No download. Disk: 200 MB below --out.
Time: a minute with --quick, some minutes without.

    python examples/deployment.py --quick --out served

The last lines are a table of the four ways, and two sentences that are computed from it.
"""

# %% Imports
# The process that serves a package imports this file too, and must not need the model's code: so our packages are
# imported where they are used.
from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WAYS = ("eager", "compile", "native", "cuda")
QUICK = {"dim": 64, "num_layers": 1, "num_heads": 4, "length": 64, "requests": 40}
FULL = {"dim": 512, "num_layers": 6, "num_heads": 8, "length": 256, "requests": 400}
MOST = 8
"""The largest batch that is admitted."""


# %% The model and its requests
# A language model with fixed weights reads the source of Python's argparse, byte by byte.
def model_of(sizes: dict[str, Any], folder: Path) -> torch.nn.Module:
    """The model with the weights in the folder, which it makes where there are none."""
    from kernel_pytorch.models import LanguageModel

    torch.manual_seed(0)
    shape = {name: sizes[name] for name in ("num_layers", "num_heads")}
    model = LanguageModel(256, sizes["dim"], **shape).eval().requires_grad_(False)
    weights = folder / "weights.pt"
    if weights.exists():
        model.load_state_dict(torch.load(weights, weights_only=True))
    else:
        torch.save(model.state_dict(), weights)
    gpu = sizes["device"] == "cuda"
    return model.to(sizes["device"], torch.bfloat16 if gpu else torch.float32)


def batch(sizes: dict[str, Any], rows: int) -> Tensor:
    """Windows of a text, `(rows, length)`."""
    text = Path(argparse.__file__).read_bytes()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, sizes["length"], 101)
    return windows[:rows].clone(memory_format=torch.contiguous_format).to(sizes["device"])  # strides are checked too


# %% Export and package
# The batch is a dynamic dimension with the range that the server admits. Two rows are the example: sizes 0 and 1 would
# be taken as constants. `check_lowerbound`: the compiled code works for one row, and its check would refuse it.
# --8<-- [start:package]
def package(model: torch.nn.Module, tokens: Tensor, file: Path) -> None:
    """Compile a model into a file that runs without Python."""
    rows = torch.export.Dim("rows", min=1, max=MOST)
    program = torch.export.export(model, (tokens,), dynamic_shapes=({0: rows},))
    options = {"aot_inductor.check_lowerbound": False}
    torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=options)
    # --8<-- [end:package]


# %% The environment of a package
# A package runs with the torch, device and instruction set that it was compiled for. Elsewhere it may fail to load,
# crash with an illegal instruction, or give other numbers; so a record is stored beside it, and compared before
# loading.
# --8<-- [start:record]
def surroundings(device: str) -> dict[str, Any]:
    """The versions and devices that a package depends on."""
    gpu = device == "cuda"
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "capability": list(torch.cuda.get_device_capability()) if gpu else torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda if gpu else None,
    }


def check_surroundings(record: dict[str, Any], device: str) -> None:
    """Raise RuntimeError if a package was made in another environment; the message names each difference."""
    here = surroundings(device)
    different = [f"{name} is {here[name]!r}, made with {record[name]!r}" for name in here if here[name] != record[name]]
    if different:
        raise RuntimeError(f"the package does not fit this machine: {'; '.join(different)}; make it again here")
    # --8<-- [end:record]


# %% Build
# Each in its own process, like on a build machine: its first call compiles with empty caches.
def build(way: str, folder: Path, sizes: dict[str, Any]) -> float:
    """Make the files of one way; return the seconds it took."""
    begin = time.perf_counter()
    model, tokens = model_of(sizes, folder), batch(sizes, 2)
    with torch.no_grad():
        if way == "compile":
            compiled = torch.compile(model, dynamic=True, fullgraph=True)
            for rows in (2, 1):  # a batch of one gets a separate graph
                compiled(batch(sizes, rows))
            (folder / "caches.bin").write_bytes(torch.compiler.save_cache_artifacts()[0])
        elif way == "native":
            package(model.use(level="native"), tokens, folder / "native.pt2")
        elif way == "cuda":
            import kernel_pytorch.cuda_ops as operators

            package(model.use(level="cuda"), tokens, folder / "cuda.pt2")
            # The program names our operators and does not hold them: their library is shipped beside it.
            shutil.copy(Path(operators.__file__).with_name("_library.so"), folder / "operators.so")
    (folder / f"{way}.json").write_text(json.dumps(surroundings(sizes["device"]), indent=1))
    return time.perf_counter() - begin


# %% Serve
# In a fresh process. `native` and `cuda` import torch and nothing of ours.
# --8<-- [start:load]
def load(way: str, folder: Path, sizes: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The function that answers requests."""
    if way == "eager":
        return model_of(sizes, folder)
    check_surroundings(json.loads((folder / f"{way}.json").read_text()), sizes["device"])
    if way == "compile":
        torch.compiler.load_cache_artifacts((folder / "caches.bin").read_bytes())
        return torch.compile(model_of(sizes, folder), dynamic=True, fullgraph=True)
    if way == "cuda":
        torch.ops.load_library(folder / "operators.so")  # before the package, which looks for their schemas
    return torch._inductor.aoti_load_package(str(folder / f"{way}.pt2"))
    # --8<-- [end:load]


def serve(way: str, folder: Path, sizes: dict[str, Any], begin: float) -> dict[str, Any]:
    """Load, warm up, answer requests; `begin` is when the process was started."""
    found: dict[str, Any] = {"import": time.time() - begin}
    answer = load(way, folder, sizes)
    found["load"] = time.time() - begin - found["import"]
    with torch.no_grad():
        answer(batch(sizes, 2))
        found["first"] = time.time() - begin - found["import"] - found["load"]
        # --8<-- [start:warm]
        for rows in range(1, MOST + 1):  # every size that is admitted: 1 compiles again, and lazy code is loaded
            answer(batch(sizes, rows))
        torch.compiler.set_stance("fail_on_recompile")  # from here on an error, where it would be a slow answer
        # --8<-- [end:warm]
        expected = torch.load(folder / "expected.pt", weights_only=True)
        errors = [float((answer(batch(sizes, rows)).cpu().float() - y).abs().max()) for rows, y in expected.items()]
        found["error"] = max(errors) / max(float(y.abs().max()) for y in expected.values())
        found |= under_load(answer, sizes)
    if way in ("native", "cuda"):  # what a server in C++ calls; the function in Python loads the compiler, too
        begin = time.time()
        torch._C._aoti.AOTIModelPackageLoader(str(folder / f"{way}.pt2"), "model", False, 1, -1)
        found["loader"] = time.time() - begin
    found["ours"] = sorted(name for name in sys.modules if name.startswith("kernel_pytorch."))
    try:
        answer(batch(sizes, MOST + 1))
        found["beyond"] = "answered"
    except RuntimeError as error:
        found["beyond"] = str(error).strip().partition("\n")[0]
    return found


# %% Load
# Two clients, each of which sends its next request when the last one was answered, so the load is bounded. One request
# is computed at a time: Dynamo is not thread-safe (pytorch#118260), and two threads in one compiled module make its
# guards fail now and then.
def under_load(answer: Callable[[Tensor], Tensor], sizes: dict[str, Any]) -> dict[str, float]:
    """Median and 99th percentile of seconds a request, with batches of 1 to `MOST` rows."""
    lock = threading.Lock()

    def client(first: int) -> list[float]:
        times = []
        with torch.no_grad():
            for i in range(sizes["requests"] // 2):
                tokens = batch(sizes, (first + i) % MOST + 1)
                begin = time.perf_counter()
                with lock:
                    answer(tokens).cpu()
                times.append(time.perf_counter() - begin)
        return times

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        times = sorted(t for part in pool.map(client, (0, MOST // 2)) for t in part)
    return {"p50": statistics.median(times), "p99": times[int(0.99 * len(times))]}


# %% Everything
def child(*arguments: str, folder: Path, cache: str) -> Any:
    """Run this file in a fresh process with separate caches; return what it printed as JSON."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / cache),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else each process compiles test programs for the instruction set (#191715)
        "AOTI_RUNTIME_CHECK_INPUTS": "1",  # else a package accepts any sizes and dtypes
    }
    command = [sys.executable, __file__, "--out", str(folder), *arguments]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if ran.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{ran.stderr[-3000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def report(built: dict[str, float], served: dict[str, dict[str, Any]]) -> None:
    """Print the table, and what it says about start-up."""
    print(f"{'way':8} {'build s':>8} {'import s':>9} {'load s':>7} {'first s':>8} {'p50 ms':>7} {'p99 ms':>7}  error")
    for way, s in served.items():
        start = f"{s['import']:9.2f} {s['load']:7.2f} {s['first']:8.2f}"
        print(f"{way:8} {built[way]:8.1f} {start} {s['p50'] * 1e3:7.2f} {s['p99'] * 1e3:7.2f}  {s['error']:.0e}")
    loaders = [f"{way} {s['loader']:.3f} s" for way, s in served.items() if "loader" in s]
    print(f"Loading a package without Python's wrapper: {', '.join(loaders)}.")
    until = sorted((s["import"] + s["load"] + s["first"], way) for way, s in served.items())
    starts = ", ".join(f"{way} {seconds:.1f} s" for seconds, way in until)
    fastest = min(served, key=lambda way: served[way]["p50"])
    gain = served["eager"]["p50"] / served[fastest]["p50"]
    print(f"To the first answer of a fresh process: {starts}. Median latency: {fastest} at {gain:.2f}x of eager.")


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Build and serve each way, and print the table; return the figures of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few requests")
    parser.add_argument("--out", type=Path, help="a folder for packages; a temporary one if left out")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.out is None:
        with tempfile.TemporaryDirectory() as folder:
            return main([*(argv or sys.argv[1:]), "--out", folder])
    folder = arguments.out.resolve()
    if arguments.build or arguments.serve:  # a process of `child`
        sizes = json.loads((folder / "sizes.json").read_text())
        made = build(arguments.build, folder, sizes) if arguments.build else None
        found = serve(arguments.serve[0], folder, sizes, float(arguments.serve[1])) if arguments.serve else made
        print(json.dumps(found))
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {**(QUICK if arguments.quick else FULL), "device": "cuda" if torch.cuda.is_available() else "cpu"}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    (folder / "weights.pt").unlink(missing_ok=True)
    model = model_of(sizes, folder)
    with torch.no_grad():
        expected = {rows: model.use(())(batch(sizes, rows)).cpu().float() for rows in (1, 3, MOST)}
    torch.save(expected, folder / "expected.pt")
    ways = [way for way in WAYS if way != "cuda" or importlib.util.find_spec("kernel_pytorch.cuda_ops")]
    if "cuda" not in ways:
        print("cuda is left out: pip install ./packages/cuda-ops")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda way: child("--build", way, folder=folder, cache=f"{way}-b"), ways[1:])
        built = {"eager": 0.0, **dict(zip(ways[1:], made, strict=True))}
    served = {way: child("--serve", way, str(time.time()), folder=folder, cache=f"{way}-s") for way in ways}
    print(f"packages, caches and records: {folder}")
    report(built, served)
    return served


if __name__ == "__main__":
    main()
