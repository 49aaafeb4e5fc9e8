"""Compiles a program for a GPU that is not in this machine, by the C API of XLA's plugin.

Why: for such a GPU JAX may write the program in a version of StableHLO that is too old for FP8 matmuls (see
``stablehlo_version``). ``audit`` then compiles by this file. JAX lowers the program and makes XLA's options
as always. Only JAX's last call, of the compiler, is replaced.

Internals: ``Lowered._lowering``, ``jaxlib._hlo``, ``jax._src.lib.xla_client``. Without them ``audit`` of
FP8 matmuls raises an error on JAX 0.12, and does not know whether a target has a version of cuDNN.

Source: XLA's public header ``xla/pjrt/c/pjrt_c_api.h``. It adds new functions and new fields at the end
only, so the positions below hold for later versions too.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import importlib.util
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import xla_client

_FUNCTIONS = {
    "PJRT_Error_Destroy": 0,
    "PJRT_Error_Message": 1,
    "PJRT_Executable_Destroy": 40,
    "PJRT_Executable_OptimizedProgram": 48,
    "PJRT_TopologyDescription_Create": 82,
    "PJRT_TopologyDescription_Destroy": 83,
    "PJRT_Compile": 89,
    "PJRT_Executable_GetCompiledMemoryStats": 96,
}
"""The index of each function among the function pointers of the struct ``PJRT_Api``.

The pointers follow the fields for the struct's size, its extensions and its version."""
_API_HEADER = 40
"""Bytes of ``PJRT_Api`` before its first function."""
_VERSION_OFFSET = 32
"""The offset of the major version in ``PJRT_Api``, in bytes."""

_pointer, _size, _text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p


class _Struct(ctypes.Structure):
    """Base class of the structs that are the arguments of the C API's functions; it fills in the size.

    Each struct has a size, a pointer to extensions, and fields of its own.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


def _struct(name: str, *fields: tuple[str, Any], spare: int = 16) -> Any:
    """Returns the class of a struct of the C API.

    The struct ends with spare space for the fields of later versions of the API, which reject a struct that
    is smaller than theirs.

    Args:
        name: the name of the class.
        *fields: name and type of each field.
        spare: the number of spare fields, of eight bytes each.
    """
    first = [("struct_size", _size), ("extension_start", _pointer)]
    return type(name, (_Struct,), {"_fields_": [*first, *fields, ("spare", ctypes.c_int64 * spare)]})


_ErrorMessage = _struct(
    "_ErrorMessage", ("error", _pointer), ("message", _pointer), ("message_size", _size)
)
_Destroy = _struct("_Destroy", ("object", _pointer))
_NamedValue = _struct(
    "_NamedValue",
    ("name", _text),
    ("name_size", _size),
    ("type", ctypes.c_int),  # 0: a string
    ("value", _text),
    ("value_size", _size),
    spare=0,  # the elements of an array
)
_Topology = _struct(
    "_Topology",
    ("name", _text),
    ("name_size", _size),
    ("options", ctypes.POINTER(_NamedValue)),
    ("num_options", _size),
    ("topology", _pointer),
)
_Program = _struct(
    "_Program", ("code", _pointer), ("code_size", _size), ("format", _text), ("format_size", _size)
)
_Compile = _struct(
    "_Compile",
    ("topology", _pointer),
    ("program", ctypes.POINTER(_Program)),
    ("options", _text),
    ("options_size", _size),
    ("client", _pointer),
    ("executable", _pointer),
)
_Optimized = _struct("_Optimized", ("executable", _pointer), ("program", ctypes.POINTER(_Program)))
_SIZES = ("generated_code", "argument", "output", "alias", "temp")
_Memory = _struct(
    "_Memory",
    ("executable", _pointer),
    *((f"{place}{name}_size_in_bytes", ctypes.c_int64) for place in ("", "host_") for name in _SIZES),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySizes:
    """The sizes of a compiled program, in bytes, as ``jax.stages.Compiled.memory_analysis`` names them."""

    temp_size_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PluginCompiled:
    """A program that the plugin compiled, with the methods of ``jax.stages.Compiled`` that only read."""

    text: str
    sizes: MemorySizes
    devices: frozenset[jax.Device]
    """The devices for which the program was compiled."""

    def as_text(self) -> str:
        """Returns the optimized HLO."""
        return self.text

    def memory_analysis(self) -> MemorySizes:
        """Returns the sizes of the program's arrays."""
        return self.sizes


