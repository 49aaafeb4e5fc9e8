"""``calibrate`` and ``freeze`` of NNX models agree with those of the same Linen model."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import RECIPES, largest_array, normal
from tests.nnx.layout import to_linen

SHORT = fp8.DelayedScaling(amax_history_len=4)
X = normal(0, 3, 4, 16)


class Model(nnx.Module):
    """Matmuls of every kind of layer, one of them shared, and statistics and dropout."""

    def __init__(self, rngs):
        kernel_init = nnx.with_metadata(nnx.initializers.lecun_normal(), note="the user's")
        self.up = nnx.Linear(16, 32, dtype=jnp.bfloat16, kernel_init=kernel_init, rngs=rngs)
        self.heads = nnx.LinearGeneral(32, (2, 8), rngs=rngs)
        self.out = nnx.Einsum("bthd,hdo->bto", (2, 8, 16), (16,), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for _ in range(2):
            x = self.out(self.heads(nnx.relu(self.up(x)).astype(jnp.float32)))
        return self.norm(self.dropout(x))


def model_of(recipe=SHORT, seed=0):
    model = fp8nnx.quantize_model(Model(nnx.Rngs(seed)), recipe, include=".*")
    return nnx.view(model, deterministic=True, use_running_average=True)


def pure(tree):
    return nnx.to_pure_dict(nnx.state(tree, nnx.Not(nnx.RngState)))


def rngs_of(model):
    """Returns the keys and the counts of random number generators as numbers."""
    state = nnx.to_pure_dict(nnx.state(model, nnx.RngState))
    keys = [jax.random.key_data(x) for x in jax.tree.leaves(state) if x.dtype != jnp.uint32]
    return keys + [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint32]


class Twin(nnx.Module):
    def __init__(self, rngs):
        op = partial(fp8nnx.Fp8DotGeneralOp, recipe=SHORT)
        self.first = nnx.Linear(16, 16, dot_general=op(), rngs=rngs)
        self.second = nnx.Linear(16, 8, dot_general=op(), rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


@pytest.mark.parametrize("grad", [nnx.value_and_grad, jax.value_and_grad], ids=["nnx.grad", "jax.grad"])
def test_calibration_of_a_model_that_differentiates_itself(grad):
    def energy(x, model):
        return jnp.sum(model(x))

    plain, model = Twin(nnx.Rngs(0)), Twin(nnx.Rngs(0))
    fp8nnx.calibrate(lambda model, x: energy(x, model), plain, [X])
    fp8nnx.calibrate(lambda model, x: grad(partial(energy, model=model))(x), model, [X])
    assert model.second.dot_general.input_amax_history.get_value()[0] > 0
    jax.tree.map(np.testing.assert_array_equal, pure(model), pure(plain))


def test_calibration_of_a_loss():
    """The state of output gradients is filled, too; all amaxes are the largest of the batches."""
    model = Twin(nnx.Rngs(0))
    fp8nnx.calibrate(lambda model, x: jnp.sum(model(x) ** 2), model, [X, 3 * X], backward=True)
    first, second = model.first.dot_general, model.second.dot_general
    assert first.input_amax_history.get_value()[0] == 3 * jnp.max(jnp.abs(X))
    wide = nnx.relu(3 * X @ model.first.kernel[...]) @ model.second.kernel[...]
    expected = [2 * jnp.max(jnp.abs(wide)), 0, 0, 0]
    np.testing.assert_allclose(second.output_grad_amax_history.get_value(), expected, rtol=1e-5)


@pytest.mark.long
def test_calibration_leaves_all_else():
    model = nnx.view(model_of(), deterministic=False, use_running_average=False)
    before, keys = pure(model), rngs_of(model)
    fp8nnx.calibrate(lambda model, x: model(x), model, [X])
    after = pure(model)
    assert after["up"].pop("dot_general")["input_scale"] != before["up"].pop("dot_general")["input_scale"]
    for name in ("heads", "out"):
        for tree in (after, before):
            tree[name].pop("dot_general" if name == "heads" else "einsum_op")
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert keys
    assert all(map(np.array_equal, keys, rngs_of(model)))
    with pytest.warns(UserWarning, match="no scaling state, so nothing was calibrated"):
        fp8nnx.calibrate(lambda model, x: model(x), model_of(fp8.Float8CurrentScaling()), [X])


@pytest.mark.long
def test_frozen_models_compute_the_same_bits():
    calibrated = model_of()
    fp8nnx.calibrate(lambda model, x: model(x), calibrated, [X, 2 * X])
    before = pure(calibrated)
    with jax.checking_leaks():
        frozen = fp8nnx.freeze(calibrated, X)
    assert frozen.up.kernel.note == "the user's"
    np.testing.assert_array_equal(frozen(X), calibrated(X))
    jax.tree.map(np.testing.assert_array_equal, pure(calibrated), before)
    kernels = [layer.kernel.get_value() for layer in (frozen.up, frozen.heads, frozen.out)]
    assert [kernel.dtype for kernel in kernels] == [jnp.float8_e4m3fn] * 3
    assert not jax.tree.leaves(nnx.state(frozen, fp8nnx.OverwriteWithGradient))
    assert len(jax.tree.leaves(nnx.state(frozen, fp8nnx.Frozen))) == 3 * 3
    assert len(jax.tree.leaves(nnx.state(frozen, nnx.Param))) == 3 + 2  # biases, and those of the norm
    jitted = nnx.jit(lambda model, x: model(x))(frozen, X)
    np.testing.assert_allclose(jitted, frozen(X), rtol=1e-2, atol=1e-2)
    graphdef, state = nnx.split(frozen)
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(X), frozen(X))


@pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls")
def test_weights_only_leaves_ops_of_wide_kernels_wide():
    """No op quantizes an input, so nothing must be calibrated."""
    x = 1e4 * X[..., :16]
    model = nnx.Sequential(nnx.Conv(16, 16, 3, rngs=nnx.Rngs(0)), nnx.Linear(16, 8, rngs=nnx.Rngs(1)))
    model8 = fp8nnx.quantize_model(model, include=".*")
    with pytest.warns(UserWarning, match="stay wide: layers/0/kernel"):
        frozen = fp8nnx.freeze(model8, x, weight_only=True)
    np.testing.assert_array_equal(frozen.layers[0](x), model.layers[0](x))
    assert isinstance(model8.layers[0].conv_general_dilated.recipe, fp8.DelayedScaling | None)
    with pytest.raises(ValueError, match="frozen already"):
        fp8nnx.freeze(frozen, x)
    with fp8.autocast(enabled=False), pytest.raises(ValueError, match="No FP8 op ran"):
        fp8nnx.freeze(model8, x)
    with fp8.autocast(recipe=fp8.Float8CurrentScaling()):
        with pytest.warns(UserWarning, match="stay wide"):
            frozen = fp8nnx.freeze(model8, x)
        expected = frozen(x)
    np.testing.assert_array_equal(frozen(x), expected)


@pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls")
def test_a_frozen_model_without_a_stored_kernel(tmp_path):
    """It is frozen all the same."""
    x = X[..., :16]
    model8 = fp8nnx.quantize_model(
        nnx.Conv(16, 16, 3, rngs=nnx.Rngs(0)), recipe=fp8.Float8CurrentScaling(), include=".*"
    )
    with pytest.warns(UserWarning, match="stay wide"):
        frozen = fp8nnx.freeze(model8, x)
    fp8.save_safetensors(tmp_path / "a", frozen)
    assert fp8.read_checkpoint(tmp_path / "a")["kernel"].dtype == np.float32
    with pytest.raises(ValueError, match="frozen already"):
        fp8nnx.freeze(frozen, x)


def test_codes_and_scales_have_no_gradients():
    op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
    frozen = fp8nnx.freeze(nnx.Linear(16, 8, dot_general=op, rngs=nnx.Rngs(0)), X)
    assert set(nnx.grad(lambda model: jnp.sum(model(X)))(frozen)) == {"bias"}
    scales = nnx.DiffState(0, nnx.PathContains("dot_general"))
    with pytest.raises(TypeError, match="have no gradient"):
        nnx.grad(lambda model: jnp.sum(model(X)), argnums=scales)(frozen)


class Scaled(nnx.Linear):
    """A layer that does not multiply by its kernel as it is."""

    def __call__(self, x):
        return self.dot_general(x, 2 * self.kernel[...], (((x.ndim - 1,), (0,)), ((), ())))


class Tied(nnx.Module):
    """Two layers; something other than the layer itself reads the kernel of the second."""

    def __init__(self, how):
        rngs, self.how = nnx.Rngs(0), how
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.tied = (Scaled if how == "scaled" else nnx.Linear)(16, 16, rngs=rngs)
        self.norm = nnx.WeightNorm(self.tied, rngs=rngs) if how == "WeightNorm" else None
        self.copy = nnx.Variable(jnp.zeros((16, 16)))

    def __call__(self, x):
        h = self.first(x)
        if self.how in ("WeightNorm", "scaled"):
            return (self.norm or self.tied)(h)
        kernel = self.tied.kernel[...]
        if self.how == "restored":
            self.tied.kernel[...] = 2 * kernel
        h = self.tied(h)
        if self.how == "restored":
            self.tied.kernel[...] = kernel
            return h
        if self.how == "returned":
            return h, kernel
        self.copy.set_value(kernel)
        return h


@pytest.mark.long
@pytest.mark.parametrize("how", ["returned", "kept", "restored", "WeightNorm", "scaled"])
def test_kernels_that_are_read_elsewhere_stay_wide(how):
    model = fp8nnx.quantize_model(Tied(how), fp8.Float8CurrentScaling(), X, include=".*")
    expected = nnx.clone(model)(X)
    where = "norm/layer_instance" if how == "WeightNorm" else "tied"
    reason = "something else reads" if how in ("returned", "kept") else "its matmul does not multiply"
    with pytest.warns(UserWarning, match=rf"wide: {where}/kernel \({reason}"):
        frozen = fp8nnx.freeze(model, X)
    assert frozen.first.kernel.get_value().dtype == jnp.float8_e4m3fn
    assert frozen.tied.kernel.get_value().dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, frozen(X), expected)


@pytest.mark.long
def test_kernels_that_pass_through_transformations_are_frozen():
    """Kernels are frozen although NNX passes them into and out of each transformation."""

    class Passed(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))
            self.b.kernel = self.a.kernel  # of two layers, no one else's

        def __call__(self, x):
            x = nnx.jit(lambda layer, x: layer(x))(self.a, x)
            x = nnx.remat(lambda layer, x: layer(x))(self.b, x)
            x = nnx.cond(x.sum() > 0, lambda l, x: l(x), lambda l, x: x, self.a, x)
            x = nnx.fori_loop(0, 2, lambda i, c: (c[0], c[0](c[1])), (self.b, x))[1]
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(self.a, x)

    model = fp8nnx.quantize_model(Passed(), fp8.Float8CurrentScaling(), include=".*")
    frozen = fp8nnx.freeze(model, X)
    assert frozen.a.kernel.get_value().dtype == frozen.b.kernel.get_value().dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(frozen(X), model(X), rtol=1e-6)


class Einsum(nnx.Module):
    """As in Tunix: a kernel without a layer of Flax."""

    def __init__(self, eqn, shape, rngs):
        self.eqn, init = eqn, nnx.initializers.lecun_normal()
        self.w = nnx.Param(init(rngs.params(), shape), note="the user's")

    def __call__(self, x):
        return jnp.einsum(self.eqn, x, self.w)  # the variable itself

    def norm(self):
        return sum(jnp.sum(jnp.abs(x.astype(jnp.float32))) for x in jax.tree.leaves(nnx.state(self)))

    def penalty(self):
        return jnp.sum(self.w[...] ** 2)

    def first_half(self, x):
        return x[:, :8] @ self.w[:8]


class Block(nnx.Module):
    """Products that modules write out, with all of a kernel, in each way that reads one."""

    def __init__(self, rngs):
        matrix = partial(nnx.initializers.lecun_normal(), rngs.params())
        self.gate, self.up = Einsum("bi,io->bo", (16, 16), rngs), nnx.Param(matrix((4, 4, 16)))
        self.heads = nnx.List(
            [Einsum("bi,hid->bhd", (2, 16, 8), rngs), Einsum("bhd,hdo->bo", (2, 8, 16), rngs)]
        )
        self.down, self.last = nnx.Param(matrix((16, 16))), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        x = nnx.gelu(self.gate(x)) * (x @ self.up.reshape(16, 16).astype(x.dtype))
        x = nnx.remat(lambda head, x: head(x))(
            self.heads[1], nnx.jit(lambda head, x: head(x))(self.heads[0], x)
        )
        return jnp.dot(x, self.down.T) + x @ self.last.kernel[...]  # of a layer that does not run


class Stacked(nnx.Module):
    def __init__(self, rngs):
        stack = nnx.split_rngs(splits=3)(nnx.vmap(Block))
        self.blocks = stack(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, block: nnx.tanh(block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.blocks
        )


OWN_KERNELS = {"gate/w", "up", "heads/0/w", "heads/1/w", "down", "last/kernel"}
ROWS = normal(0, 4, 16)


def stored(model):
    """Returns the paths of the variables in FP8."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))
    return {"/".join(map(str, path)) for path, x in state if x.get_value().dtype == jnp.float8_e4m3fn}


