"""`python -m comfy_sage2 doctor`: what this machine has, which kernels would run each mode, and why the rest cannot.

The last line is the verdict: what works, or why nothing does and what to do about it.

Needs nothing beyond the standard library and torch. Exit status 0 when an accelerated backend can run, else 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from . import __version__, explain
from .autotune.cost_model import TunedChoices
from .backends import self_test
from .backends.kernels import KERNELS
from .backends.peers import PEERS
from .command_line import Parser, say
from .dispatch import registry
from .dispatch.plan import OTHER_GPU
from .integrations.sageattention import offer
from .kernels import loader
from .options import MODES
from .system import machine
from .system.machine import devices
from .timing.measure import measure_now, remembered

_LABEL_WIDTH = 25
_WITHOUT_DRIVER = "[SA-101]"
_WRONG_CHOICE = "[SA-601]"


@dataclass(frozen=True)
class Verdict:
    """Accelerated backend -> None if it can run an ordinary call, else why not, in order of preference."""

    device: str
    mode: str
    reasons: dict[str, str | None]

    @property
    def chosen(self) -> str | None:
        return next((name for name, reason in self.reasons.items() if reason is None), None)


def _driver() -> str:
    try:
        major, minor = machine.driver_cuda()
    except OSError as error:
        return f"not found ({error})"
    return f"{machine.loaded_driver() or 'version unknown'}, supports CUDA up to {major}.{minor}"


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )


def _kernel(architecture: str) -> str:
    reason = loader.reason_unavailable(architecture)
    try:
        module = loader.load(architecture)
    except loader.KernelUnavailable:
        return f"cannot be used: {reason}"
    about = f"{loader.describe(module)}, for {module.target}"
    if reason is None:
        return f"ready: {about}"
    if reason.startswith(_WITHOUT_DRIVER):  # the driver's own line says why, once for all kernels
        return f"needs an NVIDIA driver ({about})"
    return f"cannot be used: {reason} ({about})"


def _capability(device: torch.device) -> tuple[int, int] | None:
    try:
        return torch.cuda.get_device_capability(device)
    except RuntimeError:  # a GPU that CUDA cannot start; its own line says why
        return None


def _self_test_lines() -> Iterator[str]:
    """Test each module that is for a GPU of this machine."""
    for device in devices():
        for backend in KERNELS if device.type == "cuda" else ():
            is_for = _capability(device) in backend.capabilities
            if is_for and backend.availability() is None:
                test = partial(self_test.test_now, backend.name, device.index, backend.variants)
                yield _line(f"{backend.name} on {device}", _guarded(lambda test=test: test().text))


def _guarded(probe: Callable[..., str], *arguments: object) -> str:
    """The result of a probe or its error, because a probe that fails must not hide the rest."""
    try:
        return probe(*arguments)
    except (OSError, RuntimeError, AttributeError, AssertionError, ImportError, ValueError) as error:
        return f"unknown: {type(error).__name__}: {error}"


def _verdict(device: torch.device, mode: str) -> Verdict:
    """The verdict on a call that every kernel supports: float16, head_dim 128, no mask."""
    accelerated = [backend.name for backend in registry.kernels()]
    try:
        q = torch.empty(1, 8, 1024, 128, dtype=torch.float16, device=device)
    except RuntimeError as error:
        return Verdict(str(device), mode, dict.fromkeys(accelerated, f"torch cannot use {device}: {error}"))
    reasons = explain(q, q, q, mode=mode)
    return Verdict(str(device), mode, {name: reasons[name] for name in accelerated})


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}{text}"


def _machine_lines() -> Iterator[str]:
    yield "machine"
    yield _line("Python", _guarded(machine.python))
    yield _line("torch", _guarded(machine.torch_build))
    yield _line("NVIDIA driver", _guarded(_driver))
    gpus = [device for device in devices() if device.type == "cuda"]
    for device in gpus:
        yield _line(f"GPU {device.index}", _guarded(_gpu, device.index))
    if not gpus:
        yield _line("GPU", "none that this torch can use")


def _verdict_lines(verdicts: list[Verdict]) -> Iterator[str]:
    """The backend of each mode on one device. Modes with the same verdict share a line."""
    by_reasons: dict[tuple[tuple[str, str | None], ...], list[Verdict]] = {}
    for verdict in verdicts:
        by_reasons.setdefault(tuple(verdict.reasons.items()), []).append(verdict)
    for group in by_reasons.values():
        first = group[0]
        modes = ", ".join(verdict.mode for verdict in group)
        yield _line(f"{first.device}, {modes}", first.chosen or "no kernel: the nodes leave the model as it is")
        by_reason: dict[str, list[str]] = {}
        for name, reason in first.reasons.items():
            if reason is not None:
                by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            yield _line("", f"{', '.join(names)} cannot: {reason}")


def _cause(device: str, verdicts: list[Verdict]) -> str:
    """Why no kernel runs on a device: without a GPU the machine's reason, else that of the kernels for this GPU."""
    if device == "cpu":
        return _guarded(machine.reason_without_gpu)
    reasons = [reason for verdict in verdicts for reason in verdict.reasons.values() if reason is not None]
    reasons.sort(key=lambda reason: reason.startswith(OTHER_GPU))
    return reasons[0] if reasons else "this installation has no kernels: update or reinstall the pack"


