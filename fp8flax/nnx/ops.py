"""The NNX ops: modules that layers take in the place of ``lax.dot_general`` and its like."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fp8flax._compat.flax_context import running_modules
from fp8flax._compat.max_dtype import is_max_dtype
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.formats import Format
from fp8flax._core.mode import in_op
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, SWITCHED_OFF, state_leaf_names
from fp8flax._core.options import check_choice, check_int
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.conv import fp8_conv_general_dilated
from fp8flax._core.plans.dot_general import DimensionNumbers, fp8_dot_general
from fp8flax._core.plans.einsum import einsum_with
from fp8flax._core.plans.modes import FORMS
from fp8flax._core.plans.ragged_dot import fp8_ragged_dot
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.recipes import DelayedScaling, Recipe, check_recipe
from fp8flax._core.state.state import ScalingState
from fp8flax._linen.op import MissingStateError

if TYPE_CHECKING:
    from jaxtyping import Float, Integer


# Flax's bridge makes a type of its own for a collection that it meets first: ours takes that place.
class OverwriteWithGradient(nnx.Variable[Any]):
    """Variable whose "gradient" is its next value: the scaling state of FP8 ops.

    Its arrays are float32: the scale of a tensor, and its amax history. It is not an ``nnx.Param``, so an
    optimizer of parameters does not see it. In ``flax.nnx.bridge`` it is the collection
    ``_overwrite_with_gradient``.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8DotGeneralOp()
        >>> op.input_scale.get_value()
        Array([1.], dtype=float32)
        >>> len(nnx.state(op, fp8nnx.OverwriteWithGradient).flat_state())
        6

    Source: the collection of ``flax.linen.fp8_ops``.
    """


nnx.register_variable_name(OVERWRITE_WITH_GRADIENT, OverwriteWithGradient, overwrite=True)


@jax.custom_vjp
def _checked(out: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``out``; warns where a kernel is trained by a gradient that leaves the scaling state out."""
    return out


def _checked_forward(out: Any, kernel: Any, scale: Any) -> tuple[jax.Array, None]:
    if kernel.perturbed and not scale.perturbed:
        warnings.warn(
            "The kernel of an FP8 layer of fp8flax.nnx is differentiated without its scaling state, as "
            "nnx.grad does, so the scales never change. Use fp8flax.nnx.value_and_grad or grad, and "
            "fp8flax.nnx.Optimizer.",
            UserWarning,
            stacklevel=2,
        )
    return out.value, None


def _checked_backward(_: None, g: Any) -> tuple[Any, None, None]:
    is_zero = isinstance(g, jax.custom_derivatives.SymbolicZero)
    return (jnp.zeros(g.shape, g.dtype) if is_zero else g), None, None


_checked.defvjp(_checked_forward, _checked_backward, symbolic_zeros=True)


