"""A divided loss and a divided sequence give what one process gives; `slow`, see test_strategies.py for the command."""

import pytest
import spawned
import works


def difference(answers, key):
    """The largest difference to one process in any result of any rank."""
    pairs = [pair for rank in answers for pair in zip(*rank[key], strict=True)]
    assert all(found.shape == expected.shape for found, expected in pairs)
    return max(float((found - expected).abs().max()) for found, expected in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss", "ring"])
def test_three_ranks_give_what_one_process_gives(kind, tmp_path):
    answers = spawned.spawn(works.every, 3, tmp_path, kind)
    for case, mutant in answers[0]:
        found = difference(answers, (case, mutant))
        assert found < 1e-12 if mutant is None else not found < 1e-3, (case, mutant)
    if kind == "loss":
        assert all(not each.any() for rank in answers for each in rank["all ignored", None][0])


@pytest.mark.slow
def test_what_does_not_fit_is_named(tmp_path):
    (said, _) = spawned.spawn(works.refused, 2, tmp_path)
    beginnings = ("weight: given Tensor", "weight: placed as", "weight: shape", "weight: dtype", "target: given")
    beginnings += (
        "reduction: given 'none'",
        "target: it has a value",
        "q, k, v: shapes are (1, 1, 37, 8), (1, 1, 4, 8)",
    )
    beginnings += ("q, k, v: shapes are (37, ", "scale: ")
    beginnings += (
        "layout: given 'striped'",
        "layout: given 'zigzag' for 37 tokens",
        "length: given 6; it must be a mul",
        "vocabulary_parallel_linear_cross_entropy: it has no second derivatives",
        "ring_attention: it has no second derivatives",
    )
    assert len(said) == len(beginnings)
    for message, beginning in zip(said, beginnings, strict=True):
        assert message.startswith(beginning)
