"""The order of calls, the pool and the samplers; no assertion depends on how fast this machine is."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness.clock import (
    Subject,
    Timing,
    cold_pool_bytes,
    last_level_cache_bytes,
    measure,
    on_clock_stream,
    sets_needed,
)
from kernel_pytorch.harness.clock import sampling as cpu_clock
from kernel_pytorch.harness.clock import sampling as pool_module
from kernel_pytorch.harness.clock.sampling import LONGEST_PASS, SHORTEST_SAMPLE, Sampler, calibrate, calls_per_sample

CPU = torch.device("cpu")


class LoggingSampler:
    """A sampler that only writes down what it was asked."""

    log: list[tuple]

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject, self.method, self.calls_per_sample = subject, "log", 3

    def warm_up(self) -> bool:
        self.log.append(("warm up", self.subject.name))
        return self.subject.name == "short"

    def prepare(self, *, short: bool) -> None:
        self.log.append(("prepare", self.subject.name, short))

    def sample(self, start: int) -> float:
        self.log.append((self.subject.name, start))
        return float(len(self.log))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    entries: list[tuple] = []
    monkeypatch.setattr(LoggingSampler, "log", entries, raising=False)
    return entries


def subjects(*names: str, sets: int = 4) -> list[Subject]:
    return [Subject(name, lambda index: None, sets, 1000) for name in names]


def rounds_of(log: list[tuple], size: int) -> list[list[tuple]]:
    samples = [entry for entry in log if entry[0] not in {"warm up", "prepare"}]
    return [samples[i : i + size] for i in range(0, len(samples), size)]


def test_every_round_samples_every_subject_once_at_the_same_set_in_a_shuffled_order(log: list[tuple]) -> None:
    timings = measure(subjects("a", "b", "c"), "cpu", rounds=30, make_sampler=LoggingSampler)
    rounds = rounds_of(log, 3)
    assert len(rounds) == 30
    assert all(sorted(name for name, _ in entries) == ["a", "b", "c"] for entries in rounds)
    assert all(len({start for _, start in entries}) == 1 for entries in rounds)
    assert {entries[0][1] for entries in rounds} == {0, 1, 2, 3}
    assert len({tuple(name for name, _ in entries) for entries in rounds}) == 6
    assert list(timings) == ["a", "b", "c"]
    assert all(len(timing.samples) == 30 and timing.pool_bytes == 4000 for timing in timings.values())


def test_samples_stay_with_their_subject(log: list[tuple]) -> None:
    timings = measure(subjects("a", "b"), "cpu", rounds=10, make_sampler=LoggingSampler)
    for name, timing in timings.items():
        assert timing.samples == tuple(float(at + 1) for at, entry in enumerate(log) if entry[0] == name)


def test_the_order_depends_on_the_seed_alone(log: list[tuple]) -> None:
    for seed in (1, 1, 2):
        measure(subjects("a", "b", "c"), "cpu", rounds=10, seed=seed, make_sampler=LoggingSampler)
    first, again, other = (log[i : i + 36] for i in (0, 36, 72))
    assert first == again
    assert first != other


def test_everything_is_warm_before_anything_is_prepared_and_one_short_subject_makes_all_short(log: list[tuple]) -> None:
    measure(subjects("long", "short"), "cpu", rounds=1, make_sampler=LoggingSampler)
    assert log[:4] == [("warm up", "long"), ("warm up", "short"), ("prepare", "long", True), ("prepare", "short", True)]


def test_values_are_new_before_each_sample_and_no_sample_uses_a_set_twice(log: list[tuple]) -> None:
    timings = measure(
        subjects("a", "b", sets=2), "cpu", rounds=3, refresh=lambda: log.append(("new",)), make_sampler=LoggingSampler
    )
    assert {timing.calls_per_sample for timing in timings.values()} == {2}  # the sampler would take 3
    later = log[2:]  # after warming up
    assert [entry[0] for entry in later[::2]] == ["new"] * 8
    assert "new" not in {entry[0] for entry in later[1::2]}


@pytest.mark.parametrize(
    ("given", "rounds", "named"),
    [
        ([], 1, "subjects is empty"),
        (subjects("a", "a"), 1, "share a name"),
        (subjects("a") + subjects("b", sets=5), 1, "differ in sets"),
        (subjects("a"), 0, "rounds is 0"),
    ],
)
def test_bad_measurements_are_named(given: list[Subject], rounds: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        measure(given, "cpu", rounds=rounds)


def test_an_unknown_device_and_bad_subjects_are_named() -> None:
    with pytest.raises(ValueError, match="device is meta"):
        measure(subjects("a"), "meta")
    with pytest.raises(ValueError, match="sets is 0"):
        Subject("a", lambda index: None, 0, 1)
    with pytest.raises(ValueError, match="bytes_per_set is -1"):
        Subject("a", lambda index: None, 1, -1)


def test_a_real_measurement_on_the_cpu() -> None:
    data = torch.ones(4, 64)
    timing = measure([Subject("add", lambda index: data[index] + 1, 4, 512)], "cpu", rounds=3)["add"]
    assert isinstance(timing, Timing)
    assert len(timing.samples) == 3
    assert all(seconds > 0.0 for seconds in timing.samples)
    assert timing.calls_per_sample % 4 == 0
    assert timing.method == "wall clock, rotating inputs"


# The pool.


def test_sets_needed_exceeds_the_cache_within_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "last_level_cache_bytes", lambda device: 1_000_000)
    assert cold_pool_bytes("cpu") == 2_000_000
    assert cold_pool_bytes("cuda") == 4_000_000
    assert sets_needed(100_000, "cpu") == 21
    assert sets_needed(100_000, "cuda") == 41
    assert sets_needed(10**9, "cpu") == 2
    assert sets_needed(1, "cpu") == 256
    assert sets_needed(100_000, "cpu", memory_limit_bytes=550_000) == 5
    assert sets_needed(100_000, "cpu", memory_limit_bytes=1) == 2
    assert sets_needed(5_000_000, "cuda", memory_limit_bytes=1) == 1  # evicts itself
    monkeypatch.setattr(pool_module, "last_level_cache_bytes", lambda device: None)
    assert cold_pool_bytes("cpu") == 64 * 2**20
    with pytest.raises(ValueError, match="bytes_per_set is 0"):
        sets_needed(0, "cpu")


def test_distinct_last_level_caches_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4"}
    for cpu, sharers in caches.items():
        for index, (level, kind, size, shared) in enumerate(
            [(1, "Data", "32K", str(cpu)), (1, "Instruction", "32K", str(cpu)), (3, "Unified", "16M", sharers)]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    assert pool_module._cpu_cache_bytes(tmp_path) == 32 * 2**20
    assert pool_module._cpu_cache_bytes(tmp_path / "absent") is None
    with pytest.raises(ValueError, match="device is meta"):
        last_level_cache_bytes("meta")


# The samplers.


def test_rotation_visits_fresh_sets_and_keeps_one_output_of_each() -> None:
    visited: list[int] = []

    class Output:
        alive = 0

        def __init__(self) -> None:
            Output.alive += 1

        def __del__(self) -> None:
            Output.alive -= 1

    def run(index: int) -> Output:
        visited.append(index)
        return Output()

    rotation = Sampler(Subject("a", run, 3, 1), CPU)
    rotation.run(rotation.order(2, 7))
    assert visited == [2, 0, 1, 2, 0, 1, 2]
    assert Output.alive == 3
    rotation.release()
    assert Output.alive == 0


def test_a_sample_is_whole_passes_unless_one_takes_too_long() -> None:
    assert calls_per_sample(1e-6, 64) % 64 == 0
    assert calls_per_sample(1e-6, 64) * 1e-6 >= SHORTEST_SAMPLE
    assert calls_per_sample(1e-3, 64) == 64
    assert calls_per_sample(1e-2, 64) * 1e-2 == pytest.approx(LONGEST_PASS)
    assert calls_per_sample(10.0, 2) == 1


class Clock:
    """A clock that only moves when the work says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter_ns(self) -> int:
        return round(self.seconds * 1e9)


