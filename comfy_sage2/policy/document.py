"""A policy as JSON text: schema, version, and a check of every field with a message that names it."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

from ..options import AttentionOptions, rotation_of
from ..text import check_line, quoted
from .calibrated import COMPUTE_ALL, SKIP, SPARSE, Cell, Policy
from .signature import Scalar, Signature
from .targets import TARGETS

SCHEMA = "comfy_sage2.policy"
FULL = "full"  # the mode of a cell in full precision
# Each version of the document, and the modes that it came with. A policy is written in the first version that has what
# it holds, so that packs of that time can read it.
MODES: dict[int, tuple[str, ...]] = {1: ("8b", "4b", FULL), 2: ("precise",), 3: (), 4: (), 5: (), 6: ()}
NAMED = 3  # from this version on layers may have names
SKIPS = 4  # from this version on there may be skipped blocks, and layers of either kind
BOUNDED = 5  # from this version on they may be by a bound of each head
BY_HEAD = 6  # from this version on each head may be rotated or not
LONGEST = 4_000_000  # characters; a policy for a hundred layers has some thirty thousand
LONGEST_LINE = 200  # characters of a name or a value
LONGEST_NAME = 80  # characters of a layer's name
MOST_SIZES = 200  # entries of model.config
MOST_PARTS = 1000  # of the steps
MOST_LAYERS = 4096
MOST_CELLS = 100_000  # layers times parts
_LARGEST = sys.float_info.max


def to_text(policy: Policy) -> str:
    """The policy as JSON, one attention layer a line."""
    head = {
        "schema": SCHEMA,
        "version": _version(policy),
        "model": {"class": policy.signature.model, "config": dict(policy.signature.config)},
        "target": policy.target,
        "bounds": list(policy.bounds),
        **({} if policy.rotate == "off" else {"rotate": True if policy.rotate == "on" else policy.rotate}),
        **({"skip": policy.skip} if policy.skip != COMPUTE_ALL else {}),
        **({"sparse": policy.sparse} if policy.sparse != COMPUTE_ALL else {}),
    }
    names = [{"name": name} for name in policy.names] or [{}] * len(policy.layers)
    rows = [
        json.dumps({**name, "head_dim": head_dim, "cells": [_cell(cell) for cell in cells]}, allow_nan=False)
        for name, head_dim, cells in zip(names, policy.layers, policy.cells, strict=True)
    ]
    lines = [f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}," for name, value in head.items()]
    return "\n".join(["{", *lines, ' "layers": [', ",\n".join(f"  {row}" for row in rows), " ]", "}"]) + "\n"


def _version(policy: Policy) -> int:
    if policy.rotate == "auto":
        return BY_HEAD
    if policy.sparse != COMPUTE_ALL:
        return BOUNDED
    if policy.skip != COMPUTE_ALL:
        return SKIPS
    if policy.names:
        return NAMED
    used = {cell.options.mode if cell.options else FULL for row in policy.cells for cell in row}
    return max(version for version, modes in MODES.items() if used.intersection(modes))


def _cell(cell: Cell) -> dict[str, Any]:
    if cell.options is None:
        return {"mode": FULL, "smooth_v": False}
    fields: dict[str, Any] = {"mode": cell.options.mode, "smooth_v": cell.options.smooth_v}
    if cell.cosine is not None and cell.relative_l1 is not None:
        fields |= {"cosine": round(cell.cosine, 6), "relative_l1": round(cell.relative_l1, 6)}
    return fields


def from_text(text: str) -> Policy:
    """The policy in `text`; raises ValueError that names the field, what was expected and what came."""
    if len(text) > LONGEST:
        raise ValueError(f"[SA-501] a policy has at most {LONGEST} characters, got {len(text)}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise ValueError(
            f"[SA-501] the policy is not JSON ({error}): paste the whole text that SageAttention2 Make Policy gave"
        ) from error
    document = _object(document, "the policy")
    if document.get("schema") != SCHEMA:
        raise ValueError(
            f"[SA-502] schema must be {SCHEMA!r}, got {quoted(document.get('schema'))}: this is not a SageAttention2 "
            "policy"
        )
    version = document.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version not in MODES:
        raise ValueError(
            f"[SA-502] version must be one of {', '.join(map(str, MODES))}, got {quoted(version)}: the policy was "
            "written by another version of the pack; update the pack or calibrate again"
        )
    modes = tuple(mode for since, added in MODES.items() if since <= version for mode in added)
    model = _object(_field(document, "model", "the policy"), "model")
    name = check_line("[SA-501] model.class", _field(model, "class", "model"), LONGEST_LINE)
    config = _config(_object(_field(model, "config", "model"), "model.config"))
    target = _field(document, "target", "the policy")
    if not isinstance(target, str) or target not in TARGETS:
        raise ValueError(f"[SA-501] target must be one of {', '.join(map(repr, TARGETS))}, got {quoted(target)}")
    bounds = _bounds(_field(document, "bounds", "the policy"))
    rotate = document.get("rotate", False)  # of later packs
    if not (isinstance(rotate, bool) or (version >= BY_HEAD and rotate == "auto")):
        raise ValueError(
            f"[SA-501] rotate must be true, false or from version {BY_HEAD} on 'auto', got {quoted(rotate)}"
        )
    skip = _level(document, "skip", SKIP) if version >= SKIPS else COMPUTE_ALL
    sparse = _level(document, "sparse", SPARSE) if version >= BOUNDED else COMPUTE_ALL
    rows = _list(_field(document, "layers", "the policy"), "layers")
    if not rows:
        raise ValueError("[SA-501] layers must name at least one attention layer, got none")
    cells = len(rows) * (len(bounds) - 1)
    for kind, count, most in (("layers", len(rows), MOST_LAYERS), ("cells", cells, MOST_CELLS)):
        if count > most:
            raise ValueError(f"[SA-501] a policy has at most {most} {kind}, got {count}")
    layers = [_layer(row, f"layers[{index}]", len(bounds) - 1, modes) for index, row in enumerate(rows)]
    return Policy(
        Signature.of(name, config),
        target,
        bounds,
        tuple(head_dim for head_dim, _ in layers),
        tuple(cells for _, cells in layers),
        rotation_of(rotate),
        _names(rows) if version == NAMED or (version > NAMED and any("name" in row for row in rows)) else (),
        skip,
        sparse,
    )


def _level(document: dict[str, Any], name: str, levels: tuple[str, ...]) -> str:
    level = document.get(name, COMPUTE_ALL)
    if not isinstance(level, str) or level not in levels:
        raise ValueError(f"[SA-501] {name} must be one of {', '.join(map(repr, levels))}, got {quoted(level)}")
    return level


def _names(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    names: dict[str, int] = {}
    for index, row in enumerate(rows):
        field = f"layers[{index}]"
        name = check_line(f"[SA-501] {field}.name", _field(row, "name", field), LONGEST_NAME)
        if name in names:
            raise ValueError(
                f"[SA-501] {field}.name must differ from that of layers[{names[name]}], got {quoted(name)}"
            )
        names[name] = index
    return tuple(names)


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"[SA-501] {name} must be a JSON object, got {type(value).__name__}")
    return value


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"[SA-501] {name} must be a JSON list, got {type(value).__name__}")
    return value


def _field(holder: dict[str, Any], name: str, of: str) -> Any:
    if name not in holder:
        raise ValueError(f"[SA-501] {of} lacks {name!r}; it has {quoted(list(holder)) if holder else 'nothing'}")
    return holder[name]


def _config(config: dict[str, Any]) -> dict[str, Scalar]:
    """The model's sizes; a size is a number, a flag or one line of text."""
    if len(config) > MOST_SIZES:
        raise ValueError(f"[SA-501] model.config must have at most {MOST_SIZES} entries, got {len(config)}")
    for name, value in config.items():
        check_line("[SA-501] a name in model.config", name, LONGEST_LINE)
        if isinstance(value, str):
            check_line(f"[SA-501] model.config.{name}", value, LONGEST_LINE)
        elif not isinstance(value, bool):
            _number(value, f"model.config.{name}")
    return config


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise ValueError(f"[SA-501] {name} must be a finite number, got {quoted(value)}")
    return float(value)


