"""A policy as JSON text: schema, version, and a check of every field with a message that names it."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

from .plan import FULL, QUANTISED
from .policy import Cell, Policy
from .signature import Signature
from .targets import TARGETS

SCHEMA = "comfy_sage2.policy"
VERSION = 1
MODES = (*QUANTISED, FULL)
_LARGEST = sys.float_info.max
LONGEST = 4_000_000  # characters; a policy for a hundred layers has some thirty thousand


def to_text(policy: Policy) -> str:
    """The policy as JSON, one attention layer a line."""
    head = {
        "schema": SCHEMA,
        "version": VERSION,
        "model": {"class": policy.signature.model, "config": dict(policy.signature.config)},
        "target": policy.target,
        "bounds": list(policy.bounds),
    }
    rows = [
        json.dumps({"head_dim": head_dim, "cells": [_cell(cell) for cell in cells]}, allow_nan=False)
        for head_dim, cells in zip(policy.layers, policy.cells, strict=True)
    ]
    lines = [f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}," for name, value in head.items()]
    return "\n".join(["{", *lines, ' "layers": [', ",\n".join(f"  {row}" for row in rows), " ]", "}"]) + "\n"


def _cell(cell: Cell) -> dict[str, Any]:
    fields: dict[str, Any] = {"mode": cell.mode, "smooth_v": cell.smooth_v}
    if cell.cosine is not None and cell.relative_l1 is not None:
        fields |= {"cosine": round(cell.cosine, 6), "relative_l1": round(cell.relative_l1, 6)}
    return fields


def from_text(text: str) -> Policy:
    """The policy in `text`; raises ValueError that names the field, what was expected and what came."""
    if len(text) > LONGEST:
        raise ValueError(f"a policy has at most {LONGEST} characters, got {len(text)}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise ValueError(
            f"the policy is no JSON ({error}): paste the whole text that SageAttention2 Make Policy gave"
        ) from error
    document = _object(document, "the policy")
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema must be {SCHEMA!r}, got {document.get('schema')!r}: this is no SageAttention2 policy")
    if document.get("version") != VERSION:
        raise ValueError(
            f"version must be {VERSION}, got {document.get('version')!r}: the policy was written by another version of "
            "the pack; update the pack or calibrate again"
        )
    model = _object(_field(document, "model", "the policy"), "model")
    name = _field(model, "class", "model")
    if not isinstance(name, str):
        raise ValueError(f"model.class must be a text, got {name!r}")
    config = _object(_field(model, "config", "model"), "model.config")
    target = _field(document, "target", "the policy")
    if not isinstance(target, str) or target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(map(repr, TARGETS))}, got {target!r}")
    bounds = _bounds(_field(document, "bounds", "the policy"))
    rows = _list(_field(document, "layers", "the policy"), "layers")
    if not rows:
        raise ValueError("layers must name at least one attention layer, got none")
    layers = [_layer(row, f"layers[{index}]", len(bounds) - 1) for index, row in enumerate(rows)]
    return Policy(
        Signature.of(name, config),
        target,
        bounds,
        tuple(head_dim for head_dim, _ in layers),
        tuple(cells for _, cells in layers),
    )


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {type(value).__name__}")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a JSON list, got {type(value).__name__}")
    return value


def _field(holder: dict[str, Any], name: str, of: str) -> Any:
    if name not in holder:
        raise ValueError(f"{of} lacks {name!r}; it has {', '.join(map(repr, holder)) or 'nothing'}")
    return holder[name]


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _bounds(value: object) -> tuple[float, ...]:
    bounds = tuple(_number(entry, f"bounds[{index}]") for index, entry in enumerate(_list(value, "bounds")))
    ascending = all(low < high for low, high in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0.0 or bounds[-1] != 1.0 or not ascending:
        raise ValueError(f"bounds must ascend from 0 to 1, got {list(bounds)}")
    return bounds


def _layer(value: object, name: str, parts: int) -> tuple[int, tuple[Cell, ...]]:
    row = _object(value, name)
    head_dim = _field(row, "head_dim", name)
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1:
        raise ValueError(f"{name}.head_dim must be a positive integer, got {head_dim!r}")
    cells = _list(_field(row, "cells", name), f"{name}.cells")
    if len(cells) != parts:
        raise ValueError(f"{name}.cells must have {parts} entries, one for each part of bounds, got {len(cells)}")
    return head_dim, tuple(_read_cell(cell, f"{name}.cells[{index}]") for index, cell in enumerate(cells))


def _read_cell(value: object, name: str) -> Cell:
    cell = _object(value, name)
    mode, smooth_v = _field(cell, "mode", name), _field(cell, "smooth_v", name)
    if mode not in MODES:
        raise ValueError(f"{name}.mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    if not isinstance(smooth_v, bool):
        raise ValueError(f"{name}.smooth_v must be true or false, got {smooth_v!r}")
    if "cosine" not in cell and "relative_l1" not in cell:
        return Cell(mode, smooth_v)
    return Cell(
        mode,
        smooth_v,
        _number(_field(cell, "cosine", name), f"{name}.cosine"),
        _number(_field(cell, "relative_l1", name), f"{name}.relative_l1"),
    )
