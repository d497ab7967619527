"""The figures of the SageAttention2 paper (arXiv 2411.10958), measured there on CogVideoX: table -> row -> accuracy."""

from __future__ import annotations

from comfy_sage2.metrics import Agreement

AVERAGE: dict[str, dict[str, Agreement]] = {
    "smoothing": {
        "None": Agreement(0.8004, 0.3906, 0.2223),
        "HadmdAttn": Agreement(0.7977, 0.3782, 0.2180),
        "SmoothAttn": Agreement(0.9021, 0.3383, 0.1952),
        "Smooth K": Agreement(0.9807, 0.1493, 0.0743),
        "Smooth Q": Agreement(0.9830, 0.1250, 0.0712),
        "Smooth Q+K": Agreement(0.9946, 0.0648, 0.0334),
    },
    "granularity": {
        "Per-token": Agreement(0.9945, 0.0649, 0.0335),
        "Per-thread": Agreement(0.9945, 0.0622, 0.0313),
        "Per-block": Agreement(0.9803, 0.1492, 0.0744),
        "Per-tensor": Agreement(0.9715, 0.1800, 0.0865),
    },
    "data_type": {
        "INT8": Agreement(0.7705, 0.5618, 0.5044),
        "E5M2": Agreement(0.9920, 0.0905, 0.0903),
        "E4M3": Agreement(0.9944, 0.0683, 0.0347),
        "FP16": Agreement(0.9945, 0.0649, 0.0335),
    },
    "smooth_v": {
        "without": Agreement(0.9825, 0.1980, 0.2387),
        "with": Agreement(0.9975, 0.0406, 0.0773),
    },
}
WORST: dict[str, dict[str, Agreement]] = {
    "smoothing": {
        "None": Agreement(0.0483, 0.9979, 0.7784),
        "HadmdAttn": Agreement(0.0485, 0.9978, 0.7785),
        "SmoothAttn": Agreement(0.6449, 0.9262, 0.7204),
        "Smooth K": Agreement(0.9086, 0.3565, 0.1464),
        "Smooth Q": Agreement(0.9310, 0.2989, 0.2195),
        "Smooth Q+K": Agreement(0.9671, 0.1956, 0.0779),
    },
    "granularity": {
        "Per-token": Agreement(0.9676, 0.1916, 0.0775),
        "Per-thread": Agreement(0.9672, 0.1932, 0.0776),
        "Per-block": Agreement(0.9068, 0.3615, 0.1490),
        "Per-tensor": Agreement(0.8585, 0.4687, 0.2261),
    },
    "data_type": {
        "INT8": Agreement(0.1952, 0.9579, 1.4483),
        "E5M2": Agreement(0.9494, 0.2327, 0.2361),
        "E4M3": Agreement(0.9670, 0.1956, 0.0779),
        "FP16": Agreement(0.9676, 0.1916, 0.0775),
    },
}
