"""The Linen ops, and the variables that they declare."""
