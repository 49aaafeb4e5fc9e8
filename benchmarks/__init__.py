"""Benchmarks: scripts, each of which states its question, formulas and assumptions first."""
