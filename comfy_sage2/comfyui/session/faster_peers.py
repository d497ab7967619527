"""What the node says of other packages' attentions that were measured to be faster than its mode on this GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...autotune.accumulators import resolved
from ...autotune.cost_model import TunedChoices
from ...autotune.store import choices_of
from ...autotune.timings import Candidate, Work
from ...call.signature import CallSignature
from ...dispatch import registry
from ...options import EXACT
from ..settings import ALWAYS, AUTO, FASTEST, SPARSE_OFF, Settings


def notes_on_peers(device: torch.device, settings: Settings, backend: str | None) -> tuple[str, ...]:
    """One for each package whose attention was faster in some call that was timed, and whether it serves such calls.

    backend: of the node's mode; None where none serves it.
    """
    choices = choices_of(device)
    if choices is None or backend is None or settings.backend != AUTO or settings.mode in (EXACT, "off"):
        return ()
    options, mine = settings.options(settings.mode), {}
    for head_dim in choices.head_dims:
        call = CallSignature.minimal(device, resolved(options, device, torch.bfloat16, head_dim))
        mine[head_dim] = Candidate.of(backend, registry.get(backend).settled(call).options)
    notes = [_note(choices, mine, peer, settings) for peer in choices.peers]
    return tuple(note for note in notes if note is not None)


def _note(choices: TunedChoices, mine: Mapping[int, Candidate], peer: Candidate, settings: Settings) -> str | None:
    """mine: by head_dim what the node takes."""
    works = [work for candidate, work in choices.times.seconds if candidate == mine[work.head_dim]]
    beside_exact = settings.when != ALWAYS
    ratios = {work: _ratio(choices, mine[work.head_dim], peer, work, beside_exact=beside_exact) for work in works}
    faster = {work: ratio for work, ratio in ratios.items() if ratio > 1.0 + choices.margin}
    if not faster:
        return None
    fastest = max(faster, key=faster.__getitem__)
    own = mine[fastest.head_dim]
    error, own_error = (choices.error(candidate, fastest.head_dim) for candidate in (peer, own))
    known = error is not None and own_error is not None
    shown = f"; its relative L2 error is {error:.3f}, and that of {own.words} is {own_error:.3f}" if known else ""
    text = (
        f"{peer.words} was measured to be up to {faster[fastest]:.2f} times as fast as {own.words} on this GPU, in "
        f"{len(faster)} of {len(works)} calls{shown}."
    )
    if settings.when == ALWAYS:
        return (
            f"[SA-320] {text} Choose 'where it is faster' under 'when to quantize' to let it compute them where it is "
            "as exact"
        )
    if settings.sparse != SPARSE_OFF:
        return f"[SA-320] {text} It skips no key blocks, so it computes nothing while `sparse` is on"
    is_no_less_exact = all(choices.is_no_less_exact(peer, mine[work.head_dim], work.head_dim) for work in faster)
    if settings.when == FASTEST or is_no_less_exact:
        return f"[SA-319] {text} It computes the calls for which it is faster"
    return (
        f"[SA-320] {text} It is less exact on some inputs. Choose 'whatever is fastest' under 'when to quantize' to "
        "let it compute them all"
    )


def _ratio(choices: TunedChoices, mine: Candidate, peer: Candidate, work: Work, *, beside_exact: bool) -> float:
    """How many times as fast the peer was as what the node takes without it; 0 where it was not timed."""
    seconds = choices.times.seconds
    rivals = [
        value
        for (candidate, timed_work), value in seconds.items()
        if timed_work == work and (candidate == mine or (beside_exact and candidate.mode == EXACT))
    ]
    return min(rivals) / seconds[peer, work] if (peer, work) in seconds else 0.0
