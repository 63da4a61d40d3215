"""Building the library, and what is said where it cannot be built or loaded."""

import json
import os
import re
import shutil

import build_compile
import build_library
import pytest

from kernel_pytorch.cuda_ops import LIBRARY
from kernel_pytorch.cuda_ops.library import INSTALL, load

CSRC = build_library.Path(build_library.__file__).parent / "csrc"


def test_the_library_is_of_the_present_sources():
    assert build_library.digest(CSRC) == LIBRARY.digest, "csrc/ has changed: install the package again"


SOURCES = {
    "include/kernel_pytorch/index.h": "int index;",
    "include/kernel_pytorch/cpu/isa.h": "int isa;",
    "include/kernel_pytorch/cuda/layout.h": '#include "kernel_pytorch/index.h"',
    "include/kernel_pytorch/cuda/unused.cuh": "int unused;",
    "norm/norm.h": '#include "kernel_pytorch/cpu/isa.h"\n#include "kernel_pytorch/cuda/layout.h"',
    "norm/operator.cpp": '#include "norm.h"',
    "norm/cpu.cpp": '#include "norm.h"\nconst char* text = "// no comment";',
    "norm/cuda.cu": '#include "kernels/1_naive.cuh"\n#include "norm.h"',
    "norm/kernels/1_naive.cuh": '#include "../norm.h"',
    "other/operator.cpp": "int operator_;",
    "other/cpu.cpp": '#include "kernel_pytorch/index.h"',
    "other/cuda.cu": "int cuda;",
}
BY_BOTH = {"norm/norm.h", "norm/operator.cpp"}
BY_CPU = BY_BOTH | {"include/kernel_pytorch/cpu/isa.h", "norm/cpu.cpp"}
BY_CUDA = BY_BOTH | {"include/kernel_pytorch/cuda/layout.h", "include/kernel_pytorch/index.h"}
BY_CUDA |= {"norm/cuda.cu", "norm/kernels/1_naive.cuh"}


@pytest.mark.parametrize("file", SOURCES)
def test_a_digest_changes_with_what_runs_on_its_device_and_with_nothing_else(file, tmp_path):
    def digests():
        return build_library.operator_digests(tmp_path)["norm"]

    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    before = digests()
    (tmp_path / file).write_text(f"// said\n\n{SOURCES[file]}  /* in other\n words */\n")
    assert digests() == before
    (tmp_path / file).write_text(SOURCES[file] + "\nint changed;\n")
    after = digests()
    assert (before["cpu"] != after["cpu"]) == (file in BY_CPU)
    assert (before["cuda"] != after["cuda"]) == (file in BY_CUDA)


def test_text_that_looks_like_a_comment_is_code(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    before = build_library.operator_digests(tmp_path)
    source = tmp_path / "norm/cpu.cpp"
    source.write_text(source.read_text().replace("no comment", "other text"))
    assert build_library.operator_digests(tmp_path)["norm"]["cpu"] != before["norm"]["cpu"]


def test_every_operator_has_a_digest_for_each_device():
    digests = LIBRARY.operators
    assert {"rms_norm", "bias_act"} <= digests.keys()
    assert len({value for of in digests.values() for value in of.values()}) == 2 * len(digests)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("find_torch", "torch was not found"), ("find_compiler", r"no C\+\+ compiler was found")],
)
def test_without_torch_or_compiler_importing_says_what_is_missing(missing, message, monkeypatch, tmp_path):
    monkeypatch.setattr(build_library, missing, lambda: None)
    record = build_library.build(tmp_path, tmp_path, tmp_path)
    assert message.replace("\\", "") in build_library.summary(record)
    with pytest.raises(ImportError, match=f"has no compiled library: {message}.*install") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_compiler_that_is_none_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-launcher g++")
    record = build_library.build(tmp_path, tmp_path, tmp_path)
    assert record["problem"].startswith("CXX: given 'no-launcher g++', which is no program; no C++ compiler was found")


WHERE = {
    "where.cpp": 'extern "C" const char* where() { return __FILE__; }\n',
    "where_on_cuda.cu": """
        __global__ void write(int* line) { *line = __LINE__; }
        extern "C" const char* where_on_cuda() { write<<<1, 1>>>(nullptr); return __FILE__; }
    """,
}


