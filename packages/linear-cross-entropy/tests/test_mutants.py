"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import dataclasses

import pytest
import torch

from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.linear_cross_entropy.levels import reference
from kernel_pytorch.linear_cross_entropy.technique import technique

LINEAR, LOGITS = "linear_cross_entropy", "cross_entropy"
TILE = 32


def right(*arguments):
    return reference.linear_cross_entropy(*arguments)


def changed(arguments, **scalars):
    names = ["hidden", "weight", "target", "bias", "ignore_index", "label_smoothing", "z_loss", "softcap", "reduction"]
    own = dict(zip([*names, "chunk"], arguments, strict=True)) | scalars
    return reference.linear_cross_entropy(*own.values())


def target_off_by_one_tile(hidden, weight, target, *rest):
    wrong = torch.where(target >= 0, (target + TILE) % weight.shape[0], target)
    return right(hidden, weight, wrong, *rest)


def smoothing_dropped(*arguments):
    return changed(arguments, label_smoothing=0.0)


def smoothing_over_one_word_less(*arguments):
    words = arguments[1].shape[0]
    return changed(arguments, label_smoothing=arguments[5] * words / (words - 1))


def gradient_of_z_loss_dropped(*arguments):
    without = changed(arguments, z_loss=0.0)
    return without + (right(*arguments) - without).detach()


def ignored_tokens_counted_in_the_mean(*arguments):
    return changed(arguments, reduction="sum") / arguments[2].numel()


def derivative_of_the_cap_dropped(hidden, weight, target, bias, ignore, smoothing, z_loss, softcap, reduction, chunk):
    logits = hidden @ weight.T + (0.0 if bias is None else bias)
    straight = logits + (softcap * torch.tanh(logits / softcap) - logits).detach()
    return reference.cross_entropy(straight, target, ignore, smoothing, z_loss, 0.0, reduction, False)


def last_word_skipped(hidden, weight, target, bias, *rest):
    bias = None if bias is None else bias[:-1]
    kept = target.masked_fill(target == weight.shape[0] - 1, -100)
    return right(hidden, weight[:-1], kept, bias, *rest)


def gradient_of_weight_dropped(hidden, weight, *rest):
    return right(hidden, weight.detach(), *rest)


def gradient_of_bias_dropped(hidden, weight, target, bias, *rest):
    return right(hidden, weight, target, bias.detach(), *rest)


def one_percent_too_large(*arguments):
    return right(*arguments) * 1.01


def nothing_counts_is_not_a_number(*arguments):
    return right(*arguments) / (arguments[2] != arguments[4]).any()


# Of logits.


def logits_off_by_one(logits, target, *rest):
    return reference.cross_entropy(logits, torch.where(target >= 0, (target + 1) % logits.shape[-1], target), *rest)


def gradient_written_over_logits(logits, target, *rest):
    def write(gradient):
        logits.data.copy_(gradient)

    logits.register_hook(write)
    return reference.cross_entropy(logits, target, *rest)


MUTANTS = [
    (target_off_by_one_tile, LINEAR, "mean of everything", "output is off by"),
    (smoothing_dropped, LINEAR, "mean of everything", "output is off by"),
    (smoothing_over_one_word_less, LINEAR, "mean of everything", "output is off by"),
    (gradient_of_z_loss_dropped, LINEAR, "mean of everything", "gradient of hidden is off by"),
    (ignored_tokens_counted_in_the_mean, LINEAR, "mean of everything", "output is off by"),
    (derivative_of_the_cap_dropped, LINEAR, "mean of everything", "gradient of weight is off by"),
    (last_word_skipped, LINEAR, "mean of everything", "output is off by"),
    (gradient_of_weight_dropped, LINEAR, "mean of everything", "gradient of weight is missing"),
    (gradient_of_bias_dropped, LINEAR, "mean of everything", "gradient of bias is missing"),
    (one_percent_too_large, LINEAR, "mean of everything", "output is off by"),
    (nothing_counts_is_not_a_number, LINEAR, "no target counts", "NaN or infinite"),
    (logits_off_by_one, LOGITS, "mean of everything", "output is off by"),
    (gradient_written_over_logits, LOGITS, "mean of everything", "logits was written into"),
]


def failures(function, name, case):
    """In one case, in float32: what is planted shows there."""

    def chosen(point):
        return dataclasses.replace(point, dtypes=(torch.float32,), core=True) if point.name == case else None

    return failures_of(technique, name, function, points=chosen, adversarial=False)


@pytest.mark.parametrize("name", [LINEAR, LOGITS])
@pytest.mark.parametrize("case", ["mean of everything", "no target counts"])
def test_an_unchanged_copy_is_right(name, case):
    assert failures(getattr(reference, name), name, case) == []


@pytest.mark.parametrize(
    ("mutant", "name", "case", "message"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS]
)
def test_mutant_is_found(mutant, name, case, message):
    found = failures(mutant, name, case)
    assert any(f"{name} level 'native', case " in line and message in line for line in found), found
