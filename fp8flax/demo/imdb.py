"""The task ``imdb``: the float8 example of Keras, sentiment of film reviews, in Flax Linen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fp8flax.demo.classify import Examples, Split, Task
from fp8flax.demo.data import DemoError

WHERE_FROM = (
    "--task imdb reads film reviews from a folder: download "
    "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz, unpack it with tar -xzf, and pass "
    "--data aclImdb."
)
CLASSES = ("neg", "pos")
PAD, UNKNOWN = "[PAD]", "[UNK]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that determines the numbers of a run, but for the recipe; defaults are those of Keras."""

    epochs: int = 3
    batch_size: int = 32
    vocabulary: int = 20_000
    length: int = 200
    width: int = 32
    num_heads: int = 2
    hidden: int = 32
    dropout: float = 0.1
    learning_rate: float = 1e-3
    validation: float = 0.2
    """The part of the training reviews that is held out, the same for each seed."""


class Decoder(nn.Module):
    """Causal self-attention and a ReLU MLP, each followed by dropout, the sum and its norm.

    Attributes:
        num_heads: attention heads.
        hidden: width of the MLP.
        dropout: rate, in training.
        dtype: dtype of the activations; parameters are float32.
    """

    num_heads: int
    hidden: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps activations of shape ``(batch, length, width)`` to the same shape."""
        init = nn.initializers.glorot_uniform()
        h = nn.MultiHeadDotProductAttention(
            self.num_heads,
            dtype=self.dtype,
            kernel_init=init,
            dropout_rate=self.dropout,
            broadcast_dropout=False,
            deterministic=not train,
            force_fp32_for_softmax=True,
            name="attention",
        )(x, mask=nn.make_causal_mask(x[..., 0]))
        h = nn.Dropout(self.dropout, deterministic=not train)(h)
        x = nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)(x + h)
        h = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, kernel_init=init, name="up")(x))
        h = nn.Dense(x.shape[-1], dtype=self.dtype, kernel_init=init, name="down")(h)
        h = nn.Dropout(self.dropout, deterministic=not train)(h)
        return nn.LayerNorm(epsilon=1e-5, dtype=self.dtype)(x + h)


class Classifier(nn.Module):
    """Says whether a text is positive: one decoder, the mean over all positions, an MLP.

    Padding counts in the attention and in the mean, as in Keras's example.

    Attributes:
        vocabulary: number of tokens.
        length: longest sequence.
        width: size of the activations.
        num_heads: attention heads.
        hidden: width of both MLPs.
        dropout: rate, in training.
        dtype: dtype of the activations; parameters are float32.
    """

    vocabulary: int = 20_000
    length: int = 200
    width: int = 32
    num_heads: int = 2
    hidden: int = 32
    dropout: float = 0.1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Maps tokens of shape ``(batch, length)`` to float32 logits ``(batch, 1)`` of being positive."""
        embed = nn.initializers.normal(0.03)
        dense = nn.initializers.glorot_uniform()
        x = nn.Embed(self.vocabulary, self.width, self.dtype, embedding_init=embed, name="tokens")(tokens)
        positions = self.param("positions", embed, (self.length, self.width), jnp.float32)
        x = x + positions[None, : tokens.shape[1]].astype(self.dtype)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = Decoder(self.num_heads, self.hidden, self.dropout, self.dtype, name="decoder")(x, train)
        x = nn.Dropout(self.dropout, deterministic=not train)(jnp.mean(x, axis=1))
        x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype, kernel_init=dense, name="hidden")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(1, dtype=self.dtype, kernel_init=dense, name="positive")(x).astype(jnp.float32)


