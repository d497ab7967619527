"""By what a policy tells whether a model is the kind of model it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..text import quoted

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Signature:
    """ComfyUI's class of a model, and the sizes that ComfyUI read from its weights, by name."""

    model: str
    config: tuple[tuple[str, Scalar], ...]

    @classmethod
    def of(cls, model: str, config: Mapping[str, object]) -> Signature:
        """Of a model of class `model`; of its `config` the plain numbers, words and flags count."""
        plain = {name: value for name, value in config.items() if isinstance(value, (bool, int, float, str))}
        return cls(model, tuple(sorted(plain.items())))

    def differences(self, model: Signature) -> list[str]:
        """What differs between this signature, the policy's, and that of `model`; empty when they fit.

        A size that only one of them names does not count: versions of ComfyUI differ in what they write down.
        """
        if self.model != model.model:
            return [f"it was made for {quoted(self.model)}, and the model is {quoted(model.model)}"]
        found = dict(model.config)
        return [
            f"{name} is {quoted(value)} in the policy and {quoted(found[name])} in the model"
            for name, value in self.config
            if name in found and found[name] != value
        ]

    def require(self, model: Signature) -> None:
        """Raise ValueError, naming every difference, unless a policy with this signature fits `model`."""
        differences = self.differences(model)
        if differences:
            raise ValueError(
                f"[SA-503] the policy does not fit this model: {'; '.join(differences)}. "
                "Calibrate this model, or load the policy that was made for it"
            )
