"""Reads the modules around an operation, and its role, from its name in a compiled program."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fp8flax._core.names import (
    BY_OP,
    CONVOLVED_WIDE,
    DGRAD,
    FORWARD,
    KEPT_WIDE,
    NOT_CONVERTED,
    SWITCHED_OFF,
    WGRAD,
)

_WRAPPERS = frozenset(
    (
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "eval_jaxpr",
        "pjit",
        "remat",
        "remat2",
        "rematted_computation",
        "shard_map",
        "vmap",
        BY_OP,
        NOT_CONVERTED,
    )
)
"""Components of an op name that JAX and ``quantize_model`` add; they are no modules."""

_ROLES = {FORWARD: "forward", DGRAD: "dgrad", WGRAD: "wgrad"}
"""The roles of GEMMs by the scopes in which the FP8 matmul computes them."""


def components(op_name: str) -> Iterator[str]:
    """Yields the parts of an op name, also those inside of ``jvp(…)``, but not those of ``jit(…)``."""
    for part in re.findall(r"(?:[^/()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))+", op_name):
        wrapped = re.fullmatch(r"(\w+)\((.*)\)", part)
        if wrapped is None:
            yield part
        elif wrapped[1] not in ("jit", "pjit"):
            yield from components(wrapped[2])


def path_of(op_name: str) -> str:
    """Returns the modules and scopes in an op name, without transformations, control flow and FP8 op."""
    # Under jax.checkpoint JAX names the root twice.
    op_name = re.sub(r"transpose\(jvp\(([^()]+)\)\)/jvp\(\1\)", r"transpose(jvp(\1))", op_name)
    *parts, _ = [*components(op_name)] or [""]
    kept: list[str] = []
    for part in parts:
        if part in _ROLES or part in (SWITCHED_OFF, KEPT_WIDE, CONVOLVED_WIDE):
            break  # the parts that follow are inside the FP8 matmul
        if part in _WRAPPERS or re.fullmatch(r"(Fp8|NANOOFp8)\w*(Dot|Conv)\w*_\d+", part):
            continue
        if (kept[-1:] == ["while"] and part in ("body", "cond")) or (
            kept[-1:] == ["cond"] and re.fullmatch(r"branch_\d+_fun", part)
        ):
            kept.pop()
        else:
            kept.append(part)
    return "/".join(kept)


def role_of(op_name: str) -> str:
    """Returns the role in an op name; ``backward`` if the name does not say which gradient it is."""
    *parts, _ = [*components(op_name)] or [""]
    scope = next((_ROLES[part] for part in reversed(parts) if part in _ROLES), "")
    if scope in ("dgrad", "wgrad"):
        return scope
    if "rematted_computation" in parts:
        return "recomputed forward"
    return "backward" if "transpose(" in op_name and scope != "forward" else "forward"
