"""Normalisation, with the residual add and dropout in front of it and the activation behind it."""
