"""The plan of a feed-forward block: dense layers, an activation, and one dense layer.

Only GEMMs read the result of the activation, and the gradient of its arguments. So both are requested as a
cast: a GPU kernel computes them, casts them to FP8, and writes only the FP8 codes to memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8flax._compat.reverse_mode import reverse_mode_only
from fp8flax._core.gemm.lowering import lowered
from fp8flax._core.gemm.request import Cast, CastTranspose
from fp8flax._core.mode import mode
from fp8flax._core.names import (
    DGRAD,
    FORWARD,
    KERNEL_FORWARD_NAME,
    OUTPUT_NAME,
    RESIDUAL_NAMES,
    ROLES,
    WGRAD,
)
from fp8flax._core.options import check_bool, check_choice, check_int
from fp8flax._core.plans.contraction import (
    QuantizedOperand,
    States,
    input_of,
    quantized_with_amax,
    restored,
)
from fp8flax._core.plans.dot_general import DotPlan
from fp8flax._core.plans.engine import run
from fp8flax._core.plans.modes import checked_states
from fp8flax._core.plans.plan import Extra, Operand, Plan, Scales, explicit_sharding
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.recipes import CustomRecipe
from fp8flax._core.state.state import DelayedConfig, named_scaling, step_scales

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=True),
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
"""The supported activation functions. ``flax.linen`` has all names except ``"gelu_exact"``."""

_NOT_IN_TRITON = ("gelu_exact",)
"""Activations that Pallas's Triton backend cannot compute, because it has no error function."""

_MATMUL_DIMS = (((1,), (0,)), ((), ()))
"""The dimension numbers of ``x @ kernel``."""


def check_block(activation: Any, gated: Any, **sizes: Any) -> None:
    """Raises an error if an option of a feed-forward block is not valid.

    Args:
        activation: must be one of ``ACTIVATIONS``.
        gated: must be a bool.
        **sizes: numbers of features or experts, by the names of the options. Each must be an int of 1 or
            more; None, for a default, is not checked.
    """
    for name, size in sizes.items():
        if size is not None:
            check_int(name, size, 1)
    check_choice("activation", activation, tuple(ACTIVATIONS))
    check_bool("gated", gated)


def hidden(activation: str, dense: Sequence[jax.Array]) -> jax.Array:
    """Returns the input of the last layer: ``activation(x)``, or ``activation(gate) * up`` if it is gated.

    Args:
        activation: one of ``ACTIVATIONS``.
        dense: ``[x]`` or ``[gate, up]``, the results of the first layers with their biases.
    """
    active = ACTIVATIONS[activation](dense[0])
    return active if len(dense) == 1 else active * dense[1]


def _elementwise_forward(activation: str, num: int, *args: jax.Array) -> list[jax.Array]:
    """Returns ``[hidden(...)]``, as the elementwise function of a cast.

    Args:
        activation: one of ``ACTIVATIONS``.
        num: how many products there are, 1 or 2.
        *args: ``num`` products, and ``num`` or no biases.
    """
    return [hidden(activation, _with_biases(num, args))]


def _elementwise_backward(activation: str, num: int, g: jax.Array, *args: jax.Array) -> list[jax.Array]:
    """Returns the cotangents of ``dense``, given that of ``hidden``, as the elementwise function of a cast.

    Args:
        activation: one of ``ACTIVATIONS``.
        num: how many products there are, 1 or 2.
        g: the cotangent of the result of ``hidden``.
        *args: ``num`` products, and ``num`` or no biases.
    """
    _, vjp = jax.vjp(lambda *dense: hidden(activation, dense), *_with_biases(num, args))
    return [inf_to_nan(grad) for grad in vjp(g)]


