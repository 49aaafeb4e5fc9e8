"""``audit`` and ``assert_fp8``: compile a function, and report which of its GEMMs run in FP8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from fp8flax._audit.compiling import compile_for, find_target
from fp8flax._audit.gemms import gemms_of, with_reason
from fp8flax._audit.program import bytes_moved, bytes_sent, collective_of, has_codes, parse
from fp8flax._audit.report import AuditReport, percent
from fp8flax._core.types import PyTree

_WITHOUT_TRITON = (
    "JAX without XLA's Triton GEMMs: this JAX cannot compile an FP8 algorithm for an absent GPU, so the "
    "precision of each FP8 GEMM states its accumulation."
)


def audit(
    fn: Callable[..., object], *args: PyTree, target: str | Mesh = "h200", **keywords: PyTree
) -> AuditReport:
    """Compiles a function for a GPU, which need not be present, and reports which of its GEMMs run in FP8.

    Nothing is executed, and no donated buffer is used up. Targets other than ``local`` need the extra
    ``fp8flax[audit]``.

    Args:
        fn: the function that you would give to ``jax.jit``. The donated and static arguments of a function
            that is already jitted stay as they are.
        *args: arguments of ``fn``, arrays or ``jax.ShapeDtypeStruct`` of any shape and dtype. They are
            placed on one device, or on the mesh. An array with a sharding is placed by the names of its
            mesh axes. An array without a sharding is copied whole to each device.
        target: ``"h100"``, ``"h200"``, ``"b200"``, ``"l40s"``, ``"rtx4090"``, ``"rtx5090"``, ``"a100"``,
            or ``"local"`` for the device that JAX uses here. For another GPU use one of the same compute
            capability. A mesh of ``compile_only_devices`` is a target, too: the report then shows the part
            of one device, and leaves out the time of communication between devices.
        **keywords: keyword arguments of ``fn``, treated as ``args``. Bind one that is named ``target`` with
            ``functools.partial``.

    Returns:
        An ``AuditReport``; ``print`` it.

    Raises:
        TypeError: ``fn`` is a lowered or a compiled function.
        ValueError: ``target`` is not known, or it is a mesh of devices that ``compile_only_devices`` did
            not return, or no argument lies on this mesh; or the local device is a TPU.
        ImportError: the extra is missing, or does not fit the installed jaxlib.
        Exception: ``fn`` cannot be traced, lowered or compiled; the errors are those of JAX under
            ``jax.jit``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        >>> w = jax.ShapeDtypeStruct((128, 256), jnp.float32)
        >>> report = audit(lambda x, w: jnp.dot(x, w), x, w, target="local")
        >>> [(gemm.m, gemm.k, gemm.n, gemm.is_fp8) for gemm in report.gemms]
        [(64, 128, 256, False)]

    Source: XLA's optimized HLO, as ``jax.stages.Compiled.as_text`` gives it.
    """
    found = find_target(target)
    compiled, without_triton = compile_for(found, fn, args, keywords)
    program = parse(compiled.as_text() or "")
    gemms = [gemm for kernel in program.kernels for gemm in gemms_of(kernel)]
    others = [kernel for kernel in program.kernels if next(gemms_of(kernel), None) is None]
    moved = [(bytes_moved(kernel) * kernel.trip_count, has_codes(kernel)) for kernel in others]
    sent: Counter[str] = Counter()
    for kernel in program.kernels:
        if kind := collective_of(kernel):
            sent[kind] += bytes_sent(kernel, program.num_devices) * kernel.trip_count
    loops = [instruction for instruction in program.instructions if instruction.opcode == "while"]
    count = f"{found.mesh.size} × " if found.mesh is not None and found.mesh.size > 1 else ""
    return AuditReport(
        target=found.key,
        device=f"{count}{found.device.device_kind}",
        jax_version=jax.__version__,
        compiled_by=_WITHOUT_TRITON if without_triton else "JAX",
        gemms=tuple(with_reason(gemm, found, without_triton=without_triton) for gemm in gemms),
        num_kernels=len(program.kernels),
        num_launches=sum(kernel.trip_count for kernel in program.kernels),
        bytes_sent_by=dict(sent),
        other_bytes=sum(size for size, _ in moved),
        code_bytes=sum(size for size, is_of_codes in moved if is_of_codes),
        temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
        unknown_trip_counts=any("known_trip_count" not in loop.config for loop in loops),
    )


def assert_fp8(
    fn: Callable[..., object],
    *args: PyTree,
    min_flops: float = 1.0,
    target: str | Mesh = "h200",
    **keywords: PyTree,
) -> AuditReport:
    """Raises ``AssertionError`` if too small a share of a function's GEMM FLOPs runs in FP8; see ``audit``.

    GEMMs in FP4 count, too.

    GEMMs with ``AuditedGemm.units == "maybe FP8"`` do not count: they have FP8 operands in XLA's own GPU
    kernels, which use the FP8 units with some tile sizes only. To allow them, call ``audit`` and compare
    ``fp8_flops_share + maybe_fp8_flops_share`` of its report.

    Args:
        fn, *args, target, **keywords: as in ``audit``; no keyword may be named ``min_flops`` either.
        min_flops: the required share, 0 to 1, of the FLOPs of all GEMMs.

    Returns:
        The ``AuditReport``.

    Raises:
        AssertionError: too little runs in FP8, or there is no GEMM; the message contains the report.
        ValueError: ``min_flops`` is not between 0 and 1.
        Exception: as in ``audit``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        >>> try:
        ...     assert_fp8(jnp.dot, x, x, min_flops=0.9, target="local")
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        0.0 % of the GEMMs' FLOPs run in FP8; at least 90.0 % were asked for.
    """
    if not 0 <= min_flops <= 1:
        raise ValueError(f"min_flops must be a share between 0 and 1; got {min_flops}.")
    report = audit(fn, *args, target=target, **keywords)
    share = report.fp8_flops_share + report.fp4_flops_share
    if share < min_flops:
        raise AssertionError(
            f"{percent(share)} of the GEMMs' FLOPs run in FP8; at least "
            f"{percent(min_flops)} were asked for.\n\n{report}"
        )
    return report
