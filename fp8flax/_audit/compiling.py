"""Compiles a function for a device or a mesh of devices, which need not be present."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from fp8flax._core.gemm.gpus import (
    GPUS,
    HOPPER,
    NATIVE_FP8,
    Gpu,
    compiling_for,
    compute_capability_of,
    takes_algorithms,
)
from fp8flax._core.names import CUBLASLT
from fp8flax._core.options import check_choice, check_int
from fp8flax._core.types import PyTree

# The text of a GpuTargetConfigProto. XLA's decisions depend on these numbers. Without the version of cuDNN,
# XLA expands block-scaled matmuls to bfloat16. JAX 0.10 reads the versions in the last lines of the text,
# later versions of JAX read those in the device's description. The extension is what XLA finds on the GPU.
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
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
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
    device: jax.Device
    """The device, or the first device of the mesh."""
    mesh: Mesh | None = None
    """The mesh of GPUs that need not be present; None if the program is for one device."""

    @property
    def gpu(self) -> Gpu | None:
        """The GPU, which need not be present; None for the local device."""
        return GPUS.get(self.key)

    @property
    def has_fp8_units(self) -> bool:
        """Whether the device has units that multiply FP8."""
        return compute_capability_of(self.device) >= NATIVE_FP8


def find_target(target: str | Mesh) -> Target:
    """Returns the ``Target`` for a name or for a mesh. For errors see ``audit``."""
    if isinstance(target, Mesh):
        devices = list(target.devices.flat)
        kinds = {device.device_kind for device in devices}
        found = [key for key, gpu in GPUS.items() if kinds == {gpu.name}]
        if not found or not set(devices).isdisjoint(jax.devices()):
            raise ValueError(
                "A mesh that is given as target must have devices from fp8flax.compile_only_devices; got a "
                f"mesh of {', '.join(sorted(kinds))}."
            )
        return Target(key=found[0], device=devices[0], mesh=target)
    check_choice("target", target, (*GPUS, "local"))
    if target != "local":
        return Target(key=target, device=_device(target))
    device = jax.config.jax_default_device or jax.devices()[0]
    device = jax.devices(device)[0] if isinstance(device, str) else device
    if device.platform == "tpu":
        raise ValueError(f"audit reads programs for CPUs and GPUs; use one of {', '.join(GPUS)}.")
    return Target(key="local", device=device)


@functools.cache
def _device(target: str) -> jax.Device:
    """Returns one device of ``compile_only_devices``; the same for each call."""
    return compile_only_devices(target)[0]


def compile_only_devices(target: str, count: int = 1) -> list[jax.Device]:
    """Returns GPUs that can be compiled for, but that need not be present and cannot run a program.

    Make a mesh of them for a program that is split over several GPUs or names its devices, and give this
    mesh to ``audit`` as its ``target``. Each call returns new devices.

    Args:
        target: ``"h100"``, ``"h200"``, ``"b200"``, ``"l40s"``, ``"rtx4090"``, ``"rtx5090"`` or ``"a100"``.
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
    extension = "ACCELERATED_FEATURES" if gpu.compute_capability >= HOPPER else "NONE"
    config = _TARGET_CONFIG.format(gpu=gpu, major=major, minor=minor, extension=extension)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{count}"
        )
    except Exception as error:
        version, reason = jaxlib.__version__, str(error).partition("\n")[0][:300]
        raise ImportError(
            f"JAX cannot compile for an absent {target} ({reason}). Install what it needs (no driver): "
            f"pip install jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}. If these are installed, "
            "start Python with JAX_PLATFORMS=cpu. Or use target='local'."
        ) from error
    return list(topology.devices)


def compile_for(
    target: Target, fn: Callable[..., object], args: PyTree, keywords: PyTree | None = None
) -> tuple[jax.stages.Compiled, bool]:
    """Compiles ``fn(*args, **keywords)``. For errors see ``audit``.

    Also returns whether XLA was not allowed to use Triton, which would get GEMMs that ask for cublasLt in
    vain.
    """
    if isinstance(fn, jax.stages.Lowered | jax.stages.Compiled):
        raise TypeError(
            "fn must be a function, which the audit compiles for its target; got jax.stages."
            f"{type(fn).__name__}. Pass the function that was lowered, and its arguments."
        )
    jitted: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    mesh = target.mesh
    unnamed: jax.sharding.Sharding | None = None
    if mesh is None and target.gpu is not None:
        unnamed = SingleDeviceSharding(target.device)
    elif mesh is not None and jitted is not fn:  # a jitted function may have in_shardings
        unnamed = NamedSharding(mesh, PartitionSpec())

    def shape_of(leaf: object) -> object:
        """Returns the shape, dtype and sharding of an array; any other value unchanged."""
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return leaf
        found, sharding = getattr(leaf, "sharding", None), unnamed
        if mesh is not None and isinstance(found, NamedSharding):
            fits = set(found.mesh.axis_names) <= set(mesh.axis_names)
            sharding = NamedSharding(mesh, found.spec) if fits else unnamed
        # Without x64, JAX computes in float32 with a float64 array of NumPy.
        of = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        return jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=sharding, weak_type=of.weak_type)

    shapes, named = jax.tree.map(shape_of, (args, keywords or {}))
    # XLA calls back to trace our GPU kernels for the parts of a mesh, so the GPU must be known to the end.
    with compiling_for(target.gpu):
        traced = jitted.trace(*shapes, **named)  # may compute constants on the CPU
        # JAX would lower a program without any sharding for the CPU.
        with jax.default_device(target.device):
            lowered = traced.lower(lowering_platforms=None if target.gpu is None else ("cuda",))
        without_triton = CUBLASLT in lowered.as_text(debug_info=True) and not takes_algorithms()
        options = {"xla_gpu_enable_triton_gemm": False} if without_triton else None
        # JAX warns that it cannot load a program for an absent GPU from a persistent cache, and compiles
        # again.
        with warnings.catch_warnings(action="ignore"):
            compiled: jax.stages.Compiled = lowered.compile(compiler_options=options)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    if mesh is not None and any(s.device_set != set(mesh.devices.flat) for s in shardings):
        raise ValueError(
            "The arguments do not lie on the mesh that is the target. Give them shardings on it, "
            "jax.ShapeDtypeStruct(..., sharding=), or jax.jit in_shardings."
        )
    return compiled, without_triton