class Fp8Op(nnx.Module):
    """Holds the scaling state of one contraction, if its recipe has any, and multiplies."""

    # What it computes, without FP8 and with it; the field of NNX's layers for such a function.
    plain: ClassVar[Callable[..., jax.Array]] = staticmethod(jax.lax.dot_general)
    in_fp8: ClassVar[Callable[..., jax.Array]] = staticmethod(fp8_dot_general)
    field: ClassVar[str] = ""
    stacked: ClassVar[tuple[str, ...]] = ()
    """Roles whose state has a leading dimension, of experts."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses operands, which an instance takes: a layer has the class where it calls a function."""
        if any(isinstance(arg, jax.Array | np.ndarray | str) for arg in args):
            name = cls.__name__
            is_of_nnx = cls.field and not cls.stacked
            fix = f" A layer takes an instance: {cls.field}=fp8flax.nnx.{name}()." if is_of_nnx else ""
            raise TypeError(
                f"The class fp8flax.nnx.{name} was called with operands, as its instances are.{fix}"
            )
        return super().__new__(cls)

    def __init__(self, *, recipe: Recipe | None = None, form: str = "direct"):
        self._set_up(recipe, form, ())

    def _set_up(self, recipe: Recipe | None, form: str, stacked: tuple[int, ...]) -> None:
        if recipe is not None:
            check_recipe(recipe)
        check_choice("form", form, FORMS)
        self.recipe, self.form = recipe, form
        self.scope = ""  # where it stands in a model, for the audit: NNX names nothing in programs
        self.conversion: Any = None  # how quantize_model made that model, for report
        in_use = recipe_in_use(recipe, self.default_recipe())
        if in_use is None:  # FP8 is off here
            return
        for role, quantizer in in_use.gemms.delayed.items():
            for name, shape in _shapes(role, quantizer, stacked if role in self.stacked else ()).items():
                fill = 1.0 if name == state_leaf_names(role)[0] else 0.0
                setattr(self, name, OverwriteWithGradient(jnp.full(shape, fill, jnp.float32)))

    def default_recipe(self) -> Recipe:
        """Returns the recipe where neither the op nor ``autocast`` has one."""
        return DelayedScaling()

    def _multiplier(self, stacked: tuple[int, ...] = ()) -> Callable[..., jax.Array]:
        """Returns what the op computes by the recipe in use, with the state that it needs.

        At each call: an op may be called twice, under different ambient recipes.

        Args:
            stacked: leading dimensions of the state of the roles that have any.
        """
        layer = next(reversed(running_modules()), None)
        if layer is not None and self.field and hasattr(type(layer), self.field):
            raise TypeError(
                f"The Linen layer {type(layer).__name__} was given the NNX op fp8flax.nnx."
                f"{type(self).__name__}, whose scaling state Linen cannot keep. Give it the Linen op: "
                f"{self.field}_cls=fp8flax.{type(self).__name__}."
            )
        recipe = recipe_in_use(self.recipe, self.default_recipe())

        def compute(*args: Any, **told: Any) -> jax.Array:
            with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
                return self._computed(recipe, stacked, *args, **told)

        return compute

    def _computed(
        self, recipe: Recipe | None, stacked: tuple[int, ...], *args: Any, **told: Any
    ) -> jax.Array:
        if recipe is None:
            with jax.named_scope(SWITCHED_OFF):
                return self.plain(*args, **told)
        states = self.states(recipe, stacked)
        with in_op(self._path):
            out = self.in_fp8(*args, states=states, recipe=recipe, form=self.form, **told)
        state = next((state for state in states if state is not None), None)
        if state is None or state.scale.dtype != jnp.float32:  # which fp8flax.nnx.grad has cast
            return out
        return _checked(out, told["rhs"] if "rhs" in told else args[1], state.scale)

    def states(self, recipe: Recipe, stacked: tuple[int, ...] = ()) -> States:
        """Returns the state that a recipe needs, checked; leading dimensions as of ``_multiplier``."""
        states = {
            role: self._state(role, quantizer, stacked if role in self.stacked else ())
            for role, quantizer in recipe.gemms.delayed.items()
        }
        return States(**states)

    def _path(self) -> tuple[str, ...]:
        """Returns the name of what ``statistics`` measures here."""
        if not self.scope and self.conversion is None:
            raise ValueError(
                f"fp8flax.statistics needs the path of each op, and this {type(self).__name__} does not "
                "know its path. Convert the model by fp8flax.nnx.quantize_model: ops that are there keep "
                "their state and get their paths."
            )
        return tuple(self.scope.split("/")) if self.scope else (type(self).__name__,)

    def _state(self, role: str, quantizer: DelayedQuantizer, stacked: tuple[int, ...]) -> ScalingState:
        values = []
        for name, shape in _shapes(role, quantizer, stacked).items():
            variable = getattr(self, name, None)
            where = f"{type(self).__name__}.{name}"
            if not isinstance(variable, nnx.Variable):
                raise MissingStateError(
                    f"The FP8 op has no scaling state {where}, which its recipe needs: it was made under a "
                    "recipe without delayed scaling, or with FP8 switched off. Make the op, or the model, "
                    "under the recipe of its calls (fp8flax.autocast), or give the op its own recipe: "
                    f"{type(self).__name__}(recipe=…)."
                )
            value = variable.get_value()
            if value.dtype != jnp.float32 and not is_max_dtype(value):
                raise TypeError(
                    f"The scaling state {where} must be float32; got {value.dtype}. Cast the state of "
                    "nnx.Param alone, or cast this leaf back with .astype(jnp.float32)."
                )
            if value.shape != shape:
                raise ValueError(
                    f"The scaling state {where} has shape {value.shape}, but the recipe needs {shape}. "
                    "Make the op under the recipe (the amax_history_len) of its calls. Call layers that "
                    "nnx.vmap stacked inside of nnx.vmap or nnx.scan."
                )
            values.append(value)
        return ScalingState(*values)


