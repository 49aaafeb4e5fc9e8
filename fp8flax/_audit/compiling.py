"""Compiles a function for a device or a mesh of devices, which need not be present."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fp8flax._core.gemm.gemm import ALGORITHMS
from fp8flax._core.gemm.gpus import (
    GPUS,
    NATIVE_FP8,
    Gpu,
    compile_target,
    compute_capability_of,
)
from fp8flax._core.names import CUBLASLT
from fp8flax._core.options import check_choice, check_int

_T = TypeVar("_T")

# The text of a GpuTargetConfigProto. XLA's decisions depend on these numbers. Without the version of cuDNN,
# XLA expands block-scaled matmuls to bfloat16. JAX 0.10 reads the versions in the last lines of the text,
# later versions of JAX read those in the device's description.
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
    """A key of ``GPUS``, or ``local``."""
    name: str
    platform: str
    has_fp8_units: bool
    gpu: Gpu | None = None
    """The GPU, which need not be present; None for the local device."""
    mesh: Mesh | None = None
    """The mesh of such GPUs; None if the program is for one device."""
    sharding: jax.sharding.Sharding | None = None
    """The sharding that puts arrays on the GPU, or replicates them over the mesh."""


def find_target(target: str | Mesh) -> Target:
    """Returns the ``Target`` for a name or for a mesh. For errors see ``audit``."""
    mesh = target if isinstance(target, Mesh) else None
    sharding: jax.sharding.Sharding
    if isinstance(target, Mesh):
        key, sharding = _kind_of(target), NamedSharding(target, PartitionSpec())
    elif target in tuple(GPUS):
        key, sharding = target, SingleDeviceSharding(_device(target))
    elif target == "local":
        return _local_device()
    else:
        raise ValueError(
            f"target must be one of {', '.join(GPUS)}, local, or a jax.sharding.Mesh of "
            f"compile_only_devices; got {target!r}. For another GPU use one of the same compute "
            f"capability: {', '.join(f'{key} has {gpu.compute_capability}' for key, gpu in GPUS.items())}."
        )
    gpu, count = GPUS[key], len(sharding.device_set)
    return Target(
        key=key,
        name=f"{count} × {gpu.name}" if count > 1 else gpu.name,
        platform="cuda",
        has_fp8_units=gpu.compute_capability >= NATIVE_FP8,
        gpu=gpu,
        mesh=mesh,
        sharding=sharding,
    )


def _local_device() -> Target:
    """Returns the device that JAX uses here."""
    device = jax.config.jax_default_device or jax.devices()[0]
    device = jax.devices(device)[0] if isinstance(device, str) else device
    if device.platform == "tpu":
        raise ValueError(f"audit reads programs for CPUs and GPUs; use one of {', '.join(GPUS)}.")
    return Target(
        key="local",
        name=str(device.device_kind),
        platform=device.platform,
        has_fp8_units=compute_capability_of(device) >= NATIVE_FP8,
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

    gpu = GPUS[target]
    major, minor = str(gpu.compute_capability).split(".")
    config = _TARGET_CONFIG.format(gpu=gpu, major=major, minor=minor)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{count}"
        )
    except Exception as error:
        version = jaxlib.__version__
        raise ImportError(
            f"JAX cannot compile for an absent {target} ({_first_line(error)}). Install what it needs (no "
            f"driver): pip install jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}. If these are "
            "installed, start Python with JAX_PLATFORMS=cpu. Or use target='local'."
        ) from error
    return list(topology.devices)


_UNREAD_CACHE = "ignore", re.compile("Error reading persistent compilation cache entry"), Warning, None, 0
"""A filter of warnings, as ``warnings.filterwarnings`` would insert it."""


@contextlib.contextmanager
def _ignoring_unread_cache() -> Iterator[None]:
    """Hides JAX's warning that it cannot load a program for an absent GPU from its persistent cache.

    JAX compiles the program again. After ``warnings.catch_warnings`` Python would show again all warnings
    that it shows once, and audits in several threads would restore the filters of each other.
    """
    filters: Any = warnings.filters
    filters.insert(0, _UNREAD_CACHE)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread may have reset the filters
            filters.remove(_UNREAD_CACHE)


@functools.cache
def compiles_algorithms() -> bool:
    """Returns whether JAX compiles an FP8 dot with an algorithm for a GPU that is not in this machine.

    JAX 0.12 does not: without the GPU it writes programs in a version of StableHLO that has no such
    algorithms. To find out, a small dot is compiled.
    """
    sharding = SingleDeviceSharding(_device("h200"))
    codes = jax.ShapeDtypeStruct((16, 16), jnp.float8_e4m3fn, sharding=sharding)
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=ALGORITHMS["exact"],
        preferred_element_type=jnp.float32,
    )

    def compile_dot() -> None:
        jax.jit(dot).trace(codes, codes).lower(lowering_platforms=("cuda",)).compile()

    # In a thread of its own JAX has no context of the caller, such as a mesh.
    with concurrent.futures.ThreadPoolExecutor(1) as thread, _ignoring_unread_cache():
        try:
            thread.submit(compile_dot).result()
        except jax.errors.JaxRuntimeError:
            return False
    return True


@contextlib.contextmanager
def compiling_for(gpu: Gpu | None) -> Iterator[None]:
    """Sets the GPU that programs are traced and lowered for, also for Pallas; None is the local device."""
    if gpu is None:
        yield
        return
    device = jax.sharding.AbstractDevice(
        device_kind=gpu.pallas_name or gpu.name, num_cores=gpu.cores, platform="gpu"
    )
    mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    target = compile_target(gpu.compute_capability, takes_algorithms=compiles_algorithms(), cores=gpu.cores)
    with target, mesh:
        yield


def compile_for(
    target: Target, fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles ``fn(*args, **keywords)``. For errors see ``audit``."""
    return compile_lowered(target, lower_for(target, fn, args, keywords), _name_of(fn))


