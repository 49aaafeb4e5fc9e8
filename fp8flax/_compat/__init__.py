"""Uses of private parts of JAX and Flax. Each file says which parts, why, and what works without them."""
