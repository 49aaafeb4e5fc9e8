"""The process that the package runs in: versions of JAX, Ctrl-C, files and public names."""