def _bounds(value: object) -> tuple[float, ...]:
    entries = _list(value, "bounds")
    if len(entries) > MOST_PARTS + 1:
        raise ValueError(f"[SA-501] bounds must divide the steps in at most {MOST_PARTS} parts, got {len(entries) - 1}")
    bounds = tuple(_number(entry, f"bounds[{index}]") for index, entry in enumerate(entries))
    ascending = all(low < high for low, high in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0.0 or bounds[-1] != 1.0 or not ascending:
        raise ValueError(f"[SA-501] bounds must ascend from 0 to 1, got {quoted(list(bounds))}")
    return bounds


def _layer(value: object, name: str, parts: int, modes: tuple[str, ...]) -> tuple[int, tuple[Cell, ...]]:
    row = _object(value, name)
    head_dim = _field(row, "head_dim", name)
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1:
        raise ValueError(f"[SA-501] {name}.head_dim must be a positive integer, got {quoted(head_dim)}")
    cells = _list(_field(row, "cells", name), f"{name}.cells")
    if len(cells) != parts:
        raise ValueError(
            f"[SA-501] {name}.cells must have {parts} entries, one for each part of bounds, got {len(cells)}"
        )
    return head_dim, tuple(_read_cell(cell, f"{name}.cells[{index}]", modes) for index, cell in enumerate(cells))


def _read_cell(value: object, name: str, modes: tuple[str, ...]) -> Cell:
    cell = _object(value, name)
    mode, smooth_v = _field(cell, "mode", name), _field(cell, "smooth_v", name)
    if mode not in modes:
        raise ValueError(f"[SA-501] {name}.mode must be one of {', '.join(map(repr, modes))}, got {quoted(mode)}")
    if not isinstance(smooth_v, bool):
        raise ValueError(f"[SA-501] {name}.smooth_v must be true or false, got {quoted(smooth_v)}")
    options = None if mode == FULL else AttentionOptions(mode=mode, smooth_v=smooth_v)
    if "cosine" not in cell and "relative_l1" not in cell:
        return Cell(options)
    return Cell(
        options,
        _number(_field(cell, "cosine", name), f"{name}.cosine"),
        _number(_field(cell, "relative_l1", name), f"{name}.relative_l1"),
    )
