"""Ops as modules of Flax NNX."""
