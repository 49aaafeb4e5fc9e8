"""What the package uses of the private parts of JAX, a file for each part."""
