"""A small byte-level GPT, its loss and its sampling.

This module knows one architecture. It must not know optimizers, fragments, data or devices: a
model works where its parameters are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from islands.types import ConfigError

MLP_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a `ByteGPT`.

    `width` is that of the residual stream, a multiple of `num_heads`; `context` is the most bytes
    it can look back on; `tied` uses the token embedding as output head too.
    """

    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    context: int = 64
    tied: bool = True
    vocab: int = 256

    def __post_init__(self) -> None:
        sizes = (self.width, self.num_layers, self.num_heads, self.context, self.vocab)
        if min(sizes) < 1:
            raise ConfigError(f"every size of a model must be >= 1, got {self}: raise it")
        if self.width % self.num_heads:
            raise ConfigError(
                f"model width must be a multiple of num_heads ({self.num_heads}), "
                f"got {self.width}: change one of them"
            )


class Block(nn.Module):
    """One pre-norm layer: causal self-attention, then an MLP, each added to the stream."""

    def __init__(self, shape: ModelShape, generator: torch.Generator) -> None:
        super().__init__()
        width = shape.width
        # What L layers add twice each to the stream keeps its size at the start.
        calm = 1 / math.sqrt(2 * shape.num_layers)
        self.num_heads = shape.num_heads
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.qkv = _matrix(3 * width, width, generator)
        self.attention_out = _matrix(width, width, generator, gain=calm)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.mlp_in = _matrix(MLP_FACTOR * width, width, generator)
        self.mlp_out = _matrix(width, MLP_FACTOR * width, generator, gain=calm)

    def forward(self, stream: Tensor) -> Tensor:
        """Map (batch, time, width) to (batch, time, width)."""
        batch, time, width = stream.shape
        qkv = F.linear(_norm(stream, self.attention_norm), self.qkv)
        heads = qkv.view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (batch, head, time, width / head) each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        stream = stream + F.linear(mixed, self.attention_out)
        hidden = F.gelu(F.linear(_norm(stream, self.mlp_norm), self.mlp_in))
        return stream + F.linear(hidden, self.mlp_out)


class ByteGPT(nn.Module):
    """Pre-norm GPT over bytes with learned positions; no biases, no dropout.

    Parameters are named `token_embedding`, `position_embedding`, `blocks.<i>.<name>`,
    `final_norm` and, if untied, `head`. Bare parameters instead of `nn.Linear` keep the initial
    values off torch's global generator and save a module call per matrix.
    """

    def __init__(self, shape: ModelShape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = _matrix(shape.vocab, shape.width, generator)
        self.position_embedding = _matrix(shape.context, shape.width, generator)
        self.blocks = nn.ModuleList(Block(shape, generator) for _ in range(shape.num_layers))
        self.final_norm = nn.Parameter(torch.ones(shape.width))
        if not shape.tied:
            self.head = _matrix(shape.vocab, shape.width, generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte after each one.

        Args:
            tokens: int64 (batch, time), time <= context.

        Returns:
            float32 (batch, time, vocab).
        """
        stream = F.embedding(tokens, self.token_embedding)  # (batch, time, width)
        stream = stream + self.position_embedding[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        head = self.token_embedding if self.shape.tied else self.head
        return F.linear(_norm(stream, self.final_norm), head)  # (batch, time, vocab)


def build_model(shape: ModelShape, seed: int) -> ByteGPT:
    """Return a new model whose weights follow from `seed` alone; torch's own state is untouched."""
    return ByteGPT(shape, torch.Generator().manual_seed(seed))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte, a scalar.

    Args:
        model: maps int64 (batch, time) to logits (batch, time, vocab).
        batch: int64 (batch, context + 1); each byte but the first of a row is predicted.
    """
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.inference_mode()
def generate(
    model: ByteGPT, prompt: bytes, *, num_bytes: int, temperature: float, seed: int
) -> bytes:
    """Return `num_bytes` bytes that continue `prompt`, without the prompt.

    Args:
        prompt: only its last `context` bytes count; an empty one is read as a line's end.
        temperature: divides the logits; 0 takes the likeliest byte each time.
        seed: the same model, prompt and seed give the same bytes on the same software.

    Raises:
        ConfigError: the temperature is negative or not a number.
    """
    if not temperature >= 0:
        raise ConfigError(f"temperature must be >= 0, got {temperature}: 0.8 is usual")
    generator = torch.Generator().manual_seed(seed)
    device = model.token_embedding.device
    text = bytearray(prompt or b"\n")
    start = len(text)
    for _ in range(num_bytes):
        window = list(text[-model.shape.context :])
        logits = model(torch.tensor([window], device=device))[0, -1].float().cpu()  # (vocab,)
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            chances = (logits / temperature).softmax(-1)
            text.append(int(chances.multinomial(1, generator=generator)))
    return bytes(text[start:])


def _matrix(
    rows: int, columns: int, generator: torch.Generator, *, gain: float = 1.0
) -> nn.Parameter:
    """Return a normal (rows, columns) weight that keeps the size of what it is applied to, times `gain`."""
    return nn.Parameter(
        torch.empty(rows, columns).normal_(0.0, gain / math.sqrt(columns), generator=generator)
    )


def _norm(stream: Tensor, gain: Tensor) -> Tensor:
    return F.layer_norm(stream, (stream.shape[-1],), gain)
