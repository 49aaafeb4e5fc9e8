"""``quantize_model`` and ``report``, for models of Linen and NNX, whose source stays untouched."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from types import NoneType
from typing import Any

import flax.linen as nn

from fp8flax._core.names import RNG
from fp8flax._core.ops.op import Form
from fp8flax._core.recipes import Recipe
from fp8flax._model import linen
from fp8flax._model.report import ModelReport
from fp8flax._model.rules import Rules


def is_nnx(model: Any) -> bool:
    """Returns whether a value is an NNX module. The package imports NNX only if the user has."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def quantize_model(
    model: Any,
    *inputs: Any,
    recipe: Recipe | None = None,
    include: Any = None,
    exclude: Any = (),
    rules: Any = (),
    products: bool = False,
    allow_unmatched: bool = False,
    form: Form = "direct",
    rngs: Any = None,
    **keyword_inputs: Any,
) -> Any:
    """Returns the model with its contractions in FP8; its source and its fields stay unchanged.

    A matmul of an activation and a parameter becomes an FP8 op, unless a rule or a default leaves it out:
    ``nn.Dense`` and Flax's other layers, recurrent cells, ``x @ w``, ``jnp.einsum``, ``lax.dot_general``.
    The kernel may be the parameter after casts, reshapes, transposes, slices, splits and joins, or times
    numbers. The result is used like ``model``.

    **Linen.** ``init`` gives the same parameters. With delayed scaling it also gives the state that the
    layers would have with ``dot_general_cls=Fp8DotGeneralOp``. While the model runs, the state is among the
    parameters, so ``nn.scan``, ``nn.vmap`` and ``nn.remat`` stack and share it as they do these, and
    functions of ``nn.map_variables`` get it.

    A contraction that is written out with a parameter ``w`` has the state ``Fp8DotGeneralOp_w``, whatever
    else the method computes. ``…_qkv-axis1-0-64`` is the state of ``qkv[:, :64]``, and ``…_w-T`` that of a
    transpose. A kernel that is used twice in the same way has one state. Products of activations are
    numbered. What could be read in two ways has a ``~``: the state of a parameter ``w-T`` is ``…_w~-T``.

    **NNX.** The result is a copy, which shares the arrays of the model, but none of its variables. Without
    inputs, layers with a field for an op get one: ``nnx.Linear``, ``nnx.LinearGeneral``, ``nnx.Einsum`` and
    ``nnx.Conv``, also inside of other modules of NNX. A subclass with a ``__call__`` of its own stays wide.
    With inputs, one abstract call of the model finds what each layer really computes, and the contractions
    that modules write out. Their ops are attributes of the modules, such as ``fp8_w``. Each module gets its
    own ops, with fresh state, which is stacked if ``nnx.vmap`` stacked the module along the first axis. A
    layer with an op that you gave keeps it, unless ``rules`` or ``include`` convert the layer.

    Rules are tried in this order, and the first that matches decides: ``exclude``, ``rules``, ``include``,
    the defaults. (Flax's ``nn.jit`` traces equal layers once, and all of them compute as the first: do not
    use it with rules that tell them apart.) The defaults leave out

    * embeddings
    * layers named like the last one (``lm_head``, ``logits``, ``classifier``, …), or ``router``
    * convolutions that are not matmuls, because XLA has no FP8 with gradients for them
    * kernels with K or N below 16
    * kernels too small for FP8 to gain on an H200 with any batch (``1/(1/K + 1/N) < 281``)

    The batch size has no effect on the rules, so ``init``, training and decoding agree. (The products of
    attention have the sizes of the sequence. With ``products=True`` call ``init`` with 16 tokens or more.)
    A pattern is searched (``re.search``) in a module's path, such as ``encoder/layer_0/Dense_0`` or
    ``encoder/layers/0/linear``, and in that path with the parameter's name.

    Args:
        model: an unbound Linen module; or an NNX module, also an abstract one (``nnx.eval_shape``).
        *inputs: inputs of an NNX model; ``jax.ShapeDtypeStruct`` may take the place of arrays. A Linen
            model takes none. A recipe may come before them, or alone.
        recipe: how tensors are scaled, unless a rule says otherwise. None takes the recipe of
            ``fp8flax.autocast``, or ``DelayedScaling()`` outside of it.
        include: a regular expression or several. Only contractions that match are converted, even those
            that the defaults leave out.
        exclude: a regular expression or several; contractions that match are not converted.
        rules: a sequence of pairs and callables. A pair has a regular expression and a recipe or
            ``"leave"``. A callable ``(path, module, shapes)`` returns a recipe, ``"leave"``, or None to let
            the next rule decide. It gets the module's path, the module, and the shapes of input and kernel.
            (The shape of the input of an NNX layer has only the dimensions that the kernel contracts.)
        allow_unmatched: whether to allow a pattern that decides nothing, because no contraction matches it
            or an earlier rule matches first. By default such a pattern is an error.
        form: form of the matmuls: ``"direct"``, or ``"qdq"``, which takes ``DelayedScaling``, can be
            differentiated twice and is never faster; see ``Fp8DotGeneralOp``. Convolutions have one form.
        rngs: for an NNX model and a recipe with stochastic rounding: ``nnx.Rngs(fp8=seed)``, of which each
            op takes a stream. (A Linen model gets ``rngs={"fp8": key}`` in ``apply``.)
        products: whether to convert products of two activations too, such as the two of attention. Their
            state is that of an op with the second activation as its kernel. A constant, a kernel that is
            computed in another way than above, and one in another collection than ``params`` count as
            activations; ``report`` says which it is.
        **keyword_inputs: keyword inputs of an NNX model. An input with the name of an option, such as
            ``rngs``, is passed by position.

    Returns:
        A Linen module of a subclass of ``type(model)``, equal for equal arguments; or a copy of the NNX
        model. ``report`` lists what is converted and why. The result can be copied, and pickled if the
        contents of ``rules`` can. Some code stays unconverted: JAX's own ``lax.scan`` and custom
        derivatives inside a method, ``nnx.scan`` of a method, in Linen ``jax.checkpoint`` (``report`` lists
        their contractions), and submodules of Linen models that are called from outside, on a bound model
        or by a function that ``nn.apply`` or ``nn.init`` gets. (The model's own ``apply`` and ``init`` do
        convert ``method=lambda m, x: m.encoder(x)``.)

    Raises:
        TypeError: ``model`` is not a module of Linen or NNX, a recipe is not a ``Recipe``, or is given
            twice, ``products`` or ``allow_unmatched`` is not a bool, a Linen model gets inputs, the inputs
            are not those of the NNX model, or an option has the name of one of them.
        ValueError: ``model`` is bound, or converted already; a rule or ``form`` is not valid; a pattern
            matched nothing; nothing is converted; or an op would be inside of Flax's ``custom_vjp``. A
            Linen model raises the last three in ``init``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(4)])
        >>> model8 = fp8.quantize_model(model, include="layers_0")
        >>> variables = model8.init(jax.random.key(0), jnp.ones((2, 32)))
        >>> list(variables["_overwrite_with_gradient"])
        ['layers_0']

        >>> from flax import nnx
        >>> layers = nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 4, rngs=nnx.Rngs(0))
        >>> model8 = fp8.quantize_model(nnx.Sequential(*layers), jnp.ones((2, 32)), include="layers/0")
        >>> type(model8.layers[0].dot_general).__name__
        'Fp8DotGeneralOp'

    Source: for the size limit, a roofline of an H200. (torchao's filters have other limits, from benchmarks
    on an H100.)
    """
    # None is an input of an NNX model. A Linen model takes none.
    of_recipes = (Recipe, str, type) if is_nnx(model) else (Recipe, str, type, NoneType)
    if inputs and isinstance(inputs[0], of_recipes):
        if recipe is not None:
            raise TypeError(f"recipe must be given once; got {inputs[0]!r} and recipe={recipe!r}.")
        recipe, *inputs = inputs  # type: ignore[assignment]
    options = Rules(
        recipe=recipe,
        include=include,
        exclude=exclude,
        rules=rules,
        products=products,
        allow_unmatched=allow_unmatched,
        form=form,
    )
    if is_nnx(model):
        if inputs or keyword_inputs:
            given = {x.name for x in fields(options) if getattr(options, x.name) != x.default}
            # nnx.Rngs(fp8=seed) is for FP8 ops only.
            given |= set() if rngs is None or RNG in getattr(rngs, "__dict__", {}) else {"rngs"}
            _check_inputs(model, inputs, keyword_inputs, given)
        from fp8flax._model import nnx

        return nnx.quantize(model, inputs, keyword_inputs, options, rngs)
    if isinstance(model, nn.Module) and (inputs or keyword_inputs or rngs is not None):
        raise TypeError(
            f"A Linen model takes no inputs in quantize_model; got {len(inputs)} and {[*keyword_inputs]}. "
            "Its init gets them. (Its apply gets rngs.)"
        )
    return linen.quantize(model, options)