def _with_biases(num: int, args: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds biases to products: ``args`` are ``num`` products, followed by ``num`` or no biases."""
    return [x + bias for x, bias in zip(args, args[num:])] if args[num:] else list(args)


class _Residuals(NamedTuple):
    """The residuals of a block: the forward pass keeps them for the backward pass."""

    input: Any
    """The input in FP8, as an operand of wgrad, in the form in which a contraction keeps it."""
    kernels: tuple[Any, ...]
    """The kernels in FP8, as operands of dgrad; codes as bits."""
    dense: tuple[jax.Array, ...]
    """The wide results of the first layers, without biases, from which the activation is computed again."""
    biases: tuple[jax.Array, ...]
    hidden_transposed: QTensor
    """The hidden activations, transposed, as an operand of wgrad; codes as bits."""


# The backward pass applies the derivatives of the contractions (see ``engine.run``), and the chain rule of
# the activation between them. ``CastTranspose`` computes the activation and its derivative in float32.
# Casts to FP8 are straight-through.
@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpPlan(Plan):
    """A feed-forward block of matrices: two contractions, or three with a gate. See ``mlp``.

    The operands are the input, the kernels and the biases. The tensors of contraction ``i`` are named
    ``i/input``, ``i/kernel`` and ``i/output_grad``.
    """

    first_layers: tuple[DotPlan, ...]
    """The contractions of the block's input: one, or gate and up."""
    last_layer: DotPlan
    """The last contraction, of the hidden activations."""
    activation: str
    kernel_dtypes: tuple[np.dtype, ...]
    """The dtypes of the kernels and of their cotangents. All products have the dtype of the input."""
    biases: tuple[Operand, ...]
    """The biases of ``first_layers``, ``(1, hidden)`` each; or none."""
    names: tuple[str, ...]
    """The name scopes of the contractions."""

    @property
    def plans(self) -> tuple[DotPlan, ...]:
        """All contractions, in the order of the forward pass."""
        return *self.first_layers, self.last_layer

    @property
    def operands(self) -> tuple[Operand, ...]:
        kernels = (plan.rhs._replace(dtype=dtype) for plan, dtype in zip(self.plans, self.kernel_dtypes))
        return self.first_layers[0].lhs, *kernels, *self.biases

    @property
    def configs(self) -> dict[str, DelayedConfig]:
        return _joined([plan.configs for plan in self.plans])

    def casting(
        self, f: Callable[..., Any], role: str, num: int, *, has_sums: bool = False
    ) -> CastTranspose:
        """Returns the request to compute an elementwise function and cast its results to FP8.

        Args:
            f: ``_elementwise_forward`` or ``_elementwise_backward``.
            role: the role of the results in the contractions that take them.
            num: number of results.
            has_sums: whether to return sums over the rows as well, which are the gradients of the biases.
        """
        dtype = self.last_layer.recipe.delayed[role].dtype  # all layers have one recipe
        f = partial(f, self.activation, len(self.first_layers))
        fits_kernel = self.activation not in _NOT_IN_TRITON
        return CastTranspose(f, (dtype,) * num, has_sums, fits_kernel=fits_kernel)

    def primal(self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales) -> jax.Array:
        return self.forward(operands, extra, scales)[0]

    def forward(
        self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Computes the block, see ``Plan.forward``.

        It quantizes the input and the kernels, multiplies the first layers, computes and casts the
        activation as one request, and multiplies the last layer.
        """
        del extra
        x, *rest = operands
        kernels, biases = rest[: len(self.plans)], tuple(rest[len(self.plans) :])
        layer_scales = _scales_by_layer(scales, len(self.plans))
        # Gate and up have the same input, so both take its codes, with the scale of gate.
        entered = input_of(self.first_layers[0], x, layer_scales[0]["input"])
        kernels_in = [_kernel_in_both_orders(*layer) for layer in zip(self.plans, kernels, layer_scales)]
        dense = []
        for name, layer, kernel in zip(self.names, self.first_layers, kernels_in):
            dense.append(checkpoint_name(_forward(layer, name, entered.first, kernel.first), OUTPUT_NAME))
        casting = self.casting(_elementwise_forward, "input", 1)
        (cast,) = lowered(casting, [layer_scales[-1]["input"]], *dense, *biases)
        first, second = _both_orders(self.last_layer, "input", cast, layer_scales[-1])
        out = _forward(self.last_layer, self.names[-1], first, kernels_in[-1].first)
        amaxes: list[dict[str, Any]] = [
            {"input": entered.amaxes, "kernel": kernel.amaxes} for kernel in kernels_in
        ]
        amaxes[-1]["input"] = named_scaling(cast.amaxes)
        residuals = _Residuals(
            entered.kept,
            tuple(kernel.kept for kernel in kernels_in),
            tuple(dense),
            biases,
            _as_named_bits(second, RESIDUAL_NAMES[0]),
        )
        return checkpoint_name(out, OUTPUT_NAME), residuals, _joined(amaxes)

    def backward(
        self, residuals: _Residuals, extra: Extra, scales: Scales, g: jax.Array
    ) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        """Computes the cotangents of input, kernels and biases, see ``Plan.backward``.

        It quantizes ``g``, computes dgrad and wgrad of the last layer, computes and casts the gradients of
        the first layers' results as one request, and computes dgrad and wgrad of the first layers.
        """
        del extra
        last, kept, layer_scales = self.last_layer, residuals, _scales_by_layer(scales, len(self.plans))
        g_first, g_second, g_amaxes = quantized_with_amax(
            last, "output_grad", g, layer_scales[-1]["output_grad"], ()
        )
        with jax.named_scope(self.names[-1]):
            hidden_grad = _dgrad(last, g_first, kept.kernels[-1])
            with jax.named_scope(WGRAD):
                wgrad = last.gemms.wgrad.of_transposed(lhs=True)
                last_kernel_grad = lowered(wgrad, kept.hidden_transposed.from_bits(), g_second)
        num = len(self.first_layers)
        casting = self.casting(_elementwise_backward, "output_grad", num, has_sums=bool(kept.biases))
        grad_scales = [of_layer["output_grad"] for of_layer in layer_scales[:-1]]
        casts = lowered(casting, grad_scales, hidden_grad, *kept.dense, *kept.biases)
        entered = restored(self.first_layers[0], "input", kept.input)
        input_grads, kernel_grads = [], []
        layers = zip(self.names, self.first_layers, casts, layer_scales, kept.kernels)
        for name, layer, cast, of_layer, kernel in layers:
            first, second = _both_orders(layer, "output_grad", cast, of_layer)
            with jax.named_scope(name):
                input_grads.append(_dgrad(layer, first, kernel))
                with jax.named_scope(WGRAD):
                    wgrad = layer.gemms.wgrad.of_transposed(rhs=True)
                    kernel_grads.append(lowered(wgrad, entered, second))
        sums = [cast.sums[None] for cast in casts if cast.sums is not None]
        amaxes = [*(cast.amaxes for cast in casts), g_amaxes]
        return (
            (sum(input_grads[1:], input_grads[0]), *kernel_grads, last_kernel_grad, *sums),
            _joined([{"output_grad": x} for x in amaxes]),
        )


def _joined(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges a list of dicts ``{role: x}``, one per contraction ``i``, into one dict ``{"i/role": x}``."""
    return {f"{i}/{role}": x for i, of_layer in enumerate(layers) for role, x in of_layer.items()}


def _scales_by_layer(scales: Scales, num: int) -> list[dict[str, jax.Array]]:
    """Splits the scales of a plan, ``{"i/role": scale}``, into ``num`` dicts ``{role: scalar scale}``."""
    return [{role: scales[f"{i}/{role}"].reshape(()) for role in ROLES} for i in range(num)]


def mlp_plan(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    recipe: CustomRecipe,
    activation: str,
    names: Sequence[str],
) -> MlpPlan:
    """Returns the plan of a feed-forward block.

    Args:
        x: the input, ``(M, K)``, a wide float.
        kernels: one or two kernels of the first layers ``(K, H)``, then the kernel of the last layer
            ``(H, N)``; wide floats, each of its own dtype.
        biases: the biases of the first layers, ``(1, H)`` each; or none.
        recipe: a recipe for which ``is_all_delayed`` is True.
        activation: one of ``ACTIVATIONS``.
        names: the name scopes of the layers.
    """

    def plan(lhs: Operand, kernel: jax.Array) -> DotPlan:
        # All products are in the input's dtype, whatever the dtype of the kernel is.
        rhs = Operand.of(kernel)._replace(dtype=x.dtype)
        return DotPlan(recipe=recipe, lhs=lhs, rhs=rhs, out_dtype=x.dtype, dimension_numbers=_MATMUL_DIMS)

    hidden_size = kernels[-1].shape[0]
    between = Operand((x.shape[0], hidden_size), x.dtype, sharding=None, axes=frozenset())
    return MlpPlan(
        first_layers=tuple(plan(Operand.of(x), kernel) for kernel in kernels[:-1]),
        last_layer=plan(between, kernels[-1]),
        activation=activation,
        kernel_dtypes=tuple(kernel.dtype for kernel in kernels),
        biases=tuple(map(Operand.of, biases)),
        names=tuple(names),
    )


def is_all_delayed(recipe: CustomRecipe) -> bool:
    """Returns whether every tensor has delayed scaling, with equal quantizers for its two GEMMs."""
    pairs = [recipe.of_role(role) for role in ("input", "kernel", "output_grad")]
    return all(a is not None and a.needs_state and a == b for a, b in pairs)


def runs_as_one(recipe: CustomRecipe, x: jax.Array, dtype: Any) -> bool:
    """Returns whether ``mlp`` can compute all layers of a block as one op.

    Args:
        recipe: the recipe of all layers.
        x: the input of the block.
        dtype: the dtype of the computation.
    """
    return (
        is_all_delayed(recipe)
        and mode.value is None
        and jnp.float64 not in (x.dtype, dtype)
        and explicit_sharding(x) is None
    )


def _identity(x: jax.Array) -> list[jax.Array]:
    return [x]


def _kernel_in_both_orders(
    plan: DotPlan, kernel: jax.Array, scales: dict[str, jax.Array]
) -> QuantizedOperand:
    """Quantizes a kernel in both orders: transposed for the forward GEMM, and as it is for dgrad."""
    casting = CastTranspose(_identity, (plan.recipe.delayed["kernel"].dtype,))
    (cast,) = lowered(casting, [scales["kernel"]], kernel)
    kept, first = _both_orders(plan, "kernel", cast, scales)
    first = _as_named_bits(first, KERNEL_FORWARD_NAME).from_bits()
    return QuantizedOperand(first, _as_named_bits(kept, RESIDUAL_NAMES[1]), named_scaling(cast.amaxes))


def _as_named_bits(q: QTensor, name: str) -> QTensor:
    """Returns an operand as bits, with a ``checkpoint_name`` on its codes."""
    bits = q.as_bits()
    return dataclasses.replace(bits, codes=checkpoint_name(bits.codes, name))


def _forward(plan: DotPlan, name: str, x: QTensor, kernel: QTensor) -> jax.Array:
    """Returns the forward GEMM of one contraction; its kernel is transposed, ``(columns, depth)``."""
    with jax.named_scope(name), jax.named_scope(FORWARD):
        return lowered(plan.gemms.forward.of_transposed(rhs=True), x, kernel)


def _both_orders(
    plan: DotPlan, role: str, cast: Cast, scales: dict[str, jax.Array]
) -> tuple[QTensor, QTensor]:
    """Returns a cast tensor as two operands: its codes ``(M, N)``, and its transposed codes ``(N, M)``."""
    quantizer, scale = plan.recipe.delayed[role], scales[role]
    return QTensor(cast.codes, scale, quantizer), QTensor(cast.transposed, scale, quantizer)


def _dgrad(plan: DotPlan, g: QTensor, kernel: QTensor) -> jax.Array:
    """Returns the gradient of the input of one contraction; ``kernel`` comes as bits."""
    with jax.named_scope(DGRAD):
        return plan.dgrad(g, kernel.from_bits())


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
        x: the input, ``(…, K)``, a wide float.
        kernels: one or two kernels of the first layers ``(K, H)``, then the kernel of the last layer
            ``(H, N)``. They are wide floats, and are cast to FP8 from their own dtype.
        biases: the biases of the first layers, ``(H,)`` each; or none.
        states: the states of each contraction; their "gradients" are their next values.
        recipe: a recipe for which ``is_all_delayed`` is True.
        activation: one of ``ACTIVATIONS``.
        names: the name scopes of the layers, which an audit shows.
    """
    rows = lax.reshape(x, (int(np.prod(x.shape[:-1])), x.shape[-1]))
    biases = [bias[None] for bias in biases]
    plan = mlp_plan(rows, kernels, biases, recipe, activation, names)
    plan.last_layer.warn(recipe.forward, recipe.dgrad, recipe.wgrad)
    rows, kernels, biases = jax.tree.map(reverse_mode_only, (rows, tuple(kernels), tuple(biases)))
    checked = [checked_states(one, given) for one, given in zip(plan.plans, states)]
    scales = step_scales(plan.configs, _joined(checked))
    out = run(plan, (rows, *kernels, *biases), (), scales)
    return jnp.reshape(out, (*x.shape[:-1], out.shape[-1]))
