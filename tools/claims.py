"""The page docs/results/does-it-hold.md: the paper's claims, each beside this project's figure and a verdict.

    python -m tools.claims          # write the page anew
    python -m tools.claims --check  # say whether it is current, and change nothing

Our figures are read from docs/results, and the verdicts follow from them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from .figures import DEMO_TENSORS, RESULTS, Figure, Source, renew

PAGE = RESULTS / "does-it-hold.md"
HOLDS, BETTER, NOT = "holds", "better", "**does not hold on our data**"
INCOMPARABLE, UNKNOWN = "cannot be compared", "not measured"
LEVEL = 0.05  # figures this near each other are the same

SMOOTHING = "Smoothing methods (tab:accuracy_compare1, tab:accuracy_compare2): INT4 Q and K, E4M3 P and V"
GRANULARITY = "Granularities (tab:quant_granularities1, tab:quant_granularities2): INT4 smoothed Q and K, FP16 P and V"
TYPES = "Data types of P and V (tab:quant_data_type1, tab:quant_data_type2): INT4 smoothed Q and K per thread"
SYNTHETIC = "synthetic Q, K, V with outliers (6 layers, 1 step, 2304 tokens)"


def at_least(ours: float, paper: float, spread: float = 0.0) -> str:
    """The verdict on a figure that should be large. What is better by no more than the spread is level."""
    if ours >= paper * (1 + max(LEVEL, spread)):
        return BETTER
    return HOLDS if ours >= paper * (1 - LEVEL) else NOT


def if_so(holds: bool) -> str:
    """The verdict on an order."""
    return HOLDS if holds else NOT


# The paper's figure; ours, or the command that would give it; and the verdict.
Finding = tuple[str, str, str]


@dataclass(frozen=True)
class Claim:
    """One of the paper's claims.

    where: the paper's section or table. source: where our figure stands, or None where there is none yet; `judge` is
    the finding itself then.
    """

    text: str
    where: str
    source: Source | None
    judge: Callable[[Source], Finding] | Finding

    def row(self) -> str:
        """The claim's row of the page."""
        if self.source is None or not callable(self.judge):
            assert not callable(self.judge)
            paper, command, verdict = self.judge
            cells = [self.text, self.where, paper, "", command, "", verdict]
        else:
            paper, ours, verdict = self.judge(self.source)
            command, machine = self.source.about("Command"), self.source.about("Machine")
            ours = f"{ours} ([table]({self.source.file}))"
            cells = [self.text, self.where, paper, ours, command, machine, verdict]
        return f"| {' | '.join(cells)} |"


_SPEEDUPS = "tab:speed_comparison_across_gpus"
_METRICS = "exp:metrics_loss_t2t"
_CALLS = Source("attention-h200.md", "Speed")
_SPREADS = Source("attention-h200.md", "Spread")
_ACCURACY = Source("attention-h200.md", "Accuracy")
_MODELS = Source("end-to-end.md", "The paper's models, end to end")
_PARTS = Source("ablations-h200.md", "d128-n8192")
_VIDEOS = Source("videos.md", "32 captions")
_MODALITIES = Source("modalities-h200.md", "Language, pictures, melodies")
_ACCUMULATOR = Source("accumulators.md", "Error of a sum over many keys")
_BITS = Source("accumulators.md", "Mantissa bits")
_NEEDLES = Source("needle.md", "Needles in a haystack")
_ROTATED = Source("rotation.md", "Whole videos")


def _spread(*columns: str) -> float:
    return max(_SPREADS("d128-n8192", column) for column in columns) / 100


def _faster_than_flash2(table: Source) -> Finding:
    # The paper times kernels, on operands that are quantized already.
    ours, calls = (
        table("d128-n8192", f"8b {part}") / table("d128-n8192", f"FA-2 {part}") for part in ("kernel", "call")
    )
    said = f"{ours:.2f} times, kernels, 8,192 tokens; whole calls {calls:.2f} times"
    return "2.61 times (H100)", said, at_least(ours, 2.61, _spread("8b kernel", "FA-2 kernel"))


def _level_with_flash3(table: Source) -> Finding:
    ours = table("d128-n8192", "8b kernel") / table("d128-n8192", "FA-3 FP8 kernel")
    said = f"{ours:.2f} of its speed, kernels, 8,192 tokens"
    return "2.61 against 2.63 (H100)", said, at_least(ours, 2.61 / 2.63, _spread("8b kernel", "FA-3 FP8 kernel"))


