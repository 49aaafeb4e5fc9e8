"""GPU kernels in Pallas, and how several devices share one."""
