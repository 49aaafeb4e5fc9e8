"""Compiles a function, for a GPU that need not be there, and says which of its GEMMs run in FP8."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import html
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib
import numpy as np

from fp8flax import _hlo
from fp8flax._core.device import GPUS, compile_target, has_fp8_units
from fp8flax._core.names import (
    BLOCK_GEMM_F16,
    BY_OP,
    CHOSEN_WIDE,
    CONVOLVED_WIDE,
    DGRAD,
    FORWARD,
    KEPT_WIDE,
    NOT_CONVERTED,
    SWITCHED_OFF,
    WGRAD,
    WITHOUT_UNITS,
)

TARGETS = (*GPUS, "local")
"""What ``audit`` can compile for."""

# The text of a GpuTargetConfigProto: what XLA's decisions depend on.
_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {gpu.compute_capability:.0f} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.name}"
"""

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "pred": "bool",
}

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
    )
)
"""Components of an op name that JAX adds and no module has."""

_ROLES = {FORWARD: "forward", DGRAD: "dgrad", WGRAD: "wgrad"}
"""The scopes that the FP8 matmul gives its GEMMs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemm:
    """One matrix product of a compiled program; a convolution is that of its windows with the kernel."""

    path: str
    """The modules and named scopes around it, such as ``Transformer/block_0/up``; ``""`` if unknown."""
    role: str
    """``forward``, ``dgrad``, ``wgrad``, ``recomputed forward`` (under ``jax.checkpoint``), or ``backward``
    where the two gradients cannot be told apart, as in products of two activations."""
    batch: int
    """Number of independent products; 1 for a layer."""
    m: int
    """Rows of the left operand, as the kernel has it: XLA may have swapped the operands."""
    k: int
    """Length of the sum, with the padding that XLA adds to some odd sizes."""
    n: int
    """Columns of the right operand."""
    lhs_dtype: str
    """Of what is multiplied, as JAX names it, such as ``float8_e4m3fn``."""
    rhs_dtype: str
    out_dtype: str
    """What the kernel writes; float32 where XLA cuts the sum into parts that a later kernel adds up."""
    backend: str
    """``cublasLt``, ``cuBLAS``, ``Triton``, ``cuDNN``, ``Pallas`` (this package's kernel for block
    scales), or ``other``: a plain loop."""
    accumulation: str
    """``fast`` or ``exact`` where the program says so (cublasLt in FP8), else ``default``."""
    is_fp8: bool
    """Whether the FP8 units do it; of FP8 operands in Triton, whether they may: see ``may_be_fp8``."""
    reason: str
    """Why not, or why it only may be; ``""`` where the FP8 units do it."""
    trip_count: int
    """How often it runs per call: the product of the trip counts of the loops around it."""
    bytes: int
    """Bytes that its kernel reads and writes, over all trips."""
    op_name: str
    """JAX's name of the operation, with everything that ``path`` leaves out."""

    @property
    def flops(self) -> int:
        """Two per multiply and add, over all trips."""
        return 2 * self.batch * self.m * self.k * self.n * self.trip_count

    @property
    def may_be_fp8(self) -> bool:
        """Whether it has FP8 operands, and the program does not say what multiplies them.

        So it is in XLA's Triton kernels: the tile decides which instructions they use, and XLA picks it by
        measuring on the device. Compiled without one, they convert the operands to float16.
        """
        return self.is_fp8 and self.backend == "Triton"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What a compiled program does; print it, show it in a notebook, or assert on its fields.

    A loop whose trip count XLA does not know counts once, and each branch of a conditional counts as if it
    were taken. Only what XLA itself shows as a matrix product or a convolution is a GEMM: a matrix times a
    vector or a hand-written kernel (Pallas, cuDNN attention) counts among the other kernels.
    """

    target: str
    """The name that was asked for."""
    device: str
    """What the program was compiled for."""
    jax_version: str
    jaxlib_version: str
    gemms: tuple[Gemm, ...]
    """In the order in which they run; one in a loop stands here once."""
    num_kernels: int
    """Kernels in the program, loops' bodies counted once."""
    num_launches: int
    """Kernels that one call launches."""
    other_bytes: int
    """Bytes that all kernels that are not GEMMs read and write in one call."""
    temp_bytes: int
    """Memory for temporaries."""
    argument_bytes: int
    output_bytes: int
    donated_bytes: int
    """Arguments whose memory is used again for outputs."""
    unknown_trip_counts: bool
    """Whether a loop's trip count is not known, so that it was counted once."""

    @property
    def num_gemms(self) -> int:
        """GEMMs in the program, loops' bodies counted once."""
        return len(self.gemms)

    @property
    def num_fp8_gemms(self) -> int:
        """How many of them run in FP8, those included that only may (``Gemm.may_be_fp8``)."""
        return sum(gemm.is_fp8 for gemm in self.gemms)

    @property
    def num_gemm_launches(self) -> int:
        """GEMMs that one call runs."""
        return sum(gemm.trip_count for gemm in self.gemms)

    @property
    def flops(self) -> int:
        """Floating-point operations of all GEMMs in one call."""
        return sum(gemm.flops for gemm in self.gemms)

    @property
    def fp8_flops_share(self) -> float:
        """The share of ``flops`` that runs in FP8, or may, 0 to 1; 0 without any GEMM."""
        return sum(gemm.flops for gemm in self.gemms if gemm.is_fp8) / max(1, self.flops)

    @property
    def maybe_fp8_flops_share(self) -> float:
        """The part of ``fp8_flops_share`` that only may (``Gemm.may_be_fp8``)."""
        return sum(gemm.flops for gemm in self.gemms if gemm.may_be_fp8) / max(1, self.flops)

    @property
    def gemm_bytes(self) -> int:
        """Bytes that the GEMMs' kernels read and write in one call."""
        return sum(gemm.bytes for gemm in self.gemms)

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        may = sum(gemm.may_be_fp8 for gemm in self.gemms)
        share = 100 * (self.fp8_flops_share - self.maybe_fp8_flops_share)
        maybe = f", {may} may ({100 * self.maybe_fp8_flops_share:.1f} %)," if may else ""
        return (
            f"{self.num_fp8_gemms - may} of {self.num_gemms} GEMMs run in FP8 ({share:.1f} % of FLOPs)"
            f"{maybe} on {self.device}, JAX {self.jax_version}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields and totals as values that JSON can hold."""
        totals = [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        gemms = [
            {**dataclasses.asdict(gemm), "may_be_fp8": gemm.may_be_fp8, "flops": gemm.flops}
            for gemm in self.gemms
        ]
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, **{name: getattr(self, name) for name in totals}, "gemms": gemms}

    def __str__(self) -> str:
        reasons = self._reasons()
        rows = [_HEADER, *(self._row(gemm, reasons) for gemm in self.gemms)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        if self.gemms:
            lines.insert(1, "-" * max(map(len, lines)))
        notes = [f"[{number}] {reason}" for reason, number in reasons.items()]
        return "\n".join([*lines, *([""] if notes else []), *notes, "", *self._totals()])

    def _repr_html_(self) -> str:
        reasons = self._reasons()
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in _HEADER)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in self._row(gemm, reasons)) + "</tr>"
            for gemm in self.gemms
        )
        notes = [f"[{number}] {reason}" for reason, number in reasons.items()]
        text = "".join(f"<div>{html.escape(line)}</div>" for line in [*notes, *self._totals()])
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{text}"

    def _reasons(self) -> dict[str, int]:
        reasons = dict.fromkeys(gemm.reason for gemm in self.gemms if gemm.reason)
        return {reason: number for number, reason in enumerate(reasons, 1)}

    def _row(self, gemm: Gemm, reasons: dict[str, int]) -> tuple[str, ...]:
        sizes = [gemm.m, gemm.k, gemm.n] if gemm.batch == 1 else [gemm.batch, gemm.m, gemm.k, gemm.n]
        accumulation = "" if gemm.accumulation == "default" else f", {gemm.accumulation}"
        return (
            gemm.path or "(no name)",
            gemm.role,
            "×".join(map(str, sizes)) + (f" ({gemm.trip_count} times)" if gemm.trip_count > 1 else ""),
            f"{_short(gemm.lhs_dtype)}×{_short(gemm.rhs_dtype)}→{_short(gemm.out_dtype)}",
            gemm.backend + accumulation,
            f"{100 * gemm.flops / max(1, self.flops):.1f}",
            "FP8" if not gemm.reason else f"{'may ' * gemm.may_be_fp8}[{reasons[gemm.reason]}]",
        )

    def _totals(self) -> list[str]:
        lines = [
            self.summary,
            f"{self.num_kernels} kernels, {self.num_launches} launches. The GEMMs move "
            f"{_mebibytes(self.gemm_bytes)}, the other kernels {_mebibytes(self.other_bytes)}; "
            f"temporaries take {_mebibytes(self.temp_bytes)}.",
        ]
        if self.unknown_trip_counts:
            lines.append("The trip count of a loop is not known: what runs in it counts once.")
        if self.target != "local":
            lines.append("Compiled without the device, which might choose another backend after measuring.")
        return lines


