"""FP8 ops: their canonical form, their three products, and the ways in which an op can run."""
