"""Compiles a function for a device or a mesh of devices, which need not be present."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8flax._compat.plugin_compiler import (
    PluginCompiled,
    compile_with_plugin,
    platform_of,
    target_config_of,
)
from fp8flax._compat.stablehlo_version import StableHloTooOldError
from fp8flax._core.gemm.gpus import (
    GPUS,
    OTHER_GPUS,
    Gpu,
    compile_target,
    compute_capability_of,
    has_fp8_units,
)
from fp8flax._core.options import check_choice, check_int

_T = TypeVar("_T")

TARGETS = (*GPUS, "local")
"""The names of the targets that ``audit`` can compile for."""

Compiled: TypeAlias = jax.stages.Compiled | PluginCompiled
"""A compiled program."""

# The text of a GpuTargetConfigProto. XLA's decisions depend on these numbers.
# XLA of JAX 0.10 reads dnn_version_info and the second runtime_version, later XLA the fields of the device.
_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: {gpu.threads_per_core}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  dnn_version: "9.10.0"
  runtime_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{gpu.name}"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The device or the mesh that a program is compiled for."""

    key: str
    """One of ``TARGETS``."""
    name: str
    platform: str
    has_fp8_units: bool
    compute_capability: float
    """The compute capability of an NVIDIA GPU; 0 for any other device."""
    gpu: Gpu | None = None
    """The GPU, which need not be present; None for the local device."""
    mesh: Mesh | None = None
    """The mesh of such GPUs; None if the program is for one device."""
    sharding: jax.sharding.Sharding | None = None
    """The sharding that puts arrays on the GPU, or replicates them over the mesh."""


def find_target(target: str | Mesh) -> Target:
    """Returns the ``Target`` for a name in ``TARGETS`` or for a mesh.

    Raises ``TypeError`` for a list of devices; for other errors see ``audit``.
    """
    if isinstance(target, Mesh):
        key = _kind_of(target)
        times = f"{target.size} × " if target.size > 1 else ""
        return _target_of(key, times, NamedSharding(target, PartitionSpec()), target)
    if isinstance(target, list):
        raise TypeError(
            f"target must be a name or a mesh; got a list of {len(target)}. Pass "
            "jax.sharding.Mesh(np.array(devices), ('data',)) of the devices."
        )
    if target in GPUS:
        return _target_of(target, "", jax.sharding.SingleDeviceSharding(_device(target)))
    if target != "local":
        hint = f"{OTHER_GPUS[target]} " if target in OTHER_GPUS else ""
        raise ValueError(
            f"{hint}target must be one of {', '.join(TARGETS)}, or a jax.sharding.Mesh of "
            f"compile_only_devices; got {target!r}. For another GPU use one of the same compute "
            f"capability: {', '.join(f'{key} has {gpu.compute_capability}' for key, gpu in GPUS.items())}."
        )
    device = jax.config.jax_default_device or jax.devices()[0]
    device = jax.devices(device)[0] if isinstance(device, str) else device
    if device.platform == "tpu":
        raise ValueError(f"audit reads programs for CPUs and GPUs; use one of {', '.join(GPUS)}.")
    return Target(
        key=target,
        name=str(device.device_kind),
        platform=device.platform,
        has_fp8_units=has_fp8_units(device),
        compute_capability=compute_capability_of(device),
    )


def _target_of(key: str, times: str, sharding: jax.sharding.Sharding, mesh: Mesh | None = None) -> Target:
    gpu = GPUS[key]
    return Target(
        key=key,
        name=times + gpu.name,
        platform="cuda",
        has_fp8_units=gpu.has_fp8_units,
        compute_capability=gpu.compute_capability,
        gpu=gpu,
        mesh=mesh,
        sharding=sharding,
    )


def _kind_of(mesh: Mesh) -> str:
    """Returns the target name of the GPUs in a mesh of ``compile_only_devices``."""
    devices = list(mesh.devices.flat)
    kinds = {device.device_kind for device in devices}
    found = [key for key, gpu in GPUS.items() if kinds == {gpu.name}]
    if not found or not set(devices).isdisjoint(jax.devices()):
        raise ValueError(
            "A mesh that is given as target must have devices from fp8flax.compile_only_devices; got a "
            f"mesh of {', '.join(sorted(kinds))}."
        )
    return found[0]


@functools.cache
def _device(target: str) -> Any:
    """Returns one device of ``compile_only_devices``; the same for each call."""
    return compile_only_devices(target)[0]