def build_small(folder, monkeypatch):
    """A library of a file each for CPU and CUDA; what is in it."""
    (folder / "csrc").mkdir(parents=True)
    archs = "sm_90a" if build_library.find_nvcc() else ""
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", archs)
    for name, text in WHERE.items():
        if archs or not name.endswith(".cu"):
            (folder / "csrc" / name).write_text(text)
    assert build_library.build(folder / "package", folder / "csrc", folder / "work")["problem"] is None
    return (folder / "package" / "_library.so").read_bytes()


def test_a_library_is_built_in_any_folder_and_does_not_name_it(monkeypatch, tmp_path):
    content = build_small(tmp_path / """it's a "quoted" $HOME & `more`""", monkeypatch)
    assert b"csrc/where.cpp" in content
    assert str(tmp_path).encode() not in content


def test_the_library_names_no_folder_of_the_machine_that_built_it():
    content = LIBRARY.file.read_bytes()
    package, folder_of_torch = build_library.Path(build_library.__file__).resolve().parent, build_library.find_torch()
    for folder in (package, package.parents[1], folder_of_torch, folder_of_torch.resolve()):
        assert str(folder).encode() not in content
    # Whichever machine that was.
    assert not re.search(rb"/[\x20-\x7e]+/(?:torch/include/torch|include/kernel_pytorch)/", content)


def test_a_compiler_behind_a_launcher(monkeypatch, tmp_path):
    launcher, compiler = tmp_path / "launcher", build_library.find_compiler()[-1]
    launcher.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/launched\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"{launcher} {compiler} -DOPTION")
    assert build_library.find_compiler() == [str(launcher), compiler, "-DOPTION"]
    build_small(tmp_path / "here", monkeypatch)
    assert f"{compiler} -DOPTION" in (tmp_path / "launched").read_text()


@pytest.mark.parametrize(
    "named", ["{0} -isystem /usr/include", "{0} -I /usr/include", "{0} --param x=1", "nice -n 10 {0}", "env FOO=1 {0}"]
)
def test_words_of_cxx_that_are_no_programs_stay_as_they_are(named, monkeypatch):
    compiler = build_library.find_compiler()[-1]
    words = named.format(compiler).split()
    monkeypatch.setenv("CXX", " ".join(words))
    found = build_library.find_compiler()
    assert found[1:] == words[1:]
    assert build_library._without_launcher(found)[0] == compiler


def test_a_cxx_that_is_no_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "'unbalanced")
    record = build_library.build(tmp_path, tmp_path, tmp_path)
    assert 'CXX: given "\'unbalanced", which is no program' in record["problem"]


def test_a_compiler_in_a_folder_with_a_space(monkeypatch, tmp_path):
    compiler = tmp_path / "a compiler"
    compiler.symlink_to(build_library.find_compiler()[-1])
    monkeypatch.setenv("CXX", str(compiler))
    assert build_library.find_compiler() == [str(compiler)]


def test_builds_with_other_settings_share_no_file(monkeypatch, tmp_path):
    torch_folder, compiler = build_library.find_torch(), build_library.find_compiler()
    other = tmp_path / "other"
    other.symlink_to(compiler[-1])
    choices = [
        ("objects", compiler, ()),
        ("sanitized", compiler, ()),
        ("objects", [str(other)], ()),
        ("objects", [*compiler, "-DOPTION"], ()),
        ("objects", compiler, ("sm_80",)),
    ]
    folders = [build_library.folder_for(tmp_path, kind, torch_folder, c, None, archs) for kind, c, archs in choices]
    assert len(set(folders)) == len(choices)
    assert folders[0] == build_library.folder_for(tmp_path, "objects", torch_folder, compiler)


@pytest.mark.parametrize("said", [build_library.NO_TORCH, build_library.NO_COMPILER, INSTALL])
def test_what_brings_a_library_does_not_take_a_wheel_without_one_from_a_cache(said):
    assert "pip install --force-reinstall --no-deps --no-cache-dir ./packages/cuda-ops" in said


def test_what_is_left_out_of_a_library_is_said_with_its_reason(monkeypatch):
    record = {"problem": None, "compiler": "c++", "nvcc": None, "archs": [], "instruction_sets": ["base"]}
    monkeypatch.delenv("KERNEL_PYTORCH_CUDA_ARCHS", raising=False)
    assert build_library.summary({**record, "sanitized": False}).endswith("no CUDA: nvcc was not found")
    assert build_library.summary({**record, "sanitized": True}).endswith("sanitizers watch CPU code alone")
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "")
    assert build_library.summary({**record, "sanitized": False}).endswith("KERNEL_PYTORCH_CUDA_ARCHS is empty")


