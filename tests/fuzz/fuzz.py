"""Call every operator and public function of this workspace with malformed arguments, in processes of their own.

    python tests/fuzz/fuzz.py [--count N] [--seed N] [--only TEXT] [--jobs N] [--instead FILE]
    python tests/fuzz/fuzz.py --replay 'CALL'

A call may return, or raise an ordinary exception. It may not end the process, hang, return memory that nothing was
written to, or raise the text of a C++ macro. Each failure is printed as a call that `--replay` runs again.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOGETHER = 250  # calls of a process, unless it ends before
PATIENCE = 120  # seconds for a call
PATIENCE_WITH_LARGE = 10  # where a tensor is so large that the call would be right to take for ever
MEMORY = 2**31  # bytes beside what the process has when it begins: the largest tensors cannot be allocated

M_PERTURB = -6  # mallopt(3)
MACRO = re.compile(r"API call failed at|/csrc/|/include/torch/|\.(?:cpp|cuh?|h):\d+")
OF_PYTORCH = re.compile(r"aten/src/|c10/|alloc_cpu\.cpp")


# In a process of its own.


def serve(options: argparse.Namespace) -> None:
    """Run calls `--first` to `--first + --count`; each is announced on standard output before it begins."""
    calls = _prepare(options)
    corpus = json.loads(Path(options.corpus).read_text())
    libc = ctypes.CDLL(None)
    for index in range(options.first, options.first + options.count):
        call = calls.changed(*_choice(corpus, options.seed, index))
        print(json.dumps({"index": index}), flush=True)
        outcome = _outcome(calls, call, libc)
        if outcome is not None:
            print(json.dumps({"index": index, "failure": outcome}), flush=True)


def _choice(corpus: list[Any], seed: int, index: int) -> tuple[dict[str, Any], random.Random]:
    chance = random.Random(f"{seed}/{index}")
    return chance.choice(corpus), chance


def _prepare(options: argparse.Namespace) -> Any:
    from kernel_pytorch.harness.interpreter import complete_interpreter, interpret_without_gpu

    interpret_without_gpu()
    complete_interpreter()
    sys.path.insert(0, str(Path(__file__).parent))
    import calls
    import torch

    from kernel_pytorch.harness.discovery import discover

    discover()
    if options.instead is not None:
        calls.load_file(options.instead)
    torch.set_num_threads(2)
    if "ASAN_OPTIONS" not in os.environ:  # which maps terabytes, and limits what is allocated by itself
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return calls


def _outcome(calls: Any, call: dict[str, Any], libc: Any) -> str | None:
    """What is wrong with the call, if the process is still there; it runs twice, in memory with other contents.

    A difference counts if it is there again: libraries choose the number of threads by the load of the machine, and
    another number may round otherwise.
    """
    for _ in range(2):
        results = []
        for byte in (0x55, 0xAA):
            result, problem = _run_once(calls, call, libc, byte)
            if problem is not None:
                return problem
            results.append(result)
        if results[0] == results[1]:
            return None
    return "returned memory that nothing was written to"


def _run_once(calls: Any, call: dict[str, Any], libc: Any, byte: int) -> tuple[Any, str | None]:
    """The result of the call or the name of what it raised, in memory filled with a byte; and what is wrong with it."""
    libc.mallopt(M_PERTURB, byte)
    faulthandler.dump_traceback_later(PATIENCE_WITH_LARGE if calls.is_large(call) else PATIENCE, exit=True)
    try:
        return _bytes(calls.run(call)), None
    except Exception as error:  # what else a call does with such arguments
        text = str(error)
        is_macro = MACRO.search(text) and not OF_PYTORCH.search(text)
        return type(error).__name__, f"raised {type(error).__name__}: {text}" if is_macro else None
    finally:
        faulthandler.cancel_dump_traceback_later()
        libc.mallopt(M_PERTURB, 0)


def _bytes(value: Any) -> Any:
    import torch

    if isinstance(value, (tuple, list)):
        return [_bytes(item) for item in value]
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None if isinstance(value, torch.Tensor) else repr(value)
    if value.is_quantized or value.numel() > 2**24 or value.untyped_storage().nbytes() == 0:
        return str(value.dtype)
    plain = value.detach().resolve_neg().resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


# In the process that watches.


def search(options: argparse.Namespace) -> int:
    """Run all calls, and print those that fail.

    Returns:
        The exit status: 1 if one has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        options.corpus = str(Path(folder, "corpus.json"))
        _spawn(options, "--record").check_returncode()
        corpus = json.loads(Path(options.corpus).read_text())
        corpus = [call for call in corpus if options.only in call["target"]]
        Path(options.corpus).write_text(json.dumps(corpus))
        targets = sorted({call["target"] for call in corpus})
        print(f"seed {options.seed}: {options.count} calls of {len(targets)} functions and operators", flush=True)
        starts = range(0, options.count, TOGETHER)
        with ThreadPoolExecutor(options.jobs) as pool:
            found = [f for part in pool.map(lambda first: _watch(options, first), starts) for f in part]
    sys.path.insert(0, str(Path(__file__).parent))
    import calls

    kinds: dict[tuple[str, str], int] = {}
    for index, failure in found:
        call = calls.changed(*_choice(corpus, options.seed, index))
        kind = (call["target"], failure.splitlines()[0])
        kinds[kind] = kinds.get(kind, 0) + 1
        if kinds[kind] <= 3:  # of each kind
            replay = json.dumps(call).replace("'", "'\\''")
            print(f"call {index} of {call['target']}: {failure}\n  python {sys.argv[0]} --replay '{replay}'")
    print(f"{len(found)} of {options.count} calls failed")
    return 1 if found else 0


