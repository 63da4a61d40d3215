"""What holds the workspace together: names line up, the namespace stays open, the README tells the truth."""

import ast
import collections
import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_pytorch.harness.commands.report import results_files
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.models.page import headline as headline_of_models
from kernel_pytorch.harness.models.record import load as load_models
from kernel_pytorch.harness.page import headline
from kernel_pytorch.harness.readme import read_block
from kernel_pytorch.harness.results import load
from kernel_pytorch.harness.static import ARCHITECTURES
from kernel_pytorch.harness.static.inspection import has_kernels, triton_level
from kernel_pytorch.harness.static.record import load as load_static
from kernel_pytorch.harness.static.record import record_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
HARNESS = ROOT / "harness"
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def declaration(package: Path) -> dict:
    return {"entry-points": {}} | tomllib.loads((package / "pyproject.toml").read_text())["project"]


def is_technique(package: Path) -> bool:
    return "kernel_pytorch.techniques" in declaration(package)["entry-points"]


def test_the_namespace_has_no_init_file():
    stray = [path for project in [HARNESS, *PACKAGES] for path in project.glob("src/kernel_pytorch/__init__.py*")]
    assert not stray, f"hides every other package: {stray}"


def test_the_namespace_is_shared_by_all_packages():
    namespace = importlib.import_module("kernel_pytorch")
    assert namespace.__file__ is None
    assert {Path(folder) for folder in namespace.__path__} >= {
        project / "src" / "kernel_pytorch" for project in [HARNESS, *PACKAGES]
    }


SEEN = """
import importlib, json, sys, torch
seen = {{}}
for name in {names}:
    importlib.import_module(f"kernel_pytorch.{{name}}")
    seen[name] = [other for other in ("triton", "torch._dynamo", "transformers") if sys.modules.pop(other, None)]
print(json.dumps(seen))
"""


def test_importing_a_package_imports_neither_compilers_nor_transformers():
    names = [package.name.replace("-", "_") for package in PACKAGES]
    done = subprocess.run([sys.executable, "-c", SEEN.format(names=names)], capture_output=True, text=True, check=True)
    expected = {name: [] for name in names}
    if importlib.util.find_spec("triton"):
        expected["compile_recipes"] = ["triton"]  # torch.utils.flop_counter imports it
    assert json.loads(done.stdout) == expected


@each_package
def test_one_word_runs_through_folder_distribution_import_and_entry_point(package):
    project, word = declaration(package), package.name.replace("-", "_")
    assert project["name"] == f"kernel-pytorch-{package.name}"
    assert [folder.name for folder in (package / "src" / "kernel_pytorch").iterdir() if folder.is_dir()] == [word]
    for target in project["entry-points"].get("kernel_pytorch.techniques", {}).values():
        assert target == f"kernel_pytorch.{word}.technique:technique"
    declared = {(group, name) for group, entries in project["entry-points"].items() for name in entries}
    found = importlib.metadata.distribution(project["name"]).entry_points
    assert {(entry.group, entry.name) for entry in found} == declared
    # A command has the name of what it does.
    assert {name for group, name in declared if group != "kernel_pytorch.commands"} <= {package.name}


@each_package
def test_a_technique_is_named_as_its_package(package):
    for entry in importlib.metadata.distribution(declaration(package)["name"]).entry_points:
        if entry.group == "kernel_pytorch.techniques":
            assert entry.load().name == package.name


@each_package
def test_a_package_is_complete(package):
    source = package / "src" / "kernel_pytorch" / package.name.replace("-", "_")
    assert (source / "py.typed").is_file()
    assert (package / "README.md").is_file()
    assert list((package / "tests").glob("test_*.py"))
    assert len((package / "pyproject.toml").read_text().splitlines()) <= 40
    assert declaration(package)["requires-python"] == declaration(HARNESS)["requires-python"]


def test_what_is_installed_brings_its_license():
    for project in [HARNESS, *PACKAGES]:
        assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@each_package
def test_a_readme_is_short_and_leads_to_the_page_that_is_written_beside_it(package):
    """Of a package without one the site makes a page from the README."""
    readme = (package / "README.md").read_text()
    assert len(readme.splitlines()) <= 80
    assert readme.count(":begin -->") == readme.count("<!-- results:begin -->") == 1
    page = ROOT / "docs" / "techniques" / f"{package.name}.md"
    assert (f"(../../docs/techniques/{package.name}.md)" in readme) == page.exists()
    assert not page.exists() or not is_technique(package) or f"<!-- results: {package.name} -->" in page.read_text()


@each_package
def test_the_table_of_a_readme_comes_from_the_results(package):
    files = ROOT.glob(f"results/*/{package.name}.json") if is_technique(package) else ()
    found = [load(file) for file in sorted(files)]
    written = read_block(package / "README.md", "results")
    assert not found or written == headline(found), "`kernel-pytorch report --readme packages` writes it"


