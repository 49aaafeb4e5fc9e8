"""Pure functions of arrays: formats, scaling, GEMMs of FP8 operands. Knows no Linen and no NNX."""
