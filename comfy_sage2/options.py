"""What a caller can choose about an attention call. A new option is declared here and nowhere else in Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .text import quoted

ROTATIONS = ("auto", "on", "off")  # a user's choices; a caller that reuses an earlier call's heads also has GIVEN
GIVEN = "given"
_LARGEST_SCALE = 1e24  # with it no score of float16 tensors of 256 channels overflows float32


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`, which are texts."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"[SA-208] {name} must be one of {', '.join(map(repr, choices))}, got {quoted(value)}")


def is_valid_scale(scale: float | None) -> bool:
    return scale is None or 0.0 < scale <= _LARGEST_SCALE


def _option(default: Any, *, choices: Collection[str] = (), argument: str | None = None, per_call: bool = False) -> Any:
    """A field of AttentionOptions.

    choices: of a str; a dict maps each to its number for the kernels, or to None if it never reaches them.
    argument: the name in csrc/attention_call.h; None if the kernels do not take the option.
    per_call: each call decides it, not the user of a whole model.
    """
    return field(default=default, metadata={"choices": choices, "argument": argument, "per_call": per_call})


@dataclass(frozen=True)
class AttentionOptions:
    """The choices of one attention call; `attention` takes each of them by name, or all of them as `options`.

    Attributes:
        mode: "8b" (Q, K in INT8, K smoothed) or "4b" (Q, K in INT4, both smoothed), SageAttention2 section 3;
            "precise": Q and K as in "8b", V unquantized and P in V's dtype; "exact": nothing is quantized, and torch's
            fastest exact attention serves the call; or "auto": "precise" where the GPU was measured to take at most
            15 % longer than in "8b", else "8b" (`autotune.auto_mode`).
        smooth_v: subtract V's channel means before FP8 quantization and add them to the output (section 3.4). It has
            no effect in "precise", which does not quantize V.
        is_causal: query i attends to keys 0..i, aligned at the top left.
        scale: softmax scale, above 0 and at most 1e24; None means 1/sqrt(D).
        layout: order of the dimensions of q, k, v and the output: "BHND" or "BNHD".
        return_lse: also return the log-sum-exp.
        pv_accumulator: "fp32", or "fp16" for the half-precision accumulation of P V where a backend has it, which runs
            at twice the rate on GeForce GPUs; "auto" takes the one that suits the GPU.
        rotate: multiply smoothed Q and K by one Hadamard matrix (`quantize.rotation`): "auto" in the heads that gain
            by it in a sample of their tokens (`quantize.rotation_choice`), "on" in all, "off" in none, as in the paper.
            It halves the error where a few channels are large, and nearly everywhere in "4b", which then also gives
            every token of Q its own scale; it raises the error where channels are even. "auto" takes 10 to 60 us of a
            call on an H100; "given" avoids that: it takes an earlier call's choice from the tensor `rotated_heads`.
        pv: the format of P and V in "8b" and "4b": "fp8" (E4M3), "fp16", "int8" (P relative to its largest value in
            each block of 64 keys, integer sums), "mxfp8" (fp8 by block-scaled products, whose FP32 sums have the full
            rate on RTX 50), where a backend has it; "auto" takes the one that suits the GPU.
            In "precise" they have 16 bits, and "fp16" means the 16-bit dtype of V.

    Raises TypeError for a value of the wrong type, and ValueError for one that is not a choice, or that asks for
    quantization in mode "exact"; the message names the option.
    """

    mode: str = _option("8b", choices={"8b": 8, "4b": 4, "precise": 16, "exact": None, "auto": None}, argument="mode")
    smooth_v: bool = _option(False, argument="smooth_v")
    is_causal: bool = _option(False, argument="causal", per_call=True)
    scale: float | None = _option(None, argument="scale", per_call=True)
    layout: str = _option("BHND", choices=("BHND", "BNHD"), per_call=True)
    return_lse: bool = _option(False, per_call=True)
    pv_accumulator: str = _option("fp32", choices={"fp32": 32, "fp16": 16, "auto": None}, argument="pv_accumulator")
    rotate: str = _option("auto", choices={"auto": True, "on": True, "off": False, GIVEN: True}, argument="rotate")
    pv: str = _option("auto", choices={"auto": 0, "fp8": 1, "fp16": 2, "int8": 3, "mxfp8": 4}, argument="pv")

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"[SA-208] {name} must be True or False, got {type(value).__name__}")
        for name, expected in _QUANTIZATION_OPTIONS.items() if self.mode == EXACT else ():
            value = getattr(self, name)
            if value not in expected:
                raise ValueError(
                    f"[SA-208] {name} must be {' or '.join(map(repr, expected))} in mode 'exact', which quantizes "
                    f"nothing, got {value!r}"
                )
        if self.mode == AUTO and self.pv != AUTO:
            raise ValueError(f"[SA-208] pv must be 'auto' in mode 'auto', which decides it, got {self.pv!r}")
        if self.scale is None:
            return
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float)):
            raise TypeError(f"[SA-205] scale must be a number or None, got {type(self.scale).__name__}")
        # The scale must be positive, because the kernels take the row maximum before they scale.
        if not is_valid_scale(self.scale):
            raise ValueError(f"[SA-205] scale must be above 0 and at most 1e24, got {quoted(self.scale)}")

    @classmethod
    def of(cls, options: AttentionOptions | None, choices: Mapping[str, Any]) -> AttentionOptions:
        """`options`, or the defaults, with `choices` applied; TypeError for an unknown choice or another class."""
        for name in choices:
            if name not in NAMES:
                raise TypeError(f"[SA-208] unexpected keyword argument {name!r}; the options are {', '.join(NAMES)}")
        if options is None:
            return cls(**choices)
        if not isinstance(options, cls):
            raise TypeError(f"[SA-208] options must be an AttentionOptions or None, got {type(options).__name__}")
        changed = {name: value for name, value in choices.items() if value != getattr(options, name)}
        return replace(options, **changed) if changed else options

    @classmethod
    def of_model(cls, options: AttentionOptions | None, choices: Mapping[str, Any]) -> AttentionOptions:
        """As `of`, for all calls of a model: ValueError for an option that each call decides for itself."""
        chosen = cls.of(options, choices)
        for option in fields(cls):
            if option.metadata["per_call"] and getattr(chosen, option.name) != option.default:
                raise ValueError(
                    f"[SA-208] {option.name} cannot be chosen for a whole model: each of its calls decides it"
                )
        check_choice("rotate", chosen.rotate, ROTATIONS)
        return chosen

    def without_quantization(self) -> AttentionOptions:
        """The options of the same call in mode "exact", with the defaults for all quantization options."""
        kept = {name: getattr(self, name) for name in NAMES if name not in _QUANTIZATION_OPTIONS}
        return AttentionOptions(**{**kept, "mode": EXACT})

    def values(self) -> list[Any]:
        """The values in the order of the fields: `AttentionOptions(*values)` equals this one."""
        return [getattr(self, name) for name in NAMES]


NAMES = tuple(option.name for option in fields(AttentionOptions))
CHOICES: dict[str, Collection[str]] = {
    option.name: option.metadata["choices"] for option in fields(AttentionOptions) if option.metadata["choices"]
}
_FLAGS = tuple(option.name for option in fields(AttentionOptions) if isinstance(option.default, bool))
EXACT, AUTO = "exact", "auto"
# The quantization options, each with the values that mode "exact" accepts because they request no quantization.
_QUANTIZATION_OPTIONS: dict[str, tuple[Any, ...]] = {
    "smooth_v": (False,), "rotate": ("auto", "off"), "pv_accumulator": ("fp32", "auto"), "pv": ("auto",),
}  # fmt: skip
PV_FORMATS = tuple(pv for pv in CHOICES["pv"] if pv != AUTO)
FLOAT_PV = ("fp8", "fp16")  # every build has one of them for its quantizing modes, besides other formats
MODES = tuple(mode for mode in CHOICES["mode"] if mode not in (EXACT, AUTO))  # those that quantize
