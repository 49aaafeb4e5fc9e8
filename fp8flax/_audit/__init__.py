"""Audits a program: lists which GEMMs run in FP8 on a GPU, present or not, and why the others do not."""