def _closer_than_flash3(table: Source) -> Finding:
    inputs = ("gaussian", "outliers")
    pairs = [tuple(table(row, f"{name}: relative L1") for row in ("8b", "FA-3 FP8")) for name in inputs]
    said = ", ".join(f"{ours} against {other} {name}" for (ours, other), name in zip(pairs, inputs, strict=True))
    return "metrics of videos only", f"relative L1 {said}", if_so(all(ours < other for ours, other in pairs))


def _model(row: str, before: int, after: int, gpu: str) -> Callable[[Source], Finding]:
    """Judges the gain of one of the paper's models, which took `before` and then `after` seconds."""

    def judge(table: Source) -> Finding:
        ours, paper = table(f"{row} | this node, 8b", "times as fast"), before / after
        layers = row.split(" | ")[1]
        said = f"{ours} times" + ("" if layers == "all" else f", {layers} layers")
        return f"{before} s to {after} s: {paper:.2f} times ({gpu})", said, at_least(ours, paper)

    return judge


def _parts(table: Source) -> Finding:
    delta, times = table("sm90 4b", "smooth Q's ΔS"), table("sm90 4b", "call, ms") / table("sm90 8b", "call, ms")
    said = f"smooth Q's ΔS {delta} of a 4b call, which takes {times:.1f} times 8b's: Hopper has no INT4"
    return "0.35 % (scales per thread), 3.7 % (smooth Q), 0 % (two levels) (L20)", said, INCOMPARABLE


def _smoothing(table: Source) -> Finding:
    methods = ("None", "HadmdAttn", "SmoothAttn", "Smooth K", "Smooth Q", "Smooth Q+K")
    ours = {method: table(method, "Relative L1") for method in methods}
    best = min(ours, key=lambda method: ours[method])
    said = f"{ours['Smooth Q+K']} against {ours['None']} without"
    if best != "Smooth Q+K":
        said += f"; best is {best}, {ours[best]}"
    return "relative L1 0.0648 against 0.3906 without", said, if_so(best == "Smooth Q+K")


def _smoothing_rotated(table: Source) -> Finding:
    ours, other = table("Smooth Q+K + rotation", "Relative L1"), table("HadmdAttn", "Relative L1")
    return "not in the paper", f"{ours} against {other} (HadmdAttn)", BETTER if ours < other else NOT


def _beats_per_block(table: Source) -> Finding:
    ours, other = table("Per-thread", "Relative L1"), table("Per-block", "Relative L1")
    return "relative L1 0.0622 against 0.1492", f"{ours} against {other}", if_so(ours < other)


def _as_per_token(table: Source) -> Finding:
    ours, other = table("Per-thread", "Relative L1"), table("Per-token", "Relative L1")
    return "relative L1 0.0622 against 0.0649", f"{ours} against {other}", if_so(ours <= other * (1 + LEVEL))


def _e4m3(table: Source) -> Finding:
    ours, other = table("E4M3", "Relative L1"), table("FP16", "Relative L1")
    return "relative L1 0.0683 against 0.0649", f"{ours} against {other}", if_so(ours <= other * 0.0683 / 0.0649)


def _int8(table: Source) -> Finding:
    ours, other = table("INT8", "Relative L1"), table("E4M3", "Relative L1")
    return "relative L1 0.5618 against 0.0683", f"{ours} against {other}", if_so(ours >= 2 * other)


def _smooth_v(table: Source) -> Finding:
    column = "outliers: relative L1"
    ours, other = table("8b, smooth V", column), table("8b", column)
    return "relative L1 0.0406 against 0.1980 (4b)", f"{ours} against {other} (8b, outliers)", if_so(ours < other)


def _two_levels(table: Source) -> Finding:
    row = "65,536"
    ours, other = (table(row, f"emulated, {name}") for name in ("two levels", "one accumulator for all keys"))
    return (
        "the error stays within a block",
        f"{ours:.1e} against {other:.1e}, {row} keys, emulated",
        if_so(ours < other),
    )


def _bits(table: Source) -> Finding:
    ours = table("sm90 kernel", "mantissa bits kept")
    return "13 bits", f"{ours} bits (Hopper)", if_so(float(ours) == 13.0)


def _needles(table: Source) -> Finding:
    tokens = "131,072 tokens"
    ours, full = (table.cell(row, tokens).split(" (")[0] for row in ("SageAttn2-8b (sm90 kernel)", "Full precision"))
    verdict = if_so(Figure.of(ours) >= Figure.of(full))
    return "no loss up to 262k tokens (Llama 3, a picture)", f"{ours} of {full} found, {tokens}", verdict


