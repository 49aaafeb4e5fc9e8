"""``python -m fp8flax`` prints what a bug report needs."""

import jax

import fp8flax as fp8
from fp8flax import __main__ as command


def test_command(capsys):
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"fp8flax {fp8.__version__}"
    assert f"jax: {jax.__version__}" in lines
    assert "JAX_PLATFORMS=cpu" in lines
    assert any(line.endswith("(cpu): no FP8 units; the same values are emulated") for line in lines)