def read_reviews(folder: str, part: str) -> tuple[list[str], np.ndarray]:
    """Reads the reviews in ``folder/part/neg`` and ``folder/part/pos``: texts, and their classes 0 and 1.

    Raises:
        DemoError: the folder is not laid out as ``aclImdb`` is.
    """
    root = Path(folder)
    if not folder or not root.is_dir():
        raise DemoError(f"--data: {folder!r} is not a folder.")
    texts: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(CLASSES):
        below = root / part / name
        if not below.is_dir():
            hint = " Pass the folder aclImdb inside it." if (root / "aclImdb").is_dir() else ""
            raise DemoError(
                f"--data: {root} holds no folder {part}/{name}; train/pos, train/neg, test/pos and "
                f"test/neg are needed, as in aclImdb.{hint}"
            )
        paths = sorted(p for p in below.glob("*.txt") if p.is_file() and not p.name.startswith("."))
        read = [p.read_text(encoding="utf-8", errors="replace") for p in paths]
        if not any(text.strip() for text in read):
            raise DemoError(f"--data: {below} holds no review, a file *.txt with text.")
        texts += read
        labels += [label] * len(read)
    return texts, np.array(labels, np.int32)


def make_tokenizer(texts: list[str], size: int, length: int) -> Any:
    """Returns a ``tokenizers.Tokenizer`` with a vocabulary of word pieces learnt from ``texts``.

    The same for the same texts: the trainer numbers the characters in an order that differs from process to
    process, and breaks ties by these numbers, so it is told them.

    Args:
        texts: what to learn from; lower case is made of them.
        size: of the vocabulary; less if the texts do not have so many pieces.
        length: in tokens, to which texts are padded and cut.

    Raises:
        DemoError: ``tokenizers`` is not installed.
    """
    try:
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers, trainers
    except ImportError as error:
        raise DemoError(
            "--task imdb needs the package tokenizers; install it with: pip install 'fp8flax[demo]'"
        ) from error

    def empty(**vocabulary: Any) -> Any:
        tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN, **vocabulary))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    characters = sorted(c for c in set().union(*(text.lower() for text in texts)) if not c.isspace())
    first = [PAD, UNKNOWN, *(start + c for c in characters for start in ("", "##"))]
    learning = empty()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False)
    learning.train_from_iterator(texts, trainer)
    tokenizer = empty(vocab=learning.get_vocab())  # where the characters are ordinary pieces
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=tokenizer.token_to_id(PAD), pad_token=PAD)
    return tokenizer


def encode(tokenizer: Any, texts: list[str]) -> np.ndarray:
    """Returns the tokens of the texts, int32 of shape ``(texts, length)``."""
    return np.array([e.ids for e in tokenizer.encode_batch(texts)], np.int32)


def make_task(folder: str | None, settings: Settings, recipe: str) -> tuple[Task, Any]:
    """Reads the reviews; returns the task, and the tokenizer made from the training reviews.

    Raises:
        DemoError: the folder is not laid out as ``aclImdb`` is, or holds fewer reviews than a batch takes;
            or ``tokenizers`` is not installed.
    """
    if folder is None:
        raise DemoError(WHERE_FROM)
    texts, labels = read_reviews(folder, "train")
    test_texts, test_labels = read_reviews(folder, "test")
    order = np.random.default_rng(0).permutation(len(texts))
    count = round(settings.validation * len(texts))
    if not 0 < count < len(texts):
        raise DemoError(f"--data: {folder} holds too few training reviews: {len(texts)}.")
    train = order[count:]
    tokenizer = make_tokenizer([texts[i] for i in train], settings.vocabulary, settings.length)
    tokens = encode(tokenizer, texts)
    validation, train_part = (Examples(tokens[p], labels[p]) for p in (order[:count], train))
    split = Split(train_part, validation, Examples(encode(tokenizer, test_texts), test_labels))
    model = Classifier(
        vocabulary=tokenizer.get_vocab_size(),
        length=settings.length,
        width=settings.width,
        num_heads=settings.num_heads,
        hidden=settings.hidden,
        dropout=settings.dropout,
    )
    task = Task(
        name="imdb",
        title="sentiment of film reviews, Keras's float8 example",
        source=f"Reviews in {folder}, {tokenizer.get_vocab_size():,} word pieces",
        model=model,
        optimizer=lambda steps: optax.adam(settings.learning_rate, eps=1e-7),
        split=lambda seed: split,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        recipe=recipe,
    )
    return task, tokenizer
