"""The table of entries that ``benchmarks/gpu.py`` measures; an entry times or compares programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import fp8flax as fp8
from benchmarks import accuracy, common, dense, gpu_programs
from benchmarks.common import Row, Shape
from benchmarks.gpu_programs import At, Program, Programs, filled, looped, pinned
from fp8flax.demo.model import VOCABULARY, ByteTransformer

BF16, E4M3, E5M2 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2
SECONDS_OF_A_CALL = 0.04


class Entry(NamedTuple):
    """A figure, or several that are measured together."""

    name: str
    programs: Callable[[], Programs]
    measure: Callable[[At], Row]
    expected: float
    """Seconds that it should take; it does not begin when less is left."""
    base: str | None = None
    """The program that the others are compared with."""


def rounds_per_call(flops: float = 0, bytes: float = 0) -> int:
    """Returns how many rounds should take about ``SECONDS_OF_A_CALL``; two if it takes next to nothing."""
    seconds = max(flops / 500e12, bytes / 2.5e12)
    return 2 if seconds < 1e-6 else min(1000, max(4, round(SECONDS_OF_A_CALL / seconds)))


# Values.


def _recipes() -> dict[str, fp8.Recipe]:
    recipes = {name: recipe for name, recipe in accuracy.RECIPES.items() if recipe is not None}
    for how in ("exact", "default"):
        accumulation = (how, how, how)
        recipes[f"delayed-{how}"] = fp8.DelayedScaling(accumulation=accumulation)
    recipes["delayed-margin-pow2"] = fp8.DelayedScaling(margin=2, use_power_2_scales=True)
    recipes["delayed-most-recent"] = fp8.DelayedScaling(amax_compute_algo="most_recent", amax_history_len=4)
    return {**recipes, **{f"torchao-{name}": recipe for name, recipe in _torchao_recipes().items()}}


def _torchao_recipes() -> dict[str, fp8.Recipe]:
    """Returns torchao's recipes for float8 training, by torchao's names."""
    e4m3 = fp8.CurrentQuantizer(dtype=E4M3, amax_epsilon=1e-12)
    e5m2 = dataclasses.replace(e4m3, dtype=E5M2)
    power_of_two = dataclasses.replace(e4m3, use_power_2_scales=True)
    row = dataclasses.replace(power_of_two, granularity="axiswise")
    forward = fp8.GemmRecipe(lhs=row, rhs=row, accumulation="fast")
    backward = fp8.GemmRecipe(lhs=row, rhs=row)
    return {
        "tensorwise": fp8.CustomRecipe(
            forward=fp8.GemmRecipe(lhs=e4m3, rhs=e4m3, accumulation="fast"),
            dgrad=fp8.GemmRecipe(lhs=e5m2, rhs=e4m3),
            wgrad=fp8.GemmRecipe(lhs=e4m3, rhs=e5m2),
        ),
        "rowwise": fp8.CustomRecipe(forward=forward, dgrad=backward, wgrad=backward),
        "rowwise_with_gw_hp": fp8.CustomRecipe(
            forward=forward, dgrad=fp8.GemmRecipe(lhs=row, rhs=power_of_two)
        ),
    }


RECIPES = _recipes()
NUM_EXPERTS = 5


class Experts(nn.Module):
    """A ragged dot whose experts get odd numbers of rows, one of them none, and leave some rows over."""

    recipe: fp8.Recipe
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(rows, inputs)`` to ``(rows, features)``."""
        shape = (NUM_EXPERTS, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(batch_axis=(0,)), shape)
        shares = np.array([0.21, 0.0, 0.33, 0.17, 0.24])
        group_sizes = np.where(shares > 0, (shares * x.shape[0]).astype(np.int32) | 1, 0)
        return fp8.Fp8RaggedDotOp(recipe=self.recipe)(x, kernel, jnp.asarray(group_sizes, jnp.int32))


def dense_layer(recipe: fp8.Recipe, features: int) -> nn.Module:
    return nn.Dense(features, use_bias=False, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=recipe))


def values_programs(make_layer: Callable[..., nn.Module], shape: Shape, recipe: str) -> Programs:
    """Returns a float32 layer: output, gradients of the variables and of the input."""
    M, K, N = shape
    layer = make_layer(RECIPES[recipe], N)

    def make() -> Program:
        x, g = (jax.ShapeDtypeStruct((M, n), jnp.float32) for n in (K, N))
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)
        return Program(jax.jit(common.make_step(layer.apply)), (variables, x, g))

    return {recipe: make}


