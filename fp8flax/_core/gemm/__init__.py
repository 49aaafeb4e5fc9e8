"""How a device multiplies FP8 operands, and quantizes tensors for it."""