def _perplexity(table: Source, row: str, allowed: float) -> tuple[str, str]:
    ours, full = table(row, "Perplexity"), table("Full precision", "Perplexity")
    loss = ours / full - 1
    return f"{ours} against {full} ({100 * loss:+.1f} %)", if_so(loss <= allowed)


def _language_8b(table: Source) -> Finding:
    return "6.019 against 6.013 (+0.1 %, Llama 3.1)", *_perplexity(table, "SageAttn2-8b (sm90 kernel)", 0.01)


def _language_4b(table: Source) -> Finding:
    return "6.256 against 6.013 (+4.0 %, Llama 3.1)", *_perplexity(table, "SageAttn2-4b (sm90 kernel)", 0.04)


def _language_baselines(table: Source) -> Finding:
    ours, others = table("SageAttn2-4b", "Perplexity"), {n: table(n, "Perplexity") for n in _BASELINES}
    said = f"{ours} against {' and '.join(f'{other}' for other in others.values())}"
    return "6.256 against 7.180 and 7.872 (Llama 3.1)", said, if_so(ours < min(others.values()))


def _pictures(table: Source) -> Finding:
    ours, full = table("SageAttn2-8b (sm90 kernel)", "Image accuracy"), table("Full precision", "Image accuracy")
    return "84.79 % against 84.79 % (ImageNet)", f"{ours} against {full}", if_so(ours >= full - 0.1)


def _sound(table: Source) -> Finding:
    ours, full = (table(row, "Note errors") for row in ("SageAttn2-8b (sm90 kernel)", "Full precision"))
    return (
        "word errors 1.72 against 1.74 (Qwen2-Audio)",
        f"note errors {ours} against {full}",
        if_so(ours <= full + 0.1),
    )


_BASELINES = ("SmoothAttn-4b", "HadmdAttn-4b")


def _video_baselines(table: Source) -> Finding:
    ours, others = table("SageAttn2-4b", "PSNR (dB)"), {n: table(n, "PSNR (dB)") for n in _BASELINES}
    said = f"{ours} dB against {' and '.join(f'{other}' for other in others.values())}"
    return "VQA-a 57.7 against 8.8 and 9.0 (CogVideoX 1.5)", said, if_so(ours > max(others.values()))


def _video_rotated(table: Source) -> Finding:
    ours, other = table("4b + rotation, sm90 kernel", "PSNR (dB)"), table("HadmdAttn-4b", "PSNR (dB)")
    return "not in the paper", f"{ours} dB against {other} (HadmdAttn)", BETTER if ours > other else NOT


def _video_flash3(table: Source) -> Finding:
    ours, other = table("SageAttn2-8b", "PSNR (dB)"), table("FlashAttention-3 FP8, emulated", "PSNR (dB)")
    return "VQA-a 69.5 against 6.5 (CogVideoX 1.5)", f"{ours} dB against {other}", if_so(ours > other)


