"""Networks for sequences of tokens (length,). They predict one label per position, such as the next token.

Targets have the shape of the inputs; the label -100 is not counted, so it pads targets. Inputs are padded at their end:
a position sees only those before it, so padding changes none of the others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from ..core.losses import Loss, cross_entropy
from ..core.settings import Count
from ..data.federation import Federation
from ..data.samples import row_blocks
from ..errors import ModelError
from .network_contract import Network, Shape, count_classes

Depth = Annotated[int, Field(gt=0, le=1000)]
DropoutRate = Annotated[float, Field(ge=0, lt=1)]


class _SequenceNetwork(Network):
    """Settings that all of them have."""

    name: str
    vocabulary: Count | None = None  # number of tokens; None: as many as there are classes, as for the next token
    dropout: DropoutRate = 0.0

    def build(
        self, federation: Federation, seed: int, loss: Loss, copies: int = 1, base: Path | None = None
    ) -> nn.Module:
        """The network for these data; refuses tokens that are not in its vocabulary."""
        net = super().build(federation, seed, loss, copies, base)
        vocabulary = self.vocabulary or count_classes(federation)
        for split, samples in federation.splits.items():
            for block in row_blocks(len(samples.x)):
                low, high = (int(value) for value in samples.x[block].aminmax())
                if low < 0 or high >= vocabulary:
                    raise ModelError(
                        f"{federation.name} has the token {low if low < 0 else high} among its {split} samples, and "
                        f"the vocabulary of {self.name} goes from 0 to {vocabulary - 1}; number tokens from 0, or set "
                        f"vocabulary under [model] to their number"
                    )
        return net

    def count_outputs(self, loss: Loss, federation: Federation) -> int:
        """One output per class, at every position."""
        x, y = federation.train.x, federation.train.y
        if x.is_floating_point() or x.dtype == torch.uint8 or len(x.shape) != 2:
            raise ModelError(
                f"{self.name} takes sequences of tokens, integers (n, length), but x is {x.dtype} "
                f"{('n', *x.shape[1:])}; read tokens with Federation.from_arrays(..., tokens=True)".replace("'n'", "n")
            )
        if loss is not cross_entropy or y.shape[1:] != x.shape[1:]:
            raise ModelError(
                f"{self.name} gives one label per token, but a sample has {x.shape[1]} tokens, targets of shape "
                f"{tuple(y.shape[1:])} and the loss {loss.name}; use cross_entropy and targets (n, {x.shape[1]}), with "
                f"-100 where there is no label"
            )
        return count_classes(federation)

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """The network for sequences of that length."""
        return self.make_reader(self.vocabulary or outputs, shape[0], outputs)

    @abstractmethod
    def make_reader(self, vocabulary: int, length: int, outputs: int) -> nn.Module:
        """The network for so many tokens and positions."""


class Lstm(_SequenceNetwork):
    """An embedding, LSTM layers, and a linear layer at every position.

    Dropout is on the embedding and on the output of the LSTM. It is not between LSTM layers, because torch draws that
    from its global generator. LSTMs run one client at a time: vmap cannot run them.
    """

    name: Literal["lstm"] = "lstm"
    layers: Depth = 1
    width: Count = 256
    embedding: Count | None = None  # numbers per token; None: width

    def make_reader(self, vocabulary: int, length: int, outputs: int) -> nn.Module:
        """The network for so many tokens; the length does not matter."""
        embedding = self.embedding or self.width
        layers = OrderedDict[str, nn.Module](
            tokens=nn.Embedding(vocabulary, embedding),
            dropout=nn.Dropout(self.dropout),
            cells=LSTMStates(embedding, self.width, self.layers, batch_first=True),
            output_dropout=nn.Dropout(self.dropout),
            classifier=nn.Linear(self.width, outputs),
        )
        return nn.Sequential(layers)  # in which frozen layers run once per sample


class LSTMStates(nn.LSTM):
    """An LSTM that returns its states at all positions and nothing else, so that it can stand in nn.Sequential."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        states: Tensor = super().forward(x)[0]
        return states


class Transformer(_SequenceNetwork):
    """A causal transformer with pre-norm layers and learned positions, by default the size of the paper's.

    A position sees itself and those before it. The feed-forward part of a layer is four times as wide as the layer.
    Dropout is on the embedding and after both parts of every layer, not on attention weights.
    """

    name: Literal["transformer"] = "transformer"
    layers: Depth = 4
    heads: Count = 4
    width: Count = 256

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Transformer:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads; use a multiple")
        return self

    def make_reader(self, vocabulary: int, length: int, outputs: int) -> nn.Module:
        """The network for so many tokens and positions."""
        return TokenTransformer(vocabulary, length, outputs, self.layers, self.heads, self.width, self.dropout)


class TokenTransformer(nn.Module):
    """Tokens (B, T) to outputs (B, T, outputs)."""

    def __init__(
        self, vocabulary: int, length: int, outputs: int, layers: int, heads: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, dropout) for _ in range(layers)))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        states = self.layers(self.dropout(self.tokens(x) + self.positions(positions)))
        outputs: Tensor = self.classifier(self.norm(states))
        return outputs


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then the same with a feed-forward part."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), CausalAttention(width, heads), nn.Dropout(dropout))
        wide = 4 * width
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.feed_forward(x)
        return result


class CausalAttention(nn.Module):
    """Attention of every position to itself and those before it, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).reshape(batch, length, 3, self.heads, width // self.heads)
        # Samples and heads are one dimension: with two, torch uses a kernel that vmap can only run client by client.
        q, k, v = parts.permute(2, 0, 3, 1, 4).flatten(1, 2).unbind(0)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        together = heads.reshape(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, width)
        result: Tensor = self.out(together)
        return result
