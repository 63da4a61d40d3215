"""Training on several ranks has the losses of one process; these need minutes and are marked `slow`, all but one.

.venv/bin/nox -s tests -- packages/models/tests/distributed -m slow
"""

import pytest
import spawned
import works

CASES = ("ours", "ours untied", "llama", "llama, patched before", "llama, patched after")
STEPS = 20


def differences(found, case, name, steps):
    """The largest difference of the mean loss of all ranks to that of one process."""
    alone = works.whole(case.replace("after", "before"), steps)
    assert len(set(alone)) == steps
    mean = [sum(each) / len(found) for each in zip(*(rank[name, case][0] for rank in found), strict=True)]
    return max(abs(a - b) for a, b in zip(mean, alone, strict=True))


def test_tensor_parallel_has_the_losses_of_one_process(tmp_path):
    """The short one."""
    found = spawned.spawn(works.losses, 2, tmp_path, ("tp",), ("ours",), 3)
    assert differences(found, "ours", "tp", 3) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, ("ddp", "fsdp", "tp", "tp, sequence")), (4, ("fsdp+tp", "fsdp+tp, sequence"))]
)
def test_every_strategy_has_the_losses_of_one_process(ranks, names, tmp_path):
    found = spawned.spawn(works.losses, ranks, tmp_path, names, CASES, STEPS)
    for name in names:
        for case in CASES:
            assert differences(found, case, name, STEPS) < 1e-9, (name, case)
            assert found[0][name, case][1].count("\n") >= (0 if name == "ddp" else 2)
        before, after = (found[0][name, f"llama, patched {when}"][2] for when in ("before", "after"))
        assert before == [path.replace("module.", "", 1) for path in after]
        assert len(before) == 12


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, ("ddp", "fsdp", "tp")), (4, ("fsdp+tp",))])
def test_triton_kernels_have_the_losses_of_one_process(ranks, names, tmp_path):
    """In float32; the interpreter needs most of the time of these tests."""
    found = spawned.spawn(works.losses, ranks, tmp_path, names, ("ours, triton",), STEPS)
    for name in names:
        assert differences(found, "ours, triton", name, STEPS) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ours", "llama"])
@pytest.mark.parametrize(
    ("ranks", "name"),
    [(2, "ddp"), (2, "fsdp"), (2, "tp"), (2, "tp, sequence"), (4, "fsdp+tp"), (4, "fsdp+tp, sequence")],
)
def test_compiled_models_have_the_losses_of_one_process(ranks, name, case, tmp_path):
    found, alone = spawned.spawn(works.compiled, ranks, tmp_path, name, case), works.whole(case, 3)
    mean = [sum(each) / ranks for each in zip(*found, strict=True)]
    assert mean == pytest.approx(alone, rel=0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", works.MUTANTS)
def test_a_wrong_division_is_seen(mutant, tmp_path):
    divided = works.MUTANTS[mutant][0] is works.sequence or "bias" in mutant
    name, case = "tp, sequence" if divided else "tp", "ours untied" if "bias" in mutant else "ours"
    found = spawned.spawn(works.losses, 2, tmp_path, (name,), (case,), 3, mutant)
    assert differences(found, case, name, 3) > 1e-6


@pytest.mark.slow
def test_what_cannot_be_divided_is_named(tmp_path):
    (said, _) = spawned.spawn(works.undivided, 2, tmp_path)
    beginnings = (
        "blocks.0.attention.qkv: 2 ranks do not divide 1 heads",
        "blocks.0.mlp.gate_up: 2 ranks do not divide 25 columns",
        "model.layers.0.self_attn.q_proj: it is Identity",
        "model.layers.0.self_attn.q_norm.weight: it is not known",
        "model.layers.0.self_attn.q_proj.group: its layers were fused; call",
        "model: it is FSDPLanguageModel; call tensor_parallel before",
        "model: it has sharded parameters; call tensor_parallel first",
        "model: it has no attention",
        "mesh: it has 2 dimensions",
        "model: it has sharded parameters; beside",
        "sequence: shape is (4, 5, 16); it must be",
        "sequence: shape is (4, 5, 16); it must be",
        "cache: given with targets, cu_seqlens or a divided sequence",
        "sequence_parallel: given for TransformerBlock; allowed are",
        "blocks.1.norm2: it is LayerNorm; between attention",
        "sequence_parallel: given for Sequential; allowed are",
        "model: it is compiled; call torch.compile after",
        "mesh: given ",
        "model: it is DistributedDataParallel; call data_parallel before",
        "model: it is DistributedDataParallel; call fully_sharded before",
        "mesh: its dimensions are None; the model is divided by tensor_parallel",
        "model: given list_iterator; it must be",
        "module: DistributedDataParallel knows its parameters already; unfuse, then",
        "module: its parameters are divided among ranks; unfuse before",
    )
    assert len(said) == len(beginnings)
    for message, beginning in zip(said, beginnings, strict=True):
        assert message.startswith(beginning)


@pytest.mark.slow
def test_logits_and_generation_are_those_of_one_process(tmp_path):
    assert spawned.spawn(works.generated, 2, tmp_path) == [(True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("fsdp", 2), ("tp", 2), ("fsdp+tp", 4)])
def test_clipped_gradients_have_the_norm_of_one_process(name, ranks, tmp_path):
    for found, expected in spawned.spawn(works.clipped, ranks, tmp_path, name):
        assert found == pytest.approx(expected, rel=1e-12, abs=0)
        assert expected[0] > 0.1


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_fits_one_and_four(tmp_path):
    for ranks, action in ((2, "save"), (1, "load"), (4, "load")):
        assert all(spawned.spawn(works.checkpoint, ranks, tmp_path / str(ranks), str(tmp_path / "saved"), action))