def assert_found_again(frozen, path):
    """Asserts that a file of a frozen model has all its arrays, under names that ``load_into`` finds."""
    fp8.save_safetensors(path, frozen)
    blank, in_files = nnx.clone(frozen), nnx.Any(nnx.Param, fp8nnx.Frozen)
    nnx.update(blank, jax.tree.map(jnp.zeros_like, nnx.state(blank, in_files)))
    fp8.load_into(blank, fp8.read_checkpoint(path))
    jax.tree.map(np.testing.assert_array_equal, pure(blank), pure(frozen))


@pytest.mark.filterwarnings("ignore:These scales are frozen", "ignore:These kernels .*last/dot_general")
@pytest.mark.parametrize(
    ("cls", "recipe"), [(Block, "delayed"), (Stacked, "axiswise"), (Stacked, "delayed")]
)
def test_kernels_that_modules_multiply_by_themselves(cls, recipe, tmp_path):
    model = fp8.quantize_model(cls(nnx.Rngs(0)), ROWS, recipe=RECIPES[recipe], include=".*")
    frozen = fp8.freeze(model, ROWS)
    prefix = "blocks/" if cls is Stacked else ""
    assert stored(frozen) == {prefix + name for name in OWN_KERNELS}
    np.testing.assert_array_equal(
        nnx.jit(lambda m, x: m(x))(frozen, ROWS), nnx.jit(lambda m, x: m(x))(model, ROWS)
    )
    assert (frozen.blocks if cls is Stacked else frozen).gate.w.note == "the user's"
    again = nnx.merge(*nnx.split(frozen))
    of_x = nnx.grad(lambda model, x: jnp.sum(model(x)), argnums=1)(again, ROWS)
    assert (np.abs(of_x) > 0).all()
    assert_found_again(frozen, tmp_path / "a")


