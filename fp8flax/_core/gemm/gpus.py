"""The table of known GPUs, and the GPU that a program is compiled for."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax

NATIVE_FP8, HOPPER, NATIVE_MX = 8.9, 9.0, 10.0
"""The lowest compute capabilities of GPUs that multiply FP8, of Hopper GPUs, and of GPUs that multiply FP8
with a scale per 32 columns."""


new_kernels: Any = jax.make_user_context(False)
"""Whether GPU kernels are used that no GPU has run yet. ``benchmarks/gpu.py`` sets this."""


class Fp8EmulationWarning(UserWarning):
    """Warning that the device has no units for FP8 matmuls: FP8 is emulated and brings no speedup."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """The properties of a GPU that XLA needs to compile for it, and its published speed."""

    name: str
    compute_capability: float
    pallas_name: str | None = None
    """The name, in Pallas, of a GPU with the same cores; None if Pallas knows ``name`` itself."""
    cores: int
    clock_ghz: float
    memory: int
    """Bytes."""
    l2_cache: int
    """Bytes."""
    bandwidth: int
    """Bytes per second."""
    bf16: float
    """FLOP/s of dense matmuls with float32 accumulation, as published."""
    fp8: float
    """FLOP/s in FP8, as published; 0 without FP8 units."""
    fp4: float = 0.0
    """FLOP/s in FP4, as published; 0 without FP4 units."""
    fpus_per_core: int = 128
    threads_per_core: int = 2048
    shared_memory_per_block: int = 232_448
    """Bytes of shared memory that a block of threads may use."""
    shared_memory_per_core: int = 233_472
    """Bytes. The defaults are for Hopper and the large Blackwell GPUs."""


# fmt: off
_UNITS = {"compute_capability": 1, "cores": 1, "clock_ghz": 1, "memory": 2**10, "l2_cache": 2**10,
          "bandwidth": 10**6, "bf16": 1e12, "fp8": 1e12, "fp4": 1e12}
"""The fields of ``Gpu`` in the rows below, after the name, and the unit of each."""

_ROWS: dict[str, tuple[Any, ...]] = {
    "a100":    ("A100-SXM4-80GB",    8.0, 108, 1.41,   83_105_536,  40_960, 2_039_040,  312,    0,    0),
    "l40s":    ("L40S",              8.9, 142, 2.52,   50_331_648,  98_304,   864_000,  362,  733,    0),
    "rtx4090": ("GeForce RTX 4090",  8.9, 128, 2.52,   25_165_824,  73_728, 1_008_000,  165,  330,    0),
    "h100":    ("H100",              9.0, 132, 1.98,   82_986_752,  51_200, 3_352_320,  989, 1979,    0),
    "h200":    ("H200",              9.0, 132, 1.98,  147_221_504,  61_440, 4_800_000,  989, 1979,    0),
    "b200":    ("B200",             10.0, 148, 1.965, 187_009_024, 129_536, 8_000_000, 2250, 4500, 9000),
    "rtx5090": ("GeForce RTX 5090", 12.0, 170, 2.407,  33_389_568,  98_304, 1_792_000,  209,  419, 1676),
}
# fmt: on

_ADA = {"threads_per_core": 1536, "shared_memory_per_block": 101_376, "shared_memory_per_core": 102_400}
_OTHERS: dict[str, dict[str, Any]] = {
    "a100": {"fpus_per_core": 64, "shared_memory_per_block": 166_912, "shared_memory_per_core": 167_936},
    "l40s": {"pallas_name": "NVIDIA L40", **_ADA},
    **dict.fromkeys(("rtx4090", "rtx5090"), _ADA),
}
"""The fields of ``Gpu`` that differ from the defaults."""

GPUS = {
    key: Gpu(
        name=f"NVIDIA {name}",
        **{field: unit * x for (field, unit), x in zip(_UNITS.items(), row)},
        **_OTHERS.get(key, {}),
    )
    for key, (name, *row) in _ROWS.items()
}


# The GPU that a program is compiled for.


def compiling_for(gpu: Gpu | None) -> contextlib.AbstractContextManager[object]:
    """Sets the GPU that programs are traced and lowered for; None is the first device of JAX.

    JAX keeps the GPU as the device of the abstract mesh, a part of the cache key of ``jax.jit`` that Pallas
    reads, too.
    """
    if gpu is None:
        return contextlib.nullcontext()
    kind = gpu.pallas_name or gpu.name
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=gpu.cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def absent_gpu() -> Gpu | None:
    """Returns the GPU that programs are compiled for, if it is not the first device of JAX."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.device_kind == jax.devices()[0].device_kind:
        return None
    return next((gpu for gpu in GPUS.values() if device.device_kind in (gpu.name, gpu.pallas_name)), None)


def takes_algorithms() -> bool:
    """Returns whether JAX compiles an FP8 dot with a ``DotAlgorithmPreset``.

    From version 0.12 on JAX writes a program for an absent GPU in a version of StableHLO that has no such
    algorithms, unless another GPU is present.
    """
    return absent_gpu() is None or jax.__version_info__ < (0, 12) or jax.default_backend() == "gpu"


def compute_capability() -> float:
    """Returns the compute capability of the NVIDIA GPU that JAX compiles for, or 0 for other devices."""
    gpu = absent_gpu()
    return compute_capability_of(jax.devices()[0]) if gpu is None else gpu.compute_capability


def compute_capability_of(device: jax.Device) -> float:
    """Returns the compute capability of an NVIDIA GPU, or 0 for other devices."""
    if device.platform not in ("gpu", "cuda"):
        return 0.0
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # not an NVIDIA GPU
        return 0.0


def num_cores() -> int:
    """Returns the number of cores of the GPU that JAX compiles for; that of an H200 if it is unknown."""
    gpu = absent_gpu()
    cores = getattr(jax.devices()[0], "core_count", None) if gpu is None else gpu.cores
    return int(cores or GPUS["h200"].cores)


def is_hopper(capability: float) -> bool:
    """Returns whether a compute capability is that of a Hopper GPU (H100, H200)."""
    return HOPPER <= capability < NATIVE_MX


def fits_kernels(*shapes: tuple[int, ...]) -> bool:
    """Returns whether our GPU kernels can take arrays of these shapes: they count elements in 32 bits."""
    return all(math.prod(shape) < 2**31 for shape in shapes)
