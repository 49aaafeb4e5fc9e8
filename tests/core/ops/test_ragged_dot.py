"""The FP8 matmul of a mixture of experts beside NumPy, one expert at a time."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.gemm import dispatch, ragged
from fp8flax._core.gemm.gpus import GPUS, compiling_for
from fp8flax._core.ops.ragged_dot import RaggedDot
from tests import reference
from tests.cases import OWG, mesh, name_of, struct, with_reference
from tests.gpus import run_branch_for_gpus

M, K, N, EXPERTS, LENGTH = 300, 24, 40, 4, 3  # three tiles of rows, the last one not full
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=LENGTH),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise", use_power_2_scales=True),
    # For wgrad several experts share blocks of rows. In forward the blocks of a kernel are not square.
    "blocks": dataclasses.replace(
        fp8.Float8BlockScaling().gemms, forward=fp8.MXFP8BlockScaling().gemms.forward
    ),
}
# The rows of the experts: straddling tiles, one empty and some left over; all to one; none; to the last
# only and beyond the buffer; each its share, so that tiles are shared by three.
SIZES = [(100, 0, 90, 60), (0, 300, 0, 0), (0, 0, 0, 0), (0, 0, 0, 999), (75, 75, 75, 75), (1, 127, 1, 2)]


# Most of the time is the compiler's: a third of it, for programs that are a little slower.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


ROLES = {"input": (), "kernel": (EXPERTS,), "output_grad": ()}


class RaggedStep:
    """A step in NumPy, accumulated in float64, by a loop over experts; keeps the state."""

    def __init__(self, name):
        self.name = name
        self.state = {
            f"{role}_{leaf}": np.full((*shape, size), value, np.float32)
            for role, shape in ROLES.items()
            for leaf, size, value in (("scale", 1, 1), ("amax_history", LENGTH, 0))
        }

    def _delayed(self, role, x, expert=...):
        """Returns a tensor after quantization with the state, and updates the state."""
        dtype = "float8_e5m2" if role == "output_grad" else "float8_e4m3fn"
        scale, history = (self.state[f"{role}_{leaf}"][expert] for leaf in ("scale", "amax_history"))
        scale[...] = reference.next_scale(history, scale, dtype)
        with np.errstate(invalid="ignore"):
            left = reference.quantize(x, dtype, scale).astype(np.float64) * np.float64(scale)
        history[...] = reference.next_history(x, history)
        return left

    def _quantized(self, x, w, g):
        """Returns for each role the tensor after quantization along its last and its other dimension."""
        if self.name == "delayed":
            kernels = [self._delayed("kernel", one, e) for e, one in enumerate(w)]
            x, g = self._delayed("input", x), self._delayed("output_grad", g)
            return (x, x), (g, g), (kernels, kernels)
        gemms = RECIPES[self.name].gemms
        return (
            [with_reference(q.lhs, x, axis) for q, axis in ((gemms.forward, 1), (gemms.wgrad, 0))],
            [with_reference(gemms.dgrad.lhs, g, axis) for axis in (1, 0)],
            [
                [with_reference(q.rhs, one, i) for one in w]
                for q, i in ((gemms.dgrad, 1), (gemms.forward, 0))
            ],
        )

    def __call__(self, x, w, g, sizes):
        """Returns ``(out, dx, dw)``, and the same of all magnitudes: how far rounding may be off."""
        ends = np.minimum(np.cumsum(sizes), len(x))
        used = slice(0, ends[-1])
        results = [[np.zeros(a.shape) for a in (g, x, w)] for _ in range(2)]
        (x, x_wgrad), (g, g_wgrad), (w_dgrad, w) = self._quantized(x[used], w, g[used])
        for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends)):
            rows = slice(start, end)
            factors = (x[rows], w[e]), (g[rows], w_dgrad[e].T), (x_wgrad[rows].T, g_wgrad[rows])
            for (out, dx, dw), f in zip(results, (np.asarray, np.abs)):
                out[rows], dx[rows], dw[e] = (f(lhs) @ f(rhs) for lhs, rhs in factors)
        return results


def fresh_state():
    return jax.tree.map(jnp.asarray, RaggedStep("delayed").state)


@cache
def make_step(name):
    op = fp8.Fp8RaggedDotOp(recipe=RECIPES[name])

    @jit
    def step(state, x, w, g, sizes):
        def loss(variables, x, w):
            out = op.apply(variables, x, w, sizes)
            return jnp.sum(jnp.where(g == 0, 0, out * g)), out

        variables = {OWG: state} if state else {}
        (_, out), grads = fp8.value_and_grad(loss, (0, 1, 2), has_aux=True)(variables, x, w)
        return out, *grads[1:], grads[0].get(OWG, {})

    return step


def data(seed, scales=(3.0, 0.1, 1e-3)):
    rng = np.random.default_rng(seed)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((M, K), (EXPERTS, K, N), (M, N)))
    w *= (1.0 + np.arange(EXPERTS, dtype=np.float32) ** 3)[:, None, None]  # each its own scale
    return tuple(np.float32(scale) * a for scale, a in zip(scales, (x, w, g)))


def check(actual, results):
    """The remaining error is the rounding of sums in float32."""
    for ours, wanted, magnitude in zip(actual, *results):
        assert (np.isnan(ours) == np.isnan(wanted)).all()
        smallest = np.finfo(np.float32).tiny  # what XLA flushes to zero
        assert (np.abs(np.nan_to_num(ours - wanted)) <= 2e-6 * np.nan_to_num(magnitude) + smallest).all()


@pytest.mark.optimized
@pytest.mark.newest
@pytest.mark.parametrize("name", ["delayed", "axiswise", "blocks"])
def test_steps_beside_numpy(name):
    """Results, both gradients and the next states, of steps with growing data and other groups."""
    theirs, state = RaggedStep(name), fresh_state() if name == "delayed" else {}
    for i, sizes in enumerate(SIZES):
        x, w, g = data(i, (3.0 * 2**i, 0.1 * 2**i, 1e-3 / 2**i))
        *actual, state = make_step(name)(state, x, w, g, np.array(sizes))
        check(actual, theirs(x, w, g, np.array(sizes)))
        for leaf, value in state.items():
            np.testing.assert_array_equal(value, theirs.state[leaf], err_msg=f"{leaf}, step {i}")


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_rows_that_belong_to_no_expert_do_nothing(name):
    """Whatever they hold, they reach no result, no gradient, no scale and no amax."""
    state = fresh_state() if name == "delayed" else {}
    (x, w, g), sizes = data(0), np.array(SIZES[0])
    expected = make_step(name)(state, x, w, g, sizes)
    x[sizes.sum() :], g[sizes.sum() :] = (np.nan, np.inf) if name == "delayed" else (1e6, 1e6)
    actual = make_step(name)(state, x, w, g, sizes)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nan_stays_with_its_row_and_expert(value):
    """It shows in what is computed of it, also beside rows of other experts, and in no state."""
    sizes = np.array(SIZES[0])
    state = fresh_state()
    x, w, g = data(0)
    x[130, 5], g[110, 7] = value, value  # both of expert 2; one of their tiles has rows of experts 3 and 0
    out, dx, dw, new_state = make_step("delayed")(state, x, w, g, sizes)
    is_nan = bool(np.isnan(value))  # an Inf of the input saturates; one of the cotangent becomes a NaN
    assert np.isnan(out).any(1).nonzero()[0].tolist() == [130] * is_nan
    assert np.isnan(dx).any(1).nonzero()[0].tolist() == [110]
    assert np.isnan(dw).any((1, 2)).nonzero()[0].tolist() == [2]
    for role, is_known in (("input", False), ("kernel", True), ("output_grad", False)):
        newest = new_state[f"{role}_amax_history"][..., 0]
        expected = np.abs(w).max((1, 2)) if is_known else 0
        np.testing.assert_array_equal(newest, expected, err_msg=role)


@pytest.mark.parametrize("name", RECIPES)
def test_a_nan_of_a_kernel_stays_with_its_expert(name):
    """Rows of other experts in the same tile, and the other kernels, are as without it."""
    sizes, mine = np.array(SIZES[0]), slice(100, 190)  # the rows of expert 2
    state = fresh_state() if name == "delayed" else {}
    x, w, g = data(0)
    expected = make_step(name)(state, x, w, g, sizes)[:3]
    w[2, 5, 7] = np.nan
    actual = make_step(name)(state, x, w, g, sizes)[:3]
    for ours, theirs, places in zip(actual, expected, ((mine, 7), (mine, 5), ())):
        wanted = np.zeros(ours.shape, bool)
        wanted[places] = bool(places)
        np.testing.assert_array_equal(np.isnan(ours), wanted)
        np.testing.assert_array_equal(ours[:100], theirs[:100])
        np.testing.assert_array_equal(ours[190:], theirs[190:])


# Small, under transformations. Integers that FP8 holds under every scale of a power of two: one call on all
# of the data gives the same numbers, whatever the order of the sums.

SMALL = (12, 3, 8, 5)  # rows, experts, K, N
EXACT = fp8.DelayedScaling(amax_history_len=2, use_power_2_scales=True)


def small(seed=0, batch=()):
    rows, experts, depth, columns = SMALL
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, (*batch, rows, depth)).astype(np.float32)
    w = rng.integers(-2, 3, (experts, depth, columns)).astype(np.float32)
    return x, w * np.float32([1, 2, 4])[:, None, None]


def loss_of(op, variables, x, w, sizes):
    return jnp.sum(jnp.square(op.apply(variables, x, w, sizes)))


@cache
def small_variables():
    op = fp8.Fp8RaggedDotOp(recipe=EXACT)
    shapes = jax.eval_shape(op.init, jax.random.key(0), *small(), np.array([5, 0, 6]))
    state = {name: np.full(leaf.shape, "scale" in name, np.float32) for name, leaf in shapes[OWG].items()}
    return op, {OWG: state}


@cache
def plain_step():
    op, _ = small_variables()
    return jit(fp8.grad(partial(loss_of, op), (0, 1, 2)))


def over_examples(op, variables, xs, w, sizes):
    return jnp.sum(jax.vmap(lambda x, size: loss_of(op, variables, x, w, size))(xs, sizes))


def on_two_devices(op, variables, xs, w, sizes):
    """Each device has its own rows and all experts: gradients add, states merge by maximum."""

    def of_shard(variables, x, w, size):
        return lax.psum(loss_of(op, variables, x[0], w, size[0]), "data")

    specs = (P(), P("data"), P(), P("data"))
    return jax.shard_map(of_shard, mesh=mesh(data=2), in_specs=specs, out_specs=P())(
        variables, xs, w, sizes
    )


@pytest.mark.parametrize("way", [over_examples, on_two_devices], ids=name_of)
def test_as_one_example_after_another(way):
    """Every example by itself, the states merged by maximum, gives the same as both examples at once."""
    op, variables = small_variables()
    xs, w = small(batch=(2,))
    xs[1] *= 2
    sizes = np.array([[5, 0, 6], [0, 4, 8]])
    states, dxs, dws = zip(*(plain_step()(variables, x, w, size) for x, size in zip(xs, sizes)))
    state = jax.tree.map(lambda *leaves: np.max(np.stack(leaves), axis=0), *states)
    actual = jit(fp8.grad(partial(way, op), (0, 1, 2)))(variables, xs, w, sizes)
    jax.tree.map(np.testing.assert_array_equal, actual, (state, np.stack(dxs), sum(dws)))


def test_no_row():
    """No result, and no news for the state but of the kernels."""
    _, variables = small_variables()
    x, w = small()
    state, _, dw = plain_step()(variables, x[:0], w, jnp.zeros(3, int))
    assert not dw.any()
    for role in ("input", "output_grad"):
        np.testing.assert_array_equal(state[OWG][f"{role}_amax_history"], [0, 0])
    np.testing.assert_array_equal(state[OWG]["kernel_amax_history"][:, 0], np.abs(w).max((1, 2)))


# Errors.


def call(x=None, w=None, sizes=(5, 0, 6)):
    x, w = (default if given is None else given for given, default in zip((x, w), small()))
    recipe = fp8.Float8CurrentScaling()
    return RaggedDot.in_fp8(x, w, jnp.asarray(sizes), recipe=recipe)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"x": np.ones((2, 3, 8), np.float32)}, ValueError, r"\(2, 3, 8\)"),
        ({"w": np.ones((0, 8, 5), np.float32)}, ValueError, "one expert or more"),
        ({"sizes": (5, 6)}, TypeError, "size"),
        ({"sizes": (5.0, 0.0, 6.0)}, TypeError, "integer"),
    ],
)
def test_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        call(**arguments)


def test_state_of_other_experts_is_refused():
    op, variables = small_variables()
    x, w = small()
    with pytest.raises(ValueError, match="kernel_scale"):
        op.apply(variables, x, w[:2], jnp.array([5, 6]))


def test_second_derivatives_are_refused():
    x, _ = small()
    with pytest.raises(TypeError, match="can be differentiated once"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(call(x) ** 2))(x) ** 2)), x)


def test_explicit_axes_are_refused():
    with jax.set_mesh(mesh(AxisType.Explicit, data=2)):
        x = jax.sharding.reshard(jnp.asarray(small()[0]), P("data"))
        with pytest.raises(NotImplementedError, match="inside jax.shard_map"):
            jax.eval_shape(call, x)


# The programs for NVIDIA GPUs.


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.usefixtures("gpu")
def test_three_gemms_in_fp8_tile_by_tile():
    """On Blackwell: Hopper has a kernel for all tiles. XLA would multiply all rows by all kernels."""
    rows, experts, depth, columns = 4096, 8, 512, 1024
    op = fp8.Fp8RaggedDotOp(recipe=fp8.Float8CurrentScaling())

    def step(x, w, sizes):
        out, vjp = jax.vjp(lambda x, w: op.apply({}, x, w, sizes), x, w)
        return vjp(out)

    args = struct(rows, depth), struct(experts, depth, columns), struct(experts, dtype=jnp.int32)
    report = fp8.audit(step, *args, target="b200")
    assert report.num_fp8_gemms == report.num_gemms == 3
    assert {(gemm.role, gemm.backend, gemm.accumulation) for gemm in report.gemms} == {
        ("forward", "cublasLt", "fast"),
        ("dgrad", "cublasLt", "exact"),
        ("wgrad", "cublasLt", "exact"),
    }
    tiles = 1 + (experts - 1) * ragged.tile_of(rows, experts) / rows
    assert report.flops == 6 * rows * depth * columns * tiles < 6 * rows * depth * columns * experts / 2


@pytest.mark.long
def test_each_device_of_a_mesh_multiplies_its_rows_in_tiles(monkeypatch):
    """Four CPUs, as A100s do it. Each has one expert, and rows that do not fill the last tile."""
    op = fp8.Fp8RaggedDotOp(recipe=RECIPES["current"])
    rows, depth, columns = 640, 256, 384
    rng = np.random.default_rng(0)
    shapes = (rows, depth), (EXPERTS, depth, columns), (rows, columns)
    x, w, g = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    sizes = np.array([200, 0, 130, 101])

    def step(x, w, g, sizes):
        out, vjp = jax.vjp(lambda x, w: op.apply({}, x, w, sizes), x, w)
        return out, *vjp(g)

    expected = jit(step)(x, w, g, sizes)
    run_branch_for_gpus(monkeypatch)
    # XLA calls the rule of the parts from another thread, where no target is set.
    monkeypatch.setattr(dispatch, "compute_capability", lambda: 8.0)
    split, whole = (NamedSharding(mesh(a=4), spec) for spec in (P("a"), P()))
    places = split, split, split, whole
    with compiling_for(GPUS["a100"]):
        compiled = jit(step, in_shardings=places, out_shardings=split).lower(x, w, g, sizes).compile()
    for ours, theirs in zip(compiled(*jax.device_put((x, w, g, sizes), places)), expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    # Kernels are gathered, and no rows.
    gathered = re.findall(r"= \w+\[(\d+)[\d,]*\]\S* all-gather", compiled.as_text())
    assert set(gathered) == {str(EXPERTS)}