_HEADER = ("GEMM", "role", "M×K×N", "operands", "backend", "% FLOPs", "FP8?")


def audit(fn: Callable[..., Any], *args: Any, target: str = "h200") -> AuditReport:
    """Compiles a function for a GPU, which need not be there, and reports which of its GEMMs run in FP8.

    Nothing runs and no donated buffer is used up. Targets other than ``local`` need the extra
    ``fp8flax[audit]``.

    Args:
        fn: what you would give to ``jax.jit``, or a function already jitted, whose donated and static
            arguments then stay what they are.
        *args: its arguments. Arrays may be of any shape and dtype and may be ``jax.ShapeDtypeStruct``; they
            are taken to lie on one device.
        target: ``"h100"``, ``"h200"``, ``"b200"``, or ``"local"`` for the device that JAX uses here.

    Returns:
        The report; ``print`` it.

    Raises:
        ValueError: ``target`` is not known, or the local device is a TPU.
        ImportError: the extra is missing, or does not fit the installed jaxlib.
        RuntimeError: ``fn`` cannot be traced, lowered or compiled; its cause says why.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
        >>> w = jax.ShapeDtypeStruct((128, 256), jnp.float32)
        >>> report = audit(lambda x, w: jnp.dot(x, w), x, w, target="local")
        >>> [(gemm.m, gemm.k, gemm.n, gemm.is_fp8) for gemm in report.gemms]
        [(64, 128, 256, False)]

    Source: XLA's optimized HLO, as ``jax.stages.Compiled.as_text`` gives it.
    """
    if target == "local":
        device = jax.config.jax_default_device or jax.devices()[0]
        device = jax.devices(device)[0] if isinstance(device, str) else device
        sharding = None
        platform, name, has_fp8_units = device.platform, str(device.device_kind), has_fp8_units(device)
        if platform == "tpu":
            raise ValueError(f"audit reads programs for CPUs and GPUs; use one of {', '.join(GPUS)}.")
    elif target in GPUS:
        sharding = jax.sharding.SingleDeviceSharding(_device(target))
        platform, name, has_fp8_units = "cuda", GPUS[target].name, True
    else:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; got {target!r}.")
    compiled = _compile(
        fn, args, sharding, name, GPUS[target].compute_capability if target in GPUS else None
    )
    text = compiled.as_text()
    if text is None:
        raise RuntimeError(f"XLA shows no program for {name}; use one of the targets {', '.join(GPUS)}.")
    summary = _hlo.read(text)
    gemms: list[Gemm] = []
    for kernel in summary.kernels:
        for i, dot in enumerate(kernel.dots):
            # Of several products in one kernel, the first stands for what the kernel moves.
            size = 0 if i else kernel.bytes * kernel.trip_count
            gemms.append(_gemm(dot, kernel.trip_count, size, summary.has_fp8, has_fp8_units, platform))
    memory = compiled.memory_analysis()
    return AuditReport(
        target=target,
        device=name,
        jax_version=jax.__version__,
        jaxlib_version=jaxlib.__version__,
        gemms=tuple(_tell_gradients_apart(gemms, [d for kernel in summary.kernels for d in kernel.dots])),
        num_kernels=len(summary.kernels),
        num_launches=sum(kernel.trip_count for kernel in summary.kernels),
        other_bytes=sum(k.bytes * k.trip_count for k in summary.kernels if not k.dots),
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        unknown_trip_counts=summary.unknown_trip_counts,
    )


