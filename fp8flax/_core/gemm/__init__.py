"""GEMMs and casts: requests, their references in plain JAX, and what a GPU runs in their place."""