@pytest.mark.filterwarnings("ignore:These scales are frozen", "ignore:These kernels .*last/dot_general")
def test_a_call_makes_no_wide_kernel():
    frozen = fp8.freeze(fp8.quantize_model(Block(nnx.Rngs(0)), ROWS, include=".*"), ROWS)
    graphdef, state = nnx.split(frozen)
    assert largest_array(lambda state, x: nnx.merge(graphdef, state)(x), state, ROWS[:1]) == 16 * 16


@pytest.mark.filterwarnings("ignore:These scales are frozen")
def test_what_freeze_did_not_see():
    """Other code reads no codes: it raises an error that names the kernel."""
    model = fp8.quantize_model(Block(nnx.Rngs(0)), ROWS, recipe=RECIPES["delayed"], include="gate|last")
    frozen = fp8.freeze(model, ROWS)
    for call in (
        frozen.gate.penalty,
        frozen.gate.norm,
        partial(frozen.gate.first_half, ROWS),
        partial(nnx.jit(lambda model: model.gate.penalty()), frozen),
    ):
        with pytest.raises(ValueError, match="gate/w is stored in FP8"):
            call()
    model.gate.w.set_metadata(on_get_value=lambda _, value: 2 * value)  # a hook of the user
    with pytest.warns(UserWarning, match=r"gate/w \(its matmul"):
        frozen = fp8.freeze(model, ROWS)
    np.testing.assert_array_equal(frozen(ROWS), model(ROWS))
    layer = fp8.quantize_model(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), RECIPES["current"], include=".*")
    layer.kernel.set_metadata(on_get_value=lambda _, value: 2 * value)
    with pytest.warns(UserWarning, match=r"wide: kernel \("):
        np.testing.assert_array_equal(fp8.freeze(layer, ROWS)(ROWS), layer(ROWS))
    model.gate.w.del_metadata("on_get_value")
    with pytest.warns(UserWarning, match=r"w \(something else"):
        fp8.freeze(model.gate, ROWS, methods={"penalty": ()})


