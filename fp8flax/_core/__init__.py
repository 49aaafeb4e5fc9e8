"""All that Linen and NNX share: formats, scaling, recipes, state, GEMMs, ops."""