def assert_fp8(
    fn: Callable[..., Any], *args: Any, min_flops: float = 1.0, target: str = "h200"
) -> AuditReport:
    """Raises where less of a function's GEMM FLOPs than asked for runs in FP8; see ``audit``.

    FP8 operands in a Triton kernel count, though the program does not say what multiplies them
    (``Gemm.may_be_fp8``): to leave them out, look at ``maybe_fp8_flops_share`` of the report.

    Args:
        fn: as for ``audit``.
        *args: as for ``audit``.
        min_flops: the share, 0 to 1, of the FLOPs of all GEMMs.
        target: as for ``audit``.

    Returns:
        The report.

    Raises:
        AssertionError: too little runs in FP8; the message holds the report.
        ValueError: ``min_flops`` is not between 0 and 1, or ``target`` is not known.
        ImportError: as ``audit``.
        RuntimeError: as ``audit``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        >>> try:
        ...     assert_fp8(jnp.dot, x, x, min_flops=0.9, target="local")
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[0])
        0.0 % of the GEMMs' FLOPs run in FP8; at least 90.0 % were asked for.

    Source: as ``audit``.
    """
    if not 0 <= min_flops <= 1:
        raise ValueError(f"min_flops is a share between 0 and 1; got {min_flops}.")
    report = audit(fn, *args, target=target)
    if report.fp8_flops_share < min_flops:
        if not report.gemms:
            raise AssertionError(f"There is no GEMM in the program.\n\n{report}")
        raise AssertionError(
            f"{100 * report.fp8_flops_share:.1f} % of the GEMMs' FLOPs run in FP8; at least "
            f"{100 * min_flops:.1f} % were asked for.\n\n{report}"
        )
    return report