def test_no_work_of_a_model_is_slower_with_ours():
    record = load_models(ROOT / "results" / "nvidia-h200" / "models.json")
    rows = [row for run in record.runs.values() for row in run.rows if row.variant == "ours"]
    assert [(row.model, row.work) for row in rows if row.ratio.median < 1.0] == []
    assert all(row.cost.difference < 0.05 for row in rows)


def test_no_training_is_slower_with_ours_beyond_noise():
    """ViT's eager training is stock's: PyTorch has kernels for all that it consists of."""
    record = load_models(ROOT / "results" / "nvidia-h100-80gb-hbm3" / "models.json")
    rows = [row for run in record.runs.values() for row in run.rows if row.variant == "ours"]
    assert sum(row.work == "training" for row in rows) == 6
    assert [(row.model, row.work) for row in rows if row.ratio.high < 1.0] == []
    assert all(row.cost.difference < 0.05 for row in rows)


def test_the_table_of_models_comes_from_the_results():
    record = load_models(ROOT / "results" / "nvidia-h100-80gb-hbm3" / "models.json")
    written = read_block(ROOT / "README.md", "models")
    how = "`kernel-pytorch models --json results/nvidia-h100-80gb-hbm3/models.json --readme README.md` writes it"
    assert written == headline_of_models(record), how


def test_report_reads_every_file_that_it_takes_for_results():
    assert all(load(file) for file in results_files(ROOT / "results"))


def test_ci_runs_what_the_readme_says():
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    assert [command.partition(" -s ")[2] for command in commands] == ["bench -- rmsnorm --quick", "tests"]
    ran = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {*commands, ".venv/bin/nox -s bench -- --quick", ".venv/bin/nox -s emulate oldest &"} <= {*ran}
    assert "`.venv/bin/nox -s bench`" in (ROOT / "README.md").read_text()


def test_every_session_explains_itself_in_one_line():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    sessions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(mark).startswith("nox.session") for mark in node.decorator_list)
    ]
    assert {"tests", "bench", "lint", "docs", "matrix", "gpu"} <= {session.name for session in sessions}
    for session in sessions:
        explanation = ast.get_docstring(session) or ""
        assert len(explanation.splitlines()) == 1, session.name
        assert explanation.endswith("."), session.name


def test_the_changelog_has_an_unreleased_section():
    assert re.search(r"^## \[Unreleased\]$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_no_package_is_listed_by_hand():
    for name in ["noxfile.py", "tools/environments.py", "pyproject.toml", "mkdocs.yml", "docs/hooks.py"]:
        text = (ROOT / name).read_text()
        names = {package.name for package in PACKAGES} - {"models"}  # a session times models of other libraries
        assert not [word for word in names if word in text], name


@each_package
def test_every_kernel_has_a_record_of_what_it_compiles_to(package):
    """`nox -s static` compares it with the present kernels."""
    if not is_technique(package):
        pytest.skip("it is no technique")
    technique = discover().get(package.name)
    if not has_kernels(technique):
        pytest.skip("it has no kernel of its own")
    file = record_file(ROOT / "results", package.name)
    how = f"`kernel-pytorch static {package.name} --json results` writes it"
    assert file.is_file(), f"there is none yet; {how}"
    record = load_static(file)
    assert record.broken == record.not_compiled == ()
    assert {compiled.arch for compiled in record.compiled} == set(ARCHITECTURES)
    whole = [i for i in triton_level(technique) if not i.partial]  # a partial one may refuse an architecture
    levels = {f"{o.name}/{i.name}" for o in technique.operations for i in o.implementations if i in whole}
    assert all(levels <= implementations.keys() for implementations in record.kernels.values()), how


def test_no_folder_has_more_lines_than_its_budget():
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kernel-pytorch"]["lines"]
    for project in (HARNESS, *PACKAGES):
        said = tomllib.loads((project / "pyproject.toml").read_text())["tool"].get("kernel-pytorch", {})
        budgets[project.relative_to(ROOT).as_posix()] = said.get("lines", 3000)
    lines = collections.Counter()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        folders, file = name.split("/"), ROOT / name
        if folders[0] == "results" or "tests" in folders or file.suffix == ".md" or file.is_symlink():
            continue
        folder = "/".join(folders[:2]) if folders[0] == "packages" else folders[0]
        lines[folder] += file.read_bytes().count(b"\n") if file.is_file() else 0
    assert lines, "git knows no file"
    over = {folder: n for folder, n in lines.items() if n > budgets.get(folder, 3000)}
    assert not over, "write less, or raise the budget in the folder's pyproject.toml and say why in the commit"
    assert budgets.keys() <= lines.keys(), "a budget is of a folder that is gone"


def test_the_table_of_examples_comes_from_their_record():
    spec = importlib.util.spec_from_file_location("record_examples", ROOT / "tools" / "record_examples.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = json.loads(module.figures().read_text())
    assert record.keys() == {script.stem for script in (ROOT / "examples").glob("*.py")}
    assert read_block(ROOT / "README.md", "examples") == module.table(record), "tools/record_examples.py writes it"
