"""The support table: rows and columns, reasons once, and devices merged."""

from __future__ import annotations

import dataclasses

from kernel_pytorch.harness.support import markdown


def rows(page):
    """The cells of the rows of a page's table, by their names."""
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in lines[2:]}


def test_the_table_has_the_rows_of_the_charter(record, toy):
    page = markdown(toy.technique, [record()])
    assert list(rows(page)) == [
        "fullgraph",
        "dynamic shapes",
        "opcheck",
        "export",
        "AOTInductor",
        "autocast",
        "CUDA graphs",
        "selective checkpointing",
        "FLOP counter",
        "double backward",
        "FSDP2/DTensor",
        "determinism",
        "batch invariance",
    ]
    assert "| | reference | native | compile |\n| --- | --- | --- | --- |" in page
    assert page.startswith("Tested on Made-up CPU with torch 2.13.0, on 2026-01-02.")
    assert page.rstrip().endswith("`cuda` is not here: the toy has no kernel.")


def test_reasons_are_numbered_once(record, toy):
    refused, unseen = ("no", "it is refused"), ("not tested here", "needs a CUDA device")
    found = [
        (("native", "opcheck"), ("no", "no operator")),
        (("native", "CUDA graphs"), unseen),
        (("compile", "CUDA graphs"), unseen),
        (("compile", "double backward"), refused),
        (("native", "double backward"), refused),
    ]
    page = markdown(toy.technique, [record(noes=found)])
    assert rows(page)["opcheck"] == ["yes", "no (1)", "yes"]
    assert rows(page)["CUDA graphs"] == ["yes", "not tested here (2)", "not tested here (2)"]
    assert rows(page)["double backward"] == ["yes", "no (3)", "no (3)"]
    assert "\n1. no operator\n2. needs a CUDA device\n3. it is refused\n" in page


def test_what_was_tested_somewhere_counts(record, toy):
    cpu = record(
        noes=[((level, "CUDA graphs"), ("not tested here", "needs a GPU")) for level in ("reference", "native")]
    )
    levels = ("reference", "native", "compile", "cuda")
    gpu = record("NVIDIA H200", [(("cuda", "export"), ("no", "not yet"))], levels, absent=())
    page = markdown(toy.technique, [cpu, gpu])
    assert rows(page)["CUDA graphs"] == ["yes"] * 4
    assert rows(page)["export"] == ["yes", "yes", "yes", "no (1)"]
    assert "needs a GPU" not in page
    assert "is not here" not in page
    assert "Tested on NVIDIA H200" in page


def test_devices_that_disagree_are_named(record, toy):
    gpu = record("NVIDIA H200", [(("native", "determinism"), ("no", "atomic additions"))])
    page = markdown(toy.technique, [record(), gpu])
    assert rows(page)["determinism"] == ["yes", "yes on Made-up CPU; no on NVIDIA H200 (1)", "yes"]


def test_operations_of_which_the_same_is_true_share_a_table(record, toy):
    names = ("gate", "other", "odd")
    three = dataclasses.replace(toy.technique, operations=[dataclasses.replace(toy.gate, name=n) for n in names])
    one = record()
    outcomes = [o.model_copy(update={"operation": name}) for name in names for o in one.outcomes]
    odd = outcomes[-1].model_copy(update={"answer": "no", "reason": "it is odd"})
    page = markdown(three, [one.model_copy(update={"outcomes": (*outcomes[:-1], odd)})])
    assert [line for line in page.splitlines() if line.startswith("**")] == ["**`gate`**", "**`other`**", "**`odd`**"]
    same = record(absent=()).model_copy(update={"outcomes": (*outcomes[:-1], odd)})
    page = markdown(three, [same])
    assert [line for line in page.splitlines() if line.startswith("**")] == ["**`gate`, `other`**", "**`odd`**"]
    assert page.count("1. it is odd") == 1