@functools.cache
def _device(target: str) -> Any:
    """Returns a device of the given kind that compiles and cannot run."""
    return devices(target, 1)[0]


def devices(target: str, count: int) -> list[Any]:
    """Returns several of them, in one machine."""
    from jax.experimental import topologies

    wanted = jaxlib.__version__
    packages = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
    install = f"pip install {' '.join(f'{package}=={wanted}' for package in packages)}"
    for package in packages:
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ImportError(
                f"Compiling for {target} without the device needs {package} (and neither driver nor GPU). "
                f"Install it with: {install}; or use target='local'."
            ) from None
        if found != wanted:
            raise ImportError(f"{package} {found} does not fit jaxlib {wanted}. Install with: {install}")
    config = _TARGET_CONFIG.format(gpu=GPUS[target])
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{count}"
        )
    except Exception as error:
        raise ImportError(
            f"JAX refused jax-cuda13-plugin {wanted} when it started ({_first_line(error)}), which it does "
            f"where CUDA's libraries are missing. Start Python with JAX_PLATFORMS=cpu, and on JAX 0.9 with "
            f"JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 as well."
        ) from error
    return list(topology.devices)


def _compile(
    fn: Callable[..., Any], args: tuple[Any, ...], sharding: Any, device: str, capability: float | None
) -> Any:
    """Compiles ``fn`` for the device of ``sharding``, or where that is None for the local one."""
    has_array = False

    def abstract(leaf: Any) -> Any:
        nonlocal has_array
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return leaf
        has_array = True
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    args = jax.tree.map(abstract, args)
    name = getattr(fn, "__name__", repr(fn))
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    if sharding is not None and not has_array:
        # Without an argument that lies on the device, only the outputs can say which it is.
        jitted, args = jax.jit(functools.partial(fn, *args), out_shardings=sharding), ()
    with compile_target(capability), _abstract_gpu(None if sharding is None else device):
        try:
            traced = jitted.trace(*args)
        except Exception as error:
            raise RuntimeError(
                f"{name} cannot be traced ({_first_line(error)}). It must work under jax.jit with these "
                f"arguments; bind those that are not arrays with functools.partial, or make them static."
            ) from error
        try:
            lowered = traced.lower() if sharding is None else traced.lower(lowering_platforms=("cuda",))
        except Exception as error:
            raise RuntimeError(
                f"{name} cannot be lowered for {device} ({_first_line(error)}). Leave out shardings and "
                f"meshes of other devices: the audit is for one device."
            ) from error
        try:
            with warnings.catch_warnings():
                # A compiler without its GPU cannot load what it wrote to the persistent compilation cache
                # (JAX_COMPILATION_CACHE_DIR); JAX warns and compiles anew.
                warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
                return lowered.compile()
        except Exception as error:
            raise RuntimeError(
                f"XLA cannot compile {name} for {device} ({_first_line(error)}). If it speaks of an "
                f"algorithm, a dot asks for one that its dtypes lack there: e5m2 × e5m2 has none in FP8."
            ) from error


