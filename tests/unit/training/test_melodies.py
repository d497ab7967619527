"""The melodies: what is heard is what the notes say, and how transcripts are counted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.training.modalities import melodies
from lab.training.modalities.melodies import FRAMES, NOTES, RATE, SILENCE, WINDOW, Transcriber, clips, edits, transcript

CPU = torch.device("cpu")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_what_is_heard_is_what_the_notes_say(fresh_seed: int) -> None:
    heard = clips(4, generator(fresh_seed), CPU)
    assert heard.spectra.shape == (4, FRAMES, WINDOW // 2 + 1) and heard.notes.shape == (4, FRAMES)
    for spectrum, notes in zip(heard.spectra, heard.notes, strict=True):
        melody = transcript(notes.tolist())
        assert len(melody) > 10 and melody[0] == 0 and set(melody) <= set(range(NOTES))
        # The loudest frequency of a frame in the middle of a tone, in semitones above that of the first tone.
        inside = [
            frame for frame in range(4, FRAMES - 4) if len(set(notes[frame - 4 : frame + 5].tolist())) == 1
        ]  # fmt: skip
        sounding = [frame for frame in inside if notes[frame] != SILENCE]
        hertz = spectrum[sounding].argmax(dim=1) * (RATE / WINDOW)
        key = hertz[[notes[frame] == 0 for frame in sounding].index(True)]
        above = 12 * torch.log2(hertz / key)
        # A frequency's bin is up to half a semitone wide at the lowest tone, on both sides.
        assert (above - notes[sounding]).abs().max() < 1.2


def test_keys_differ(fresh_seed: int) -> None:
    """The same note is another frequency in another clip: without the key it has no name."""
    heard = clips(16, generator(fresh_seed), CPU)
    first = heard.spectra[:, 4].argmax(dim=1)
    assert (heard.notes[:, 4] == 0).all() and len(first.unique()) > 4


def test_a_seed_fixes_the_clips(fresh_seed: int) -> None:
    one, again, other = (clips(2, generator(seed), CPU) for seed in (fresh_seed, fresh_seed, fresh_seed + 1))
    assert torch.equal(one.notes, again.notes) and torch.equal(one.spectra, again.spectra)
    assert not torch.equal(one.notes, other.notes)


def test_transcripts() -> None:
    assert transcript([SILENCE, 3, 3, SILENCE, 3, 4, 4, SILENCE]) == [3, 3, 4]
    assert transcript([SILENCE] * 5) == []


@pytest.mark.parametrize(
    ("found", "right", "count"),
    [([1, 2, 3], [1, 2, 3], 0), ([], [1, 2], 2), ([1, 2], [], 2), ([1, 3], [1, 2, 3], 1), ([1, 9, 3], [1, 2, 3], 1)],
)
def test_edits(found: list[int], right: list[int], count: int) -> None:
    assert edits(found, right) == count


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6), st.integers(0, 3))
def test_edits_are_a_distance(one: list[int], other: list[int], note: int) -> None:
    distance = edits(one, other)
    assert distance == edits(other, one)
    assert abs(len(one) - len(other)) <= distance <= max(len(one), len(other))
    assert (distance == 0) == (one == other)
    assert edits([*one, note], [*other, note]) == distance


def test_the_model_is_asked_about_every_frame(fresh_seed: int) -> None:
    torch.manual_seed(fresh_seed)
    calls = 0

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert q.shape[2] == k.shape[2] == FRAMES
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    found = melodies.measure(Transcriber().eval(), 5, fresh_seed, attend)
    assert calls == 2 * 4, "two batches of four clips at most, four layers"
    assert found["errors"] > 0.5 and 1.5 < found["loss"] < 4.0, "an untrained model knows nothing"


def test_right_frames_are_no_errors(fresh_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {}
    make = melodies.clips

    def noted(*arguments: object) -> melodies.Clips:
        known["notes"] = (heard := make(*arguments)).notes  # type: ignore[arg-type]
        return heard

    monkeypatch.setattr(melodies, "clips", noted)
    model = Transcriber().eval()
    monkeypatch.setattr(
        Transcriber, "forward", lambda self, spectra: torch.nn.functional.one_hot(known["notes"], NOTES + 1) * 50.0
    )
    assert melodies.measure(model, 4, fresh_seed, torch.nn.functional.scaled_dot_product_attention)["errors"] == 0
