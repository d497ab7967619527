"""The retrieval model: what its contexts ask, that it takes any length, and the table made of its answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lab.evaluation import needle
from lab.training.modalities import retrieval
from lab.training.modalities.retrieval import ASK, DEPTHS, KEYS, MARK, NOISE, VALUES, Retriever, contexts
from lab.training.modalities.transformer import causal_attention


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_question_has_its_needle(fresh_seed: int) -> None:
    seen = contexts(5, 700, generator(fresh_seed))
    assert seen.tokens.shape == (5, 700) and seen.answers.shape == seen.depths.shape == (5, DEPTHS)
    for tokens, answers, depths in zip(seen.tokens.tolist(), seen.answers.tolist(), seen.depths.tolist(), strict=True):
        haystack, questions = tokens[: -2 * DEPTHS], tokens[-2 * DEPTHS :]
        needles = [haystack[place + 1 : place + 3] for place, token in enumerate(haystack) if token == MARK]
        places = [place for place, token in enumerate(haystack) if token == MARK]
        assert len(needles) == len(dict(needles)) == DEPTHS, "a key that lies there twice has two answers"
        assert places[0] == 0 and places[-1] == len(haystack) - 3
        assert questions[::2] == [ASK] * DEPTHS
        assert sorted(depths) == list(range(DEPTHS))
        for key, answer, depth in zip(questions[1::2], answers, depths, strict=True):
            assert NOISE <= key < NOISE + KEYS and 0 <= answer < VALUES
            assert dict(needles)[key] == answer + NOISE + KEYS
            assert needles[depth][0] == key


def test_a_seed_fixes_the_contexts(fresh_seed: int) -> None:
    one, again, other = (contexts(2, 300, generator(seed)) for seed in (fresh_seed, fresh_seed, fresh_seed + 1))
    assert torch.equal(one.tokens, again.tokens) and not torch.equal(one.tokens, other.tokens)
    with pytest.raises(ValueError, match="at least 256 tokens, got 255"):
        contexts(1, 255, generator(0))


def oracle(tokens: torch.Tensor) -> torch.Tensor:
    """Logits that are right, read from the tokens."""
    logits = torch.zeros(len(tokens), DEPTHS, VALUES)
    for row, line in enumerate(tokens.tolist()):
        values = {line[place + 1]: line[place + 2] - NOISE - KEYS for place, token in enumerate(line) if token == MARK}
        for question, key in enumerate(line[1 - 2 * DEPTHS :: 2]):
            logits[row, question, values[key]] = 1.0
    return logits


def test_answers_are_counted_by_depth(fresh_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Retriever()
    monkeypatch.setattr(Retriever, "forward", lambda self, tokens: oracle(tokens))
    assert retrieval.measure(model, 400, 3, fresh_seed, causal_attention) == [1.0] * DEPTHS

    def forgets_the_beginning(self: Retriever, tokens: torch.Tensor) -> torch.Tensor:
        logits = oracle(tokens)
        logits[tokens[:, 1 - 2 * DEPTHS :: 2] == tokens[:, 1:2]] *= -1  # the key of the needle that comes first
        return logits

    monkeypatch.setattr(Retriever, "forward", forgets_the_beginning)
    assert retrieval.measure(model, 400, 3, fresh_seed, causal_attention) == [0.0] + [1.0] * (DEPTHS - 1)


@pytest.mark.slow
def test_the_model_takes_any_length_and_looks_at_no_later_token(fresh_seed: int) -> None:
    torch.manual_seed(fresh_seed)
    model = Retriever().eval()
    seen = contexts(1, 1500, generator(fresh_seed))
    other = seen.tokens.clone()
    other[0, -1] = NOISE + (other[0, -1] - NOISE + 1) % KEYS  # another last question
    with torch.no_grad():
        one, two = model(seen.tokens), model(other)
        assert one.shape == (1, DEPTHS, VALUES)
        torch.testing.assert_close(one[:, :-1], two[:, :-1])
        assert not torch.equal(one[:, -1], two[:, -1])
        # Without places a context is read alike wherever it stands, but for the scale of the queries.
        model.use_attention(F.scaled_dot_product_attention)
        assert not torch.equal(model(seen.tokens), one)


def test_the_table_leaves_out_what_was_not_asked() -> None:
    good, bad = [1.0] * DEPTHS, [0.5] + [1.0] * (DEPTHS - 1)
    found: needle.Found = {"Full precision": {4096: good, 8192: bad}, "SageAttn2-8b": {4096: bad}}
    rows = list(needle.table(found, [4096, 8192]))
    assert rows[0] == "| Attention | 4,096 tokens | 8,192 tokens |"
    assert rows[2] == "| Full precision | 100.0% (100%) | 95.5% (50%) |"
    assert rows[3] == "| SageAttn2-8b | 95.5% (50%) | – |"


def test_the_outcome_is_said_in_words() -> None:
    good, bad = [1.0] * DEPTHS, [0.5] + [1.0] * (DEPTHS - 1)
    found: needle.Found = {"Full precision": {300: good, 600: bad}, "one": {300: good}, "other": {300: good, 600: bad}}
    assert needle.finding(found).startswith("No attention gives fewer right answers than full precision")
    found["other"][300] = bad
    assert needle.finding(found) == "Fewer right answers than in full precision at some length: other."


def test_emulated_attentions_are_spared_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Any]] = []

    def measure(model: Any, length: int, trials: int, seed: int, attend: Any) -> list[float]:
        asked.append((length, attend))
        return [1.0] * DEPTHS

    monkeypatch.setattr(retrieval, "measure", measure)
    attentions: dict[str, Any] = {"Full precision": "full", "SageAttn2-8b": "8b", "SageAttn2-8b (sm90 kernel)": "sm90"}
    found = needle.ask(Retriever(), attentions, [300, 600], 1, 0, longest_emulated=300)
    assert asked == [(300, "full"), (300, "8b"), (300, "sm90"), (600, "full"), (600, "sm90")]
    assert {name: list(rows) for name, rows in found.items()} == {
        "Full precision": [300, 600], "SageAttn2-8b": [300], "SageAttn2-8b (sm90 kernel)": [300, 600],
    }  # fmt: skip


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[float]]:
    """The command without training; what it was to train for is noted."""
    seconds: list[float] = []

    def train(time: float, seed: int, device: torch.device) -> Retriever:
        seconds.append(time)
        return Retriever().eval()

    monkeypatch.setattr(retrieval, "train", train)
    return lambda: seconds


@pytest.mark.slow
def test_the_command_writes_its_results(tmp_path: Path, trained: Callable[[], list[float]]) -> None:
    output, results = tmp_path / "out", tmp_path / "results"
    arguments = ["--output", str(output), "--results", str(results), "--device", "cpu", "--lengths", "256", "300"]
    assert needle.main([*arguments, "--trials", "1", "--seconds", "7"]) == 0
    assert trained() == [7.0]
    page = (results / "needle.md").read_text(encoding="utf-8")
    assert page == (output / "needle.md").read_text(encoding="utf-8")
    assert "- Machine: CPU" in page and "| precise + rotation | " in page and "trained for 7 s" in page
    assert (output / "needle.json").is_file()
    assert (output / "needle.png").read_bytes().startswith(b"\x89PNG")


def test_a_context_that_is_too_short_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        needle.main(["--output", str(tmp_path / "out"), "--lengths", "100"])
    assert "expected at least 256 tokens, got 100" in capsys.readouterr().err