@pytest.mark.filterwarnings("ignore:These scales are frozen")
@pytest.mark.parametrize("how", ["alike", "transposed", "another recipe"])
def test_layers_that_share_a_kernel(how, tmp_path):
    """Layers that multiply by it in one way store it once; otherwise it stays wide."""

    class Tied(nnx.Module):
        def __init__(self):
            ops = [fp8nnx.Fp8DotGeneralOp(recipe=SHORT) for _ in range(2)]
            if how == "another recipe":
                ops[1] = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
            self.a, self.b = (nnx.Linear(16, 16, dot_general=op, rngs=nnx.Rngs(0)) for op in ops)
            self.b.kernel = self.a.kernel

        def __call__(self, x):
            x = nnx.tanh(self.a(x))
            return (
                self.b.dot_general(x, self.b.kernel[...].T, (((1,), (0,)), ((), ())))
                if how == "transposed"
                else self.b(x)
            )

    model = Tied()
    fp8.calibrate(lambda model, x: model(x), model, [ROWS])
    if how != "alike":
        with pytest.warns(UserWarning, match=r"a/kernel \(something else"):
            assert not stored(fp8.freeze(model, ROWS))
        return
    frozen = fp8.freeze(model, ROWS)
    np.testing.assert_array_equal(frozen(ROWS), model(ROWS))
    assert frozen.a.kernel is frozen.b.kernel
    assert stored(frozen) == {"a/kernel"}
    fp8.save_safetensors(tmp_path / "a", frozen)
    names = set(safetensors.safe_open(tmp_path / "a", "np").keys())
    assert names == {"a.weight", "a.weight_scale", "a.input_scale", "b.input_scale", "a.bias", "b.bias"}
    assert_found_again(frozen, tmp_path / "a")


