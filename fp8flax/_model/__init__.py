"""Models with their contractions in FP8: finding them, deciding which, saying why. ``nnx`` uses it, too."""
