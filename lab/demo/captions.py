"""The demo model's text encoder: a caption becomes the sequence of embeddings that the diffusion model attends to.

Each word has a fixed code. A word means something else in each clause ("red" may be the first thing, the second thing
or the backdrop), so the code of its clause is added to it: clause 0 at the start, 1 after "and", 2 after "over".
The sequence is padded with zeros, as Wan 2.1 pads its text; the empty caption, all zeros, is the unconditional input.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from comfy_sage2.text import one_line, quoted

CAPTION_LENGTH = 24  # words

_CLAUSE_OPENERS = {"and": 1, "over": 2}
_OPTIONAL_MARKS = str.maketrans("", "", ".,!")


class CaptionError(ValueError):
    """A caption that the demo model does not understand."""


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
    def load(cls, path: str | Path) -> CaptionEncoder:
        """Read the codes from a file. CaptionError if it is another kind of file."""
        with safe_open(str(path), framework="pt") as file:
            words = (file.metadata() or {}).get("vocabulary")
            if words is None:
                raise CaptionError(
                    f"{one_line(str(path))} has no vocabulary: choose the captions file that belongs to the demo model"
                )
            return cls(tuple(json.loads(words)), file.get_tensor("word_codes"), file.get_tensor("clause_codes"))

    def tokens(self, caption: str) -> tuple[list[int], list[int]]:
        """The word and the clause index of each word of a caption.

        Raises CaptionError when a word is unknown or the caption is too long.
        """
        row = {word: index for index, word in enumerate(self.words)}
        spoken = caption.lower().translate(_OPTIONAL_MARKS).split()
        unknown = [word for word in spoken if word not in row]
        if unknown:
            raise CaptionError(
                f"the demo model does not know {', '.join(map(quoted, unknown[:5]))}. "
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