def test_ops_by_hand_in_lists_and_dicts():
    class Own(nnx.Module):
        def __init__(self, rngs):
            op, matrix = (
                partial(fp8nnx.Fp8DotGeneralOp, recipe=RECIPES["current"]),
                nnx.initializers.normal(),
            )
            self.ops = nnx.List([op(), fp8nnx.Fp8Einsum(recipe=RECIPES["current"])])
            self.w = nnx.List([nnx.Param(matrix(rngs.params(), (16, 16))) for _ in range(2)])
            self.layers = nnx.Dict({"a": nnx.Linear(16, 16, dot_general=op(), rngs=rngs)})

        def __call__(self, x):
            x = self.ops[0](x, self.w[0], (((1,), (0,)), ((), ())))
            return self.layers["a"](self.ops[1]("bi,oi->bo", x, self.w[1][...]))

    model = Own(nnx.Rngs(0))
    frozen = fp8.freeze(model, ROWS)
    assert stored(frozen) == {"w/0", "w/1", "layers/a/kernel"}
    np.testing.assert_array_equal(frozen(ROWS), model(ROWS))


def test_methods():
    class Autoencoder(nnx.Module):
        def __init__(self):
            op = partial(fp8nnx.Fp8DotGeneralOp, recipe=fp8.Float8CurrentScaling())
            self.encoder, self.decoder = (
                nnx.Linear(16, 16, dot_general=op(), rngs=nnx.Rngs(i)) for i in range(2)
            )

        def encode(self, x, scale):
            return scale * self.encoder(x)

        def decode(self, z):
            return self.decoder(z)

    model = Autoencoder()
    frozen = fp8.freeze(model, methods={"encode": {"x": ROWS, "scale": 2.0}, "decode": (ROWS,)})
    assert stored(frozen) == {"encoder/kernel", "decoder/kernel"}
    np.testing.assert_array_equal(
        frozen.decode(frozen.encode(ROWS, 2.0)), model.decode(model.encode(ROWS, 2.0))
    )
    with pytest.warns(UserWarning, match="decoder/dot_general .it did not run"):
        frozen = fp8.freeze(model, methods={"encode": {"x": ROWS, "scale": 2.0}})
    np.testing.assert_array_equal(frozen.decode(ROWS), model.decode(ROWS))


