"""SageAttention2 attention for PyTorch: Q and K in INT8 or INT4, P and V in FP8, smoothed against channel outliers."""

__version__ = "0.1.0"
__all__ = ["UnsupportedError", "__version__", "attention", "explain"]

try:
    from .attention import attention, explain
    from .registry import UnsupportedError
except ModuleNotFoundError as missing:
    # Without torch the loader of the kernels still works, and the doctor says what is missing.
    if missing.name != "torch":
        raise

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise ModuleNotFoundError(f"comfy_sage2.{name} needs torch, which this Python does not have", name="torch")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
