"""Dense layers with an activation between them, whose activations are cast to FP8 as they are computed.

Between two dense layers stand tensors that nothing else reads: what the activation makes goes into one GEMM
forward and another one backward, and so does the gradient of what it takes. Here they exist in FP8 alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8flax._core.amax import largest_of
from fp8flax._core.differentiable import (
    Entering,
    Operand,
    States,
    calibrating,
    explicit_sharding,
    input_of,
    named_scaling,
    quantized_with_amax,
    restored,
    scales_of,
)
from fp8flax._core.dot_general import DotPlan
from fp8flax._core.gemm.lowering import lowered
from fp8flax._core.gemm.reference import reference_cast, reference_gemm
from fp8flax._core.gemm.request import Cast, CastTranspose
from fp8flax._core.jax_rules import reverse_mode_only, sum_to_axes, traced_once
from fp8flax._core.measuring import measuring
from fp8flax._core.names import DGRAD, FORWARD, KERNEL_FORWARD_NAME, OUTPUT_NAME, RESIDUAL_NAMES, WGRAD
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.recipes import CustomRecipe
from fp8flax._core.state.state import next_state, state_to_keep

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
"""By name, as ``flax.linen`` has them."""

_NOT_IN_TRITON = ("gelu_exact",)
"""Those that Pallas's Triton backend, which has no error function, does not compute."""

_DENSE = (((1,), (0,)), ((), ()))


def hidden(activation: str, dense: Sequence[jax.Array]) -> jax.Array:
    """Returns what goes into the last layer: ``activation(x)``, or gated ``activation(gate) * up``.

    Args:
        activation: one of ``ACTIVATIONS``.
        dense: the results of the first layer, or of both.
    """
    active = ACTIVATIONS[activation](dense[0])
    return active if len(dense) == 1 else active * dense[1]


def _hidden(activation: str, num: int, *args: jax.Array) -> list[jax.Array]:
    """Elementwise: of ``num`` products, and as many biases if there are any."""
    return [hidden(activation, _dense(num, args))]


def _hidden_grads(activation: str, num: int, g: jax.Array, *args: jax.Array) -> list[jax.Array]:
    """Elementwise: the cotangents of what ``hidden`` takes, of that of its result."""
    _, vjp = jax.vjp(lambda *dense: hidden(activation, dense), *_dense(num, args))
    return [inf_to_nan(grad) for grad in vjp(g)]


def _dense(num: int, args: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + bias for x, bias in zip(args, args[num:])] if args[num:] else list(args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpPlan:
    """The contractions of a block, of matrices."""

    into: tuple[DotPlan, ...]
    """Those of the input: one, or those of gate and up."""
    out_of: DotPlan
    """That of the hidden activations."""
    activation: str
    kernel_dtypes: tuple[np.dtype, ...]
    """As the kernels come, and go back; the gradients of all products are of the input's dtype."""
    names: tuple[str, ...]
    """Scopes of the contractions."""

    def casting(
        self, f: Callable[..., Any], role: str, *plans: DotPlan, has_sums: bool = False
    ) -> CastTranspose:
        """Returns how something elementwise is cast for these contractions."""
        dtypes = tuple(plan.recipe.delayed[role].dtype for plan in plans)
        f = partial(f, self.activation, len(self.into))
        return CastTranspose(f, dtypes, has_sums, fits_kernel=self.activation not in _NOT_IN_TRITON)


def mlp_plan(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    recipe: CustomRecipe,
    activation: str,
    names: Sequence[str],
) -> MlpPlan:
    """Returns the plan of a block.

    Args:
        x: ``(M, K)``, a wide float.
        kernels: those of the first layers ``(K, H)``, and that of the last ``(H, N)``; of any wide floats.
        recipe: delayed scaling in all of it, see ``is_all_delayed``.
        activation: one of ``ACTIVATIONS``.
        names: of the layers.
    """
    axes = frozenset().union(*(Operand.of(array).axes for array in (x, *kernels[:-1])))

    def plan(lhs: Operand, kernel: jax.Array) -> DotPlan:
        rhs = Operand.of(kernel)._replace(dtype=x.dtype)
        return DotPlan(recipe=recipe, lhs=lhs, rhs=rhs, out_dtype=x.dtype, dimension_numbers=_DENSE)

    between = Operand((x.shape[0], kernels[-1].shape[0]), x.dtype, None, axes)
    return MlpPlan(
        into=tuple(plan(Operand.of(x), kernel) for kernel in kernels[:-1]),
        out_of=plan(between, kernels[-1]),
        activation=activation,
        kernel_dtypes=tuple(kernel.dtype for kernel in kernels),
        names=tuple(names),
    )


def is_all_delayed(recipe: CustomRecipe) -> bool:
    """Tells whether each tensor has one scale, from past steps, for both of its GEMMs."""
    pairs = [recipe.of_role(role) for role in ("input", "kernel", "output_grad")]
    return all(a is not None and a.needs_state and a == b for a, b in pairs)


def is_one(recipe: CustomRecipe, x: jax.Array, dtype: Any) -> bool:
    """Tells whether nothing here stands against computing all layers as one.

    Args:
        recipe: of all layers.
        x: the input.
        dtype: of the computation.
    """
    return (
        is_all_delayed(recipe)
        and not calibrating.value
        and measuring.value is None
        and jnp.float64 not in (x.dtype, dtype)
        and explicit_sharding(x) is None
    )


class _Residuals(NamedTuple):
    input: Any
    """The input as wgrad takes it, in FP8."""
    kernels: tuple[Any, ...]
    """As dgrad takes them, in FP8."""
    dense: tuple[jax.Array, ...]
    """The wide products that the activation takes."""
    biases: tuple[jax.Array, ...]
    transposed: QTensor
    """The hidden activations as wgrad takes them: transposed, as bits."""
    scales: tuple[dict[str, jax.Array], ...]
    amaxes: tuple[dict[str, Any], ...]
    states: tuple[States, ...]


# Derivation. As of its contractions, see ``differentiable``, with the chain rule of the activation between
# them, which is computed in float32, of wide tensors. The cotangent of what is cast passes as it is.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def _mlp(
    plan: MlpPlan,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...],
    states: tuple[States, ...],
) -> jax.Array:
    return _mlp_fwd(plan, x, kernels, biases, states)[0]