class _HandedOverError(Exception):
    """Raised inside of JAX instead of a compilation; its arguments are what JAX would have compiled."""


class _Client:
    """Wraps JAX's client of a GPU, and raises ``_HandedOverError`` instead of compiling a program."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(
        self, module: Any, *, executable_devices: Any, compile_options: Any, **_: Any
    ) -> None:
        raise _HandedOverError(module, executable_devices, compile_options)


def target_config_of(device: jax.Device) -> str:
    """Returns the ``GpuTargetConfigProto``, as text, by which XLA describes a GPU that is not here."""
    return str(xla_client.get_topology_for_devices([device]).target_config)


def platform_of(lowered: Any) -> str:
    """Returns the platform of the devices that JAX would compile for: "gpu" or "cpu".

    Args:
        lowered: the lowered program, of ``jax.jit`` or of ``nnx.jit``.
    """
    platform: str = _of_jax(lowered)._lowering.compile_args["backend"].platform
    return platform


def _of_jax(lowered: Any) -> Any:
    """Returns JAX's lowered program; that of ``nnx.jit`` wraps it."""
    return getattr(lowered, "lowered", lowered)


_compiled: weakref.WeakKeyDictionary[Any, PluginCompiled] = weakref.WeakKeyDictionary()
"""Results without options, by JAX's lowered program, which JAX keeps as long as the function."""


def compile_with_plugin(lowered: jax.stages.Lowered, options: dict[str, Any] | None) -> PluginCompiled:
    """Compiles a lowered program by the C API of the plugin. Without options it compiles only once.

    Args:
        lowered: the program, for devices of ``jax.experimental.topologies``.
        options: options of XLA's, as for ``jax.stages.Lowered.compile``.

    Raises:
        RuntimeError: the plugin refuses the program, or its C API is not the one of the header.
    """
    program = _of_jax(lowered)._lowering
    if options:
        return _compile(lowered, options)
    if program not in _compiled:
        _compiled[program] = _compile(lowered, options)
    return _compiled[program]


def _compile(lowered: Any, options: dict[str, Any] | None) -> PluginCompiled:
    """Returns the result of ``compile_with_plugin``, newly compiled."""
    module, devices, compile_options = _handed_over(lowered, options)
    code = _serialized(module)
    plugin = _Plugin()
    with (
        plugin.topology(target_config_of(devices[0]), len(devices)) as topology,
        plugin.executable(topology, code, compile_options.SerializeAsString()) as executable,
    ):
        return PluginCompiled(
            text=plugin.optimized_hlo(executable),
            sizes=plugin.memory_sizes(executable),
            devices=frozenset(devices),
        )


def _serialized(module: Any) -> bytes:
    """Returns the bytecode of a module.

    The plugin can read it, because it has the same version of MLIR as jaxlib. StableHLO's portable format
    cannot hold all programs: on GPUs, JAX 0.12 writes ``jnp.cumsum`` as an operation of another dialect.
    """
    bytecode = io.BytesIO()
    module.operation.write_bytecode(file=bytecode)
    return bytecode.getvalue()


def _handed_over(lowered: Any, options: dict[str, Any] | None) -> tuple[Any, Any, Any]:
    """Returns the module, the devices and XLA's options of the compilation that JAX would run.

    JAX compiles with a ``_Client``, which raises them as the arguments of an error.
    """
    lowering = copy.copy(_of_jax(lowered)._lowering)
    lowering.compile_args = {**lowering.compile_args, "backend": _Client(lowering.compile_args["backend"])}
    try:
        lowering.compile(compiler_options=options or {})
    except _HandedOverError as handed:
        module, devices, compile_options = handed.args
        return module, devices, compile_options
    raise RuntimeError(
        f"fp8flax.audit cannot take the program from JAX {jax.__version__}, which compiles in another way "
        "than JAX 0.9 to 0.12. Use one of these, or a newer fp8flax."
    )