def _abstract_gpu(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Tells Pallas from JAX 0.11 on, which asks, for which GPU it lowers a kernel."""
    if name is None or jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind=name, num_cores=None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _dtype(name: str) -> str:
    """Returns JAX's name of an XLA dtype."""
    if name.startswith("f8"):
        return "float8_" + name[2:]
    return _DTYPES.get(name, re.sub(r"^([su])(\d+)$", lambda m: f"{'u' * (m[1] == 'u')}int{m[2]}", name))


def _short(dtype: str) -> str:
    """Returns a dtype's name for a table."""
    short = re.sub(r"^float8_(e\dm\d).*", r"\1", dtype)
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}.get(short, short)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _components(op_name: str) -> Iterator[str]:
    """Yields the parts of an op name, those inside ``jvp(…)`` and other transformations included."""
    for part in re.findall(r"(?:[^/()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))+", op_name):
        wrapped = re.fullmatch(r"(\w+)\((.*)\)", part)
        if wrapped is None:
            yield part
        elif wrapped[1] not in ("jit", "pjit"):
            yield from _components(wrapped[2])


def _path(op_name: str) -> str:
    """Returns the modules and scopes in an op name: without transformations, control flow, and the op."""
    # Under jax.checkpoint JAX names the root twice.
    op_name = re.sub(r"transpose\(jvp\(([^()]+)\)\)/jvp\(\1\)", r"transpose(jvp(\1))", op_name)
    *parts, _ = [*_components(op_name)] or [""]
    kept: list[str] = []
    for part in parts:
        if part in _ROLES or part in (SWITCHED_OFF, KEPT_WIDE, CONVOLVED_WIDE):
            break  # what follows is inside the FP8 matmul
        if (
            part in _WRAPPERS
            or part in (BY_OP, NOT_CONVERTED)
            or re.fullmatch(r"(Fp8|NANOOFp8)\w*(Dot|Conv)\w*_\d+", part)
        ):
            continue
        if (kept[-1:] == ["while"] and part in ("body", "cond")) or (
            kept[-1:] == ["cond"] and re.fullmatch(r"branch_\d+_fun", part)
        ):
            kept.pop()
        else:
            kept.append(part)
    return "/".join(kept)


def _role(op_name: str) -> str:
    """Returns the role that an op name tells; ``backward`` for either gradient."""
    *parts, _ = [*_components(op_name)] or [""]
    scope = next((_ROLES[part] for part in reversed(parts) if part in _ROLES), "")
    if scope in ("dgrad", "wgrad"):
        return scope
    if "rematted_computation" in parts:
        return "recomputed forward"
    return "backward" if "transpose(" in op_name and scope != "forward" else "forward"


def _gemm(
    dot: _hlo.Dot, trip_count: int, size: int, has_fp8: bool, has_fp8_units: bool, platform: str
) -> Gemm:
    in_fp8 = dot.lhs_dtype.startswith("f8") and dot.rhs_dtype.startswith("f8")
    is_fp8 = (
        in_fp8 and has_fp8_units and dot.backend != "other" and BLOCK_GEMM_F16 not in dot.op_name.split("/")
    )
    reason = "" if is_fp8 else _reason(dot, has_fp8, has_fp8_units, platform)
    if is_fp8 and dot.backend == "Triton":
        reason = _OF_THE_TILE
    return Gemm(
        path=_path(dot.op_name),
        role=_role(dot.op_name),
        batch=dot.batch,
        m=dot.m,
        k=dot.k,
        n=dot.n,
        lhs_dtype=_dtype(dot.lhs_dtype),
        rhs_dtype=_dtype(dot.rhs_dtype),
        out_dtype=_dtype(dot.out_dtype),
        backend=dot.backend,
        accumulation=dot.accumulation,
        is_fp8=is_fp8,
        reason=reason,
        trip_count=trip_count,
        bytes=size,
        op_name=dot.op_name,
    )


