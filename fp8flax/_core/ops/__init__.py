"""FP8 ops as plans, the engine that differentiates them, and the ways in which an op can run."""