def _shapes(role: str, quantizer: DelayedQuantizer, stacked: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a role's scale and amax history, by their names."""
    lengths = (1, quantizer.amax_history_len)
    return {name: (*stacked, length) for name, length in zip(state_leaf_names(role), lengths)}


class Fp8DotGeneralOp(Fp8Op):
    """FP8 matmul for NNX layers, called like ``lax.dot_general``.

    Give an instance to a layer: ``nnx.Linear(…, dot_general=fp8flax.nnx.Fp8DotGeneralOp())``.
    ``nnx.LinearGeneral`` has the same field. You can also call the op in a module of your own; several
    calls of one op share its state. For ``nnx.MultiHeadAttention`` use ``quantize_model``, which gives each
    layer its own op; one instance would be shared, with its scales, by query, key and value.

    Do not give the op as ``dot_general_cls``. NNX makes a new op at each call of such a layer, so the state
    is lost, and the scales stay 1.

    Delayed scaling is the default. The op then holds float32 variables of the type
    ``OverwriteWithGradient``: ``{input,kernel,output_grad}_scale`` of shape ``(1,)`` and
    ``{…}_amax_history`` of shape ``(amax_history_len,)``. The gradient of each variable is its next value.
    With other recipes the op holds no variables. Under ``autocast(enabled=False)`` the op is
    ``lax.dot_general``.

    The call takes:
        lhs: the input, any shape; bfloat16, float16, float32 or float64.
        rhs: the kernel, any shape; bfloat16, float16, float32 or float64.
        dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
        precision: None takes the accumulation of the recipe (by default fast forward, exact gradients).
            ``DEFAULT`` accumulates fast, ``HIGH`` and ``HIGHEST`` exactly, in all three GEMMs.
        preferred_element_type: dtype of the result; None for the dtype that ``lax.dot_general`` returns.
        out_sharding: how to shard the result on a mesh with explicit axes, as in ``lax.dot_general``.

    Args:
        recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
            ``DelayedScaling()`` outside of it. The state is made for the recipe under which the op is made.
        form: ``"direct"`` multiplies FP8 operands, on the FP8 units of GPUs that have them. ``"qdq"`` casts
            to FP8 and back around a matmul in the operands' dtype; it serves as a reference and is never
            faster.

    Raises:
        MissingStateError: the op was made under a recipe without the state that it needs now.
        TypeError: an operand has another dtype than those above, or the state is not float32.
        ValueError: the history in the state has another length than the recipe says.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 4))).shape
        (2, 8)
        >>> layer.dot_general.kernel_amax_history.shape
        (1024,)

    Source: ``flax.linen.fp8_ops``, whose state it has; Micikevicius et al., 2022, arXiv:2209.05433.
    """

    field = "dot_general"

    def __call__(
        self,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        dimension_numbers: DimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[jax.Array, "*output"]:
        """Multiplies the operands in FP8; see the class for the arguments."""
        operands = lhs, rhs, dimension_numbers, precision, preferred_element_type
        return self._multiplier()(*operands, out_sharding=out_sharding)


class NANOOFp8DotGeneralOp(Fp8DotGeneralOp):
    """``Fp8DotGeneralOp`` whose default recipe has the FNUZ formats of AMD MI300.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 8, dot_general=fp8nnx.NANOOFp8DotGeneralOp(), rngs=nnx.Rngs(0))

    Source: ``flax.linen.fp8_ops.NANOOFp8DotGeneralOp``.
    """

    def default_recipe(self) -> DelayedScaling:
        """Returns ``DelayedScaling`` in the FNUZ formats."""
        return DelayedScaling(fp8_format=Format.HYBRID_FNUZ)


class Fp8Einsum(Fp8Op):
    """FP8 einsum of two operands, with the scaling state of ``Fp8DotGeneralOp``.

    The first operand is the input and the second is the kernel, in any order of the result's indices. Give
    an instance to a layer: ``nnx.Einsum(…, einsum_op=fp8flax.nnx.Fp8Einsum())``.

    The call takes:
        eqn: the equation; no index may occur twice within one operand.
        lhs: the input, any shape; bfloat16, float16, float32 or float64.
        rhs: the kernel, any shape; bfloat16, float16, float32 or float64.
        precision: accumulation of the GEMMs; see ``Fp8DotGeneralOp``.
        preferred_element_type: dtype of the result; None for the dtype that ``lax.dot_general`` returns.
        out_sharding: how to shard the result; see ``Fp8DotGeneralOp``.

    Args:
        recipe: how tensors are scaled; see ``Fp8DotGeneralOp``.
        form: ``"direct"`` or ``"qdq"``; see ``Fp8DotGeneralOp``.

    Raises:
        MissingStateError: the op was made under a recipe without the state that it needs now.
        TypeError: ``eqn`` is not a string, an operand has another dtype than those above, or the state is
            not float32.
        ValueError: the equation does not fit the operands, or the state does not fit the recipe.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8Einsum()
        >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), einsum_op=op, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 2))).shape
        (1, 3, 8, 4)

    Source: ``flax.linen.fp8_ops.Fp8Einsum``.
    """

    field = "einsum_op"

    def __call__(
        self,
        eqn: str,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[jax.Array, "*output"]:
        """Contracts the operands in FP8; see the class for the arguments."""
        if not isinstance(eqn, str):
            raise TypeError(
                f"eqn must be an equation such as 'ab,bc->ac'; got {type(eqn).__name__}. Fp8Einsum is "
                "called like jnp.einsum; nnx.Linear takes fp8flax.nnx.Fp8DotGeneralOp() as dot_general=."
            )
        operands = eqn, lhs, rhs, precision, preferred_element_type
        return einsum_with(self._multiplier(), *operands, out_sharding)


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """FP8 convolution for NNX layers, called like ``lax.conv_general_dilated``.

    Give an instance to a layer: ``nnx.Conv(…, conv_general_dilated=…)``. A convolution that is a matmul
    (its windows do not overlap, and it has no groups) runs as a matmul in FP8. In all other convolutions
    the tensors are cast to FP8 and back, and convolved in the operands' dtype; see
    ``fp8flax.Fp8ConvGeneralDilatedOp``.

    The call takes:
        lhs: the input, in the layout of ``dimension_numbers``; bfloat16, float16, float32 or float64.
        rhs: the kernel, in the layout of ``dimension_numbers`` and the dtype of ``lhs``.
        window_strides: one int for each spatial dimension.
        padding: ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, or a pair ``(before, after)`` for each spatial
            dimension.
        lhs_dilation: one int for each spatial dimension; None for 1.
        rhs_dilation: one int for each spatial dimension; None for 1.
        dimension_numbers: the layouts, as ``lax.conv_general_dilated`` takes them.
        feature_group_count: number of groups of features.
        batch_group_count: number of groups of the batch.
        precision: for a matmul as in ``Fp8DotGeneralOp``; otherwise the precision of all three
            convolutions.
        preferred_element_type: dtype of the result; None for the dtype of the operands.
        out_sharding: how to shard the result; see ``Fp8DotGeneralOp``.

    Args:
        recipe: how tensors are scaled; see ``Fp8DotGeneralOp``.
        form: ``"direct"`` or ``"qdq"``; see ``fp8flax.Fp8ConvGeneralDilatedOp``.

    Raises:
        MissingStateError: the op was made under a recipe without the state that it needs now.
        TypeError: an operand has another dtype than those above, or the state is not float32.
        ValueError: the recipe scales along the contraction and the convolution is not a matmul, or the
            state does not fit the recipe.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8ConvGeneralDilatedOp()
        >>> layer = nnx.Conv(3, 8, (4, 4), (4, 4), conv_general_dilated=op, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16, 16, 3))).shape
        (2, 4, 4, 8)

    Source: ``lax.conv_general_dilated``; recipes of Micikevicius et al., 2022, arXiv:2209.05433.
    """

    plain = staticmethod(jax.lax.conv_general_dilated)
    in_fp8 = staticmethod(fp8_conv_general_dilated)
    field = "conv_general_dilated"

    def __call__(
        self,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[jax.Array, "*output"]:
        """Convolves the operands in FP8; see the class for the arguments."""
        out = self._multiplier()(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            batch_group_count,
            precision,
            preferred_element_type,
        )
        return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)


class Fp8RaggedDotOp(Fp8Op):
    """FP8 matmul of a mixture of experts, called like ``lax.ragged_dot``.

    The scaling state is that of ``Fp8DotGeneralOp``, except that each expert's kernel has its own scale and
    amax history. ``kernel_scale`` has shape ``(num_experts, 1)`` and ``kernel_amax_history`` has shape
    ``(num_experts, amax_history_len)``. See ``fp8flax.Fp8RaggedDotOp``.

    The call takes:
        lhs: the input, ``(rows, K)``, sorted by expert; bfloat16, float16, float32 or float64.
        rhs: the kernels, ``(experts, K, N)``; bfloat16, float16, float32 or float64.
        group_sizes: rows of each expert, ``(experts,)``, integers.
        precision: accumulation of the GEMMs; see ``Fp8DotGeneralOp``.
        preferred_element_type: dtype of the result; None for the dtype that ``lax.ragged_dot`` returns.

    Args:
        num_experts: number of kernels, 1 or more.
        recipe: how tensors are scaled; see ``Fp8DotGeneralOp``.
        form: ``"direct"`` or ``"qdq"``; see ``Fp8DotGeneralOp``.

    Raises:
        MissingStateError: the op was made under a recipe without the state that it needs now.
        TypeError: an operand has another dtype than those above, or the state is not float32.
        ValueError: the shapes do not fit, or the state does not fit the recipe or the number of experts.

    Example:
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> op, x, kernels = fp8nnx.Fp8RaggedDotOp(2), jnp.ones((6, 4)), jnp.ones((2, 4, 8))
        >>> op(x, kernels, jnp.array([4, 2])).shape
        (6, 8)
        >>> op.kernel_scale.shape
        (2, 1)

    Source: ``jax.lax.ragged_dot``; the state of ``flax.linen.fp8_ops``, per expert.
    """

    plain = staticmethod(jax.lax.ragged_dot)
    in_fp8 = staticmethod(fp8_ragged_dot)
    field = "ragged_dot"  # of MoE's experts
    stacked = ("kernel",)

    def __init__(self, num_experts: int, *, recipe: Recipe | None = None, form: str = "direct"):
        check_int("num_experts", num_experts, 1)
        self._set_up(recipe, form, (num_experts,))

    def __call__(
        self,
        lhs: Float[jax.Array, "rows depth"],
        rhs: Float[jax.Array, "experts depth columns"],
        group_sizes: Integer[jax.Array, " experts"],
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Float[jax.Array, "rows columns"]:
        """Multiplies each row by the kernel of its expert, in FP8; see the class for the arguments."""
        multiply = self._multiplier(jnp.shape(rhs)[:1])
        return multiply(lhs, rhs, group_sizes, precision, preferred_element_type)
