"""Benchmarks: scripts that state their question, formulas and assumptions first."""