def measure_values(make_layer: Callable[..., nn.Module], shape: Shape, recipe: str, at: At) -> Row:
    """Compares a layer on the device with the same on the CPU, where FP8 is emulated.

    Delayed scaling has seen the same tensors one step before.
    """
    at(recipe)
    (make,) = values_programs(make_layer, shape, recipe).values()
    program = make()
    with jax.default_device(jax.devices("cpu")[0]):
        arguments = filled(program.specs)
        wanted = common.second_step(program.function, *arguments)
    compiled = gpu_programs.compiled_here(program)
    got = common.second_step(compiled, *jax.device_put(arguments, jax.devices()[0]))
    row = gpu_programs.read_or_say(compiled)
    results = [(out, dx, variables["params"]["kernel"]) for out, variables, dx in (got, wanted)]
    for gemm, device, cpu in zip(common.GEMMS, *results, strict=True):
        row[gemm] = common.relative_error(np.asarray(device, np.float64), np.asarray(cpu, np.float64))
    states = [jax.tree.leaves(step[1].get(common.OWG, {})) for step in (got, wanted)]
    row["states_that_differ"] = sum(int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in zip(*states))
    return {"rows": {recipe: row}}


# One Dense layer, forward and backward.


def dense_programs(shape: Shape, names: Sequence[str]) -> Programs:
    M, K, N = shape
    flops = 6 * M * K * N
    steps = rounds_per_call(flops)

    def make(name: str) -> Program:
        layer, (variables, x, g) = dense.specs(dense.CONTENDERS[name], shape)
        step = common.make_step(layer.apply)

        def body(carry: Any) -> Any:
            variables, x, g, _ = carry
            # Only the kernel stays what it was: a state is another one in each round.
            kernel, x_now, g_now = pinned((variables["params"], x, g))
            y, dvariables, dx = step({**variables, "params": kernel}, x_now, g_now)
            return {**dvariables, "params": variables["params"]}, x, g, (y, dvariables["params"], dx)

        y, dvariables, dx = jax.eval_shape(step, variables, x, g)
        return looped(body, (variables, x, g, (y, dvariables["params"], dx)), steps, flops=flops)

    return {name: partial(make, name) for name in names}


# GEMMs alone.


def gemm_programs(shape: Shape) -> Programs:
    M, K, N = shape
    flops = 2 * M * K * N
    presets = lax.DotAlgorithmPreset
    fast, exact = presets.ANY_F8_ANY_F8_F32_FAST_ACCUM, presets.ANY_F8_ANY_F8_F32

    def make(lhs: Any, rhs: Any, precision: Any, rhs_is_transposed: bool) -> Program:
        dims = (((1,), (1 if rhs_is_transposed else 0,)), ((), ()))

        def dot(a: jax.Array, b: jax.Array, precision: Any = None) -> jax.Array:
            return lax.dot_general(a, b, dims, precision, preferred_element_type=BF16)

        def body(carry: Any) -> Any:
            a, b, _ = carry
            # CPUs refuse what states its accumulation.
            out = lax.platform_dependent(
                *pinned((a, b)), cuda=partial(dot, precision=precision), default=dot
            )
            return a, b, out

        shapes = ((M, K), (N, K) if rhs_is_transposed else (K, N), (M, N))
        specs = tuple(jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (lhs, rhs, BF16)))
        size = sum(math.prod(s.shape) * s.dtype.itemsize for s in specs)
        return looped(body, specs, rounds_per_call(flops, size), flops=flops, bytes=size)

    return {
        "bf16": partial(make, BF16, BF16, None, False),
        "bf16-transposed": partial(make, BF16, BF16, None, True),
        "fp8-fast": partial(make, E4M3, E4M3, fast, True),
        "fp8-exact": partial(make, E4M3, E4M3, exact, True),
        "fp8-exact-gradient": partial(make, E5M2, E4M3, exact, True),
        "fp8-default": partial(make, E4M3, E4M3, None, True),
        "fp8-default-not-transposed": partial(make, E4M3, E4M3, None, False),
    }


# A training step.


class Training(NamedTuple):
    """A Transformer on bytes, as the demo has it, and its batch."""

    width: int
    layers: int
    heads: int
    batch: int
    length: int


OPS = {
    "bf16": None,
    "delayed": fp8.Fp8DotGeneralOp,
    "current": partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8CurrentScaling()),
}


def model_programs(training: Training) -> Programs:
    width, layers, heads, batch, length = training
    windows = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    flops = 6 * batch * length * (12 * layers * width**2 + VOCABULARY * width)

    def make(op: Any) -> Program:
        model = ByteTransformer(width, layers, heads, length, op)

        def initial(key: jax.Array) -> fp8.TrainState:
            variables = model.init(key, jnp.zeros((1, length), jnp.int32))
            return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-4))

        def step(carry: Any) -> Any:
            state, windows, _ = carry

            def loss(variables: Any) -> jax.Array:
                logits = state.apply_fn(variables, windows[:, :-1])
                return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

            value, grads = fp8.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), windows, value

        def carry() -> Any:
            drawn = jax.random.randint(jax.random.key(1), windows.shape, 0, VOCABULARY)
            return jax.jit(initial)(jax.random.key(0)), drawn, jnp.zeros(())

        state = jax.eval_shape(initial, jax.random.key(0))
        specs = ((state, windows, jax.ShapeDtypeStruct((), jnp.float32)),)
        return Program(jax.jit(step, donate_argnums=0), specs, carry=carry, flops=flops)

    return {name: partial(make, op) for name, op in OPS.items()}