FILES = {"delayed": SHORT, "mxfp8": fp8.MXFP8BlockScaling(), "weight_only": SHORT}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:These scales are frozen")
@pytest.mark.parametrize("recipe", FILES)
def test_safetensors_are_those_of_the_linen_model(recipe, tmp_path):
    options = {"weight_only": recipe == "weight_only"}
    op, linen_op = (partial(o, recipe=FILES[recipe]) for o in (fp8nnx.Fp8DotGeneralOp, fp8.Fp8DotGeneralOp))

    class LinenNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.DenseGeneral((2, 32), dot_general_cls=linen_op, name="heads")(x)
            x = nn.DenseGeneral(8, axis=(-2, -1), dot_general_cls=linen_op, name="out")(x)
            return nn.Dense(3, name="last")(x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.heads = nnx.LinearGeneral(16, (2, 32), dot_general=op(), rngs=rngs)
            self.out = nnx.LinearGeneral((2, 32), 8, axis=(-2, -1), dot_general=op(), rngs=rngs)
            self.last = nnx.Linear(8, 3, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.last(self.out(self.heads(x)))

    model, paths = Net(nnx.Rngs(0)), [tmp_path / "nnx.safetensors", tmp_path / "linen.safetensors"]
    frozen = fp8nnx.freeze(model, X, **options)
    fp8nnx.save_safetensors(paths[0], frozen)
    fp8.save_safetensors(paths[1], *fp8.freeze(LinenNet(), to_linen(model), X, **options))
    files = [safetensors.safe_open(path, "np") for path in paths]
    ours, theirs = (dict(safetensors.deserialize(path.read_bytes())) for path in paths)
    assert ours == theirs
    assert "heads.weight" in ours
    assert len({file.metadata().get("quantization_config") for file in files}) == 1
    other = Net(nnx.Rngs(1))
    assert fp8.load_into(other, fp8.read_checkpoint(paths[0])) is other
    np.testing.assert_allclose(fp8nnx.freeze(other, X, **options)(X), frozen(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="none are passed beside it; got dict"):
        fp8.save_safetensors(paths[0], frozen, {})


@pytest.mark.long
def test_stacked_layers_lists_and_wide_ops(tmp_path):
    class Stack(nnx.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), 3)
            self.stack = nnx.vmap(lambda key: nnx.Linear(16, 16, rngs=nnx.Rngs(key)))(keys)
            self.layers = nnx.List(
                [nnx.Linear(16, 4, rngs=nnx.Rngs(0)), nnx.Conv(4, 8, 1, rngs=nnx.Rngs(0))]
            )
            self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(0))

        def __call__(self, x):
            x = nnx.scan(lambda x, l: l(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.stack)
            return self.norm(self.layers[1](self.layers[0](x)))

    model = fp8nnx.quantize_model(Stack(), SHORT, include=".*")
    fp8nnx.calibrate(lambda model, x: model(x), model, [X])
    with pytest.warns(UserWarning, match="layers/1/kernel"):
        frozen = fp8nnx.freeze(model, X)
    np.testing.assert_array_equal(frozen(X), model(X))
    path = tmp_path / "model.safetensors"
    fp8nnx.save_safetensors(path, frozen)
    file = safetensors.safe_open(path, "np")
    names = {"stack.weight", "stack.weight_scale", "stack.bias", "layers.0.weight", "layers.1.kernel"}
    assert names < set(file.keys())
    assert file.get_slice("stack.weight").get_shape() == [3, 16, 16]
    assert "quantization_config" not in file.metadata()  # a convolution in FP8 is in none
    blank, values = nnx.clone(frozen), (nnx.Param, nnx.BatchStat, fp8nnx.Frozen)
    nnx.update(blank, jax.tree.map(jnp.zeros_like, nnx.state(blank, nnx.Any(*values))))
    np.testing.assert_array_equal(fp8.load_into(blank, fp8.read_checkpoint(path))(X), frozen(X))


def test_a_slash_in_the_name_of_a_layer(tmp_path):
    op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())

    class Named(nnx.Module):
        def __init__(self):
            self.layers = nnx.Dict({"a/b": nnx.Linear(16, 8, dot_general=op, rngs=nnx.Rngs(0))})

        def __call__(self, x):
            return self.layers["a/b"](x)

    fp8nnx.save_safetensors(tmp_path / "a", fp8nnx.freeze(Named(), X))
    names = [f"layers.a/b.{name}" for name in ("bias", "weight", "weight_scale")]
    assert sorted(safetensors.safe_open(tmp_path / "a", "np").keys()) == names


def test_freeze_of_a_known_model_under_eval_shape():
    """The target for a checkpoint library, also if the trained model is closed over."""
    model = Twin(nnx.Rngs(0))
    fp8nnx.calibrate(lambda model, x: model(x), model, [X])
    shapes = nnx.state(nnx.eval_shape(lambda: fp8nnx.freeze(nnx.clone(model), X)))
    expected = nnx.state(fp8nnx.freeze(model, X))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, expected)


