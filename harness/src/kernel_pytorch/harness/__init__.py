"""Declare a technique once; prove it, time it, explain it."""
