"""``Op`` describes an op without a framework; ``OpBase`` is the base of the ops that a user calls."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from fp8flax._compat.max_dtype import is_max_dtype
from fp8flax._core.autocast import is_off, recipe_in_use
from fp8flax._core.axes import on_automatic_axes
from fp8flax._core.gemm.dispatch import warn_if_emulated
from fp8flax._core.gemm.gemm import GemmSizes
from fp8flax._core.names import KEPT_WIDE, SWITCHED_OFF, state_leaf_names
from fp8flax._core.observe import in_op, is_calibrating, mode
from fp8flax._core.ops.canonical import Shape
from fp8flax._core.ops.contract import STATELESS, Contraction, Scales, States, contract
from fp8flax._core.ops.modes import observed
from fp8flax._core.options import check_choice
from fp8flax._core.quantize import as_float_array
from fp8flax._core.recipes import DelayedScaling, Recipe, check_recipe
from fp8flax._core.state.state import ScalingState, check_state_dtype, step_scales, warn_if_constant_of_loop

Form: TypeAlias = Literal["direct", "qdq"]
"""How an FP8 matmul is written: GEMMs of codes, or GEMMs of wide operands between quantize-dequantize."""

Plans: TypeAlias = Mapping[str, Callable[..., Contraction]]
"""``plan(lhs, rhs, *arguments, recipe=)`` returns how an op computes in FP8 under a recipe.

The key is the option ``form`` of the op; an op that does not have the option has the plan "direct"."""


class Op:
    """Describes an op to the rest of the package; each op has a subclass, which has no instances.

    An op has two operands, ``lhs`` (the input) and ``rhs`` (the kernel), and further arguments. The
    subclass defines ``__call__`` with the signature of the JAX function that the op stands for. Its
    ``self`` is any object with two attributes: ``_run(lhs, rhs, *arguments)``, which takes all arguments in
    the order of ``plain``, and ``_is_off``. Others borrow ``__call__``: the Linen op and the NNX op, whose
    ``op_type`` is the subclass, and ``calling``, which passes a ``SimpleNamespace`` of the two as ``self``.
    """

    name: ClassVar[str]
    """The name of the class of the op, in Linen and in NNX."""
    plain: ClassVar[Callable[..., jax.Array]]
    """``plain(lhs, rhs, *arguments)`` computes the op without FP8."""
    plans: ClassVar[Plans]
    """How the op computes in FP8."""
    stores_kernel: ClassVar[bool] = False
    """Whether a frozen model stores the codes of the kernel. Then "direct" has a ``StoredContraction``."""
    sizes: ClassVar[Callable[..., GemmSizes]]
    """``sizes(lhs_shape, rhs_shape, *arguments)`` returns the sizes of the matmuls."""
    primitive: ClassVar[str | None] = None
    """The JAX primitive that a converted model computes by this op."""
    params: ClassVar[tuple[str, ...]] = ()
    """The names of the arguments of the op among the parameters of the primitive."""
    swapped: ClassVar[Callable[..., Any] | None] = None
    """``swapped(lhs, rhs, *arguments)`` exchanges the operands. None if the left one cannot be a kernel.

    It returns the arguments for operands in the other order, and a function that restores the result."""
    nnx_field: ClassVar[str]
    """The field of NNX layers that takes an instance of the op."""
    is_stack: ClassVar[bool] = False
    """Whether the kernel stacks matrices, whose states are stacked along a leading dimension."""
    unsupported: ClassVar[Callable[..., str | None]] = staticmethod(lambda _: None)
    """``unsupported(params)`` returns why the op cannot compute the primitive with these parameters."""
    is_matmul: ClassVar[Callable[..., bool]] = staticmethod(lambda *_: True)
    """``is_matmul(lhs, rhs, *arguments)`` returns whether GEMMs compute the op."""

    @classmethod
    def arguments(cls, params: Mapping[str, object]) -> tuple[object, ...]:
        """Returns the arguments of the op from the parameters of the primitive."""
        return tuple(params[name] for name in cls.params)

    @classmethod
    def in_fp8(
        cls,
        lhs: jax.Array,
        rhs: jax.Array,
        *arguments: object,
        recipe: Recipe,
        form: Form = "direct",
        states: States = STATELESS,
        key: jax.Array | None = None,
        **keywords: object,
    ) -> jax.Array:
        """Returns the result of the op in FP8, in the ambient ``mode``; see ``plans``.

        ``states`` are the scaling states of the roles with delayed scaling. ``key`` is a random key, if the
        recipe ``is_random``.
        """
        plan = cls.plans[form](lhs, rhs, *arguments, recipe=recipe, **keywords)
        gemms = plan.recipe
        if key is not None:
            plan = dataclasses.replace(plan, key=key)

        def on_axes(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
            return partial(on_automatic_axes(f, lhs, plan.out.sharding), plan)

        wide, compute = on_axes(type(plan).wide), on_axes(plan.function)
        if not any(gemms.quantizers):
            with jax.named_scope(KEPT_WIDE):
                return wide(lhs, rhs)
        scales: Scales = {}
        if states:
            found = step_scales([gemms.delayed[role] for role in states], list(states.values()))
            scales = dict(zip(states, found))
        if is_calibrating():
            compute = lambda operands, _: wide(*operands)  # noqa: E731
        elif plan.function is contract:
            warn_if_emulated(gemms.forward, gemms.dgrad, gemms.wgrad)
        if mode.value is None:
            return compute((lhs, rhs), scales)
        return observed(plan, compute, (lhs, rhs), states, scales)


def calling(op: type[Op], run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function with the signature of an op, which computes with ``run``."""
    call: Any = vars(op)["__call__"]
    return partial(call, SimpleNamespace(_run=run, _is_off=False))  # the ``self`` of the call


