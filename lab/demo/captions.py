"""The demo model's text encoder: a caption becomes the sequence of embeddings that the diffusion model attends to.

Each word has a fixed code. A word means something else in each clause ("red" may be the first thing, the second thing
or the backdrop), so the code of its clause is added to it: clause 0 to begin with, 1 after "and", 2 after "over".
The sequence is padded with zeros, as Wan 2.1 pads its text; the empty caption, all zeros, is the unconditional input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from comfy_sage2.text import error_text, one_line, quoted

from .scenes import COLORS, MOTIONS, PATTERNS, SHAPES, SIZES, SURFACES

LONGEST = 1000  # characters of a caption
TEXT_DIM = 4096
CAPTION_LENGTH = 24

_CLAUSE_OPENERS = {"and": 1, "over": 2}
_CODE_STD = 1 / 16
_OPTIONAL_MARKS = str.maketrans("", "", ".,!")


class CaptionError(ValueError):
    """A caption that the demo model cannot be asked for."""


def vocabulary() -> tuple[str, ...]:
    """Every word the demo model knows, in the order of the code table's rows."""
    grammar = ("a", "an", "and", "over", "drifting", "floor")
    sizes = (size for size in SIZES if size != "medium")  # a medium size is never said
    return tuple(dict.fromkeys((*grammar, *sizes, *COLORS, *PATTERNS, *SHAPES, *MOTIONS, *SURFACES)))


def _words(text: str) -> tuple[str, ...]:
    """The vocabulary of a caption file, a JSON list of words."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CaptionError(f"the file's vocabulary is no JSON ({type(error).__name__}).") from error
    if not isinstance(words, list) or not all(isinstance(word, str) and len(word) <= 40 for word in words):
        raise CaptionError(f"the file's vocabulary must be a list of words, got {quoted(words)}.")
    return tuple(words)


@dataclass(frozen=True)
class CaptionEncoder:
    """Codes of words and clauses.

    words: the vocabulary, one word for each row of ``word_codes``.
    word_codes: (len(words), text_dim) float.
    clause_codes: (3, text_dim) float.
    """

    words: tuple[str, ...]
    word_codes: torch.Tensor
    clause_codes: torch.Tensor

    @classmethod
    def random(cls, seed: int, text_dim: int = TEXT_DIM) -> CaptionEncoder:
        """Draw new codes: nearly orthogonal to each other, since they are long and random."""
        generator = torch.Generator().manual_seed(seed)
        words = vocabulary()
        codes = _CODE_STD * torch.randn(len(words) + 3, text_dim, generator=generator)
        codes = codes.to(torch.float16)
        return cls(words=words, word_codes=codes[:-3].clone(), clause_codes=codes[-3:].clone())

    @classmethod
    def load(cls, path: str | Path) -> CaptionEncoder:
        """Read the codes that :meth:`save` wrote."""
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if "vocabulary" not in metadata:
                    raise CaptionError(
                        f"{path} is not a caption code file: its metadata has no 'vocabulary'. "
                        "Choose the captions file that belongs to the demo model."
                    )
                encoder = cls(
                    _words(metadata["vocabulary"]), file.get_tensor("word_codes"), file.get_tensor("clause_codes")
                )
                if encoder.word_codes.shape[:1] != (len(encoder.words),) or encoder.clause_codes.shape[:1] != (3,):
                    raise CaptionError(f"{path} is broken: its tables do not have one row for each word and clause.")
                return encoder
        except SafetensorError as error:
            raise CaptionError(f"{path} cannot be read as safetensors ({error_text(error)}).") from error

    def save(self, path: str | Path) -> None:
        """Write the codes as safetensors, the vocabulary in its metadata."""
        tensors = {"word_codes": self.word_codes, "clause_codes": self.clause_codes}
        save_file(tensors, str(path), metadata={"format": "pt", "vocabulary": json.dumps(self.words)})

    def tokens(self, caption: str) -> tuple[list[int], list[int]]:
        """The word and the clause index of each word of a caption.

        Raises CaptionError when a word is unknown or the caption is too long.
        """
        if len(caption) > LONGEST:
            raise CaptionError(f"the caption must have at most {LONGEST} characters, got {len(caption)}.")
        row = {word: index for index, word in enumerate(self.words)}
        spoken = caption.lower().translate(_OPTIONAL_MARKS).split()
        unknown = [word for word in spoken if word not in row]
        if unknown:
            raise CaptionError(
                f"the demo model does not know {', '.join(map(quoted, unknown))}. "
                f"It knows these words only: {', '.join(map(one_line, sorted(self.words)))}."
            )
        if len(spoken) > CAPTION_LENGTH:
            raise CaptionError(
                f"the caption has {len(spoken)} words, expected at most {CAPTION_LENGTH}: describe one or two things."
            )
        clauses, clause = [], 0
        for word in spoken:
            clause = _CLAUSE_OPENERS.get(word, clause)
            clauses.append(clause)
        return [row[word] for word in spoken], clauses

    def encode(self, caption: str) -> torch.Tensor:
        """A caption as conditioning: (1, CAPTION_LENGTH, text_dim) float32, zeros after its last word."""
        words, clauses = self.tokens(caption)
        embedding = torch.zeros(1, CAPTION_LENGTH, self.word_codes.shape[1])
        if words:
            embedding[0, : len(words)] = self.word_codes[words].float() + self.clause_codes[clauses].float()
        return embedding