def test_an_instruction_set_that_nobody_knows_is_named(monkeypatch):
    monkeypatch.setenv("KERNEL_PYTORCH_CPU_ISA", "avx1024")
    with pytest.raises(ImportError, match="KERNEL_PYTORCH_CPU_ISA: given 'avx1024'; allowed are base, avx2, avx512"):
        load(LIBRARY.file.parent)


def test_a_torch_without_a_stable_abi_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build_library, "find_torch", lambda: tmp_path)
    assert "torch 2.10 or later" in build_library.build(tmp_path, tmp_path, tmp_path)["problem"]


def test_a_folder_that_was_never_built_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("KERNEL_PYTORCH_LIBRARY", raising=False)
    with pytest.raises(
        ImportError, match=r"its build step was not run; in a checkout .*: pip install .* \./packages/cuda-ops"
    ):
        load(tmp_path)
    monkeypatch.setenv("KERNEL_PYTORCH_LIBRARY", "nowhere")
    with pytest.raises(ImportError, match="KERNEL_PYTORCH_LIBRARY is set to 'nowhere'"):
        load(tmp_path)


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    record = {"problem": None, "compiler": "", "nvcc": None, "archs": [], "instruction_sets": [], "sanitized": False}
    (tmp_path / "_library.json").write_text(json.dumps({**record, "digest": "", "operators": {}}))
    (tmp_path / "_library.so").write_text("no library")
    with pytest.raises(ImportError, match=r"_library\.so cannot be loaded by torch"):
        load(tmp_path)


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    (tmp_path / "wrong.cpp").write_text("this is no C++")
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "")
    with pytest.raises(build_library.BuildError, match=r"wrong\.cpp"):
        build_library.build(tmp_path / "package", tmp_path, tmp_path / "build")


def test_an_unknown_architecture_is_named(monkeypatch):
    nvcc = build_library.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    for arch in ("sm_1", "sm_75"):
        monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", f"sm_90a, {arch}")
        with pytest.raises(
            build_library.BuildError, match=rf"given '{arch}'; the kernels need sm_80, .* knows .*sm_90"
        ):
            build_library.wanted_archs(nvcc)
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "90a")
    with pytest.raises(build_library.BuildError, match=r"given '90a' \(did you mean sm_90a\?\); [^\n]*$"):
        build_library.wanted_archs(nvcc)
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "sm_90a;sm_80")
    assert build_library.wanted_archs(nvcc) == ["sm_90a", "sm_80"]
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "")
    assert build_library.wanted_archs(nvcc) == []


def test_architectures_are_listed_in_order_with_those_that_nvcc_does_not_list(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho sm_100 sm_120 sm_75 sm_80 sm_90\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "sm_70")
    with pytest.raises(build_library.BuildError, match=r"knows sm_80, sm_90, sm_90a, sm_100, sm_120$"):
        build_library.wanted_archs(str(nvcc))


def test_compiling_reports_each_file_and_stops_at_the_first_error(tmp_path, monkeypatch):
    def compile_object(csrc, command, target):
        if command == ["fails"]:
            raise build_library.BuildError("planted")

    monkeypatch.setattr(build_compile, "compile_object", compile_object)
    lines = []
    steps = [([], f"{i}.o") for i in range(5)]
    build_compile.compile_all(tmp_path, steps, lines.append)
    cores = len(os.sched_getaffinity(0))
    assert lines[0] == f"cuda-ops: compiling 5 files on {cores} cores, about 1 minute the first time"
    assert [line.split(" after ")[0] for line in lines[1:]] == [f"cuda-ops: {i} of 5 files" for i in range(1, 6)]
    assert sorted(line.rpartition(" ")[2] for line in lines[1:]) == [target for _, target in steps]
    with pytest.raises(build_library.BuildError, match="planted"):
        build_compile.compile_all(tmp_path, [(["fails"], "x.o"), *steps], lines.append)


def test_the_expected_minutes_count_cuda_files_for_each_architecture():
    cpp, cuda = (["c++"], "a.o"), (["nvcc", "-gencode=1", "-gencode=2"], "b.o")
    assert build_compile._expected([cpp], 1) == "about 1 minute"
    minutes = (2 * build_compile.SECONDS_OF_CUDA + build_compile.SECONDS_OF_CPP) * 100 / 2 / 60
    assert build_compile._expected([cpp, cuda] * 100, 2) == f"about {round(minutes)} minutes"


