"""SageAttention2 attention for PyTorch: Q and K in INT8 or INT4, P and V in 8 bits, smoothed against outliers."""

import sys as _sys

__version__ = "1.0.0"
__all__ = ["AttentionOptions", "BlockMask", "Sparse", "UnsupportedError", "__version__", "attention", "explain"]


def _refuse_a_second_copy() -> None:
    """Raise ImportError if this library is imported under another name: both copies would define the same operators."""
    for name, module in list(_sys.modules.items()):
        if name != __name__ and name.rpartition(".")[2] == "comfy_sage2" and hasattr(module, "__version__"):
            raise ImportError(
                f"[SA-111] comfy_sage2 is imported already, as {name!r} from {module.__path__[0]}; the copy in "
                f"{__path__[0]} cannot be used beside it: remove one of the two folders"
            )


_refuse_a_second_copy()

try:
    from .attention import attention, explain
    from .block_mask import BlockMask
    from .dispatch.registry import UnsupportedError
    from .options import AttentionOptions
    from .sparsity.declared import Sparse
except Exception as error:  # torch is missing, or an unusual build of it raises anything
    # The kernel loader and the doctor still work, and ComfyUI's nodes say what is missing.
    _cause = error

    def __getattr__(name: str) -> object:
        if name in __all__:
            if isinstance(_cause, ModuleNotFoundError) and _cause.name == "torch":
                text = f"comfy_sage2.{name} needs torch, which this Python does not have"
                raise ModuleNotFoundError(text, name="torch") from _cause
            text = f"comfy_sage2.{name} could not be imported ({type(_cause).__name__}: {_cause})"
            raise ImportError(text) from _cause
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
