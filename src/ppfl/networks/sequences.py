"""Networks for sequences of tokens (length,). They predict one label per position, such as the next token.

Targets have the shape of the inputs; the label -100 is not counted, so it pads targets. Inputs are padded at their end:
a position sees only those before it, so padding changes none of the others.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import suppress
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ..core.losses import Loss, cross_entropy
from ..core.settings import Count
from ..data.federation import Federation
from ..data.sample_spec import SampleSpec
from ..data.samples import row_blocks
from ..errors import ModelError
from .plain import count_classes, refuse_odd_parts

Depth = Annotated[int, Field(gt=0, le=1000)]
DropoutRate = Annotated[float, Field(ge=0, lt=1)]


def lstm(
    spec: SampleSpec,
    loss: Loss,
    layers: Depth = 1,
    width: Count = 256,
    embedding: Count | None = None,
    vocabulary: Count | None = None,
    dropout: DropoutRate = 0.0,
) -> nn.Module:
    """An embedding, LSTM layers, and a linear layer at every position.

    Dropout is on the embedding and on the output of the LSTM. It is not between LSTM layers, because torch draws that
    from its global generator. LSTMs run one client at a time: vmap cannot run them.

    embedding: numbers per token; None: `width`.
    vocabulary: number of tokens; None: as many as there are classes, as for the next token.
    """
    outputs = _count_labels("lstm", spec, loss)
    embedding = embedding or width
    named = OrderedDict[str, nn.Module](
        tokens=nn.Embedding(vocabulary or outputs, embedding),
        dropout=nn.Dropout(dropout),
        cells=LSTMStates(embedding, width, layers, batch_first=True),
        output_dropout=nn.Dropout(dropout),
        classifier=nn.Linear(width, outputs),
    )
    return nn.Sequential(named)  # in which frozen layers run once per sample


def transformer(
    spec: SampleSpec,
    loss: Loss,
    layers: Depth = 4,
    heads: Count = 4,
    width: Count = 256,
    vocabulary: Count | None = None,
    dropout: DropoutRate = 0.0,
) -> nn.Module:
    """A causal transformer with pre-norm layers and learned positions, by default the size of the paper's.

    A position sees itself and those before it. The feed-forward part of a layer is four times as wide as the layer.
    Dropout is on the embedding and after both parts of every layer, not on attention weights.

    vocabulary: number of tokens; None: as many as there are classes, as for the next token.
    """
    refuse_odd_parts((width,), heads, "numbers per token", "heads")
    outputs = _count_labels("transformer", spec, loss)
    return TokenTransformer(vocabulary or outputs, spec.shape[0], outputs, layers, heads, width, dropout)


def _count_labels(name: str, spec: SampleSpec, loss: Loss) -> int:
    """Number of labels at every position; refuses samples that are no sequences of tokens."""
    if spec.dtype.is_floating_point or spec.dtype == torch.uint8 or len(spec.shape) != 1:
        raise ModelError(
            f"{name} takes sequences of tokens, integers (n, length), but x is {spec.dtype} "
            f"{('n', *spec.shape)}; read tokens with Federation.from_arrays(..., tokens=True)".replace("'n'", "n")
        )
    if loss is not cross_entropy or spec.target_shape != spec.shape:
        (length,) = spec.shape
        raise ModelError(
            f"{name} gives one label per token, but a sample has {length} tokens, targets of shape "
            f"{spec.target_shape} and the loss {loss.name}; use cross_entropy and targets (n, {length}), with -100 "
            f"where there is no label"
        )
    return count_classes(spec)


def refuse_unknown_tokens(net: nn.Module, federation: Federation) -> None:
    """Refuse tokens that are not in the vocabulary of a network, where samples are tokens that it embeds."""
    if federation.train.x.is_floating_point() or (vocabulary := _vocabulary(net, federation.train.x.shape[1:])) is None:
        return
    for split, samples in federation.splits.items():
        for block in row_blocks(len(samples.x)):
            low, high = (int(value) for value in samples.x[block].aminmax())
            if low < 0 or high >= vocabulary:
                raise ModelError(
                    f"{federation.name} has the token {low if low < 0 else high} among its {split} samples, and the "
                    f"vocabulary of the network goes from 0 to {vocabulary - 1}; number tokens from 0, or set "
                    f"vocabulary under [model] to their number"
                )


def _vocabulary(net: nn.Module, shape: torch.Size) -> int | None:
    """The number of rows of the embedding that is given the samples themselves; None where there is none."""
    if not any(isinstance(module, nn.Embedding) for module in net.modules()):
        return None
    sample, found = torch.zeros(1, *shape, dtype=torch.int64, device=next(net.parameters()).device), []

    def watch(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(layer, nn.Embedding) and inputs[0] is sample:
            found.append(layer.num_embeddings)

    tried = copy.deepcopy(net)  # batch norms change their buffers
    for layer in tried.modules():
        layer.register_forward_pre_hook(watch)
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        tried(sample)  # what is wrong with the network is said where its backend is made
    return found[0] if found else None


class LSTMStates(nn.LSTM):
    """An LSTM that returns its states at all positions and nothing else, so that it can stand in nn.Sequential."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        states: Tensor = super().forward(x)[0]
        return states


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