@traced_once
def _mlp_fwd(
    plan: MlpPlan,
    x: jax.Array,
    kernels: tuple[jax.Array, ...],
    biases: tuple[jax.Array, ...],
    states: tuple[States, ...],
) -> tuple[jax.Array, _Residuals]:
    plans = *plan.into, plan.out_of
    scales = named_scaling([scales_of(one, state) for one, state in zip(plans, states)])
    for of_one in scales[1:-1]:  # gate and up take the same input, once
        of_one["input"] = scales[0]["input"]
    entered = input_of(plan.into[0], x, scales[0]["input"])
    kernels_in = [_kernel_of(one, kernel, s) for one, kernel, s in zip(plans, kernels, scales)]
    dense = []
    for name, one, kernel in zip(plan.names, plan.into, kernels_in):
        dense.append(checkpoint_name(_forward(one, name, entered.first, kernel.first), OUTPUT_NAME))
    casting = plan.casting(_hidden, "input", plan.out_of)
    (cast,) = lowered(casting, reference_cast, [scales[-1]["input"].reshape(())], *dense, *biases)
    first, second = _both(plan.out_of, "input", cast, scales[-1])
    out = _forward(plan.out_of, plan.names[-1], first, kernels_in[-1].first)
    amaxes: list[dict[str, Any]] = [{"input": entered.amaxes, "kernel": one.amaxes} for one in kernels_in]
    amaxes[-1]["input"] = named_scaling(cast.amaxes)
    return checkpoint_name(out, OUTPUT_NAME), _Residuals(
        entered.kept,
        tuple(kernel.kept for kernel in kernels_in),
        tuple(dense),
        biases,
        _named(second, RESIDUAL_NAMES[0]),
        tuple(scales),
        tuple(amaxes),
        tuple(States(*map(state_to_keep, state)) for state in states),
    )


def _identity(x: jax.Array) -> list[jax.Array]:
    return [x]


def _kernel_of(plan: DotPlan, kernel: jax.Array, scales: dict[str, jax.Array]) -> Entering:
    """Returns a kernel, quantized: transposed, as the forward GEMM of ``_forward`` takes it."""
    casting = CastTranspose(_identity, (plan.recipe.delayed["kernel"].dtype,))
    (cast,) = lowered(casting, reference_cast, [scales["kernel"].reshape(())], kernel)
    kept, first = _both(plan, "kernel", cast, scales)
    first = _named(first, KERNEL_FORWARD_NAME).from_bits()
    return Entering(first, _named(kept, RESIDUAL_NAMES[1]), named_scaling(cast.amaxes))


def _named(q: QTensor, name: str) -> QTensor:
    """Returns what is kept of an operand: bits, under a name for policies."""
    bits = q.as_bits()
    return dataclasses.replace(bits, codes=checkpoint_name(bits.codes, name))


def _forward(plan: DotPlan, name: str, x: QTensor, kernel: QTensor) -> jax.Array:
    with jax.named_scope(name), jax.named_scope(FORWARD):
        return lowered(plan.gemms.forward.of_transposed(rhs=True), reference_gemm, x, kernel)