def lower_for(
    target: Target, fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any] | None = None
) -> jax.stages.Lowered:
    """Lowers ``fn(*args, **keywords)`` for ``compile_lowered``."""
    name = _name_of(fn)
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    # A jitted function may have in_shardings, so on a mesh its arguments get no sharding here. Arguments of
    # other functions are replicated.
    elsewhere = None if target.mesh is not None and jitted is fn else target.sharding
    shape_of = functools.partial(_shape_of, mesh=target.mesh, elsewhere=elsewhere)
    shapes = jax.tree.map(shape_of, (args, keywords or {}))
    # JAX would lower a program without any sharding for the CPU. Tracing may compute constants on the CPU.
    device = jax.config.jax_default_device
    if target.sharding is not None:
        device = next(iter(target.sharding.device_set))
    platforms = {} if target.gpu is None else {"lowering_platforms": ("cuda",)}
    with compiling_for(target.gpu):
        traced = _explained(
            lambda: jitted.trace(*shapes[0], **shapes[1]),
            f"{name} cannot be traced",
            "It must work under jax.jit with these arguments; bind those that are not arrays with "
            "functools.partial, or make them static.",
        )
        with jax.default_device(device):
            return _explained(
                lambda: traced.lower(**platforms),
                f"{name} cannot be lowered for {target.name}",
                "Shardings and meshes must be of the devices that it is compiled for: leave others out, or "
                "give a mesh of fp8flax.compile_only_devices as the target.",
            )


def compile_lowered(target: Target, lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
    """Compiles the result of ``lower_for``; ``name`` is that of the function, for error messages.

    Raises:
        RuntimeError: the program cannot be compiled, or no argument of it lies on the mesh.
    """
    options = {}
    lacks_algorithms = target.gpu is not None and not compiles_algorithms()
    if lacks_algorithms and CUBLASLT in lowered.as_text(debug_info=True):
        # Without an algorithm, XLA would give to Triton the GEMMs that ask for cublasLt.
        options["xla_gpu_enable_triton_gemm"] = False
    # XLA calls back to trace our GPU kernels for the parts of a mesh, so the GPU must be known here, too.
    with _ignoring_unread_cache(), compiling_for(target.gpu):
        compiled = _explained(
            lambda: lowered.compile(compiler_options=options or None),
            f"XLA cannot compile {name} for {target.name}",
            "If the error names an algorithm, the device has no such algorithm for the dtypes of a dot: "
            "e5m2 × e5m2 has none in FP8. If it names StableHLO, this JAX can compile a DotAlgorithmPreset "
            "of FP8 only on a machine with the GPU; the ops of fp8flax need none for an audit.",
        )
    if target.mesh is not None:
        _check_on_mesh(compiled, target.mesh, name)
    return compiled


def _check_on_mesh(compiled: jax.stages.Compiled, mesh: Mesh, name: str) -> None:
    """Raises ``RuntimeError`` if the arguments of a compiled function do not lie on the whole mesh.

    This happens to a jitted function without ``in_shardings`` and with arguments without shardings.
    """
    found = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    if not all(sharding.device_set == set(mesh.devices.flat) for sharding in found):
        raise RuntimeError(
            f"The arguments of {name} do not lie on the mesh that is the target. Give them shardings on "
            "it, jax.ShapeDtypeStruct(..., sharding=), or jax.jit in_shardings."
        )


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))


def _shape_of(leaf: Any, mesh: Mesh | None, elsewhere: Any) -> Any:
    """Returns the shape and dtype of an array, and the sharding to compile for; any other value unchanged.

    The sharding has the partition spec of the array on ``mesh``. If the array has no spec with the axes of
    ``mesh``, its sharding is ``elsewhere``.
    """
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return leaf
    found = getattr(leaf, "sharding", None)
    if (
        mesh is not None
        and isinstance(found, NamedSharding)
        and set(found.mesh.axis_names) <= set(mesh.axis_names)
    ):
        elsewhere = NamedSharding(mesh, found.spec)
    weak = getattr(leaf, "weak_type", False)
    # Without x64, JAX computes in float32 with a float64 array of NumPy.
    dtype = jax.typeof(leaf).dtype if isinstance(leaf, np.ndarray) else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=elsewhere, weak_type=weak)


def _explained(step: Callable[[], _T], failure: str, advice: str) -> _T:
    """Returns the result of ``step()``; to an error it adds what failed and what to do."""
    try:
        return step()
    except Exception as error:
        raise RuntimeError(f"{failure} ({_first_line(error)}). {advice}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
