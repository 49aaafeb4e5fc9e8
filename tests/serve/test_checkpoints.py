"""FP8 checkpoints of other libraries have the values of their formats; damaged files are refused."""

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import fp8flax as fp8
from fp8flax._serve.checkpoints import CheckpointTensor

E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
NAMES = {
    np.dtype(dtype): name
    for name, dtype in {
        "F8_E4M3": E4M3,
        "F8_E5M2": E5M2,
        "F8_E8M0": E8M0,
        "BF16": ml_dtypes.bfloat16,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "U8": np.uint8,
        "I8": np.int8,
        "I32": np.int32,
    }.items()
}


def header_of(tensors):
    """Returns the entries of a header, and the bytes of the tensors, by the format's specification."""
    entries, data = {}, b""
    for name, array in tensors.items():
        array = np.asarray(array)
        offsets = [len(data), len(data) + array.nbytes]
        entries[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    return entries, data


def write(path, tensors, metadata=None, change=lambda entries, data: (json.dumps(entries), data)):
    """Writes a safetensors file; ``change`` returns the text of the header and the data."""
    entries, data = header_of(tensors)
    text, data = change(entries | ({} if metadata is None else {"__metadata__": metadata}), data)
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data)
    return path


def codes_of(seed, *shape, dtype=E4M3):
    """Returns random codes, without NaN and infinities."""
    return np.random.default_rng(seed).integers(0, 0x7B, shape, np.uint8).view(dtype)


def scales_of(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).uniform(1e-3, 2, shape).astype(dtype)


