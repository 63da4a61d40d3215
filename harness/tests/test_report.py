"""Tables, pages and plots say what was measured, what was not, and why."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kernel_pytorch.harness import plots
from kernel_pytorch.harness.clock import Verdict
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.page import headline, markdown
from kernel_pytorch.harness.plots import plot
from kernel_pytorch.harness.readme import read_block, write_block
from kernel_pytorch.harness.records import Identity
from kernel_pytorch.harness.report import (
    COLUMNS,
    best_pytorch,
    cells,
    groups,
    provenance,
    reasons,
    seconds,
    speedup,
    terminal_tables,
)
from kernel_pytorch.harness.results import CaseRecord, Comparison, Interval, Measurement, Results

KERNEL = "Triton kernels need compute capability 8.0 [sm_80]"


def interval(median):
    return Interval(median=median, low=0.9 * median, high=1.1 * median)


def comparison(ratio, verdict="FASTER"):
    return Comparison(speedup=interval(ratio), verdict=Verdict[verdict])


def measurement(implementation, status="measured", case="prefill", **fields):
    about = {"operation": "gate", "direction": "forward", "level": implementation.partition(":")[0]}
    record = CaseRecord(name=case, dtype="float16", sizes={"shape": [8, 64]})
    return Measurement(**about, implementation=implementation, case=record, status=status, **fields)


def timed(implementation, median, **fields):
    figures = {"bytes_per_second": 4096 / median, "share_of_copy": 0.25e-6 / median, "relative_error": 1.2e-4}
    return measurement(implementation, seconds=interval(median), samples=(median,), **figures | fields)


@pytest.fixture
def results(machine):
    faster = {"reference": comparison(4.0), "native": comparison(1.0, "SAME"), "compile": comparison(0.5, "UNSURE")}
    measurements = (
        timed("reference", 4e-6),
        timed("native", 2e-6, comparisons={"reference": comparison(2.0)}),
        timed("compile", 1e-6, comparisons={"reference": comparison(4.0), "native": comparison(2.0)}),
        timed("cuda", 1.01e-6, comparisons=faster),
        measurement("triton", "unavailable", reason=KERNEL),
        measurement("peer:quick", "rejected", reason="memory: too fast", seconds=interval(1e-9), samples=(1e-9,)),
        measurement("triton", "unavailable", case="decode", reason=KERNEL),
        measurement("native", "wrong", case="decode", reason="output is off by 1"),
    )
    about = {"technique": "toy", "created": "2026-01-02T03:04:05+00:00", "quick": True}
    return Results(**about, machine=machine, measurements=measurements)


def printed(tables):
    console = Console(width=200, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "text"), [(1.5, "1.5 s"), (0.0125, "12.5 ms"), (1e-3, "1 ms"), (9.99e-4, "999 µs"), (1.2e-8, "0.012 µs")]
)
def test_durations_have_three_digits_and_a_unit(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("verdict", "text"), [("FASTER", "2.00x"), ("SLOWER", "2.00x"), ("SAME", "2.00x ="), ("UNSURE", "2.00x ?")]
)
def test_a_verdict_has_its_mark(verdict, text):
    assert speedup(comparison(2.0, verdict)) == text
    assert speedup(None) == ""


def test_the_best_pytorch_is_the_fastest_that_was_measured(results):
    prefill, decode = groups(results).values()
    assert best_pytorch(prefill) == "compile"
    assert best_pytorch(decode) is None
    assert best_pytorch([m for m in prefill if m.implementation in ("cuda", "peer:quick")]) is None
    assert best_pytorch([*prefill, timed("peer:flex", 0.9e-6), timed("peer:liger", 0.8e-6)]) == "peer:flex"


def test_a_row_holds_a_cell_for_every_column(results):
    prefill, decode = groups(results).values()
    row = dict(zip(COLUMNS, cells(prefill[3], "compile"), strict=True))
    assert row == {
        "level": "cuda",
        "median": "1.01 µs",
        "±": "10%",
        "GB/s": "4.1",
        "of copy": "25%",
        "vs reference": "4.00x",
        "vs native": "1.00x =",
        "vs best PyTorch": "0.50x ?",
        "error": "1.2e-04",
    }
    assert cells(prefill[2], "compile")[COLUMNS.index("vs best PyTorch")] == "is it"
    for m in (*prefill, *decode):
        assert len(cells(m, "compile")) == len(COLUMNS)


def test_a_row_without_a_figure_shows_none(results):
    prefill, decode = groups(results).values()
    assert cells(prefill[4], "compile")[:3] == ["triton", "not measured here", ""]
    assert cells(prefill[5], "compile")[:3] == ["peer:quick", "rejected", ""]
    assert cells(decode[1], None)[:3] == ["native", "wrong", ""]


def test_every_reason_is_given_once(results):
    assert reasons(results) == [
        f"triton not measured here: {KERNEL}",
        "gate peer:quick, forward, prefill 8x64 float16: rejected: memory: too fast",
        "gate native, forward, decode 8x64 float16: wrong: output is off by 1",
    ]


def test_the_terminal_shows_cases_below_each_other(results):
    (table,) = terminal_tables(results)
    text = printed([table])
    assert "gate, forward" in text
    assert text.index("prefill 8x64 float16") < text.index("1.01 µs") < text.index("decode 8x64 float16")
    assert text.count("not measured here") == 2
    assert text.count("is it") == 1


def test_tables_fit_a_terminal_of_80_columns_whole(results):
    far = results.measurements[1].model_copy(update={"error_over_budget": 123.45, "bytes_per_second": 4.5678e12})
    whole = results.model_copy(update={"measurements": (far, *results.measurements)})
    console = Console(file=io.StringIO(), width=80)
    for table in terminal_tables(whole):
        console.print(table)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    assert any("123.5x of" in line and "4,568" in line for line in lines)


def test_brackets_in_names_are_printed(results):
    m = timed("native", 1e-6)
    odd = m.model_copy(update={"case": m.case.model_copy(update={"name": "[bold]odd[/]"})})
    assert "[bold]odd[/] 8x64 float16" in printed(terminal_tables(results.model_copy(update={"measurements": (odd,)})))


def test_a_page_says_where_when_and_how(results):
    page = markdown(results)
    assert page.startswith("Measured on Made-up CPU with torch 2.13.0, 2 CPU threads, on 2026-01-02. A short run:")
    header, _, prefill, decode = (line for line in page.splitlines() if line.startswith("|"))
    levels = "reference | native | compile | cuda | triton | peer:quick"
    assert header == f"| case | {levels} | cuda over native | cuda over best PyTorch |"
    times = "4 µs ± 10.0%, 6% | 2 µs ± 10.0%, 12% | 1 µs ± 10.0%, 25% | 1.01 µs ± 10.0%, 25%"
    assert prefill == f"| prefill 8x64 float16 | {times} | - | rejected | 1.00x = | 0.50x ? |"
    assert decode == "| decode 8x64 float16 |  | wrong |  |  | - |  |  |  |"
    assert page.count(KERNEL) == 1
    assert "A quick run" not in markdown(results.model_copy(update={"quick": False}))


def test_the_tables_of_many_operations_are_folded_below_what_they_come_to(results):
    every = [m.model_copy(update={"operation": name}) for name in ("a", "b", "c") for m in results.measurements]
    few = markdown(results.model_copy(update={"measurements": tuple(every)}))
    assert "<details" not in few
    fourth = [m.model_copy(update={"operation": "d"}) for m in results.measurements]
    many = markdown(results.model_copy(update={"measurements": (*every, *fourth)}))
    assert many.count('<details markdown="1">\n<summary>') == many.count("\n</details>\n") == 4
    assert "<summary><code>a</code>: forward cuda 0.50x of the best PyTorch</summary>\n\n**`a`, forward**" in many
    assert [line for line in many.splitlines() if line.startswith("|")] == [
        line for _ in range(4) for line in markdown(results).splitlines() if line.startswith("|")
    ]


def of_operations(results, *names, directions=("forward",)):
    every = [
        m.model_copy(update={"operation": name, "direction": direction})
        for name in names
        for direction in directions
        for m in results.measurements
    ]
    return results.model_copy(update={"measurements": tuple(every)})


def headline_rows(results):
    return [line.strip("| ").split(" | ") for line in headline([results]).splitlines() if line.startswith("| `")]


def test_a_headline_names_the_best_pytorch_beside_ours(results):
    text = headline([results])
    assert text.startswith("Made-up CPU, torch 2.13.0, 2026-01-02. The largest case of each operation: ")
    best, ours = "`compile` 1 µs ± 10.0%, 25%", "`cuda` 1.01 µs ± 10.0%, 25%"
    assert headline_rows(results) == [["`gate`, forward", "prefill 8x64 float16", best, ours, "0.50x ?"]]


def test_a_headline_shows_the_default_where_ours_was_not_measured(results):
    theirs = results.model_copy(update={"measurements": tuple(m for m in results.measurements if m.level != "cuda")})
    (row,) = headline_rows(theirs)
    best = "`compile` 1 µs ± 10.0%, 25%"
    assert row == ["`gate`, forward", "prefill 8x64 float16", best, "`native` 2 µs ± 10.0%, 12%"]
    assert "no kernel of ours was timed, `native` is the default" in headline([theirs])
    assert "`native` is the default" not in headline([results])
    compiled = tuple(m for m in theirs.measurements if m.level == "compile")
    (row,) = headline_rows(theirs.model_copy(update={"measurements": compiled}))
    assert row[3:] == ["not measured here"]


def test_a_headline_names_levels_alone(results):
    # A kernel that is also measured by a name of its own is no level that users can ask for.
    kernel = timed("triton (tiled)", 0.5e-6, comparisons={"compile": comparison(2.0)})
    tiled = kernel.model_copy(update={"level": "triton"})
    both = results.model_copy(update={"measurements": (tiled, *results.measurements)})
    assert headline_rows(both) == headline_rows(results)
    level = tiled.model_copy(update={"implementation": "triton"})
    (row,) = headline_rows(results.model_copy(update={"measurements": (tiled, level, *results.measurements[:4])}))
    assert row[3:] == ["`triton` 0.5 µs ± 10.0%, 50%", "2.00x"]


def test_headlines_are_five_rows_that_nobody_chooses(results):
    seven = of_operations(results, *"abcdefg", directions=("forward", "backward"))
    assert [row[0] for row in headline_rows(seven)] == [f"`{name}`, forward" for name in "abcef"]
    three = of_operations(results, *"abc", directions=("backward", "forward"))
    chosen = ["`a`, forward", "`a`, backward", "`b`, forward", "`b`, backward", "`c`, forward"]
    assert [row[0] for row in headline_rows(three)] == chosen
    larger = [
        m.model_copy(update={"bytes": 10**6, "case": m.case.model_copy(update={"name": "large"})})
        for m in results.measurements
    ]
    both = results.model_copy(update={"measurements": (*results.measurements, *larger)})
    assert [row[1] for row in headline_rows(both)] == ["large 8x64 float16", "prefill 8x64 float16"]


def test_a_headline_is_of_the_gpu_where_there_is_one(results):
    environment = results.machine.environment.model_copy(update={"device_type": "cuda", "device_name": "A GPU"})
    gpu = results.model_copy(update={"machine": results.machine.model_copy(update={"environment": environment})})
    assert headline([results, gpu]).startswith("A GPU, torch")


README = "# Toy\n\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n"


def test_the_headline_goes_between_the_markers_of_a_readme(results, command_line, tmp_path):
    results.save(tmp_path / "results" / "made-up" / "toy.json")
    readme = tmp_path / "packages" / "toy" / "README.md"
    readme.parent.mkdir(parents=True)
    for place in (readme, tmp_path / "packages"):
        readme.write_text(README)
        assert command_line("report", str(tmp_path / "results"), "--readme", str(place)).code == 0
        assert readme.read_text() == README.replace("old\n", headline([results]))
    other = readme.parents[1] / "other" / "README.md"
    printed = command_line("report", str(tmp_path / "results"), "--readme", str(other))
    assert (printed.code, printed.err) == (2, f"kernel-pytorch: {other} was not written: no results of other\n")


def test_a_block_is_replaced_and_nothing_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    assert read_block(readme, "results") == "old\n"
    write_block(readme, "results", "new\n")
    assert readme.read_text() == README.replace("old", "new")
    with pytest.raises(UserError, match=r"README\.md has no <!-- other:begin --> and <!-- other:end -->, each on"):
        write_block(readme, "other", "new\n")
    with pytest.raises(UserError, match=r"no file .*absent\.md"):
        read_block(tmp_path / "absent.md", "results")


def test_a_plot_is_a_png_and_an_svg_that_come_out_the_same_twice(results, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        assert [path.name for path in plot(results, folder / "toy.json")] == ["toy-gate.png", "toy-gate.svg"]
    one, other = ((folder / "toy-gate.svg").read_bytes() for folder in folders)
    assert one == other
    assert b"<svg" in one
    assert (folders[0] / "toy-gate.png").read_bytes().startswith(b"\x89PNG")
    slower = tuple(m.model_copy(update={"share_of_copy": 0.1}) if m.seconds else m for m in results.measurements)
    plot(results.model_copy(update={"measurements": slower}), folders[1] / "toy.json")
    assert (folders[1] / "toy-gate.svg").read_bytes() != one


def test_the_legend_names_levels_that_the_first_case_lacks(results, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    late = (
        measurement("native", "wrong", reason="off"),
        timed("reference", 1e-6),
        timed("native", 1e-6, case="decode"),
    )
    plot(results.model_copy(update={"measurements": late}), tmp_path / "toy.json")
    text = (tmp_path / "toy-gate.svg").read_text()
    assert ">native</text>" in text
    assert ">reference</text>" in text


def test_a_case_that_one_direction_lacks_leaves_its_place_empty(results, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    drawn = []

    def record(axis, cases, *rest, labelled):
        drawn.append([len(group) for group in cases.values()])

    monkeypatch.setattr(plots, "_panel", record)
    backward = timed("native", 1e-6, case="decode").model_copy(update={"direction": "backward"})
    both = (timed("native", 1e-6), timed("native", 1e-6, case="decode"), backward)
    plot(results.model_copy(update={"measurements": both}), tmp_path / "toy.json")
    assert drawn == [[1, 1], [0, 1]]


def test_what_multiplies_is_drawn_as_a_share_of_the_fastest_product(results, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    for name, share, words in [
        ("copy", 0.1, "of the copy bandwidth"),
        ("matmul", 0.9, "of the fastest matrix product"),
    ]:
        update = {"share_of_copy": 0.2, "share_of_matmul": share}
        products = tuple(m.model_copy(update=update) for m in results.measurements if m.status == "measured")
        (tmp_path / name).mkdir()
        plot(results.model_copy(update={"measurements": products}), tmp_path / name / "toy.json")
        assert words in (tmp_path / name / "toy-gate.svg").read_text()


def test_a_case_is_drawn_by_the_limit_that_it_comes_nearer(results, tmp_path, monkeypatch):
    # As a share of the products, which the prompt comes nearer, the bar of one token would be a line.
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    widths = []
    monkeypatch.setattr(matplotlib.axes.Axes, "barh", lambda self, place, width, **_: widths.append(round(width)))
    prompt = timed("native", 1e-6, share_of_copy=0.1, share_of_matmul=0.8, same_size=True)
    token = timed("native", 1e-6, case="one token", share_of_copy=0.6, share_of_matmul=0.002, same_size=True)
    plot(results.model_copy(update={"measurements": (prompt, token)}), tmp_path / "toy.json")
    assert widths == [80, 60]
    text = (tmp_path / "toy-gate.svg").read_text()
    assert ">one token *</text>" in text
    assert ">prefill</text>" in text
    assert ">* speed over that of a copy of the same size</text>" in text


def test_a_bar_too_short_to_be_seen_has_its_figure(results, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    shares = (timed("native", 1e-6, share_of_copy=0.0012), timed("reference", 1e-6, share_of_copy=0.5))
    plot(results.model_copy(update={"measurements": shares}), tmp_path / "toy.json")
    text = (tmp_path / "toy-gate.svg").read_text()
    assert ">0.12%</text>" in text
    assert ">50.00%</text>" not in text


def test_long_sizes_of_a_case_leave_room_for_the_bars(results, tmp_path, recwarn):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    first, *_ = (m for m in results.measurements if m.status == "measured")
    sizes = {f"number_of_something_{letter}": 1024 for letter in "abcdef"}
    case = first.case.model_copy(update={"sizes": {**first.case.sizes, **sizes}})
    long = first.model_copy(update={"case": case})
    plot(results.model_copy(update={"measurements": (long,)}), tmp_path / "toy.json")
    assert not [each for each in recwarn if "constrained_layout" in str(each.message)]


def test_where_nothing_was_measured_there_is_no_plot(results, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    refused = tuple(m for m in results.measurements if m.status != "measured")
    assert plot(results.model_copy(update={"measurements": refused}), tmp_path / "toy.json") == []
    assert plot(results.model_copy(update={"measurements": ()}), tmp_path / "toy.json") == []
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_before_records_named_the_code_is_marked(results):
    full = results.model_copy(update={"quick": False})
    (line,) = provenance(full)
    assert line == "Measured before records named the code that ran, 2026-01-02"
    assert f"{line}." in markdown(full)
    identified = {"gate/native": Identity(made_by="torch 2.13.0")}
    assert provenance(full.model_copy(update={"identities": identified})) == []