def compile_only_devices(target: str, count: int = 1) -> list[jax.Device]:
    """Returns GPUs that can be compiled for, but that need not be present and cannot run a program.

    Make a mesh of them for a program that is split over several GPUs or names its devices, and give this
    mesh to ``audit`` as its ``target``. Each call returns new devices.

    Args:
        target: ``"h100"``, ``"h200"``, ``"b200"``, ``"l40s"``, ``"rtx4090"`` or ``"a100"``.
        count: number of GPUs, in one machine.

    Returns:
        A list of ``count`` devices.

    Raises:
        ImportError: as in ``audit``.
        TypeError: ``count`` is not an integer.
        ValueError: ``target`` is not known, or ``count`` is not positive.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> import fp8flax as fp8
        >>> mesh = jax.sharding.Mesh(np.array(fp8.compile_only_devices("h200", 4)), ("data",))
        >>> rows = NamedSharding(mesh, P("data"))
        >>> x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=rows)
        >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
        >>> report = fp8.audit(jnp.dot, x, w, target=mesh)
        >>> report.device, report.gemms[0].m
        ('4 × NVIDIA H200', 1024)

    Source: ``jax.experimental.topologies``.
    """
    check_choice("target", target, tuple(GPUS))
    check_int("count", count, 1)
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
    gpu = GPUS[target]
    major, minor = str(gpu.compute_capability).split(".")
    config = _TARGET_CONFIG.format(gpu=gpu, major=major, minor=minor)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{count}"
        )
    except Exception as error:
        raise ImportError(
            f"JAX did not load jax-cuda13-plugin {wanted} when it started ({_first_line(error)}). This "
            "happens if CUDA's libraries are missing. Start Python with JAX_PLATFORMS=cpu."
        ) from error
    return list(topology.devices)


@contextlib.contextmanager
def compiling_for(gpu: Gpu) -> Iterator[None]:
    """Sets the GPU that programs are traced and lowered for, for this package and for Pallas."""
    device = jax.sharding.AbstractDevice(
        device_kind=gpu.pallas_name or gpu.name, num_cores=gpu.cores, platform="gpu"
    )
    mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    with compile_target(gpu.compute_capability), mesh:
        yield


def compile_for(target: Target, fn: Callable[..., Any], args: tuple[Any, ...]) -> Compiled:
    """Compiles ``fn(*args)``; arguments may be ``jax.ShapeDtypeStruct``. Errors: see ``audit``."""
    return compile_lowered(target, lower_for(target, fn, args), _name_of(fn))


def lower_for(
    target: Target, fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any] | None = None
) -> jax.stages.Lowered:
    """Lowers ``fn(*args, **keywords)`` for ``compile_lowered``."""
    name = _name_of(fn)
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    shape_of = functools.partial(_shape_of, sharding=target.sharding)
    if target.mesh is not None:
        # An argument without a sharding is replicated. A jitted function may have in_shardings, so its
        # arguments get no sharding here.
        elsewhere = target.sharding if jitted is not fn else None
        shape_of = functools.partial(_shape_on_mesh, mesh=target.mesh, elsewhere=elsewhere)
    given = args, keywords or {}
    shapes = jax.tree.map(shape_of, given)
    if target.gpu is not None and not any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes)
    ):
        # No argument has a sharding that names the device, so the outputs must name it.
        bound = functools.partial(fn, *given[0], **given[1])
        jitted, shapes = jax.jit(bound, out_shardings=target.sharding), ((), {})
    with contextlib.nullcontext() if target.gpu is None else compiling_for(target.gpu):
        traced = _explained(
            lambda: jitted.trace(*shapes[0], **shapes[1]),
            f"{name} cannot be traced",
            "It must work under jax.jit with these arguments; bind those that are not arrays with "
            "functools.partial, or make them static.",
        )
        platforms = {} if target.gpu is None else {"lowering_platforms": ("cuda",)}
        return _explained(
            lambda: traced.lower(**platforms),
            f"{name} cannot be lowered for {target.name}",
            "Shardings and meshes must be of the devices that it is compiled for: leave others out, or "
            "give a mesh of fp8flax.compile_only_devices as the target.",
        )