def in_blocks(codes, scale, rows, columns):
    """Computes a weight by the formats' definition: each code times the scale of its block."""
    scale = np.asarray(scale).astype(np.float32)
    i, j = np.indices(codes.shape[-2:])
    return codes.astype(np.float32) * scale[..., i // rows, j // columns]


UP = codes_of(0, 200, 300)
RAGGED = scales_of(1, 2, 3)
EXPERTS = codes_of(2, 3, 130, 40)
NVFP4 = {"weight_packed": np.ones((4, 16), np.uint8), "weight_scale": UP[:4, :2]}
NVFP4["weight_global_scale"] = np.ones(1, np.float32)
MX = np.random.default_rng(3).integers(100, 140, (200, 10), np.uint8)
# name: (tensors beside up.weight, block, expected); tests/serve/files has more.
FORMATS = {
    "deepseek": ({"weight_scale_inv": RAGGED}, (128, 128), in_blocks(UP, RAGGED, 128, 128)),
    "deepseek, bf16 scales": (
        {"weight_scale_inv": RAGGED.astype(ml_dtypes.bfloat16)},
        (128, 128),
        in_blocks(UP, RAGGED.astype(ml_dtypes.bfloat16), 128, 128),
    ),
    "transformers, per tensor": (
        {"weight_scale_inv": np.float32(0.3), "activation_scale": np.float32(0.7)},
        (200, 300),
        UP.astype(np.float32) * np.float32(0.3),
    ),
    "compressed-tensors, blocks": (
        {"weight_scale": scales_of(7, 4, 19)},
        (64, 16),
        in_blocks(UP, scales_of(7, 4, 19), 64, 16),
    ),
    "MXFP8": (
        {"weight_scale": MX.view(E8M0)},
        (1, 32),
        in_blocks(UP, np.exp2(MX.astype(np.float32) - 127), 1, 32),
    ),
    "modelopt": (
        {"weight_scale": np.float32(0.01), "input_scale": np.float32(0.5)},
        (200, 300),
        UP.astype(np.float32) * np.float32(0.01),
    ),
    "modelopt, blocks": (
        {"weight_scale": RAGGED[:, None, :, None]},
        (128, 128),
        in_blocks(UP, RAGGED, 128, 128),
    ),
    "fbgemm, one dimension": (
        {"weight_scale": scales_of(8, 200)},
        (1, 300),
        in_blocks(UP, scales_of(8, 200, 1), 1, 300),
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, tmp_path):
    beside, block, expected = FORMATS[name]
    tensors = {f"up.{key}": value for key, value in beside.items()}
    norm = scales_of(9, 5, dtype=ml_dtypes.bfloat16)
    write(tmp_path / "model.safetensors", {"up.weight": UP, **tensors, "norm.weight": norm})
    checkpoint = fp8.read_checkpoint(tmp_path)
    assert list(checkpoint) == ["up.weight", "norm.weight"]
    up = checkpoint["up.weight"]
    assert up.block == block
    np.testing.assert_array_equal(up.codes.view(np.uint8), UP.view(np.uint8))
    scale = next(value for key, value in tensors.items() if "weight_scale" in key)
    assert up.scale.tobytes() == np.asarray(scale).tobytes()
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(up.dequantize(dtype), expected.astype(dtype))
    given = next((value for key, value in tensors.items() if "weight" not in key), None)
    assert (up.input_scale is None) == (given is None)
    assert given is None or up.input_scale == given
    np.testing.assert_array_equal(checkpoint["norm.weight"], norm)
    assert not up.codes.flags.writeable


def test_float64_is_computed_in_float64(tmp_path):
    path = write(tmp_path / "a", {"up.weight": UP, "up.weight_scale": scales_of(1, 200, 1)})
    expected = UP.astype(np.float64) * scales_of(1, 200, 1).astype(np.float64)
    np.testing.assert_array_equal(fp8.read_checkpoint(path)["up.weight"].dequantize(np.float64), expected)


def test_torchao(tmp_path):
    """A weight is two tensors, whose names begin with an underscore."""
    tensors = {"a._weight_qdata": UP, "a._weight_scale": scales_of(1, 200, 1), "a.bias": scales_of(2, 200)}
    checkpoint = fp8.read_checkpoint(write(tmp_path / "a", tensors))
    assert sorted(checkpoint) == ["a.bias", "a.weight"]
    expected = in_blocks(UP, scales_of(1, 200, 1), 1, 300)
    np.testing.assert_array_equal(checkpoint["a.weight"].dequantize(), expected)
    for name, array in (("a.weight", UP), ("a._weight_qdata", UP.view(np.int8))):
        with pytest.raises(ValueError, match=r"'a\.weight' must have .*'a\._weight_qdata' (int|float)8"):
            fp8.read_checkpoint(write(tmp_path / "b", {**tensors, name: array}))


@pytest.mark.parametrize(
    ("scale", "block"),
    [
        (scales_of(1, 3, 2, 1), (1, 128, 40)),
        (scales_of(1, 3, 1, 40), (1, 130, 1)),
        (scales_of(1, 3), (1, 130, 40)),
        (scales_of(1, 3, 1), (1, 130, 40)),
        (scales_of(1, 1), (3, 130, 40)),
    ],
)
def test_experts(scale, block, tmp_path):
    """Several weights in one tensor, also under a name that does not end in ``weight``."""
    path = write(tmp_path / "a", {"mlp.experts.down_proj": EXPERTS, "mlp.experts.down_proj_scale": scale})
    down = fp8.read_checkpoint(path)["mlp.experts.down_proj"]
    assert down.block == block
    e, i, j = np.indices(EXPERTS.shape)
    scale = scale.reshape([-(-n // b) for n, b in zip(EXPERTS.shape, block)])
    expected = EXPERTS.astype(np.float32) * scale[e // block[0], i // block[1], j // block[2]]
    np.testing.assert_array_equal(down.dequantize(), expected)


def test_extreme_scales(tmp_path):
    """The smallest E8M0 scale is subnormal in float32; NaN, Inf and overflow are those of the product."""
    codes = np.asarray([[1, 0x7E, 0x7F, 0x80, 0x08]], np.uint8).view(E4M3)
    for scale in (np.asarray([[0]], np.uint8).view(E8M0), np.float32([[np.nan]]), np.float32([[np.inf]])):
        path = write(tmp_path / "a", {"a.weight": codes, "a.weight_scale": scale})
        with np.errstate(all="ignore"):
            expected = codes.astype(np.float64) * scale.astype(np.float64)
        np.testing.assert_array_equal(fp8.read_checkpoint(path)["a.weight"].dequantize(), expected)
    path = write(tmp_path / "a", {"a.weight": codes, "a.weight_scale": np.float32(1e35)})
    assert np.isinf(fp8.read_checkpoint(path)["a.weight"].dequantize(np.float16)[0, 1])


@pytest.mark.parametrize("shape", [(), (7,), (0, 5), (5, 0), (1, 1)])
def test_other_shapes(shape, tmp_path):
    scale = np.full((1,) * len(shape), 0.5, np.float32)
    if 0 in shape:
        scale = scale[tuple(slice(min(n, 1)) for n in shape)]
    codes = codes_of(0, *shape)
    path = write(tmp_path / "a", {"odd": np.zeros(3, np.uint8), "a": codes, "a_scale": scale, "b": codes})
    checkpoint = fp8.read_checkpoint(path)
    assert checkpoint["a"].shape == shape
    np.testing.assert_array_equal(checkpoint["a"].dequantize(), codes.astype(np.float32) / 2)
    np.testing.assert_array_equal(checkpoint["b"], codes)  # FP8 without a scale


def sharded(folder):
    """Writes a folder of two files, with codes and scales of a weight in different ones."""
    files = {
        "model-1.safetensors": {"up.weight": codes_of(1, 40, 96), "norm.weight": scales_of(2, 5)},
        "model-2.safetensors": {
            "up.weight_scale": scales_of(3, 1, 3),
            "down.weight": codes_of(4, 9, 40),
            "down.weight_scale": scales_of(5, 9, 1),
            "down.input_scale": scales_of(6, 1),
        },
    }
    for name, tensors in files.items():
        write(folder / name, tensors, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": {n: f for f, some in files.items() for n in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_several_files(tmp_path):
    checkpoint = fp8.read_checkpoint(sharded(tmp_path))
    assert list(checkpoint) == ["up.weight", "norm.weight", "down.weight"]
    expected = in_blocks(codes_of(1, 40, 96), scales_of(3, 1, 3), 64, 32)
    np.testing.assert_array_equal(checkpoint["up.weight"].dequantize(), expected)
    assert checkpoint["down.weight"].input_scale == scales_of(6, 1)
    assert "down.weight_scale" not in checkpoint


TWO = {"a.weight": codes_of(0, 4, 6), "a.weight_scale": scales_of(1, 1), "b": scales_of(2, 3)}


def changed(change):
    """Returns a change of the entries of a header."""

    def write_changed(entries, data):
        change(entries)
        return json.dumps(entries), data

    return write_changed


def text(old, new):
    return lambda entries, data: (json.dumps(entries).replace(old, new), data)


DAMAGED = {
    "no header": lambda entries, data: ("", b""),
    "not JSON": lambda entries, data: (json.dumps(entries)[:-1], data),
    "nested too deep": lambda entries, data: ('{"a":' + "[" * 100000, data),
    "a list": lambda entries, data: ("[]", data),
    "a huge number": text("24]", "9" * 5000 + "]"),
    "name twice": text('"b"', '"a.weight"'),
    # The library would take the last of the two.
    "entry twice": lambda entries, data: (
        f'{json.dumps(entries)[:-1]}, "b": {json.dumps(entries["b"])}}}',
        data,
    ),
    "truncated": lambda entries, data: (json.dumps(entries), data[:-1]),
    "longer": lambda entries, data: (json.dumps(entries), data + b"0"),
    "size that lies": changed(lambda e: e["a.weight"].update(shape=[4, 7])),
    "huge size": changed(lambda e: e["a.weight"].update(shape=[2**62, 2**62])),
    "negative size": changed(lambda e: e["a.weight"].update(shape=[-4, -6])),
    "size is true": changed(lambda e: e["b"].update(shape=[3, True])),
    "overlap": changed(lambda e: e["b"].update(data_offsets=[24, 36])),
    "out of range": changed(lambda e: e["b"].update(data_offsets=[1000, 1012])),
    "negative": changed(lambda e: e["b"].update(data_offsets=[-12, 0])),
    "backwards": changed(lambda e: e["b"].update(data_offsets=[40, 28])),
    "NaN": changed(lambda e: e["b"].update(data_offsets=[float("nan"), 40])),
    "no dtype": changed(lambda e: e["b"].pop("dtype")),
    "other dtype": changed(lambda e: e["b"].update(dtype="F4")),
    "dtype of six bits": changed(lambda e: e["b"].update(dtype="F6_E2M3", shape=[16])),
    "dtype is a list": changed(lambda e: e["b"].update(dtype=["F32"])),
    "not an entry": changed(lambda e: e.update(b=7)),
    "metadata": changed(lambda e: e.update(__metadata__={"x": 1})),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name, tmp_path):
    path = write(tmp_path / "model.safetensors", TWO, change=DAMAGED[name])
    with pytest.raises(ValueError, match="damaged|which is none of") as error:
        fp8.read_checkpoint(path)
    assert str(path) in str(error.value)


def test_headers_that_are_too_long(tmp_path):
    path = tmp_path / "a"
    for data in (b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="not a safetensors file"):
            fp8.read_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        fp8.read_checkpoint(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        fp8.read_checkpoint(tmp_path)


# Blocks of rows, columns or experts, or scales of q, k and v, or of the two matrices of each expert.
AMBIGUOUS = [((384, 128), (3,)), ((384, 512), (3, 1)), ((256, 512), (1, 4)), ((3, 192, 64), (3, 2))]
AMBIGUOUS += [((32, 8, 8), (2,)), ((32, 8, 8), (2, 1, 1)), ((64,), (4,))]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": UP, "weight_scale": scales_of(0, 2, 2)}, r"'a\.weight' must .* float32\[2, 2\]"),
        ({"weight": UP, "weight_scale": MX[:2, :3]}, r"'a\.weight' must .* uint8\[2, 3\]"),
        ({"weight": UP, "weight_scale": np.int32([1])}, r"'a\.weight' must .* int32\[1\]"),
        ({"weight": UP, "weight_scale": RAGGED, "weight_scale_inv": RAGGED}, "one tensor of scales"),
        ({"weight": UP, "weight_scale": RAGGED, "weight_zero_point": RAGGED}, "'a.weight_zero_point'"),
        ({**NVFP4, "weight_scale": UP[:4, :3]}, r"In NVFP4 .* uint8\[4, 16\], .* float8_e4m3fn\[4, 3\]"),
        ({**NVFP4, "weight_packed": np.ones((4, 15), np.uint8)}, r"uint8\[4, 15\], .*fn\[4, 2\]"),
        ({**NVFP4, "weight_global_scale": np.ones(4, np.float32)}, r"float32\[4\]"),
        ({**NVFP4, "weight_global_scale": np.ones(1, np.float16)}, r"float16\[1\]"),
        ({**NVFP4, "weight_scale": scales_of(0, 4, 2)}, r"'a\.weight_scale' float32\[4, 2\]"),
        ({**NVFP4, "weight": RAGGED}, "'a.weight' float32"),
        *(
            ({"weight": codes_of(0, *shape), end: scales_of(0, *scale)}, "or of joined matrices")
            for shape, scale in AMBIGUOUS
            for end in ("weight_scale", "weight_scale_inv")
        ),
    ],
)
def test_scales_that_are_refused(tensors, message, tmp_path):
    path = write(tmp_path / "model.safetensors", {f"a.{name}": array for name, array in tensors.items()})
    with pytest.raises(ValueError, match=message) as error:
        fp8.read_checkpoint(path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ([1], "quant_method"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    ],
)
def test_configs_that_are_refused(config, word, tmp_path):
    """Codes times scales are not the weights of these formats."""
    write(tmp_path / "model.safetensors", TWO)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ValueError, match=word) as error:
        fp8.read_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)


NO_NAMES = ["../model-1.safetensors", "..", "a\0b", 3, "x" * 5000, "\ud800"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((lambda m, n=n: m.update({"up.weight": n}), "must be the name of a file") for n in NO_NAMES),
        (lambda m: m.update({"up.weight": "model-2.safetensors"}), r"disagree on whether \['up\.weight'\]"),
        (lambda m: m.update({"more": "model-2.safetensors"}), r"disagree on whether \['more'\]"),
        (lambda m: m.pop("up.weight"), r"disagree on whether \['up\.weight'\]"),
    ],
)
def test_wrong_indexes(change, message, tmp_path):
    index = sharded(tmp_path) / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    change(whole["weight_map"])
    index.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=message) as error:
        fp8.read_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_single_file_beside_an_index(tmp_path):
    """One of the two is from an older save, so neither is read."""
    write(sharded(tmp_path) / "model.safetensors", TWO)
    with pytest.raises(ValueError, match="it has both") as error:
        fp8.read_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "b" in fp8.read_checkpoint(tmp_path / "model.safetensors")


def test_damaged_indexes(tmp_path):
    sharded(tmp_path)
    for text, match in (
        ('{"weight_map": 3}', "must have a weight_map"),
        ("[]", "must be an object"),
        ('{"weight_map": {"a": "b", "a": "c"}}', "has a name twice"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            fp8.read_checkpoint(tmp_path)


def check_changes(folder, seeds):
    """Changes one byte of a file at a time, and reads the folder: the library's values, or a ValueError."""
    sharded(folder)
    original = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    refused = 0
    for seed in seeds:
        rng = random.Random(seed)
        path = rng.choice(list(original))
        data = bytearray(original[path])
        # Half of the changes are in the headers.
        place = rng.randrange(min(len(data), rng.choice([len(data), 700])))
        data[place] = rng.choice([rng.randrange(256), data[place] ^ 1, *b'0123456789"{}[],:'])
        path.write_bytes(data)
        try:
            read = dict(fp8.read_checkpoint(folder))
        except ValueError as error:
            if str(folder) not in str(error):
                raise AssertionError(f"{seed}: the error names no file: {error}") from error
            refused += 1
        else:
            shards = [safetensors.deserialize(path.read_bytes()) for path in folder.glob("*.safetensors")]
            expected = {name: bytes(info["data"]) for shard in shards for name, info in shard}
            for name, tensor in read.items():
                assert tensor.__class__ in (np.ndarray, CheckpointTensor)
                if isinstance(tensor, CheckpointTensor):
                    assert tensor.scale.tobytes() == expected[f"{name}_scale"], (seed, name)
                    tensor = tensor.codes
                assert tensor.tobytes() == expected[name], (seed, name)
        path.write_bytes(original[path])
    return refused


def test_random_changes(tmp_path):
    assert 50 < check_changes(tmp_path, range(300)) < 250


@pytest.mark.long
def test_memory(tmp_path):
    """A folder of 2 GB is dequantized with less than 400 MB of memory, beside the pages of the files."""
    weight_map = {}
    for i in range(4):
        names = [f"{i}.{j}.weight" for j in range(8)]
        entries, end = {}, 0
        for name in names:
            size = 8192 * 8192
            entries[name] = {"dtype": "F8_E4M3", "shape": [8192, 8192], "data_offsets": [end, end + size]}
            shape, end = [64, 64], end + size
            offsets = [end, end + 4 * 64 * 64]
            entries[f"{name}_scale_inv"] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            end = offsets[1]
        header = json.dumps(entries).encode()
        with open(tmp_path / f"{i}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + end)  # zeros that take no place on the disk
        weight_map |= dict.fromkeys(entries, f"{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    script = """
        import sys
        import tracemalloc
        import ml_dtypes
        import fp8flax as fp8

        tracemalloc.start()
        checkpoint = fp8.read_checkpoint(sys.argv[1])
        read = sum(tensor.dequantize(ml_dtypes.bfloat16).size for tensor in checkpoint.values())
        print(read, tracemalloc.get_traced_memory()[1] // 1000)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    read, kilobytes = map(int, done.stdout.split())
    assert read == 2**31
    assert kilobytes < 400_000, kilobytes


WRITTEN = sorted(path for path in (Path(__file__).parent / "files").iterdir() if path.is_dir())
LAYERS = [path for path in WRITTEN if "llama" not in path.name]


# test_load_into.py reads the Llama.
@pytest.mark.parametrize("folder", LAYERS, ids=lambda path: path.name)
def test_files_of_the_libraries(folder):
    """Each library's own file has the values that the library itself computes, bit for bit."""
    checkpoint = fp8.read_checkpoint(folder)
    expected = safetensors.numpy.load_file(folder / "expected.safetensors")
    dtype = ml_dtypes.float4_e2m1fn if "nvfp4" in folder.name else E4M3
    assert set(checkpoint) == {f"{layer}.{kind}" for layer in ("up", "down") for kind in ("weight", "bias")}
    for name, values in expected.items():
        assert checkpoint[name].codes.dtype == dtype
        np.testing.assert_array_equal(checkpoint[name].dequantize(values.dtype), values)
