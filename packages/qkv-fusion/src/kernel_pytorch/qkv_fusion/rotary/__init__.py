"""Rotary position embedding of queries and keys at once."""