class MissingStateError(ValueError):
    """Error of an FP8 layer that was applied with variables that hold no scaling state for it."""


class StateLeaf(NamedTuple):
    """One array of the scaling state of an op: a scale, or an amax history."""

    name: str
    shape: Shape
    fill: float
    """The value of a new array: 1 for a scale, 0 for a history."""


line_search: Any = jax.make_user_context(False)
"""Whether a line search runs, which differentiates kernels and must not change their scaling state."""


@jax.custom_jvp
def _checked(out: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``out``; warns if the kernel is differentiated, and the scale of its state is not."""
    return out


@partial(_checked.defjvp, symbolic_zeros=True)
def _checked_jvp(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    _, kernel, scale = (isinstance(tangent, SymbolicZero) for tangent in tangents)
    if scale and not kernel:
        warnings.warn(
            "The kernel of an FP8 layer is differentiated without its scaling state, so the scales never "
            "change. In Linen, differentiate all variables, by fp8flax.value_and_grad; in NNX, use "
            "fp8flax.nnx.value_and_grad and fp8flax.nnx.Optimizer.",
            UserWarning,
            stacklevel=2,
        )
    if not (scale or kernel):
        warn_if_constant_of_loop(primals[2], stacklevel=2)
    return primals[0], tangents[0]


class OpBase:
    """Base class of ops for Linen, NNX and plain JAX, which define ``_value``, ``_place`` and ``_key``."""

    op_type: type[Op]
    """The description of the op."""
    default_recipe: ClassVar[Recipe] = DelayedScaling()
    """The recipe if neither the op nor ``autocast`` has one."""

    has_kernel: bool = True
    """Whether ``rhs`` is a kernel, and not an activation."""
    recipe: Recipe | None
    form: Form = "direct"
    """Which of the ``plans`` of its type the op runs; a field of the ops that have several."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuses operands, which a layer passes if it gets the class in the place of an op."""
        if any(isinstance(x, jax.Array) for x in args):
            raise TypeError(
                f"{cls.__name__} is a class, and was called with arrays. A layer of NNX takes an instance: "
                f"{cls.op_type.nnx_field}={cls.__name__}(). A layer of Linen takes the class, in a field "
                "whose name ends with _cls, such as dot_general_cls."
            )
        return super().__new__(cls)

    def _value(self, leaf: StateLeaf) -> tuple[jax.Array, str]:
        """Returns the value of one array of the state, and its name for errors."""
        raise NotImplementedError

    def _place(self) -> tuple[str, ...]:
        """Returns the path of the op in the model, under which ``statistics`` shows the op."""
        raise NotImplementedError

    def _key(self) -> jax.Array | None:
        """Returns a new random key for stochastic rounding; None if the user gave none."""
        raise NotImplementedError

    def _check_options(self) -> None:
        """Raises an error if ``recipe`` or ``form`` is not valid."""
        if self.recipe is not None:
            check_recipe(self.recipe)
        check_choice("form", self.form, tuple(self.op_type.plans))

    def _recipe_in_use(self) -> Recipe | None:
        """Returns the recipe of a call that runs now; None if FP8 is switched off."""
        return recipe_in_use(self.recipe, self.default_recipe)

    @property
    def _is_off(self) -> bool:
        """Whether FP8 is switched off in a call that runs now."""
        return is_off()

    @property
    def _run(self) -> Callable[..., jax.Array]:
        """Returns ``_compute`` with the recipe that is in use in a call that runs now."""
        return partial(self._compute, self._recipe_in_use())

    def _compute(
        self, recipe: Recipe | None, lhs: ArrayLike, rhs: ArrayLike, *arguments: object, **keywords: Any
    ) -> jax.Array:
        """Returns the result, not in FP8 if the recipe is None."""
        if recipe is None:
            with jax.named_scope(SWITCHED_OFF):
                return self.op_type.plain(lhs, rhs, *arguments, **keywords)
        states = self._states(recipe, jnp.shape(rhs))
        lhs, rhs = as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")
        key = self._key() if recipe.gemms.is_random else None
        with in_op(self._place):
            out = self.op_type.in_fp8(
                *(lhs, rhs, *arguments), recipe=recipe, form=self.form, states=states, key=key, **keywords
            )
        for state in states.values():
            # A state that merges by maximum has entered a gradient, see ``state.tree``.
            if self.has_kernel and not (is_max_dtype(state.scale) or line_search.value):
                return _checked(out, rhs, state.scale)
        return out

    def _states(self, recipe: Recipe, kernel: Shape) -> States:
        """Returns the states that a recipe needs for a kernel of this shape, and checks their arrays."""
        values = []
        for leaf in self._state_leaves(recipe, kernel):
            value, where = self._value(leaf)
            check_state_dtype(where, value)
            if value.shape != leaf.shape:
                raise ValueError(
                    f"The scaling state {where} has shape {value.shape}, but the recipe needs "
                    f"{leaf.shape}. Use the recipe (the amax_history_len) under which the state was made, "
                    "or make the state anew: by fp8flax.add_fp8_state in Linen, by a new op in NNX. Call "
                    "stacked NNX layers inside of nnx.vmap or nnx.scan."
                )
            values.append(value)
        return dict(zip(recipe.gemms.delayed, map(ScalingState, values[::2], values[1::2])))

    def _state_leaves(self, recipe: Recipe, kernel: Shape) -> list[StateLeaf]:
        """Returns the arrays of the state that a recipe needs: a scale and a history for each role."""
        leaves = []
        for role, quantizer in recipe.gemms.delayed.items():
            scale, history = state_leaf_names(role)
            stack = kernel[:1] if role == "kernel" and self.op_type.is_stack else ()
            leaves.append(StateLeaf(scale, (*stack, 1), 1.0))
            leaves.append(StateLeaf(history, (*stack, quantizer.amax_history_len), 0.0))
        return leaves