def compile_lowered(
    target: Target, lowered: jax.stages.Lowered, name: str, options: dict[str, Any] | None = None
) -> Compiled:
    """Compiles the result of ``lower_for`` by JAX, or by XLA's plugin if JAX cannot compile it.

    Args:
        target: the device or mesh to compile for.
        lowered: the lowered program.
        name: the name of the function, for error messages.
        options: compiler options of XLA.

    Raises:
        RuntimeError: the program cannot be compiled, or no argument of it lies on the mesh.
    """
    if target.mesh is not None and target.gpu is not None and platform_of(lowered) == "cpu":
        # XLA for CPUs would abort the process for some programs that are written for GPUs.
        raise RuntimeError(_not_on_mesh(name))

    def compile_here() -> Compiled:
        try:
            return lowered.compile(compiler_options=options)
        except StableHloTooOldError:
            return compile_with_plugin(lowered, options)

    # XLA calls back to trace our GPU kernels for the parts of a mesh, so the GPU must be known here, too.
    known = contextlib.nullcontext() if target.gpu is None else compiling_for(target.gpu)
    with _ignoring_cache_errors(), known:
        return _explained(
            compile_here,
            f"XLA cannot compile {name} for {target.name}",
            "If the error names an algorithm, the device has no such algorithm for the dtypes of a dot: "
            "e5m2 × e5m2 has none in FP8.",
        )


_CACHE_ERROR = "ignore", re.compile("Error reading persistent compilation cache entry"), Warning, None, 0
"""A filter of warnings, as ``warnings.filterwarnings`` would insert it."""


@contextlib.contextmanager
def _ignoring_cache_errors() -> Iterator[None]:
    """Ignores the warning of JAX that it cannot read a program from its persistent compilation cache.

    Without the GPU JAX cannot load such a program. It warns and compiles the program again.

    ``warnings.catch_warnings`` would make Python show again all warnings that it shows once, and audits in
    several threads would restore the filters of each other.
    """
    filters: Any = warnings.filters
    filters.insert(0, _CACHE_ERROR)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread may have reset the filters
            filters.remove(_CACHE_ERROR)


def check_cudnn_is_known(target: Target, lowered: jax.stages.Lowered, name: str) -> None:
    """Raises ``RuntimeError`` for block-scaled matmuls if XLA does not know cuDNN's version.

    XLA then expands them to bfloat16, although the GPU would run them in FP8. The field of
    ``_TARGET_CONFIG`` that holds the version depends on the version of JAX.
    """
    if target.gpu is None or target.sharding is None or not target.gpu.has_mx_units:
        return
    config = target_config_of(next(iter(target.sharding.device_set)))
    if "dnn_version" not in config and "block_scaled_dot" in lowered.as_text():
        raise RuntimeError(
            f"{name} has block-scaled matmuls, but XLA does not know the version of cuDNN of "
            f"{target.name}, so it compiles another program than that GPU runs. Use devices from "
            "fp8flax.compile_only_devices, which have a version of cuDNN. If yours are from there, this "
            f"fp8flax does not know how JAX {jax.__version__} reads the version."
        )


def check_on_mesh(compiled: Compiled, mesh: Mesh, name: str) -> None:
    """Raises ``RuntimeError`` if the arguments of a compiled function do not lie on the whole mesh.

    This happens to a jitted function without ``in_shardings`` and with arguments without shardings.
    """
    if isinstance(compiled, PluginCompiled):
        found = [compiled.devices]
    else:
        found = [sharding.device_set for sharding in jax.tree.leaves(compiled.input_shardings)]
    if not all(devices == set(mesh.devices.flat) for devices in found):
        raise RuntimeError(_not_on_mesh(name))


def _not_on_mesh(name: str) -> str:
    return (
        f"The arguments of {name} do not lie on the mesh that is the target. Give them shardings on it, "
        "jax.ShapeDtypeStruct(..., sharding=), or jax.jit in_shardings."
    )


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))


def _shape_of(leaf: Any, sharding: Any) -> Any:
    """Returns the shape and dtype of an array, with ``sharding``; returns any other value unchanged."""
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return leaf
    weak = getattr(leaf, "weak_type", False)
    # Without x64, JAX computes in float32 with a float64 array of NumPy.
    dtype = jax.typeof(leaf).dtype if isinstance(leaf, np.ndarray) else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=weak)


def _shape_on_mesh(leaf: Any, mesh: Mesh, elsewhere: Any) -> Any:
    """Returns the shape and dtype of an array, with its partition spec on ``mesh``.

    If the array has no partition spec with the axes of ``mesh``, its sharding is ``elsewhere``.
    """
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_names) <= set(mesh.axis_names):
        return _shape_of(leaf, NamedSharding(mesh, sharding.spec))
    return _shape_of(leaf, elsewhere)


def _explained(step: Callable[[], _T], failure: str, advice: str) -> _T:
    """Returns the result of ``step()``; to an error it adds what failed and what to do."""
    try:
        return step()
    except Exception as error:
        raise RuntimeError(f"{failure} ({_first_line(error)}). {advice}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
