"""The task ``digits``: a small Vision Transformer on the 8×8 digits that scikit-learn brings along."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8flax.demo.classify import Examples, Split, Task
from fp8flax.demo.data import DemoError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that determines the numbers of a run, but for the recipe."""

    epochs: int = 15
    batch_size: int = 64
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    learning_rate: float = 3e-3
    held_out: float = 0.4
    """The part of the images that is not trained on, drawn anew for each seed."""


class Encoder(nn.Module):
    """Pre-norm self-attention and a GELU MLP."""

    num_heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations of shape ``(batch, patches, width)`` to the same shape."""
        width = x.shape[-1]
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.num_heads, dtype=self.dtype, name="attention")(h)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="up")(h))
        return x + nn.Dense(width, dtype=self.dtype, name="down")(h)


class VisionTransformer(nn.Module):
    """A Vision Transformer on patches of 2×2 pixels, with a convolution before them.

    (On these few images it reads others less well without that one: 96 % of them were right, not 98 %.)

    Attributes:
        width: size of the activations.
        num_layers: number of encoders.
        num_heads: attention heads of each.
        classes: number of logits.
        dtype: dtype of the activations; parameters are float32.
    """

    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    classes: int = 10
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """Maps images of shape ``(batch, height, width, channels)`` to float32 logits."""
        x = nn.gelu(nn.Conv(self.width // 2, (3, 3), dtype=self.dtype, name="stem")(images))
        x = nn.Conv(self.width, (2, 2), strides=(2, 2), dtype=self.dtype, name="patches")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        positions = self.param(
            "positions", nn.initializers.normal(0.5), (x.shape[1], self.width), jnp.float32
        )
        x = x + positions[None].astype(self.dtype)
        for i in range(self.num_layers):
            x = Encoder(self.num_heads, self.dtype, name=f"encoder_{i}")(x)
        x = jnp.mean(nn.LayerNorm(dtype=self.dtype)(x), axis=1)
        return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x).astype(jnp.float32)


def load() -> Examples:
    """Reads the 1,797 images, ``(1797, 8, 8, 1)`` in [-1, 1], and their classes.

    Raises:
        DemoError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore
    except ImportError as error:
        raise DemoError(
            "--task digits takes its images from scikit-learn; install it with: pip install 'fp8flax[demo]'"
        ) from error
    digits = load_digits()
    return Examples((digits.images / 8 - 1).astype(np.float32)[..., None], digits.target.astype(np.int32))


def split(images: Examples, seed: int, held_out: float) -> Split:
    """Returns a random split of the images; another one for each seed."""
    order = np.random.default_rng(seed).permutation(len(images))
    count = round(held_out * len(images))
    validation, train = (
        Examples(images.inputs[part], images.labels[part]) for part in (order[:count], order[count:])
    )
    return Split(train, validation)


def make_task(settings: Settings, recipe: str) -> Task:
    """Returns the task.

    Raises:
        DemoError: scikit-learn is not installed, or the batch size is too large.
    """
    images = load()

    def optimizer(steps: int) -> optax.GradientTransformation:
        warm_up = max(1, steps // 10)
        return optax.adam(
            optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warm_up, max(2, steps), 0.0)
        )

    return Task(
        name="digits",
        title="8×8 digits, a small Vision Transformer",
        source="8×8 digits of scikit-learn",
        model=VisionTransformer(settings.width, settings.num_layers, settings.num_heads),
        optimizer=optimizer,
        split=lambda seed: split(images, seed, settings.held_out),
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        recipe=recipe,
    )
