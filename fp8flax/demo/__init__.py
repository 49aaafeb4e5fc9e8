"""The runnable example: a language model and a classifier, each trained in bf16 and in FP8.

Run it with ``python -m fp8flax.demo``; it needs the ``demo`` extra.
"""
