"""Gated linear units: an activation of one half times the other half."""
