"""Comparison of two results files, case by case: faster, slower, the same or unsure."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_pytorch.harness.clock import Comparison, Interval, compare_intervals
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.results import IntervalRecord, Measurement, Results


@dataclass(frozen=True)
class Change:
    """One implementation on one case in both files.

    Attributes:
        comparison: new beside old, or None where one of them has no figure.
        missing: which file has no figure and why, empty where both have one.
        lost: whether the old file has a figure and the new one has none: the case went wrong, or away.
    """

    operation: str
    direction: str
    case: str
    implementation: str
    comparison: Comparison | None
    missing: str = ""
    lost: bool = False

    @property
    def label(self) -> str:
        """For tables and messages."""
        return f"{self.operation} {self.implementation}, {self.direction}, {self.case}"

    def slower_than(self, share: float) -> bool:
        """Whether even the kindest reading of the intervals is slower by more than this share."""
        return self.comparison is not None and self.comparison.speedup.high < 1.0 / (1.0 + share)


def compare(old: Results, new: Results, *, across_devices: bool = False) -> list[Change]:
    """Pair the measurements of two files, in the order of the old one; cases that only the new one has come last.

    Args:
        old: the earlier results.
        new: the later results.
        across_devices: compare although the devices differ.

    Raises:
        UserError: different techniques; different devices, unless `across_devices`.
    """
    if old.technique != new.technique:
        raise UserError(f"the old file is of technique {old.technique!r}, the new one of {new.technique!r}")
    devices = [device(results) for results in (old, new)]
    if devices[0] != devices[1] and not across_devices:
        raise UserError(
            f"the old file was measured on {devices[0]}, the new one on {devices[1]}: a difference would tell "
            "about the devices, not about the code (--across-devices compares all the same)"
        )
    before, after = ({_key(m): m for m in results.measurements} for results in (old, new))
    return [_change(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]


def device(results: Results) -> str:
    """What must agree for times to be comparable: the device, and on a CPU its threads."""
    environment = results.machine.environment
    threads = f" with {environment.torch_threads} threads" if environment.device_type == "cpu" else ""
    return environment.device_name + threads


def environment_differences(old: Results, new: Results) -> list[tuple[str, str, str]]:
    """Fields of the environments that differ: name, old value, new value."""
    before, after = (results.machine.environment.model_dump() for results in (old, new))
    return [(name, str(before[name]), str(after[name])) for name in before if before[name] != after[name]]


def _key(m: Measurement) -> tuple[str, str, str, str]:
    return m.operation, m.direction, m.case.label, m.implementation


def _change(key: tuple[str, str, str, str], old: Measurement | None, new: Measurement | None) -> Change:
    operation, direction, case, implementation = key
    missing = [f"{which}: {why}" for which, m in (("old", old), ("new", new)) if (why := _why_no_figure(m))]
    if missing and old is not None and new is not None and old.status == new.status == "unavailable":
        missing = [f"both: {new.reason}"]
    comparison = None
    if old is not None and new is not None and not missing:
        if old.method != new.method:
            missing = [f"timed differently: {old.method} and {new.method}"]
        elif old.seconds is not None and new.seconds is not None:
            comparison = compare_intervals(_interval(old.seconds), _interval(new.seconds))
    lost = old is not None and old.status == "measured" and (new is None or new.status != "measured")
    return Change(operation, direction, case, implementation, comparison, "; ".join(missing), lost)


def _why_no_figure(m: Measurement | None) -> str:
    if m is None:
        return "no such case"
    return "" if m.status == "measured" else f"{m.status}: {m.reason}"


def _interval(record: IntervalRecord) -> Interval:
    return Interval(record.median, record.low, record.high)
