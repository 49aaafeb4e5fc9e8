"""Converts whole models: finds their contractions, decides which run in FP8, and reports the reasons."""
