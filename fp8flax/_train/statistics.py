"""Measures the quantization error of each tensor of each FP8 op: underflow, saturation and SQNR.

``statistics`` runs a loss forward and backward in a program of its own, in which every op reports its
numbers (see ``_core.measuring``). Sowing into a collection would not do: every step would measure, the
backward pass cannot sow, and every ``nn.scan`` would have to name the collection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.measuring import Numbers, measured, merged_calls
from fp8flax._core.names import ROLES
from fp8flax._core.options import check_function, check_no_train_state

Statistics = dict[str, dict[str, dict[str, jax.Array]]]
"""Float32 numbers by the path of an op, the role of a tensor, and the name of the number."""


def statistics(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Statistics]:
    """Returns a function that measures, for each FP8 op and role, what is lost in the cast to FP8.

    The returned function runs ``fun`` forward and backward, separately from the training step. It computes
    two of the three GEMMs of each layer, because no gradient of a kernel is needed. It is pure and works
    with every recipe. It returns seven float32 numbers for each tensor:

    * ``underflow``: share of the finite nonzero values whose code is zero, 0 to 1
    * ``saturation``: share of the finite nonzero values that were clipped at the largest FP8 value, 0 to 1
    * ``sqnr``: signal-to-quantization-noise ratio of the finite values in dB, ``10 log10(Σ x² / Σ (x - q *
      scale)²)``. At best it is about 31 for e4m3 and 25 for e5m2. It is inf if nothing is lost, and 0 if
      nothing is left.
    * ``headroom``: the largest magnitude that the scale represents, divided by the current amax; the
      smallest over the scales of a tensor. Below 1 something saturates. It is inf for a tensor of zeros.
    * ``amax``: the largest finite magnitude
    * ``scale``: the scale in use (``x ≈ q * scale``); the largest over the slices or blocks of a tensor
      that are not all zero
    * ``nonfinite``: number of NaN and Inf

    The numbers have leading axes for layers that ``nn.scan`` or ``nn.vmap`` stacked, and for microbatches
    in a ``lax.scan``. Those of a ``lax.while_loop`` are over all rounds. A tensor enters two GEMMs; if its
    quantizers differ, as with scales per block, all counts are over both. For an op that is called several
    times all counts are over all calls. All numbers are NaN if nothing was computed, as in a branch of
    ``lax.cond`` that was not taken.

    It works under ``jax.jit`` (without it, each call compiles again), ``jax.vmap`` and sharding, inside of
    ``jax.shard_map``, and in models of ``quantize_model``. ``fun`` may contain ``nn.scan``, ``nn.remat``,
    ``lax.scan``, ``lax.cond``, ``lax.while_loop`` and ``lax.stop_gradient``. An op that gets no gradient
    has no ``output_grad``.

    Not covered are

    * frozen models
    * ``in_qdq`` and ``out_qdq`` on their own
    * ops of NNX models that ``fp8flax.nnx.quantize_model`` did not return, because these ops do not know
      their paths
    * a ``jax.shard_map`` inside of ``fun``
    * layers of one kind in ``nn.jit``, which traces all of them as the first one, and a layer in ``nn.jit``
      that runs several times; measure the model without ``nn.jit``

    Ops of two models that have the same path count as one.

    Args:
        fun: ``fun(variables, *args, **kwargs)``, a loss; returns a scalar, or a pair ``(scalar, aux)``.
        has_aux: whether ``fun`` returns auxiliary data.

    Returns:
        A function of the same arguments that returns ``{path: {role: {name: number}}}``. The path of an op
        is that of its scaling state, if it has one: ``"encoder/Dense_0/Fp8DotGeneralOp_0"``. The roles are
        those of ``input``, ``kernel`` and ``output_grad`` that the recipe quantizes.

    Raises:
        TypeError: ``fun`` is not a function, but for instance a model; or (when called) it returns no
            scalar, or its first argument is a whole ``TrainState``.
        ValueError: (when called) no FP8 op was reached, one is inside of a ``jax.shard_map`` of
            ``fun``, or ``nn.jit`` runs several layers under one path.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> measure = jax.jit(fp8.statistics(lambda v, x: 1e-9 * jnp.sum(model.apply(v, x))))
        >>> found = measure(variables, x)["Fp8DotGeneralOp_0"]
        >>> found["input"]["underflow"], found["output_grad"]["underflow"]
        (Array(0., dtype=float32), Array(1., dtype=float32))

    Source: torchao and Transformer Engine, which log some of these.
    """
    check_function("fun", fun, "lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)")

    def measure(variables: Any, *args: Any, **kwargs: Any) -> Statistics:
        check_no_train_state(variables)

        def gradient(variables: Any) -> Any:
            grads = jax.grad(fun, has_aux=has_aux, allow_int=True)(variables, *args, **kwargs)
            grads = grads[0] if has_aux else grads
            return [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]

        @partial(jax.jit, inline=True)
        def run(variables: Any) -> Any:
            return measured(gradient, variables)[1]

        reported = run(variables)
        if not reported:
            raise ValueError(
                "No FP8 op was reached: the gradient of fun with respect to its first argument contains "
                "none. fun must apply a model with FP8 ops to the variables that it is given, with a "
                "recipe that quantizes. A model that freeze returned cannot be measured."
            )
        found: Statistics = {}
        for path, role in sorted(reported, key=lambda key: (key[0], ROLES.index(key[1]))):
            numbers = merged_calls(reported[path, role])
            found.setdefault("/".join(path), {})[role] = _statistics(numbers)
        return found

    return measure


def _statistics(numbers: Numbers) -> dict[str, jax.Array]:
    count = jnp.maximum(numbers.values, np.float32(1))
    is_exact = numbers.noise == 0
    ratio = numbers.signal / jnp.where(is_exact, np.float32(1), numbers.noise)
    found = {
        "underflow": numbers.underflowed / count,
        "saturation": numbers.saturated / count,
        "sqnr": jnp.where(is_exact, np.float32(np.inf), np.float32(10) * jnp.log10(ratio)),
        "headroom": numbers.headroom,
        "amax": numbers.amax,
        "scale": numbers.scale,
        "nonfinite": numbers.nonfinite,
    }
    is_measured = numbers.amax >= 0
    return jax.tree.map(lambda x: jnp.where(is_measured, x, np.float32(np.nan)), found)
