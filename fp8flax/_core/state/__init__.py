"""The state of delayed scaling: one tensor's, all tensors' at once, and the tree that holds it."""