def test_the_cpu_sampler_divides_by_its_calls_and_starts_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, visited = Clock(), []
    monkeypatch.setattr(cpu_clock, "time", clock)

    def run(index: int) -> None:
        visited.append((index, gc.isenabled()))
        clock.seconds += 0.02

    sampler = Sampler(Subject("a", run, 8, 1), CPU)
    assert sampler.warm_up() is False
    assert {index for index, _ in visited} == set(range(8))
    sampler.prepare(short=False)
    assert sampler.calls_per_sample == 5
    visited.clear()
    assert sampler.sample(6) == pytest.approx(0.02)
    assert visited == [(index, False) for index in (6, 7, 0, 1, 2)]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before_even_after_an_exception(enabled: bool) -> None:
    def run(index: int) -> None:
        raise RuntimeError("broken")

    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError, match="broken"):
            Sampler(Subject("a", run, 2, 1), CPU).sample(0)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_on_a_cpu_there_is_no_clock_stream() -> None:
    with on_clock_stream("cpu"):
        pass


def test_an_interruption_does_not_make_a_short_call_long():
    waits = [0.0, 0.0, 5.0]  # seconds; the third reading is interrupted

    def elapsed(calls):
        return calls * 1e-5 + (waits.pop(0) if waits else 0.0)

    assert calibrate(elapsed) == pytest.approx(1e-5)
    assert calibrate(lambda calls: 3.0 * calls) == 3.0
