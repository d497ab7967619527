"""INT4 Q and K without smoothing: the "None" row of the paper's smoothing table, and the base of two baselines."""

from dataclasses import replace

from comfy_sage2.options import AttentionOptions
from comfy_sage2.reference.options import ReferenceOptions

UNSMOOTHED_4B = replace(ReferenceOptions.of(AttentionOptions("4b", rotate="off")), smooth_q=False, smooth_k=False)
