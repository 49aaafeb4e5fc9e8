"""``Schedule``: the recipe follows from the step of a run, and from a statistic that the loop measures."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax

from fp8flax._core.autocast import phase_context
from fp8flax._core.options import check_bool, check_float, check_int
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe, Recipe, check_recipe

_FALLBACK = "fallback"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a run that has one recipe; see ``Schedule``.

    Attributes:
        name: the name that ``audit`` and ``report`` show.
        until: the first step that does not belong to the phase, 1 or more; None in the last phase.
        recipe: the recipe of the FP8 layers. None leaves to each layer what it has without a schedule.
        enabled: False turns FP8 off, as ``fp8flax.autocast(enabled=False)`` does.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``name`` is empty; ``until`` is less than 1; or FP8 is off and there is a recipe.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.Phase(name="end", enabled=False).until is None
        True
    """

    name: str
    until: int | None = None
    recipe: Recipe | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name of a Phase must be a str; got {self.name!r}.")
        if not self.name:
            raise ValueError("name of a Phase must not be empty: reports and errors show it.")
        if self.until is not None:
            check_int(f"until of the phase {self.name!r}", self.until, 1)
        check_bool(f"enabled of the phase {self.name!r}", self.enabled)
        if self.recipe is not None:
            check_recipe(self.recipe)
            if not self.enabled:
                raise ValueError(
                    f"The phase {self.name!r} has enabled=False, which turns FP8 off, and a recipe. Leave "
                    "out one of them."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback:
    """Turns FP8 off for some steps after a statistic was above a bound; see ``Schedule``.

    Attributes:
        above: the bound. A statistic that is NaN counts as above it.
        hold: for how many steps FP8 is off after each value above the bound, 1 or more.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``above`` is not finite; or ``hold`` is less than 1.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.Fallback(above=10.0, hold=100).hold
        100
    """

    above: float
    hold: int

    def __post_init__(self) -> None:
        check_float("above of a Fallback", self.above)
        if not math.isfinite(self.above):
            raise ValueError(f"above of a Fallback must be finite; got {self.above}.")
        check_int("hold of a Fallback", self.hold, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Changes the recipe during a run: the step determines the phase.

    ``with schedule.at(step):`` around a call of the jitted training step sets the recipe of the phase, as
    ``fp8flax.autocast`` does. Each phase compiles one program; phases with equal recipes share it.

    A phase sets the recipe of these layers:

    * layers without a recipe of their own
    * layers whose own recipe is equal to that of a phase of this schedule

    Layers with another recipe keep it, such as those to which a rule of ``quantize_model`` gave one. A
    phase that turns FP8 off turns it off in all layers. Layers that ``quantize_model`` leaves out stay wide
    in all phases.

    The tree of the scaling state is the same in all phases if the state was made under ``init()``. A phase
    whose recipe does not use a state leaves it unchanged. When a later phase uses the state, its first
    scales come from the amax histories that the state has at that time.

    Attributes:
        phases: the phases in their order. ``until`` increases, and is None in the last phase. Either all
            phases with FP8 have a recipe, or none has.
        fallback: turns FP8 off while a statistic is too large, in the phases that have FP8. None for no
            such rule.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: there is no phase; ``until`` does not increase, or is missing before the last phase;
            two phases have one name; a part of the phases with FP8 has no recipe; or two recipes need amax
            histories of different lengths.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, fp8flax as fp8
        >>> schedule = fp8.Schedule(
        ...     phases=(fp8.Phase(name="fp8", until=3), fp8.Phase(name="bf16", enabled=False))
        ... )
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> with schedule.init():
        ...     variables = model.init(jax.random.key(0), x)
        >>> state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))
        >>> @jax.jit
        ... def train_step(state):
        ...     grads = fp8.grad(lambda v: jnp.mean(state.apply_fn(v, x)))(state.params)
        ...     return state.apply_gradients(grads=grads)
        >>> for step in range(5):
        ...     with schedule.at(step):
        ...         state = train_step(state)
        >>> [schedule.phase(step).name for step in range(5)]
        ['fp8', 'fp8', 'fp8', 'bf16', 'bf16']

    Source: NVIDIA, 2025, arXiv:2509.25149, which ends a run in higher precision.
    """

    phases: tuple[Phase, ...]
    fallback: Fallback | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.phases, tuple) or not all(isinstance(p, Phase) for p in self.phases):
            raise TypeError(f"phases must be a tuple of fp8flax.Phase(…); got {self.phases!r}.")
        if self.fallback is not None and not isinstance(self.fallback, Fallback):
            raise TypeError(f"fallback must be an fp8flax.Fallback(…) or None; got {self.fallback!r}.")
        if not self.phases:
            raise ValueError("A Schedule needs one phase or more; got no phase.")
        self._check_steps()
        self._check_names()
        recipes = [phase.recipe is not None for phase in self.phases if phase.enabled]
        if any(recipes) and not all(recipes):
            without = [phase.name for phase in self.phases if phase.enabled and phase.recipe is None]
            raise ValueError(
                f"The phases {without} have FP8 but no recipe, and other phases have one. Give each phase "
                "with FP8 a recipe, or none of them. A phase without FP8 has enabled=False."
            )
        self._delayed()  # raises an error if the histories differ in length

    def _check_names(self) -> None:
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError(f"Each phase needs a name of its own; got {names}.")
        if self.fallback is not None and _FALLBACK in names:
            raise ValueError(
                f"No phase may be named {_FALLBACK!r} in a schedule with a fallback. Rename the phase."
            )

    def _check_steps(self) -> None:
        *others, last = self.phases
        if last.until is not None:
            raise ValueError(
                f"The last phase, {last.name!r}, must have until=None, because it lasts to the end of the "
                f"run; got {last.until}."
            )
        begin = 0
        for phase in others:
            if phase.until is None:
                raise ValueError(
                    f"The phase {phase.name!r} is followed by another, so it needs until=, the first step "
                    "that does not belong to it."
                )
            if phase.until <= begin:
                raise ValueError(
                    f"until must increase from phase to phase; the phase {phase.name!r} begins at step "
                    f"{begin} and has until={phase.until}."
                )
            begin = phase.until

    @property
    def _recipes(self) -> tuple[CustomRecipe, ...]:
        """Returns the recipes of the phases, in their order; empty if the phases have none."""
        return tuple(phase.recipe.gemms for phase in self.phases if phase.recipe is not None)

    def _delayed(self) -> dict[str, DelayedQuantizer]:
        """Returns a quantizer for each role that has a state in some phase.

        Raises:
            ValueError: two recipes need histories of different lengths.
        """
        found: dict[str, DelayedQuantizer] = {}
        for recipe in self._recipes:
            for role, quantizer in recipe.delayed.items():
                first = found.setdefault(role, quantizer)
                if quantizer.amax_history_len != first.amax_history_len:
                    raise ValueError(
                        "All phases share one scaling state, so delayed recipes of a schedule must have "
                        f"the same amax_history_len; got {first.amax_history_len} and "
                        f"{quantizer.amax_history_len} for the {role}."
                    )
        return found

    def phase(self, step: Any, *, off_until: Any = 0) -> Phase:
        """Returns the phase of a step.

        Args:
            step: the number of steps done before this one: an int, or an integer scalar that is not traced.
            off_until: the first step that has FP8 again, as ``next_off_until`` returned it; 0 if the
                statistic was never above the bound.

        Returns:
            One of ``phases``, or a phase named ``"fallback"`` without FP8.

        Raises:
            TypeError: an argument is not an integer, or is traced by ``jax.jit``.
            ValueError: an argument is negative; or ``off_until`` is not 0, and there is no fallback.
        """
        step, off_until = _as_int("step", step), _as_int("off_until", off_until)
        if self.fallback is None and off_until:
            raise ValueError(f"off_until needs a schedule with a fallback; got off_until={off_until}.")
        one = next(phase for phase in self.phases if phase.until is None or step < phase.until)
        return Phase(name=_FALLBACK, enabled=False) if one.enabled and step < off_until else one

    def at(self, step: Any, *, off_until: Any = 0) -> contextlib.AbstractContextManager[None]:
        """Returns a context with the recipe of a step; see ``autocast`` for threads and asyncio tasks.

        Enter it outside of ``jax.jit``. Pass a Python int that the loop counts. Reading ``state.step``
        waits until the previous step has ended.

        Args:
            step: as in ``phase``.
            off_until: as in ``phase``.

        Raises:
            TypeError: as in ``phase``.
            ValueError: as in ``phase``.
        """
        one = self.phase(step, off_until=off_until)
        recipe = None if one.recipe is None else one.recipe.gemms
        replaced = frozenset(self._recipes)
        return phase_context(enabled=one.enabled, recipe=recipe, replaced=replaced, phase=one.name)

    def init(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a model gets the scaling state of all phases.

        Call ``init`` of a Linen model, ``fp8flax.add_fp8_state`` and ``fp8flax.calibrate`` in it, and make
        and convert NNX models in it.
        """
        recipes, delayed = self._recipes, self._delayed()
        if delayed:
            x, kernel, g = (delayed.get(role) for role in ("input", "kernel", "output_grad"))
            recipe: CustomRecipe | None = CustomRecipe(
                forward=GemmRecipe(lhs=x, rhs=kernel),
                dgrad=GemmRecipe(lhs=g, rhs=kernel),
                wgrad=GemmRecipe(lhs=x, rhs=g),
            )
        else:
            recipe = recipes[0] if recipes else None
        return phase_context(enabled=True, recipe=recipe, replaced=frozenset(recipes), phase=None)

    def next_off_until(self, step: Any, statistic: Any, off_until: Any = 0) -> int:
        """Returns the first step that has FP8 again, after the statistic of a step is known.

        The result is the only memory of the fallback, so save it with the train state. After a statistic
        that is NaN or above the bound, it is the larger of ``off_until`` and ``step + 1 + hold``. After any
        other statistic it is ``off_until``.

        Args:
            step: the step in which the statistic was measured.
            statistic: a float, or a scalar array that is not traced. To read it waits until the step has
                ended, so a loop may do this every so many steps only.
            off_until: the result of the call before; 0 at first.

        Raises:
            TypeError: ``statistic`` is not a number; ``step`` or ``off_until`` is not an integer; or an
                argument is traced by ``jax.jit``.
            ValueError: there is no fallback; or ``step`` or ``off_until`` is negative.

        Example:
            >>> import fp8flax as fp8
            >>> schedule = fp8.Schedule(
            ...     phases=(fp8.Phase(name="fp8"),), fallback=fp8.Fallback(above=10.0, hold=2)
            ... )
            >>> off_until = schedule.next_off_until(7, statistic=12.5)
            >>> [schedule.phase(step, off_until=off_until).name for step in (8, 9, 10)]
            ['fallback', 'fallback', 'fp8']
        """
        step, off_until = _as_int("step", step), _as_int("off_until", off_until)
        if self.fallback is None:
            raise ValueError("next_off_until needs a schedule with a fallback; set Schedule(fallback=…).")
        _check_not_traced("statistic", statistic)
        try:
            value = float(statistic)
        except (TypeError, ValueError) as error:
            raise TypeError(f"statistic must be a number or a scalar array; got {statistic!r}.") from error
        is_above = math.isnan(value) or value > self.fallback.above
        return max(off_until, step + 1 + self.fallback.hold) if is_above else off_until