CLAIMS = (
    Claim("8b is faster than FlashAttention-2 on Hopper", _SPEEDUPS, _CALLS, _faster_than_flash2),
    Claim("8b is as fast as FlashAttention-3's FP8 on Hopper", _SPEEDUPS, _CALLS, _level_with_flash3),
    Claim("8b is more exact than FlashAttention-3's FP8", "section 4", _ACCURACY, _closer_than_flash3),
    Claim("Whole models gain: CogVideoX-2B", "tab:e2e_speedup", _MODELS,
          _model("CogVideoX-2B, 480p | all | 17,776", 86, 54, "RTX 4090")),
    Claim("Whole models gain: CogVideoX 1.5", "tab:e2e_speedup", _MODELS,
          _model("CogVideoX1.5-5B, 768p | 5 of 42 | 45,106", 1040, 577, "RTX 4090")),
    Claim("Whole models gain: HunyuanVideo", "tab:e2e_speedup", _MODELS,
          _model("HunyuanVideo, 720p, 129 frames | 1 + 1 of 20 + 40 | 119,056", 2221, 1486, "L20")),
    Claim("Whole models gain: Mochi", "tab:e2e_speedup", _MODELS,
          _model("Mochi, 480p, 163 frames | 8 of 48 | 44,712", 2336, 1316, "L20")),
    Claim("4b is 3 times as fast as FlashAttention-2 on RTX 4090", "section 4.2", None,
          ("2.93 times", "`python -m lab bench` on such a card", UNKNOWN)),
    Claim("Smooth Q+K is the best smoothing for INT4: outliers", "tab:accuracy_compare1",
          Source("accuracy-tables.md", SMOOTHING, SYNTHETIC), _smoothing),
    Claim("Smooth Q+K is the best smoothing for INT4: the demo model", "tab:accuracy_compare1",
          Source("accuracy-tables.md", SMOOTHING, DEMO_TENSORS), _smoothing),
    Claim("The same with this pack's rotation: the demo model", "",
          Source("accuracy-tables.md", SMOOTHING, DEMO_TENSORS), _smoothing_rotated),
    Claim("Scales per thread are better than per block: outliers", "tab:quant_granularities1",
          Source("accuracy-tables.md", GRANULARITY, SYNTHETIC), _beats_per_block),
    Claim("Scales per thread are better than per block: the demo model", "tab:quant_granularities1",
          Source("accuracy-tables.md", GRANULARITY, DEMO_TENSORS), _beats_per_block),
    Claim("Scales per thread are as good as per token", "tab:quant_granularities1",
          Source("accuracy-tables.md", GRANULARITY, SYNTHETIC), _as_per_token),
    Claim("P and V in E4M3 are nearly as good as in FP16", "tab:quant_data_type1",
          Source("accuracy-tables.md", TYPES, SYNTHETIC), _e4m3),
    Claim("P and V in INT8 lose much", "tab:quant_data_type1", Source("accuracy-tables.md", TYPES, SYNTHETIC), _int8),
    Claim("Smooth V helps values far from zero", "tab:smooth_v1", _ACCURACY, _smooth_v),
    Claim("Two levels of accumulation keep the sum exact", "section 3.4", _ACCUMULATOR, _two_levels),
    Claim("The tensor cores' FP8 accumulator has 13 mantissa bits", "section 3.4", _BITS, _bits),
    Claim("Scales per thread, smooth Q and two levels cost little", "tab:ablation_overhead_smoothing", _PARTS, _parts),
    Claim("8b loses nearly nothing: language", _METRICS, _MODALITIES, _language_8b),
    Claim("4b loses little: language", _METRICS, _MODALITIES, _language_4b),
    Claim("4b is better than SmoothAttn and HadmdAttn: language", _METRICS, _MODALITIES, _language_baselines),
    Claim("8b loses nearly nothing: pictures classified", "exp:metrics_loss_t2t-3_appendix", _MODALITIES, _pictures),
    Claim("8b loses nothing: sound written down", "exp:metrics_loss_audio-appendix", _MODALITIES, _sound),
    Claim("8b loses nothing: needles in long contexts", "fig:llama3_262k_niah", _NEEDLES, _needles),
    Claim("4b is better than SmoothAttn and HadmdAttn: video", _METRICS, _VIDEOS, _video_baselines),
    Claim("The same with this pack's rotation: video", "", _ROTATED, _video_rotated),
    Claim("8b is better than FlashAttention-3's FP8: video", _METRICS, _VIDEOS, _video_flash3),
)  # fmt: skip

_HEAD = """# Does it hold?

The claims of the [SageAttention2 paper](https://arxiv.org/abs/2411.10958), its figures and ours.

- Command: `python -m tools.claims`, which wrote this page: our figures are those of the pages beside it.
- Machine: that of each row.

"Holds": the same order, or within 5 % of the paper's ratio. A call's speed is "better" by more than the spread of its
rounds, too. Models, GPUs and inputs differ from the paper's: our models are small and our outliers are made.
[../quality.md](../quality.md) says what follows for a user.

| claim | in the paper | the paper's figure | ours | command | machine | verdict |
| --- | --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The page as the results have it now; ValueError for a claim whose figure is not found."""
    rows = [claim.row() for claim in CLAIMS]
    verdicts = [row.rstrip(" |").rsplit("| ", 1)[1] for row in rows]
    counted = ", ".join(
        f"{verdicts.count(verdict)} {words}"
        for verdict, words in (
            (HOLDS, "hold"),
            (BETTER, "are better"),
            (NOT, "do not hold on our data"),
            (INCOMPARABLE, "cannot be compared"),
            (UNKNOWN, "are not measured"),
        )
    )
    return _HEAD + "\n".join(rows) + f"\n\nOf {len(rows)} claims {counted}.\n"


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 when the page is not current (with --check) or cannot be made."""
    return renew(PAGE, page, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