def _both(plan: DotPlan, role: str, cast: Cast, scales: dict[str, jax.Array]) -> tuple[QTensor, QTensor]:
    quantizer, scale = plan.recipe.delayed[role], scales[role].reshape(())
    return QTensor(cast.codes, scale, quantizer), QTensor(cast.transposed, scale, quantizer)


@traced_once
def _mlp_bwd(plan: MlpPlan, residuals: _Residuals, g: jax.Array) -> Any:
    plans, kept, scales = (*plan.into, plan.out_of), residuals, residuals.scales
    last = plan.out_of
    g_first, g_second, g_amaxes = quantized_with_amax(last, "output_grad", g, scales[-1]["output_grad"], ())
    like = kept.dense[0]
    name = plan.names[-1]
    with jax.named_scope(name), jax.named_scope(DGRAD):
        hidden_grad = last.dgrad(g_first, kept.kernels[-1].from_bits(), like)
    with jax.named_scope(name), jax.named_scope(WGRAD):
        kernel_grads = [_wgrad(last, kept.transposed.from_bits(), g_second, is_lhs=True)]
    casting = plan.casting(_hidden_grads, "output_grad", *plan.into, has_sums=bool(kept.biases))
    grad_scales = [s["output_grad"].reshape(()) for s in scales[:-1]]
    casts = lowered(casting, reference_cast, grad_scales, hidden_grad, *kept.dense, *kept.biases)
    entered = restored(plan.into[0], "input", kept.input)
    grads = []
    for name, one, cast, s, kernel in reversed([*zip(plan.names, plan.into, casts, scales, kept.kernels)]):
        first, second = _both(one, "output_grad", cast, s)
        with jax.named_scope(name), jax.named_scope(DGRAD):
            grads.append(one.dgrad(first, kernel.from_bits(), like))
        with jax.named_scope(name), jax.named_scope(WGRAD):
            kernel_grads.insert(0, _wgrad(one, entered, second, is_lhs=False))
    x_grad = _as_operand(sum(grads[1:], grads[0]), plan.into[0].lhs)
    grad_amaxes = [*(cast.amaxes for cast in casts), g_amaxes]
    parts = [{**of_one, "output_grad": of_grad} for of_one, of_grad in zip(kept.amaxes, grad_amaxes)]
    leaves, treedef = jax.tree.flatten(parts)
    amaxes = treedef.unflatten(largest_of(leaves))
    new = tuple(
        States(**{role: next_state(amax[role], s[role], getattr(state, role)) for role in s})
        for amax, s, state in zip(amaxes, scales, kept.states)
    )
    sums = [cast.sums[None] for cast in casts if cast.sums is not None]
    bias_grads = tuple(map(_as_operand, sums, map(Operand.of, kept.biases)))
    rhs = [one.rhs._replace(dtype=dtype) for one, dtype in zip(plans, plan.kernel_dtypes)]
    return x_grad, tuple(map(_as_operand, kernel_grads, rhs)), bias_grads, new


def _wgrad(plan: DotPlan, lhs: QTensor, rhs: QTensor, *, is_lhs: bool) -> jax.Array:
    """Returns the gradient of a kernel, given one operand transposed: the left one, or the right one."""
    gemm = plan.gemms.wgrad.of_transposed(lhs=is_lhs, rhs=not is_lhs)
    return lowered(gemm, reference_gemm, lhs, rhs)


def _as_operand(grad: jax.Array, operand: Operand) -> jax.Array:
    # Inside shard_map an operand that is the same everywhere gets the sum of all cotangents.
    return sum_to_axes(grad, operand.axes).astype(operand.dtype)


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def mlp(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    states: Sequence[States],
    recipe: CustomRecipe,
    activation: str,
    names: Sequence[str],
) -> jax.Array:
    """Returns ``hidden(activation, [x @ kernel + bias, …]) @ last kernel``, in FP8.

    Args:
        x: ``(…, K)``, a wide float.
        kernels: those of the first layers ``(K, H)``, one or two, and that of the last ``(H, N)``; of any
            wide floats, which are not rounded to the input's before they are cast.
        biases: of the first layers, ``(H,)``; or none.
        states: of each contraction; their "gradients" are their next values.
        recipe: delayed scaling in all of it, see ``is_all_delayed``.
        activation: one of ``ACTIVATIONS``.
        names: of the layers, as an audit shows them.
    """
    rows = lax.reshape(x, (int(np.prod(x.shape[:-1])), x.shape[-1]))
    plan = mlp_plan(rows, kernels, recipe, activation, names)
    plan.out_of.warn(recipe.forward, recipe.dgrad, recipe.wgrad)
    rows, kernels = reverse_mode_only(rows), tuple(map(reverse_mode_only, kernels))
    biases = tuple(reverse_mode_only(bias)[None] for bias in biases)
    out = _mlp(plan, rows, kernels, biases, tuple(states))
    return jnp.reshape(out, (*x.shape[:-1], out.shape[-1]))
