"""A character-level causal language model, trained on the source code of Python's standard library.

Every machine that can run this has that text. Each tenth file, in the order of their names, is kept for the test.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from ...demo.sampler import half_precision
from ..demo_model.state import TrainingSchedule
from .fitting import Batch, fit
from .transformer import AttentionFunction, Trunk, causal_attention

SYMBOLS = 128
CONTEXT = 1024
_DIM, _LAYERS, _HEAD_DIM = 256, 4, 128
_BATCH = {"cuda": 64, "cpu": 4}
_TEST_EVERY = 10
# At 5e-3 and 2e-3 the loss rises again after 2,000 steps.
_MATRIX_RATE, _OTHER_RATE = 2e-3, 1e-3


class LanguageModel(nn.Module):
    """Symbols (batch, tokens) to the logits of the next ones (batch, tokens, SYMBOLS)."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, _DIM)
        self.trunk = Trunk(CONTEXT, _DIM, _LAYERS, _HEAD_DIM, causal_attention)
        self.logits = nn.Linear(_DIM, SYMBOLS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.logits(self.trunk(self.symbols(text)))
        return result


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and test text as ASCII codes (uint8); what is not ASCII is left out."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*.py") if not {"test", "site-packages"} & set(path.parts))
    texts = [path.read_bytes() for path in files]
    kept = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts if text]
    kept = [text[text < SYMBOLS] for text in kept]
    test = kept[::_TEST_EVERY]
    training = [text for number, text in enumerate(kept) if number % _TEST_EVERY]
    return torch.cat(training), torch.cat(test)


def train(text: torch.Tensor, seconds: float, seed: int, device: torch.device) -> LanguageModel:
    """Train for ``seconds`` on random pieces of the text; returns the averaged model."""
    torch.manual_seed(seed)
    model = LanguageModel().to(device)
    text = text.to(device)
    piece = torch.arange(CONTEXT + 1, device=device)

    def batch() -> Batch:
        starts = torch.randint(len(text) - CONTEXT - 1, (_BATCH[device.type], 1), device=device)
        symbols = text[starts + piece].long()
        return symbols[:, :-1], symbols[:, 1:]

    return fit(
        "language", model, model.trunk.hidden_weights(), TrainingSchedule(seconds, _MATRIX_RATE, _OTHER_RATE), batch
    )


@torch.no_grad()
def measure(model: LanguageModel, text: torch.Tensor, pieces: int, attend: AttentionFunction) -> dict[str, float]:
    """Perplexity and next-symbol accuracy on ``pieces`` evenly spread pieces of CONTEXT symbols."""
    model.trunk.use_attention(attend)
    device = next(model.parameters()).device
    starts = torch.linspace(0, len(text) - CONTEXT - 1, pieces).long()
    symbols = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    loss, right = 0.0, 0.0
    for part in symbols.split(_BATCH[device.type]):
        part = part.to(device)
        with half_precision(device):
            logits = model(part[:, :-1]).float()
        loss += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
        right += (logits.argmax(dim=2) == part[:, 1:]).sum().item()
    count = pieces * CONTEXT
    return {"perplexity": math.exp(loss / count), "accuracy": right / count}