def conclusion(verdicts: list[Verdict]) -> str:
    parts = []
    for device in dict.fromkeys(verdict.device for verdict in verdicts):
        on_device = [verdict for verdict in verdicts if verdict.device == device]
        modes_by_kernel: dict[str, list[str]] = {}
        for verdict in on_device:
            if verdict.chosen is not None:
                modes_by_kernel.setdefault(verdict.chosen, []).append(verdict.mode)
        parts += [f"{kernel} runs {', '.join(modes)} on {device}" for kernel, modes in modes_by_kernel.items()]
        if not modes_by_kernel:
            where = "this machine" if device == "cpu" else device
            parts.append(
                f"no kernel runs on {where}, so models on it keep ComfyUI's own attention. "
                f"Cause: {_cause(device, on_device)}"
            )
    return f"verdict: {'; '.join(parts)}"


def _measured_lines(measure: Callable[[int], TunedChoices | None]) -> Iterator[str]:
    """The table of each GPU. `measure` returns the GPU's choices, or None if it was not measured yet."""

    def table(index: int) -> str:
        choices = measure(index)
        return (
            "not yet: the first run of a node measures it, and so does doctor --measure"
            if choices is None
            else "\n".join(choices.lines())
        )

    for device in devices():
        for line in _guarded(table, device.index).splitlines() if device.type == "cuda" else ():
            yield _line(str(device), line)


def _peer_lines() -> Iterator[str]:
    for peer in PEERS:
        yield _line(peer.name, _guarded(lambda peer=peer: peer.availability() or f"ready: version {peer.version}"))


def _other_packs() -> str:
    if offer.other_package() is not None:
        return f"the {offer.NAME} that is installed in this Python"
    backend, reason = offer.serving()
    if backend is None:
        why = reason if reason is not None and reason.startswith(_WRONG_CHOICE) else "no kernel runs here"
        return f"nothing: no {offer.NAME} is installed, and this pack cannot take its place: {why}"
    return f"{backend}, if you start ComfyUI with --use-sage-attention or switch on the pack's setting"


def report(verdicts: list[Verdict], measure: Callable[[int], TunedChoices | None]) -> str:
    """The text that the command prints. `measure`: as for `_measured_lines`."""
    lines = [f"comfy_sage2 {__version__}", *_machine_lines(), "kernels"]
    accelerated = [backend.name for backend in registry.kernels()]
    for name in accelerated:
        lines.append(_line(name, _guarded(_kernel, name)))
        passed_over = loader.ignored(name)
        if passed_over is not None:
            lines.append(_line("", passed_over))
    lines += ["self-test of the kernels", *(list(_self_test_lines()) or [_line("none", "no kernels for a GPU here")])]
    lines += ["attentions of other packages", *_peer_lines()]
    lines += ["measured speed", *(list(_measured_lines(measure)) or [_line("none", "no GPU here")])]
    lines += [f"packs that import {offer.NAME}", _line("computed by", _guarded(_other_packs))]
    lines.append("backend for each mode (float16, head_dim 128)")
    for device in dict.fromkeys(verdict.device for verdict in verdicts):
        lines += _verdict_lines([verdict for verdict in verdicts if verdict.device == device])
    lines.append(conclusion(verdicts))
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = Parser(prog="python -m comfy_sage2 doctor", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure every GPU again, in a few seconds each")
    options = parser.parse_args(arguments)
    times = measure_now if options.measure else remembered
    verdicts = [_verdict(device, mode) for device in devices() for mode in MODES]
    say(report(verdicts, times))
    return 0 if any(verdict.chosen for verdict in verdicts) else 1