def test_an_installation_reports_its_progress_on_standard_error(monkeypatch, tmp_path, capfd):
    """Where `pip install -v` shows it at once."""
    hatch_build = pytest.importorskip("hatch_build", reason="needs hatchling")

    def build(package, csrc, work, *, say):
        say("cuda-ops: 1 of 1 files")
        return {"problem": "planted"}

    monkeypatch.setattr(build_library, "build", build)
    hook = hatch_build.CustomBuildHook(str(tmp_path), {}, None, None, str(tmp_path), "wheel", None)
    hook.initialize("editable", {})
    assert "cuda-ops: 1 of 1 files" in capfd.readouterr().err


def test_nothing_here_writes_messages_by_iostreams():
    """Beside a copy of libstdc++ that the compiler links statically, PyTorch's copy makes them crash."""
    sources = [file for file in CSRC.rglob("*") if file.suffix in (".h", ".cuh", ".cpp", ".cu")]
    found = [str(file) for file in sources if re.search(r"<(?:[io]?s?stream|fstream)>", file.read_text())]
    assert found == []
    assert b"stringstream" not in LIBRARY.file.read_bytes()


ARGUMENTS = "const Tensor& x, std::optional<Tensor>, double, double, std::string casting"
CRASHING = {
    "loading it: the process ended by SIGABRT": "__attribute__((constructor)) static void crash() { abort(); }",
    "calling its operator rms_norm: the process ended by SIGABRT": f"Tensor rms_norm({ARGUMENTS}) {{ abort(); }}",
    "raising an error of its operator rms_norm: the process ended by SIGABRT": f"""
        Tensor rms_norm({ARGUMENTS}) {{
          if (casting == "wrong") abort();
          return x;
        }}
    """,
    "raising an error of its operator rms_norm: AssertionError: no error was raised": f"""
        Tensor rms_norm({ARGUMENTS}) {{ return x; }}
    """,
    "calling its operator rms_norm: AssertionError: rms_norm of ones gave [[0.5": f"""
        Tensor rms_norm({ARGUMENTS}) {{ return torch::stable::subtract(x, x, 0.5); }}
    """,
}
OPERATOR = """
#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
{planted}
#if {registers}
std::tuple<Tensor, Tensor> both(const Tensor& x, std::optional<Tensor> w, double e, double o, std::string casting) {{
  return {{rms_norm(x, w, e, o, casting), x}};
}}
STABLE_TORCH_LIBRARY(kernel_pytorch_cuda, library) {{
  library.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting) -> (Tensor y, Tensor rstd)");
}}
STABLE_TORCH_LIBRARY_IMPL(kernel_pytorch_cuda, CPU, library) {{ library.impl("rms_norm", TORCH_BOX(&both)); }}
#endif
"""


@pytest.mark.parametrize("said", CRASHING)
def test_a_library_that_crashes_is_removed_and_the_reason_is_kept(said, monkeypatch, tmp_path):
    folder, package = tmp_path / "csrc" / "rms_norm", tmp_path / "package"
    folder.mkdir(parents=True)
    planted = CRASHING[said]
    (folder / "operator.cpp").write_text(OPERATOR.format(planted=planted, registers=int("rms_norm" in planted)))
    for name in ("cpu.cpp", "cuda.cu"):
        (folder / name).write_text("")
    package.mkdir()
    (package / "_library.so").write_text("of an earlier build")
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "")
    record = build_library.build(package, tmp_path / "csrc", tmp_path / "work")
    assert said in record["problem"]
    assert [file.name for file in package.iterdir()] == ["_library.json"]
    with pytest.raises(ImportError, match=r"does not work, and was removed: .*set CXX to another one, then install"):
        load(package)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("-static-libstdc++", None),
        ("-static-libstdc++ -static-libgcc", "raising an error of its operator rms_norm: the process ended by SIG"),
    ],
)
def test_a_compiler_that_links_its_runtime_statically(options, problem, monkeypatch, tmp_path):
    """Errors of a library with a libgcc of its own cannot reach PyTorch, whoever wrote it; all else works."""
    for part in ("include", "rms_norm"):
        shutil.copytree(CSRC / part, tmp_path / "csrc" / part)
    for source in CSRC.glob("*.cpp"):
        shutil.copy(source, tmp_path / "csrc")
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {build_library.find_compiler()[-1]} "$@" {options}\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("KERNEL_PYTORCH_CUDA_ARCHS", "")
    record = build_library.build(tmp_path, tmp_path / "csrc", tmp_path / "work")
    if problem is None:
        assert record["problem"] is None
        assert b"libstdc++.so" not in (tmp_path / "_library.so").read_bytes()
    else:
        assert problem in record["problem"]
