"""An einsum of two operands by one ``dot_general`` that does not swap input and kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8flax._core.names import SWITCHED_OFF
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.shapes import Float
from fp8flax._core.types import OutSharding


class Einsum(DotGeneral):
    """``jnp.einsum`` of two operands. A converted model meets its ``dot_general``, and not the einsum."""

    name = "Fp8Einsum"
    primitive = None
    nnx_field = "einsum_op"

    def __call__(  # type: ignore[override]
        self: Any,
        eqn: str,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: OutSharding = None,
    ) -> Float[jax.Array, "*output"]:
        """Contracts the operands in FP8, as ``jnp.einsum`` does in their own dtypes.

        ``jnp.einsum`` swaps the operands if that saves a transpose. A swap would exchange the roles of
        input and kernel. An axis of size 1 broadcasts. Axes that only one operand has, and not the result,
        are summed first; a sum that overflows becomes NaN. No index may occur twice within one operand.

        The other arguments than ``eqn`` are those of ``Fp8DotGeneralOp``.
        """
        if self._is_off:  # JAX's own einsum may multiply and sum in another order
            options = {"precision": precision, "preferred_element_type": preferred_element_type}
            with jax.named_scope(SWITCHED_OFF):
                return jnp.einsum(eqn, lhs, rhs, out_sharding=out_sharding, **options)
        # JAX raises its own errors if the equation does not fit the shapes.
        shapes = (jax.ShapeDtypeStruct(jax.typeof(x).shape, np.float32) for x in (lhs, rhs))
        jax.eval_shape(partial(jnp.einsum, eqn), *shapes)
        inputs, result, _ = opt_einsum.parser.parse_einsum_input((eqn, lhs, rhs))
        operands, names = [lhs, rhs], inputs.split(",")
        if any(len(set(each)) != len(each) for each in names):
            raise ValueError(
                f"The einsum equation {eqn!r} repeats an index within one operand. Take the diagonal "
                "before the FP8 einsum."
            )

        def sum_over(i: int, indices: set[str]) -> None:
            axes = tuple(axis for axis, n in enumerate(names[i]) if n in indices)
            # A cast to FP8 would make a finite number of a sum that has overflowed.
            operands[i] = inf_to_nan(jnp.sum(operands[i], axis=axes)) if axes else operands[i]
            names[i] = "".join(n for n in names[i] if n not in indices)

        ones = [{n for n, size in zip(each, x.shape) if size == 1} for each, x in zip(names, operands)]
        for i, other in ((0, 1), (1, 0)):  # an index of size 1 broadcasts
            sum_over(i, (ones[i] - ones[other]) & set(names[other]))
        for i, other in ((0, 1), (1, 0)):
            sum_over(i, set(names[i]) - {*names[other], *result})
        shared = [n for n in names[0] if n in names[1]]
        batch = [n for n in result if n in shared]
        contract = [n for n in shared if n not in result]
        free = [n for each in names for n in each if n not in shared]
        dims = tuple(tuple(tuple(map(each.index, ns)) for each in names) for ns in (contract, batch))
        permutation = tuple([*batch, *free].index(n) for n in result)
        keywords = {} if out_sharding is None else {"out_sharding": _before(out_sharding, permutation)}
        out = self._run(*operands, dims, precision, preferred_element_type, **keywords)
        return lax.transpose(out, permutation)


def _before(sharding: NamedSharding | PartitionSpec, permutation: tuple[int, ...]) -> OutSharding:
    """Returns the sharding of ``x``, given the sharding of ``lax.transpose(x, permutation)``."""
    is_spec = isinstance(sharding, PartitionSpec)
    spec = sharding if is_spec else sharding.spec
    names = [*spec, *[None] * (len(permutation) - len(spec))]
    of_array = PartitionSpec(*(names[permutation.index(i)] for i in range(len(permutation))))
    return of_array if is_spec else NamedSharding(sharding.mesh, of_array)
