"""A Linen model with its contractions in FP8: finding them, deciding which, saying why."""