_OF_THE_TILE = (
    "FP8 operands in a Triton kernel: which instructions multiply them depends on the tile, which XLA "
    "picks by measuring on the device; the tile that it takes without one has them multiplied in float16"
)
"""Why a product only may run in FP8; seen in the PTX of JAX 0.10.2."""


def _reason(dot: _hlo.Dot, has_fp8: bool, has_fp8_units: bool, platform: str) -> str:
    """Says why a product does not run in FP8."""
    dtypes = " and ".join(dict.fromkeys((_dtype(dot.lhs_dtype), _dtype(dot.rhs_dtype))))
    parts = [*_components(dot.op_name)]
    is_op = any(part.startswith(("Fp8", "NANOOFp8")) for part in parts)
    for scope, reason in CHOSEN_WIDE.items():
        if scope in parts:
            return reason.format(dtypes=dtypes)
    if not has_fp8_units and (is_op or any(dot.fp8_sources)):
        device = "the CPU" if platform == "cpu" else "this GPU"
        return f"{device} has no FP8 units; the values are emulated"
    for scope, reason in WITHOUT_UNITS.items():
        if scope in parts:
            return reason.format(dtypes=dtypes)
    if dot.lhs_dtype.startswith("f8") and dot.rhs_dtype.startswith("f8"):
        return "operands are FP8, but the product is computed in a plain loop, without the FP8 units"
    if dot.fp8_sources == ("f8e5m2", "f8e5m2"):
        return f"e5m2×e5m2 is not supported by cublasLt; multiplied in {dtypes}"
    if is_op or all(dot.fp8_sources):
        dropped = "" if has_fp8 else " (XLA left out even the rounding to FP8)"
        return f"quantize-dequantize pattern not matched: multiplied in {dtypes}{dropped}"
    if any(dot.fp8_sources):
        return f"only one operand comes from FP8: multiplied in {dtypes}"
    if dot.batch > 1 and not dot.is_convolution:
        return f"operands are {dtypes}: batched product (attention, or an einsum layer not converted)"
    return f"operands are {dtypes}: layer not converted"


def _tell_gradients_apart(gemms: list[Gemm], dots: list[_hlo.Dot]) -> Iterator[Gemm]:
    """Replaces ``backward`` by ``dgrad`` or ``wgrad`` where sizes or contracted dimensions tell.

    With a forward product of sizes M, K, N, dgrad is (M, N) by (N, K) and sums over N, wgrad is (K, M) by
    (M, N) and sums over M. Where that does not decide, a product that sums over the first dimensions of
    both operands is taken for wgrad, one that sums over the last for dgrad; for FP8 in cublasLt, which
    sums over the last only, XLA has transposed the operands.
    """
    forward: dict[str, set[tuple[int, int, int]]] = {}
    for gemm in gemms:
        if gemm.role.endswith("forward"):
            forward.setdefault(gemm.path, set()).add((gemm.m, gemm.k, gemm.n))
    for gemm, dot in zip(gemms, dots):
        if gemm.role != "backward" or gemm.batch > 1:
            yield gemm
            continue
        roles = set()
        for m, k, n in forward.get(gemm.path, ()):
            if gemm.k == n and {gemm.m, gemm.n} == {m, k}:
                roles.add("dgrad")
            if gemm.k == m and {gemm.m, gemm.n} == {k, n}:
                roles.add("wgrad")
        transposed = gemm.is_fp8 and gemm.backend == "cublasLt"
        if len(roles) != 1 and dot.contracts_leading is not None and not transposed:
            roles = {"wgrad" if dot.contracts_leading else "dgrad"}
        yield dataclasses.replace(gemm, role=roles.pop()) if len(roles) == 1 else gemm
