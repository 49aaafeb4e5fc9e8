"""A trained model for serving: kernels stored in FP8, scales that no longer change, files."""
