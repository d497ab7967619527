"""Facts about the modules of a model, read in one walk: there are thousands, and packs may change them at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .declared_attention import CHILD
from .packs import pack_of, replaced_methods

# Parts of the names that ComfyUI's models give to their cross-attention modules.
_CROSS = ("cross", "attn2")
_COMPILED = "_orig_mod"  # torch's name for the original module inside a compiled one


@dataclass(frozen=True)
class ModelModules:
    """Facts about the modules of a diffusion model.

    Attributes:
        declaring: the `comfy_attention` modules, into which ComfyUI reads the attention that a file asks for.
        replaced: other packs' functions that replace methods of single modules.
        have_hooks: a module has a torch hook around its forward function.
        cross_attend: a module is a cross-attention, by its name or class. True if the model is no torch module.
    """

    declaring: Sequence[torch.nn.Module] = ()
    replaced: Sequence[object] = ()
    have_hooks: bool = False
    cross_attend: bool = True

    @classmethod
    def of(cls, model: object) -> ModelModules:
        if not isinstance(model, torch.nn.Module):
            return cls()
        modules, seen, names = [model], {id(model)}, set[str]()
        declaring: list[torch.nn.Module] = []
        for module in modules:  # the list grows; torch's `modules`, a generator for each level, takes twice as long
            children = module._modules
            if not children:
                continue
            names.update(children.keys())  # of a TorchScript module the dictionary itself cannot be iterated over
            for name, child in children.items():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
                    if name == CHILD:
                        declaring.append(child)
        is_compiled = _COMPILED in names  # a compiled module has its own forward function
        plain = [module for module in modules if _COMPILED not in module._modules] if is_compiled else modules
        words = names.union(module_class.__name__ for module_class in set(map(type, modules)))
        return cls(
            declaring,
            [function for function in replaced_methods(plain) if not hasattr(function, "makes_slices")],
            any(module._forward_hooks or module._forward_pre_hooks for module in modules),
            any(part in word.lower() for word in words for part in _CROSS),
        )

    @property
    def pack(self) -> str | None:
        """The folder of a pack that replaced a module's method with its own function, or None."""
        owners = (pack_of(getattr(function, "__func__", function)) for function in self.replaced)
        return next(filter(None, owners), None)
