"""Measures and plots the quantization error of each tensor of each FP8 op."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from fp8flax._core.measuring import statistics_of
from fp8flax._core.names import ROLES
from fp8flax._core.observe import Observing, Report, collect
from fp8flax._core.ops.modes import Errors
from fp8flax._core.options import check_function, check_no_train_state
from fp8flax._core.tables import table_lines
from fp8flax._core.types import PyTree, Role

Tensor: TypeAlias = tuple[tuple[str, ...], tuple[int, ...], Role]
"""The path of an op, the layer of a stack (``()`` for an op that is not stacked), and the role."""


class Statistics(dict[str, dict[str, dict[str, float]]]):
    """Numbers by the path of an op, the role of a tensor, and the name of the number; prints as a table."""

    def by_tensor(self) -> dict[str, dict[str, float]]:
        """Returns the numbers by the path of an op and the role of a tensor, joined to one name."""
        return {f"{path}/{role}": n for path, roles in self.items() for role, n in roles.items()}

    def __str__(self) -> str:
        rows = self.by_tensor()
        # Kurtosis is for code that watches a run, and the table has the width of a terminal.
        shown = [number for number in next(iter(rows.values()), ()) if number != "kurtosis"]
        header = ("tensor", *shown)
        cells = [(name, *(f"{numbers[x]:.3g}" for x in shown)) for name, numbers in rows.items()]
        return "\n".join(table_lines(header, cells))


def statistics(fun: Callable[..., PyTree], has_aux: bool = False) -> Callable[..., Statistics]:
    """Returns a function that measures, for each FP8 op and role, what is lost in the cast to FP8.

    The returned function runs ``fun`` forward and backward, apart from the training step. Call it outside
    of ``jax.jit``. It returns eight numbers for each tensor:

    * ``underflow``: share of the finite nonzero values whose code is zero, 0 to 1
    * ``saturation``: share of the finite nonzero values that were clipped at the largest FP8 value, 0 to 1
    * ``sqnr``: signal-to-quantization-noise ratio of the finite values in dB, ``10 log10(Σ x² / Σ (x - q *
      scale)²)``; at best about 31 for e4m3 and 25 for e5m2, inf if nothing is lost
    * ``headroom``: the largest magnitude that the scale represents, divided by the current amax; the
      smallest over the scales of a tensor. Below 1 something saturates. It is inf for a tensor of zeros.
    * ``amax``: the largest finite magnitude, or 0 if it is subnormal
    * ``scale``: the scale in use (``x ≈ q * scale``); the largest over the slices or blocks of a tensor
      that are not all zero
    * ``kurtosis``: ``mean(x**4) / mean(x**2)**2`` of the finite nonzero values: 3 for Gaussian ones, up to
      their number if one outlier holds all of the power; 0 for a tensor of zeros
    * ``nonfinite``: number of NaN and Inf

    ``fun`` may contain any transformation of JAX and Flax, also ``lax.while_loop`` and ``jax.shard_map``.
    Each layer of a stack (``nn.scan``, ``nn.vmap``, ``lax.scan`` over kernels) has numbers of its own, and
    its index behind the path: ``"blocks/Dense_0/Fp8DotGeneralOp_0[3]"``. In a loop the index counts the
    calls of the forward pass, from 0; a call that ``lax.cond`` skips does not count. The layers of a loop
    are told apart by the sums of their kernels: layers with equal kernels, such as zeros at the start,
    count as one. All calls with one kernel count as one op: repeated calls, a loop over microbatches, the
    examples of ``jax.vmap``. So do the devices of ``jax.shard_map``. A tensor enters two GEMMs; if its
    quantizers differ, as with scales per block, all counts are over both. ``nn.jit`` traces equal layers
    once, so the first of them has the numbers of all: measure without ``nn.jit``. A call without a gradient
    (``lax.stop_gradient``) reports no ``output_grad``.

    Not covered are frozen models, ``in_qdq`` and ``out_qdq`` on their own, and ops of NNX models that do
    not come from ``fp8flax.nnx.quantize_model``, because they do not know their paths.

    Args:
        fun: ``fun(variables, *args, **kwargs)``, a loss of arrays; returns a scalar, or a pair
            ``(scalar, aux)``.
        has_aux: whether ``fun`` returns auxiliary data.

    Returns:
        A function of the same arguments that returns a dict ``{path: {role: {name: number}}}``, which
        ``print`` shows as a table, without the kurtosis. The path is that of an op in the model, such as
        ``"encoder/Dense_0/Fp8DotGeneralOp_0"``; the roles are ``input``, ``kernel`` and ``output_grad``.

    Raises:
        TypeError: ``fun`` is not a function; or (when called) it returns no scalar.
        ValueError: (when called) no FP8 op was reached, or the call is inside of ``jax.jit``, of another
            ``statistics`` or of ``calibrate``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> measure = fp8.statistics(lambda v, x: 1e-9 * jnp.sum(model.apply(v, x)))
        >>> found = measure(variables, x)["Fp8DotGeneralOp_0"]
        >>> found["input"]["underflow"], found["output_grad"]["underflow"]
        (0.0, 1.0)

    Source: torchao and Transformer Engine, which log some of these; kurtosis: arXiv:2505.20524.
    """
    check_function("fun", fun, "lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)")

    @jax.jit
    def gradient(variables: PyTree, args: PyTree, kwargs: PyTree) -> list[jax.Array]:
        found = jax.value_and_grad(fun, has_aux=has_aux, allow_int=True)(variables, *args, **kwargs)
        return [x for x in jax.tree.leaves(found) if isinstance(x, jax.Array)]

    def measure(variables: PyTree, *args: PyTree, **kwargs: PyTree) -> Statistics:
        check_no_train_state(variables)
        reported = collect(Observing(calibrates=False), gradient, variables, args, kwargs)
        if not reported:
            raise ValueError(
                "No FP8 op was reached. fun must apply a model with FP8 ops, not a frozen one, to the "
                "variables that it is given, with a recipe that quantizes. Call statistics outside of jit."
            )
        found = Statistics()
        records = _records(reported)
        for path, layer, role in sorted(records, key=lambda key: (*key[:2], ROLES.index(key[2]))):
            name = "/".join(path) + (str(list(layer)) if layer else "")
            found.setdefault(name, {})[role] = statistics_of(records[path, layer, role])
        return found

    return measure


def _records(reports: Sequence[Report]) -> dict[Tensor, np.ndarray]:
    """Returns the ``Numbers`` of each tensor, ``(records, numbers)``.

    Equal records of several devices count once. For the ten ``Numbers`` of an input with two quantizers, in
    an op at the path ``p``::

        the layer            forward reports  of_kernel  of_roles[0]  the input of
        alone                1                (2,)       (2, 10)      p: 2 records
        nn.scan over three   3                (2,)       (2, 10)      p[0], p[1], p[2]: 2 records each
        nn.vmap over three   1                (3, 2)     (1, 2, 10)   p[0], p[1], p[2]: 2 records each
        jax.vmap, 4 examples 1                (1, 2)     (4, 2, 10)   p: 8 records
    """
    sums: dict[Hashable, list[np.ndarray]] = defaultdict(list)
    for one in reports:
        if (of_kernel := Errors.of(one).of_kernel) is not None:
            sums[*one.label[:2], one.device].append(np.asarray(of_kernel))
    # A loop whose kernel stays the same calls one layer several times.
    is_stack = {key: len({x.tobytes() for x in of_calls}) > 1 for key, of_calls in sums.items()}
    found: dict[Tensor, set[tuple[Any, ...]]] = defaultdict(set)
    for one in reports:
        (path, place, roles), device, errors = one.label, one.device, Errors.of(one)
        call = one.call if errors.call is None else int(errors.call.ravel()[0])
        *kernels, _ = sums[path, place, device][call].shape
        for role, records in zip(roles, errors.of_roles):
            shape = np.broadcast_shapes(kernels, records.shape[:-2])
            records = np.broadcast_to(records, (*shape, *records.shape[-2:]))
            for i in np.ndindex(shape):
                # The layers of nn.vmap have a kernel each. The examples of a batch share one.
                of_vmap = tuple(j for j, size in zip(i, kernels) if size > 1)
                layer = (call, *of_vmap) if is_stack[path, place, device] else of_vmap
                for use, record in enumerate(records[i].tolist()):
                    found[path, layer, role].add((place, call, i, use, *record))
    return {key: np.array(sorted(record[4:] for record in each)) for key, each in found.items()}


def plot_statistics(history: Mapping[int, Statistics]) -> Any:
    """Draws underflow, saturation and scale of each tensor over time.

    The figure has three maps, with a row for each tensor and a column for each step. A number that was not
    measured is left white.

    Args:
        history: statistics by step, ``{step: result of the function that statistics returned}``.

    Returns:
        A ``matplotlib.figure.Figure``. (``fp8flax[plots]`` installs matplotlib.)

    Raises:
        ValueError: there are no statistics.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> found = fp8.statistics(lambda v, x: jnp.sum(model.apply(v, x)))(variables, x)
        >>> figure = fp8.plot_statistics({0: found, 10: found})
    """
    from matplotlib.figure import Figure

    rows = {step: Statistics(history[step]).by_tensor() for step in sorted(history)}
    tensors = sorted({tensor for row in rows.values() for tensor in row})
    if not tensors:
        raise ValueError(f"history must have the statistics of a step, {{step: found}}; got {history!r}.")
    underflow, saturation, scale = (
        np.array([[row.get(tensor, {}).get(number, np.nan) for row in rows.values()] for tensor in tensors])
        for number in ("underflow", "saturation", "scale")
    )
    maps = {
        "underflow, %": 100 * underflow,
        "saturation, %": 100 * saturation,
        "log2 of the scale": np.log2(scale, out=np.full_like(scale, np.nan), where=scale > 0),
    }
    figure = Figure(figsize=(14, 1.5 + 0.25 * len(tensors)), layout="constrained")
    for axes, (label, values) in zip(figure.subplots(1, 3, sharey=True), maps.items()):
        image = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest")
        if label.endswith("%"):
            image.set_clim(0, 100)
        ticks = range(0, len(rows), -(-len(rows) // 8))
        axes.set_xticks(ticks, [str(list(rows)[j]) for j in ticks])
        axes.set_yticks(range(len(tensors)), tensors, fontsize="small")
        axes.set_xlabel("step")
        figure.colorbar(image, ax=axes, label=label)
    return figure
