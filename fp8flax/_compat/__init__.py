"""Uses of private parts of JAX and Flax. Each file says which parts it uses, and why."""
