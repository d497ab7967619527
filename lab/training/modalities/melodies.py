"""A transcriber of melodies: sound to notes, as speech recognition is sound to words.

A clip is a melody of sine tones with overtones, in noise, in a key that no two clips need to share. Its first tone is
the key's own, and a note is named by its distance from it. So the model has to look back at the beginning of the clip,
from every tone, to name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from ...demo.sampler import half_precision
from ..demo_model.state import TrainingSchedule
from .fitting import Batch, fit
from .transformer import AttentionFunction, Trunk

NOTES = 12  # semitones above the key
SILENCE = NOTES
RATE, HOP, WINDOW = 8000, 64, 512  # samples a second, between frames, in a frame
FRAMES = 512
_SAMPLES = FRAMES * HOP
_TONES = 28  # of a clip, more than fit: it ends in the middle of one
_SOUND, _GAP = (10, 24), (4, 10)  # frames of a tone, and of the silence after it: least and most
_LOWEST_HERTZ = 440.0
_OVERTONES = (1.0, 0.5, 0.25)
_NOISE = (0.05, 0.5)  # least and most, of a tone's amplitude

_DIM, _LAYERS, _HEAD_DIM = 256, 4, 128
_BATCH = {"cuda": 64, "cpu": 4}
_MATRIX_RATE, _OTHER_RATE = 2e-3, 1e-3


@dataclass(frozen=True)
class Clips:
    """spectra: (batch, FRAMES, WINDOW // 2 + 1), logarithms of magnitudes; notes: (batch, FRAMES), SILENCE between."""

    spectra: torch.Tensor
    notes: torch.Tensor


def clips(batch: int, generator: torch.Generator, device: torch.device) -> Clips:
    """Fresh clips, the same for a seed on every machine but for the rounding of its sine."""

    def between(bounds: tuple[int, int]) -> torch.Tensor:
        return torch.randint(bounds[0], bounds[1] + 1, (batch, _TONES), generator=generator)

    sound, gap = between(_SOUND), between(_GAP)
    notes = torch.randint(NOTES, (batch, _TONES), generator=generator)
    notes[:, 0] = 0
    keys = torch.randint(NOTES, (batch, 1), generator=generator)
    noise = _NOISE[0] + (_NOISE[1] - _NOISE[0]) * torch.rand(batch, 1, generator=generator)
    hiss = torch.randn(batch, _SAMPLES, generator=generator)

    ends = (sound + gap).cumsum(dim=1)
    frame = torch.arange(FRAMES).expand(batch, -1).contiguous()
    tone = torch.searchsorted(ends, frame, right=True).clamp(max=_TONES - 1)
    sounds = frame < (ends - gap).gather(1, tone)
    hertz = _LOWEST_HERTZ * torch.exp2((notes + keys) / 12).gather(1, tone)
    labels = torch.where(sounds, notes.gather(1, tone), SILENCE)

    phase = (hertz.to(device).repeat_interleave(HOP, dim=1).double() * (2 * torch.pi / RATE)).cumsum(dim=1)
    wave = sum(share * torch.sin(number * phase) for number, share in enumerate(_OVERTONES, 1))
    assert isinstance(wave, torch.Tensor)
    wave = wave.float() * sounds.to(device).repeat_interleave(HOP, dim=1) + (noise * hiss).to(device)
    window = torch.hann_window(WINDOW, device=device)
    spectra = torch.stft(wave, WINDOW, HOP, window=window, return_complex=True)[:, :, :FRAMES].abs()
    return Clips(torch.log1p(spectra).transpose(1, 2), labels.to(device))


class Transcriber(nn.Module):
    """Spectra (batch, FRAMES, WINDOW // 2 + 1) to the logits of notes and silence (batch, FRAMES, NOTES + 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.spectra = nn.Linear(WINDOW // 2 + 1, _DIM)
        self.trunk = Trunk(FRAMES, _DIM, _LAYERS, _HEAD_DIM, F.scaled_dot_product_attention)
        self.logits = nn.Linear(_DIM, NOTES + 1)

    def forward(self, spectra: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.logits(self.trunk(self.spectra(spectra)))
        return result


def train(seconds: float, seed: int, device: torch.device) -> Transcriber:
    """Train for ``seconds`` on fresh clips; returns the averaged model."""
    torch.manual_seed(seed)
    model = Transcriber().to(device)
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        heard = clips(_BATCH[device.type], generator, device)
        return heard.spectra, heard.notes

    return fit(
        "melodies", model, model.trunk.hidden_weights(), TrainingSchedule(seconds, _MATRIX_RATE, _OTHER_RATE), batch
    )


def transcript(frames: Sequence[int]) -> list[int]:
    """The notes of a clip's frames: each run of one note once, silence left out."""
    return [note for before, note in zip([SILENCE, *frames], frames, strict=False) if note not in (before, SILENCE)]


def edits(found: Sequence[int], right: Sequence[int]) -> int:
    """The fewest insertions, deletions and replacements that turn one sequence into the other."""
    distances = list(range(len(right) + 1))
    for row, one in enumerate(found, 1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(right, 1):
            replaced = diagonal + (one != other)
            diagonal = distances[column]
            distances[column] = min(replaced, diagonal + 1, distances[column - 1] + 1)
    return distances[-1]


@torch.no_grad()
def measure(model: Transcriber, count: int, seed: int, attend: AttentionFunction) -> dict[str, float]:
    """Note error rate (edits / notes, as word error rate) and loss on ``count`` fresh clips, the same for a seed."""
    model.trunk.use_attention(attend)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    wrong = notes = 0
    loss = 0.0
    for start in range(0, count, _BATCH[device.type]):
        heard = clips(min(_BATCH[device.type], count - start), generator, device)
        with half_precision(device):
            logits = model(heard.spectra).float()
        loss += F.cross_entropy(logits.flatten(0, 1), heard.notes.flatten(), reduction="sum").item()
        for found, right in zip(logits.argmax(dim=2).tolist(), heard.notes.tolist(), strict=True):
            melody = transcript(right)
            wrong += edits(transcript(found), melody)
            notes += len(melody)
    return {"errors": wrong / notes, "loss": loss / (count * FRAMES)}
