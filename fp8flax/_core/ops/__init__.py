"""FP8 ops: their canonical layouts, their three products, and the ways in which an op can run."""