def report(model: Any, *args: Any, **kwargs: Any) -> ModelReport:
    """Lists every contraction of a converted model: sizes, whether it runs in FP8, and why or why not.

    Nothing is computed: the shapes come from tracing a call. Sizes are those of one call with these inputs;
    under ``vmap`` they are those of the whole batch. In ``nn.scan``, ``nn.RNN`` and ``nnx.scan`` a
    contraction counts as often as the loop runs; in a ``while_loop`` it counts once, because the number is
    not known. All branches of a condition count. The report says FP8 only of ops that ran in this call. All
    other contractions count, too, each with a reason, wherever they are.

    What a GPU runs, and a predicted time, is in the compiled program: see ``audit``.

    Args:
        model: the Linen or NNX model that ``quantize_model`` returned, or a part of an NNX model.
        *args: inputs of the model; ``jax.ShapeDtypeStruct`` may take the place of arrays.
        **kwargs: keyword inputs of the model.

    Returns:
        A ``ModelReport``; print it, or look at its ``rows``.

    Raises:
        TypeError: ``model`` does not come from ``quantize_model``, or a Linen model gets ``rngs`` or
            ``mutable`` by keyword.
        ValueError: a rule of ``quantize_model`` matched nothing.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Sequential([nn.Dense(1024), nn.relu, nn.Dense(4)]))
        >>> print(fp8.report(model8, jnp.ones((8192, 4096))))
        contraction  kernel  B×M×K×N         times  % FLOPs  FP8?  why
        ---------------------------------------------------------------------------------------
        layers_0     kernel  8192×4096×1024  1      99.9     FP8   by default
        layers_2     kernel  8192×1024×4     1      0.1      no    K=1024, N=4: a size below 16
        <BLANKLINE>
        1 of 2 contractions are converted (99.9 % of their FLOPs).
    """
    if is_nnx(model):
        from fp8flax._model import nnx

        return nnx.report(model, args, kwargs)
    return linen.report(model, args, kwargs)


def _check_inputs(model: Any, inputs: Any, keyword_inputs: Any, given: set[str]) -> None:
    """Raises ``TypeError`` if an NNX model does not take the inputs, or ``given`` options may be inputs."""
    signature = inspect.signature(type(model).__call__)
    by_position = signature.bind_partial(model, *inputs).arguments
    # A required input by keyword has the name of an option, so it cannot be given, also not as None.
    required = {
        x.name for x in signature.parameters.values() if x.kind is x.KEYWORD_ONLY and x.default is x.empty
    }
    may_be_meant = given | (required & {"rngs", *(x.name for x in fields(Rules))})
    for option in may_be_meant & (signature.parameters.keys() - by_position):
        raise TypeError(
            f"{option}= is an option of quantize_model, and {type(model).__name__} has an input {option}. "
            f"Pass the input by position, even if it is None: then {option}= is the option. ("
            "rngs=nnx.Rngs(fp8=0) always is.) If the model takes it by keyword only, convert a module that "
            "calls the model."
        )