class _Plugin:
    """Calls the functions of the CUDA plugin's C API."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("jax_plugins.xla_cuda13")
        assert found is not None  # compile_only_devices has looked for it
        assert found.origin is not None
        library = ctypes.CDLL(str(Path(found.origin).parent / "xla_cuda_plugin.so"))
        library.GetPjrtApi.restype = _pointer
        self._api = library.GetPjrtApi()
        size = ctypes.c_size_t.from_address(self._api).value
        major = ctypes.c_int.from_address(self._api + _VERSION_OFFSET).value
        if major != 0 or size < _API_HEADER + 8 * (max(_FUNCTIONS.values()) + 1):
            raise RuntimeError(
                f"fp8flax.audit cannot use this CUDA plugin: its C API has version {major} and {size} "
                "bytes. Install the plugin of a supported JAX (0.9 to 0.12), or a newer fp8flax."
            )

    def call(self, name: str, arguments: Any) -> None:
        """Calls a function of the API; raises ``RuntimeError`` with the API's message if it fails.

        Args:
            name: the name of the function.
            arguments: the struct of its arguments, which also receives its results.
        """
        error = self._function(name, _pointer)(ctypes.addressof(arguments))
        if error:
            said = _ErrorMessage(error=error)
            self._function("PJRT_Error_Message", None)(ctypes.addressof(said))
            message = ctypes.string_at(said.message, said.message_size).decode(errors="replace")
            self._function("PJRT_Error_Destroy", None)(ctypes.addressof(_Destroy(object=error)))
            raise RuntimeError(message)

    def _function(self, name: str, result: Any) -> Any:
        """Returns a function of the API that takes a pointer; ``result`` is the C type of its result."""
        address = ctypes.c_void_p.from_address(self._api + _API_HEADER + 8 * _FUNCTIONS[name]).value
        return ctypes.CFUNCTYPE(result, _pointer)(address)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def topology(self, target_config: str, count: int) -> Iterator[Any]:
        """Makes the description of a machine with ``count`` GPUs of one kind, and destroys it on exit."""
        options = {b"target_config": target_config.encode(), b"topology": f"1x1x{count}".encode()}
        values = (_NamedValue * len(options))(
            *(
                _NamedValue(name=name, name_size=len(name), type=0, value=value, value_size=len(value))
                for name, value in options.items()
            )
        )
        made = _Topology(name=b"", name_size=0, options=values, num_options=len(options))
        self.call("PJRT_TopologyDescription_Create", made)
        try:
            yield made.topology
        finally:
            self.call("PJRT_TopologyDescription_Destroy", _Destroy(object=made.topology))

    @contextlib.contextmanager
    def executable(self, topology: Any, code: bytes, options: bytes) -> Iterator[Any]:
        """Makes an executable from the bytecode of a module, and destroys it on exit.

        Args:
            topology: the result of ``topology``.
            code: the bytecode, see ``_serialized``.
            options: the serialized ``CompileOptionsProto``.
        """
        kept = ctypes.create_string_buffer(code, len(code))
        program = _Program(
            code=ctypes.addressof(kept), code_size=len(code), format=b"mlir", format_size=len(b"mlir")
        )
        made = _Compile(
            topology=topology, program=ctypes.pointer(program), options=options, options_size=len(options)
        )
        self.call("PJRT_Compile", made)
        try:
            yield made.executable
        finally:
            self.call("PJRT_Executable_Destroy", _Destroy(object=made.executable))

    def optimized_hlo(self, executable: Any) -> str:
        """Returns the text of the optimized HLO of an executable."""
        from jaxlib import _hlo  # type: ignore[attr-defined]

        program = _Program()
        arguments = _Optimized(executable=executable, program=ctypes.pointer(program))
        self.call("PJRT_Executable_OptimizedProgram", arguments)  # returns the size
        buffer = ctypes.create_string_buffer(program.code_size)
        program.code = ctypes.addressof(buffer)
        self.call("PJRT_Executable_OptimizedProgram", arguments)
        module = _first_field(buffer.raw)
        return _hlo.HloModule.from_serialized_hlo_module_proto(module).to_string()

    def memory_sizes(self, executable: Any) -> MemorySizes:
        """Returns the sizes of the arrays of an executable."""
        stats = _Memory(executable=executable)
        self.call("PJRT_Executable_GetCompiledMemoryStats", stats)
        names = [field.name for field in dataclasses.fields(MemorySizes)]
        return MemorySizes(**{name: getattr(stats, name) for name in names})


def _first_field(message: bytes) -> bytes:
    """Returns the first field of a serialized ``HloModuleProtoWithConfig``: its ``HloModuleProto``.

    The first field must be field 1 and a message. Its length is encoded as a varint.
    """
    if message[:1] != b"\x0a":
        raise RuntimeError(
            "fp8flax.audit cannot read the optimized program of this CUDA plugin. Install the plugin of a "
            "supported JAX (0.9 to 0.12), or a newer fp8flax."
        )
    size, shift, at = 0, 0, 1
    while True:
        byte = message[at]
        size |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return message[at : at + size]
