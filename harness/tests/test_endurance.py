"""Burst and sustained speed, of recorded devices: one that keeps its clock, and one that reaches its power limit."""

import pytest

from kernel_pytorch.harness.clock.endurance import BATCH, Endurance, endurance


class Recorded:
    """A device whose calls take as long as its history says, by the seconds that it has worked since its last rest."""

    def __init__(self, *history):
        self.history = history  # (until how many seconds of work, seconds per call)
        self.worked = 0.0
        self.rests = []
        self.batches = []

    def elapsed(self, calls):
        seconds = calls * next(each for until, each in self.history if self.worked < until)
        self.worked += seconds
        self.batches.append(calls)
        return seconds

    def sleep(self, seconds):
        self.rests.append(seconds)
        self.worked = 0.0

    def endurance(self, **options):
        return endurance(self.elapsed, 1e-3, sleep=self.sleep, **options)


def test_a_card_that_reaches_its_power_limit_is_slower_in_the_end():
    card = Recorded((0.3, 1.0e-3), (0.6, 1.1e-3), (float("inf"), 1.25e-3))
    assert card.endurance() == Endurance(burst=pytest.approx(1.0e-3), sustained=pytest.approx(1.25e-3))


def test_a_card_that_keeps_its_clock_is_as_fast_in_the_end():
    found = Recorded((float("inf"), 1e-3)).endurance()
    assert found.burst == pytest.approx(found.sustained)


def test_it_rests_once_after_a_call_then_works_without_a_pause():
    card = Recorded((float("inf"), 1e-3))
    card.endurance(rest=0.5, lasting=0.195)
    assert card.rests == [0.5]
    assert card.batches == [1] + [round(BATCH / 1e-3)] * 10
    assert card.worked == pytest.approx(0.2)


def test_a_single_spike_is_neither():
    card = Recorded((0.02, 5e-3), (float("inf"), 1e-3))
    assert card.endurance().burst == pytest.approx(1e-3)


def test_a_time_that_cannot_be():
    with pytest.raises(ValueError, match="seconds_per_call is 0"):
        endurance(lambda calls: 1.0, 0.0)
