"""Dense layers with an activation between them, whose activations are cast to FP8 as they are computed.

Between two dense layers stand tensors that nothing else reads: what the activation makes goes into one GEMM
forward and another one backward, and so does the gradient of what it takes. Here they exist in FP8 alone.
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
from fp8flax._core.gemm.reference import reference_cast, reference_gemm
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
from fp8flax._core.plans.contraction import Entering, States, input_of, quantized_with_amax, restored
from fp8flax._core.plans.dot_general import DotPlan
from fp8flax._core.plans.engine import named_scaling, run
from fp8flax._core.plans.plan import Extra, Operand, Plan, Scales, explicit_sharding
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.recipes import CustomRecipe
from fp8flax._core.state.state import DelayedConfig, ScalingState

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


class _Residuals(NamedTuple):
    input: Any
    """The input as wgrad takes it, in FP8."""
    kernels: tuple[Any, ...]
    """The kernels as dgrad takes them, in FP8."""
    dense: tuple[jax.Array, ...]
    """The wide products that the activation takes."""
    biases: tuple[jax.Array, ...]
    transposed: QTensor
    """The hidden activations as wgrad takes them: transposed, as bits."""


# Derivation. The derivatives are those of the contractions (see ``engine.run``), with the chain rule of the
# activation between them. It is computed in float32, of wide tensors. What is cast passes its cotangent on
# as it is.
@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpPlan(Plan):
    """The contractions of a block, of matrices. Its operands are the input, the kernels and the biases.

    The tensors of contraction ``i`` are named ``i/input``, ``i/kernel`` and ``i/output_grad``.
    """

    into: tuple[DotPlan, ...]
    """The contractions of the input: one, or those of gate and up."""
    out_of: DotPlan
    """The contraction of the hidden activations."""
    activation: str
    kernel_dtypes: tuple[np.dtype, ...]
    """The dtypes of the kernels and of their cotangents; all products are of the input's dtype."""
    biases: tuple[Operand, ...]
    names: tuple[str, ...]
    """Scopes of the contractions."""

    @property
    def plans(self) -> tuple[DotPlan, ...]:
        """All contractions."""
        return *self.into, self.out_of

    @property
    def operands(self) -> tuple[Operand, ...]:
        kernels = (plan.rhs._replace(dtype=dtype) for plan, dtype in zip(self.plans, self.kernel_dtypes))
        return self.into[0].lhs, *kernels, *self.biases

    @property
    def configs(self) -> dict[str, DelayedConfig]:
        return _joined([plan.configs for plan in self.plans])

    def scales(self, states: Mapping[str, ScalingState]) -> Scales:
        found = super().scales(states)
        for i in range(1, len(self.into)):  # gate and up take the same input, once
            found[f"{i}/input"] = found["0/input"]
        return found

    def casting(
        self, f: Callable[..., Any], role: str, *plans: DotPlan, has_sums: bool = False
    ) -> CastTranspose:
        """Returns how the result of an elementwise function is cast for these contractions."""
        dtypes = tuple(plan.recipe.delayed[role].dtype for plan in plans)
        f = partial(f, self.activation, len(self.into))
        return CastTranspose(f, dtypes, has_sums, fits_kernel=self.activation not in _NOT_IN_TRITON)

    def primal(self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales) -> jax.Array:
        return self.forward(operands, extra, scales)[0]

    def forward(
        self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        del extra
        x, *rest = operands
        kernels, biases = rest[: len(self.plans)], tuple(rest[len(self.plans) :])
        of_each = _apart(scales, len(self.plans))
        entered = input_of(self.into[0], x, of_each[0]["input"])
        kernels_in = [_kernel_of(*each) for each in zip(self.plans, kernels, of_each)]
        dense = []
        for name, one, kernel in zip(self.names, self.into, kernels_in):
            dense.append(checkpoint_name(_forward(one, name, entered.first, kernel.first), OUTPUT_NAME))
        casting = self.casting(_hidden, "input", self.out_of)
        (cast,) = lowered(casting, reference_cast, [of_each[-1]["input"].reshape(())], *dense, *biases)
        first, second = _both(self.out_of, "input", cast, of_each[-1])
        out = _forward(self.out_of, self.names[-1], first, kernels_in[-1].first)
        amaxes: list[dict[str, Any]] = [
            {"input": entered.amaxes, "kernel": kernel.amaxes} for kernel in kernels_in
        ]
        amaxes[-1]["input"] = named_scaling(cast.amaxes)
        residuals = _Residuals(
            entered.kept,
            tuple(kernel.kept for kernel in kernels_in),
            tuple(dense),
            biases,
            _named(second, RESIDUAL_NAMES[0]),
        )
        return checkpoint_name(out, OUTPUT_NAME), residuals, _joined(amaxes)

    def backward(
        self, residuals: _Residuals, extra: Extra, scales: Scales, g: jax.Array
    ) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        del extra
        last, kept, of_each = self.out_of, residuals, _apart(scales, len(self.plans))
        g_first, g_second, g_amaxes = quantized_with_amax(
            last, "output_grad", g, of_each[-1]["output_grad"], ()
        )
        like, name = kept.dense[0], self.names[-1]
        with jax.named_scope(name), jax.named_scope(DGRAD):
            hidden_grad = last.dgrad(g_first, kept.kernels[-1].from_bits(), like)
        with jax.named_scope(name), jax.named_scope(WGRAD):
            kernel_grads = [_wgrad(last, kept.transposed.from_bits(), g_second, is_lhs=True)]
        casting = self.casting(_hidden_grads, "output_grad", *self.into, has_sums=bool(kept.biases))
        grad_scales = [scales["output_grad"].reshape(()) for scales in of_each[:-1]]
        casts = lowered(casting, reference_cast, grad_scales, hidden_grad, *kept.dense, *kept.biases)
        entered = restored(self.into[0], "input", kept.input)
        grads = []
        backwards = reversed([*zip(self.names, self.into, casts, of_each, kept.kernels)])
        for name, one, cast, of_one, kernel in backwards:
            first, second = _both(one, "output_grad", cast, of_one)
            with jax.named_scope(name), jax.named_scope(DGRAD):
                grads.append(one.dgrad(first, kernel.from_bits(), like))
            with jax.named_scope(name), jax.named_scope(WGRAD):
                kernel_grads.insert(0, _wgrad(one, entered, second, is_lhs=False))
        sums = [cast.sums[None] for cast in casts if cast.sums is not None]
        amaxes = [*(cast.amaxes for cast in casts), g_amaxes]
        return (
            (sum(grads[1:], grads[0]), *kernel_grads, *sums),
            _joined([{"output_grad": each} for each in amaxes]),
        )


def _joined(of_each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns dicts by role, one of each contraction, as one dict by the names of the tensors."""
    return {f"{i}/{role}": x for i, of_one in enumerate(of_each) for role, x in of_one.items()}


def _apart(tensors: Mapping[str, Any], num: int) -> list[dict[str, Any]]:
    """Returns what ``_joined`` was given."""
    return [
        {role: tensors[f"{i}/{role}"] for role in ROLES if f"{i}/{role}" in tensors} for i in range(num)
    ]


def mlp_plan(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    recipe: CustomRecipe,
    activation: str,
    names: Sequence[str],
) -> MlpPlan:
    """Returns the plan of a block.

    Args:
        x: ``(M, K)``, a wide float.
        kernels: those of the first layers ``(K, H)``, and that of the last ``(H, N)``; of any wide floats.
        biases: of the first layers, ``(1, H)``; or none.
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
        biases=tuple(map(Operand.of, biases)),
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
        and mode.value is None
        and jnp.float64 not in (x.dtype, dtype)
        and explicit_sharding(x) is None
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


def _wgrad(plan: DotPlan, lhs: QTensor, rhs: QTensor, *, is_lhs: bool) -> jax.Array:
    """Returns the gradient of a kernel, given one operand transposed: the left one, or the right one."""
    gemm = plan.gemms.wgrad.of_transposed(lhs=is_lhs, rhs=not is_lhs)
    return lowered(gemm, reference_gemm, lhs, rhs)


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
    biases = [bias[None] for bias in biases]
    plan = mlp_plan(rows, kernels, biases, recipe, activation, names)
    plan.out_of.warn(recipe.forward, recipe.dgrad, recipe.wgrad)
    rows, kernels, biases = jax.tree.map(reverse_mode_only, (rows, tuple(kernels), tuple(biases)))
    of_each = [{role: getattr(state, role) for role in ROLES} for state in states]
    out = run(plan, (rows, *kernels, *biases), (), _joined(of_each))
    return jnp.reshape(out, (*x.shape[:-1], out.shape[-1]))