def schedule(recipe: Recipe | None, *, until: int, then: Recipe | Schedule | None = None) -> Schedule:
    """Returns a schedule with one recipe before a step, and another recipe, or no FP8, from that step on.

    Args:
        recipe: the recipe before the step. None leaves to each layer what it has without a schedule.
        until: the first step that does not have ``recipe`` any more, 1 or more.
        then: the recipe from the step on; None turns FP8 off; or a ``Schedule``, whose steps count from the
            beginning of the run.

    Returns:
        The ``Schedule``. Its phases are named ``"before step …"`` and ``"from step …"``; those of a
        ``Schedule`` in ``then`` keep their names.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: as in ``Schedule``.

    Example:
        >>> import fp8flax as fp8
        >>> schedule = fp8.schedule(fp8.DelayedScaling(), until=900)
        >>> schedule.phase(899).name, schedule.phase(900).enabled
        ('before step 900', False)
    """
    if not (then is None or isinstance(then, Recipe | Schedule)):
        raise TypeError(f"then must be a recipe, None (FP8 off), or a schedule; got {then!r}.")
    before = Phase(name=f"before step {until}", until=until, recipe=recipe)
    if isinstance(then, Schedule):
        return dataclasses.replace(then, phases=(before, *then.phases))
    after = Phase(name=f"from step {until}", recipe=then, enabled=then is not None)
    return Schedule(phases=(before, after))


def _check_not_traced(name: str, value: Any) -> None:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a concrete value; got {value}, traced by jax.jit or another transformation. A "
            "phase is chosen before the step is compiled: use the schedule outside of the jitted function."
        )


def _as_int(name: str, value: Any) -> int:
    """Returns a step as an int."""
    _check_not_traced(name, value)
    return check_int(name, value, 0)
