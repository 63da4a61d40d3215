"""Norm of every head of queries and keys, then rotary position embedding."""
