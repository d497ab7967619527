"""A model that finds needles in a haystack, trained on short contexts and asked about long ones.

A context is noise in which needles lie: a mark, a key and a value. At its end each key is asked for, and the model has
to say the value that followed it. Nothing tells the model where a token stands, so that it can read contexts that are
longer than any it was trained on; its queries are scaled with the logarithm of the length, since a softmax over more
tokens needs larger scores to look at one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ...demo.sampler import half_precision
from ..demo_model.state import TrainingSchedule
from .fitting import Batch, fit
from .transformer import AttentionFunction, Trunk, causal_attention

DEPTHS = 11  # needles of a context, from its beginning to its end in tenths
NOISE, KEYS, VALUES = 64, 64, 16
MARK, ASK = NOISE + KEYS + VALUES, NOISE + KEYS + VALUES + 1
SYMBOLS = ASK + 1
_NEEDLE, _QUESTION = 3, 2  # tokens: mark, key, value; ask, key

_DIM, _LAYERS, _HEAD_DIM, _NEAR = 256, 2, 128, 3
_TRAINED = (256, 1024)  # least and most tokens of a context in training
_BATCH = {"cuda": 64, "cpu": 8}
_MATRIX_RATE, _OTHER_RATE = 2e-3, 1e-3
SHORTEST = 256


@dataclass(frozen=True)
class Contexts:
    """tokens: (batch, length); answers and depths: (batch, DEPTHS), of the questions in the order they are asked in.

    An answer is a value from 0 to VALUES - 1; a depth is the needle's place, 0 at the beginning, DEPTHS - 1 at the end.
    """

    tokens: torch.Tensor
    answers: torch.Tensor
    depths: torch.Tensor

    def to(self, device: torch.device) -> Contexts:
        return Contexts(self.tokens.to(device), self.answers.to(device), self.depths.to(device))


def contexts(batch: int, length: int, generator: torch.Generator) -> Contexts:
    """Fresh contexts of ``length`` tokens, questions included; ValueError below SHORTEST."""
    if length < SHORTEST:
        raise ValueError(f"a context must have at least {SHORTEST} tokens, got {length}")
    tokens = torch.randint(NOISE, (batch, length), generator=generator)
    keys = torch.rand(batch, KEYS, generator=generator).argsort(dim=1)[:, :DEPTHS] + NOISE
    values = torch.randint(VALUES, (batch, DEPTHS), generator=generator)
    questions = length - DEPTHS * _QUESTION
    starts = torch.linspace(0, questions - _NEEDLE, DEPTHS).long()
    tokens[:, starts] = MARK
    tokens[:, starts + 1] = keys
    tokens[:, starts + 2] = values + NOISE + KEYS
    # In another order than they lie in, so that a needle cannot be told by its place.
    depths = torch.rand(batch, DEPTHS, generator=generator).argsort(dim=1)
    tokens[:, questions::_QUESTION] = ASK
    tokens[:, questions + 1 :: _QUESTION] = keys.gather(1, depths)
    return Contexts(tokens, values.gather(1, depths), depths)


class Retriever(nn.Module):
    """Tokens (batch, length) to the logits of the values at the DEPTHS questions (batch, DEPTHS, VALUES)."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, _DIM)
        # A token sees the two before it: a value its key, and the question what is asked for.
        self.near = nn.Conv1d(_DIM, _DIM, _NEAR)
        self.trunk = Trunk(None, _DIM, _LAYERS, _HEAD_DIM, causal_attention)
        self.logits = nn.Linear(_DIM, VALUES)
        self.use_attention(causal_attention)

    def use_attention(self, attend: AttentionFunction) -> None:
        """Let every layer compute its attention with ``attend``, which gets queries scaled by the length."""

        def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attend(q * (math.log(q.shape[2]) / math.log(_TRAINED[1])), k, v)

        self.trunk.use_attention(scaled)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.symbols(tokens)
        x = x + self.near(F.pad(x.transpose(1, 2), (_NEAR - 1, 0))).transpose(1, 2)
        result: torch.Tensor = self.logits(self.trunk(x)[:, 1 - _QUESTION * DEPTHS :: _QUESTION])
        return result


def train(seconds: float, seed: int, device: torch.device) -> Retriever:
    """Train for ``seconds`` on fresh contexts of changing length; returns the averaged model."""
    torch.manual_seed(seed)
    model = Retriever().to(device)
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        length = int(torch.randint(_TRAINED[0], _TRAINED[1] + 1, (1,), generator=generator))
        seen = contexts(_BATCH[device.type], length, generator).to(device)
        return seen.tokens, seen.answers

    return fit(
        "retrieval", model, model.trunk.hidden_weights(), TrainingSchedule(seconds, _MATRIX_RATE, _OTHER_RATE), batch
    )


@torch.no_grad()
def measure(model: Retriever, length: int, trials: int, seed: int, attend: AttentionFunction) -> list[float]:
    """The share of right answers at each depth, over ``trials`` contexts of ``length`` tokens; the same for a seed."""
    model.use_attention(attend)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    right = torch.zeros(DEPTHS)
    for _ in range(trials):
        seen = contexts(1, length, generator).to(device)
        with half_precision(device):
            answers = model(seen.tokens).argmax(dim=2)
        right.index_add_(0, seen.depths[0].cpu(), (answers == seen.answers)[0].float().cpu())
    return [share / trials for share in right.tolist()]
