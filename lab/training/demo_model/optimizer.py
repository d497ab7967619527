"""The optimizer of both models: Muon for weight matrices, AdamW for the rest.

Muon (Jordan et al., 2024) replaces a matrix's momentum by the nearest matrix with equal singular values, found by a few
steps of a Newton-Schulz iteration. Convolution weights count as matrices of (outputs, everything else).
"""

from __future__ import annotations

from collections import defaultdict

import torch

_MOMENTUM = 0.95
_ITERATION = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_ADAM_RMS = 0.2  # the root mean square of AdamW's usual update: with it one learning rate serves both


class Muon(torch.optim.Optimizer):
    """Muon over parameters of two or more axes; those of one shape are orthogonalised together."""

    def __init__(self, parameters: list[torch.Tensor], learning_rate: float, weight_decay: float):
        super().__init__(parameters, {"lr": learning_rate, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no line searches
        """One update from the gradients in place."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                alike[parameter.shape].append(parameter)
            for parameters in alike.values():
                self._update(parameters, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[torch.Tensor], rate: float, weight_decay: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum"] for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, _MOMENTUM)  # Nesterov's
        stacked = torch.stack([update.flatten(1) for update in ahead])
        updates = _orthogonalised(stacked) * (_ADAM_RMS * max(stacked.shape[1:]) ** 0.5)
        changes = [update.view_as(parameter) for parameter, update in zip(parameters, updates, strict=True)]
        torch._foreach_mul_(parameters, 1 - rate * weight_decay)
        torch._foreach_sub_(parameters, changes, alpha=rate)


def _orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """(count, rows, columns) to matrices of the same singular vectors whose singular values are all near 1."""
    wide = matrices.shape[1] <= matrices.shape[2]
    x = (matrices if wide else matrices.mT).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = _ITERATION
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    result: torch.Tensor = (x if wide else x.mT).float()
    return result
