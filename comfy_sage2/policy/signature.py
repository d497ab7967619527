"""By what a policy tells whether a model is the kind of model it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Signature:
    """The host's class of a model, and the sizes that the host read from its weights, by name."""

    model: str
    config: tuple[tuple[str, Scalar], ...]

    @classmethod
    def of(cls, model: str, config: Mapping[str, object]) -> Signature:
        """Of a model of class `model`; of its `config` the plain numbers, words and flags count."""
        plain = {name: value for name, value in config.items() if isinstance(value, (bool, int, float, str))}
        return cls(model, tuple(sorted(plain.items())))

    def differences(self, model: Signature) -> list[str]:
        """What differs between this signature, the policy's, and that of `model`; empty when they fit.

        A size that only one of them names does not count: host versions differ in what they write down.
        """
        if self.model != model.model:
            return [f"it was made for {self.model}, and the model is {model.model}"]
        found = dict(model.config)
        return [
            f"{name} is {value} in the policy and {found[name]} in the model"
            for name, value in self.config
            if name in found and found[name] != value
        ]

    def require(self, model: Signature) -> None:
        """Raise ValueError, naming every difference, unless a policy with this signature fits `model`."""
        differences = self.differences(model)
        if differences:
            raise ValueError(
                f"the policy does not fit this model: {'; '.join(differences)}. "
                "Calibrate this model, or load the policy that was made for it"
            )
