"""Measures the quantization error of each tensor of each FP8 op: underflow, saturation and SQNR.

``statistics`` runs a loss forward and backward in a program of its own, in which every op reports its
numbers to the host (see ``_core.observe``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fp8flax._core.measuring import statistics_of
from fp8flax._core.names import ROLES
from fp8flax._core.observe import Observing, collect
from fp8flax._core.options import check_function, check_no_train_state
from fp8flax._core.tables import table_lines


class Statistics(dict[str, dict[str, dict[str, float]]]):
    """Numbers by the path of an op, the role of a tensor, and the name of the number.

    ``print`` shows them as a table, with a row for each tensor.
    """

    def __str__(self) -> str:
        rows = {f"{path}/{role}": n for path, roles in self.items() for role, n in roles.items()}
        header = ("tensor", *next(iter(rows.values()), ()))
        return "\n".join(
            table_lines(header, [(name, *(f"{x:.3g}" for x in n.values())) for name, n in rows.items()])
        )


def statistics(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Statistics]:
    """Returns a function that measures, for each FP8 op and role, what is lost in the cast to FP8.

    The returned function runs ``fun`` forward and backward, apart from the training step. Call it outside
    of ``jax.jit``. It returns seven numbers for each tensor:

    * ``underflow``: share of the finite nonzero values whose code is zero, 0 to 1
    * ``saturation``: share of the finite nonzero values that were clipped at the largest FP8 value, 0 to 1
    * ``sqnr``: signal-to-quantization-noise ratio of the finite values in dB, ``10 log10(Σ x² / Σ (x - q *
      scale)²)``; at best about 31 for e4m3 and 25 for e5m2, inf if nothing is lost
    * ``headroom``: the largest magnitude that the scale represents, divided by the current amax; the
      smallest over the scales of a tensor. Below 1 something saturates. It is inf for a tensor of zeros.
    * ``amax``: the largest finite magnitude
    * ``scale``: the scale in use (``x ≈ q * scale``); the largest over the slices or blocks of a tensor
      that are not all zero
    * ``nonfinite``: number of NaN and Inf

    For an op that is called several times all numbers are over all calls, except for repeated equal ones.
    Layers that ``nn.scan`` or ``nn.vmap`` stacked have one path, so they count as one op, and so do ops of
    two models with the same path. A tensor enters two GEMMs; if its quantizers differ, as with scales per
    block, all counts are over both.

    ``fun`` may contain any transformation of JAX and Flax, also ``lax.while_loop``, ``jax.shard_map`` and
    ``lax.stop_gradient``. A call without a gradient reports no ``output_grad``. In ``jax.shard_map`` each
    device counts as a call. ``nn.jit`` traces equal layers once, so the first of them has the numbers of
    all: measure without ``nn.jit``.

    Not covered are frozen models, ``in_qdq`` and ``out_qdq`` on their own, and ops of NNX models that do
    not come from ``fp8flax.nnx.quantize_model``, because they do not know their paths.

    Args:
        fun: ``fun(variables, *args, **kwargs)``, a loss of arrays; returns a scalar, or a pair
            ``(scalar, aux)``.
        has_aux: whether ``fun`` returns auxiliary data.

    Returns:
        A function of the same arguments that returns a dict ``{path: {role: {name: number}}}``, which
        ``print`` shows as a table. The path of an op is that of its scaling state, if it has one:
        ``"encoder/Dense_0/Fp8DotGeneralOp_0"``. The roles are those of ``input``, ``kernel`` and
        ``output_grad`` that the recipe quantizes.

    Raises:
        TypeError: ``fun`` is not a function; or (when called) it returns no scalar.
        ValueError: (when called) no FP8 op was reached, or the call is inside of ``jax.jit``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> measure = fp8.statistics(lambda v, x: 1e-9 * jnp.sum(model.apply(v, x)))
        >>> found = measure(variables, x)["Fp8DotGeneralOp_0"]
        >>> found["input"]["underflow"], found["output_grad"]["underflow"]
        (0.0, 1.0)

    Source: torchao and Transformer Engine, which log some of these.
    """
    check_function("fun", fun, "lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)")

    @jax.jit
    def gradient(variables: Any, args: Any, kwargs: Any) -> list[jax.Array]:
        found = jax.value_and_grad(fun, has_aux=has_aux, allow_int=True)(variables, *args, **kwargs)
        return [x for x in jax.tree.leaves(found) if isinstance(x, jax.Array)]

    def measure(variables: Any, *args: Any, **kwargs: Any) -> Statistics:
        check_no_train_state(variables)
        reported = collect(Observing(calibrates=False), gradient, variables, args, kwargs)
        if not reported:
            raise ValueError(
                "No FP8 op was reached: the gradient of fun with respect to its first argument contains "
                "none. fun must apply a model with FP8 ops to the variables that it is given, with a "
                "recipe that quantizes. Call statistics outside of jax.jit. A model that freeze returned "
                "cannot be measured."
            )
        found = Statistics()
        for path, role in sorted(reported, key=lambda key: (key[0], ROLES.index(key[1]))):
            found.setdefault("/".join(path), {})[role] = statistics_of(reported[path, role])
        return found

    return measure