# The table.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table: entries that differ in their arguments only."""

    name: str
    programs: Callable[..., Programs]
    full: Mapping[str, tuple[Any, ...]]
    """The arguments of ``programs``, by the rest of the name of an entry."""
    small: Mapping[str, tuple[Any, ...]]
    """The same with sizes that a CPU runs within seconds."""
    base: str | None = None
    expected: float
    measure: Callable[..., Row] | None = None
    """Takes the arguments, and ``at``; by default all programs are timed."""

    def entries(self, is_small: bool) -> list[Entry]:
        """Returns an entry for each name."""
        return [self._entry(*item) for item in (self.small if is_small else self.full).items()]

    def _entry(self, name: str, arguments: tuple[Any, ...]) -> Entry:
        def measure(at: At) -> Row:
            if self.measure is not None:
                return self.measure(*arguments, at)
            return gpu_programs.measure_timed(self.programs(*arguments), self.base, at)

        programs = partial(self.programs, *arguments)
        return Entry(f"{self.name}/{name}", programs, measure, self.expected, self.base)


def of_shapes(*shapes: Shape, also: tuple[Any, ...] = ()) -> dict[str, tuple[Any, ...]]:
    return {common.text_of(shape): (shape, *also) for shape in shapes}


def of_recipes(layer: Callable[..., nn.Module], shape: Shape, *recipes: str) -> dict[str, tuple[Any, ...]]:
    return {recipe: (layer, shape, recipe) for recipe in recipes}


WIDE = Training(width=4096, layers=4, heads=32, batch=8, length=2048)
TINY = Training(width=32, layers=2, heads=4, batch=2, length=8)
FEW = ("bf16", "flax-qdq", "flax-direct", "fp8flax", "fp8flax-triton", "fp8flax-current")
OF_TRANSFORMER_ENGINE = tuple(
    (15872, k, n) for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
)
"""Transformer Engine publishes the times of these layers."""
FIRST, *OTHERS = dense.OPTIONS["shapes"]
CORE = ("delayed", "delayed-exact", "delayed-default", "current", "axiswise", "mxfp8", "block128")
MORE = tuple(name for name in RECIPES if name not in CORE)

values = partial(Family, programs=values_programs, measure=measure_values, expected=8)
layers = partial(Family, name="dense", programs=dense_programs, base="bf16")
TABLE = (
    values(
        name="values",
        full=of_recipes(dense_layer, (512, 768, 384), *CORE),
        small=of_recipes(dense_layer, (32, 64, 32), *CORE),
    ),
    Family(
        name="gemm",
        programs=gemm_programs,
        full=of_shapes((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 4096)),
        small=of_shapes((16, 16, 16)),
        base="bf16",
        expected=15,
    ),
    values(
        name="values-experts",
        full=of_recipes(Experts, (512, 768, 384), "current-e4m3", "block128"),
        small=of_recipes(Experts, (32, 64, 32), "current-e4m3", "block128"),
    ),
    layers(
        full=of_shapes(FIRST, also=(tuple(dense.CONTENDERS),)),
        small=of_shapes((32, 32, 32), also=(tuple(dense.CONTENDERS),)),
        expected=50,
    ),
    Family(
        name="model",
        programs=model_programs,
        full={"bytes-800m": (WIDE,)},
        small={"tiny": (TINY,)},
        base="bf16",
        expected=200,
    ),
    layers(
        full=of_shapes(*OF_TRANSFORMER_ENGINE, *OTHERS, also=(FEW,)),
        small=of_shapes((16, 32, 48), also=(FEW,)),
        expected=30,
    ),
    values(
        name="values",
        full=of_recipes(dense_layer, (512, 768, 384), *MORE),
        small=of_recipes(dense_layer, (32, 64, 32), *MORE),
    ),
    values(
        name="values-odd",
        full=of_recipes(dense_layer, (72, 200, 136), *CORE),
        small=of_recipes(dense_layer, (6, 10, 14), *CORE),
    ),
)
"""The most telling first."""


def entries(is_small: bool = False) -> list[Entry]:
    """Returns all entries, in the order of the table."""
    return [entry for family in TABLE for entry in family.entries(is_small)]
