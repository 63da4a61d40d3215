"""What test_isolation.py runs in another process: functions that end in every way."""

import os
import signal
import sys
import time


def double(number, announce):
    announce("doubling")
    return 2 * number


def raises(announce):
    announce("raising")
    raise ValueError("planted")


def aborts(announce):
    announce("aborting")
    os.abort()


def exits(announce):
    sys.exit(3)


def exits_hard(announce):
    os._exit(4)


def is_killed(announce):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(announce):
    announce("hanging")
    time.sleep(3600)


def process_id(announce):
    return os.getpid()


def variable(name, announce):
    return os.environ.get(name)


def not_picklable(announce):
    return lambda: None


def prepares_badly():
    raise ValueError("planted")