class Products(nnx.Module):
    """Kernels that modules multiply by themselves: several in one, of a child, shared, and slices."""

    def __init__(self, seed):
        self.up, self.down = nnx.Param(normal(seed, 16, 8)), nnx.Param(normal(seed, 16, 8))
        self.experts = nnx.Param(normal(seed, 2, 16, 8))
        self.child = nnx.Linear(16, 8, rngs=nnx.Rngs(seed))
        kernel, pair = nnx.Param(normal(seed, 16, 8)), nnx.Param(normal(seed, 2, 16, 8))
        self.last = nnx.Dict(a=Last(kernel, pair), b=Last(kernel, pair))
        self.pair = nnx.Param(normal(seed, 16, 2, 8))

    def __call__(self, x):
        h = x @ self.up[...] + nnx.tanh(x @ self.down[...]) + x @ self.child.kernel[...]
        h += self.last.a(x) - self.last.b(3 + x) + x @ self.pair[:, 0] - x @ self.pair[...][:, 1]
        return jnp.einsum("eri,eio->ro", jnp.stack([x, x]), self.experts[...]) + h


class Last(nnx.Module):
    def __init__(self, kernel, pair):
        self.kernel_of_all, self.pair_of_all = kernel, pair

    def __call__(self, x):
        return x @ self.kernel_of_all[...] + x @ self.pair_of_all[0] - x @ self.pair_of_all[1]


@pytest.mark.filterwarnings("ignore:These scales are frozen")
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_several_kernels_of_a_module_and_shared_ones(recipe, tmp_path):
    """All are converted, stored in FP8, and found in a file again with their own scales."""
    options = {"recipe": RECIPES[recipe], "include": ".*", "exclude": "experts"}
    model = fp8.quantize_model(Products(0), ROWS, **options)
    frozen = fp8.freeze(model, ROWS)
    shared = {"last/a/kernel_of_all", "last/a/pair_of_all"}
    assert stored(frozen) == {"up", "down", "child/kernel", "pair"} | shared
    np.testing.assert_array_equal(frozen(ROWS), model(ROWS))
    assert_found_again(frozen, tmp_path / "a")


@pytest.mark.filterwarnings("ignore:These scales are frozen")
def test_a_kernel_that_has_its_path_in_another_module(tmp_path):
    class Tied(nnx.Module):
        def __init__(self):
            op = fp8nnx.Fp8DotGeneralOp(recipe=SHORT)
            self.layer = nnx.Linear(16, 16, dot_general=op, rngs=nnx.Rngs(0))
            self.first = self.layer.kernel

        def __call__(self, x):
            return self.layer(x)

    frozen = fp8.freeze(Tied(), ROWS)
    assert stored(frozen) == {"first"}
    assert_found_again(frozen, tmp_path / "a")
