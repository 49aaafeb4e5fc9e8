"""Pallas kernels, each beside its twin in plain JAX."""
