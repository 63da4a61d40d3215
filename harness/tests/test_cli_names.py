"""`kernel-pytorch calibrate`, and names that commands and options had before."""

from kernel_pytorch.harness.environment import describe_environment


def test_the_slug_is_alone_on_its_line(command_line):
    printed = command_line("calibrate", "--device", "cpu", "--slug")
    assert printed == (0, describe_environment("cpu").slug + "\n", "")


def test_the_self_test_that_was_removed_names_its_replacement(command_line):
    printed = command_line("calibrate", "--device", "cpu", "--self-test")
    assert printed.code == 2
    assert "compare_implementations` takes one function twice" in " ".join(printed.err.split())


def test_old_names_work_and_are_named(command_line):
    printed = command_line("machine", "--device", "cpu", "--slug")
    assert printed.out == command_line("calibrate", "--device", "cpu", "--slug").out
    assert "machine is now called calibrate" in printed.err
    assert "--processes is now called --jobs" in command_line("verify", "--processes=1", "--help").err
