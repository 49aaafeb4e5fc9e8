"""The runnable example: three models, each trained in bf16 and in FP8, to compare them.

Run it with ``fp8flax demo``; it needs the ``demo`` extra.
"""