def _watch(options: argparse.Namespace, first: int) -> list[tuple[int, str]]:
    """Run the calls from `first` on that go together, in as many processes as that takes."""
    found: list[tuple[int, str]] = []
    end = min(first + TOGETHER, options.count)
    while first < end:
        ended = _spawn(options, "--serve", f"--first={first}", f"--count={end - first}")
        last = None
        for line in ended.stdout.splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue  # what a library prints
            if "failure" in said:
                found.append((said["index"], said["failure"]))
            last = said["index"]
        if ended.returncode == 0:
            return found
        if last is None:
            raise SystemExit(f"a process ended before its first call:\n{ended.stderr}")
        if f"Timeout (0:00:{PATIENCE_WITH_LARGE})!" not in ended.stderr:
            said = "\n".join(ended.stderr.splitlines()[-30:])
            found.append((last, f"ended the process with status {ended.returncode}\n{said}"))
        first = last + 1
    return found


def _spawn(options: argparse.Namespace, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, *arguments, f"--seed={options.seed}", f"--corpus={options.corpus}"]
    command += [f"--instead={options.instead}"] if options.instead else []
    # Memory that was freed is to be filled when it is taken again, which the caches of threads do not do.
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0", "OMP_NUM_THREADS": "2", "PYTHONFAULTHANDLER": "1"}
    stderr = None if "--record" in arguments else subprocess.PIPE
    return subprocess.run(
        command, env=os.environ | tunables, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False
    )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=10_000, help="how many calls")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="of the random calls")
    parser.add_argument("--only", default="", help="a part of the name of what is called")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--instead", help="a Python file of other operators, with a function `examples(recorder)`")
    parser.add_argument("--replay", help="one call, as it was printed")
    for option in ("--serve", "--record"):
        parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        Path(options.corpus).write_text(json.dumps(_prepare(options).examples(options.instead)))
    elif options.serve:
        serve(options)
    elif options.replay is not None:
        outcome = _outcome(_prepare(options), json.loads(options.replay), ctypes.CDLL(None))
        print(outcome or "nothing is wrong with it")
        sys.exit(outcome is not None)
    else:
        sys.exit(search(options))


if __name__ == "__main__":
    main()
