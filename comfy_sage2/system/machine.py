"""Facts about this machine, for reports: Python, torch, the driver, GPUs. None of them identifies its owner."""

from __future__ import annotations

import ctypes
import platform
import re
import sys

import torch

_NVML_INIT_NO_GPUS = 1  # NVML_INIT_FLAG_NO_GPUS: start only the library, and wake up no GPU
_USUAL_WORDS = re.compile(r"^(NVIDIA |GeForce |Tesla )+|[ -](\d+ ?GB|SXM|PCI[eE]|HBM|NVL|Blackwell|Generation|GPU).*$")
_SYSTEM_FOLDER_ONLY = 0x800  # LOAD_LIBRARY_SEARCH_SYSTEM32


def python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def torch_build() -> str:
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"{torch.__version__}, {cuda}"


def device_name(device: torch.device) -> str:
    """The GPU's name, or which CPU architecture it is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def _driver_library(windows: str, linux: str) -> ctypes.CDLL:
    """Load a library of the driver; on Windows only from the system folder. OSError if it is missing."""
    return ctypes.CDLL(windows, winmode=_SYSTEM_FOLDER_ONLY) if sys.platform == "win32" else ctypes.CDLL(linux)


def loaded_driver() -> str | None:
    """The NVIDIA driver's version by its management library, within milliseconds; None if that does not answer."""
    try:
        library = _driver_library("nvml.dll", "libnvidia-ml.so.1")
        if library.nvmlInitWithFlags(_NVML_INIT_NO_GPUS) != 0:
            return None
        text = ctypes.create_string_buffer(80)
        answers = library.nvmlSystemGetDriverVersion(text, len(text)) == 0
        library.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return text.value.decode("ascii", errors="replace") if answers else None


def short_name(device: torch.device) -> str:
    """The GPU's name without its maker, memory and form: "H100", "RTX 4090"; "CPU"."""
    return _USUAL_WORDS.sub("", device_name(device)) if device.type == "cuda" else device.type.upper()


def devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]


def driver_cuda() -> tuple[int, int]:
    """The driver's newest CUDA, such as (13, 0). OSError if it does not load, RuntimeError if it does not answer."""
    library = _driver_library("nvcuda.dll", "libcuda.so.1")
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        raise RuntimeError(
            "[SA-101] the NVIDIA driver is installed but does not answer: restart the computer, then read its log"
        )
    return version.value // 1000, version.value % 1000 // 10


def reason_without_gpu() -> str:
    """Why this torch uses no GPU, and what to do; for machines on which `torch.cuda.is_available()` is False."""
    if torch.version.hip is not None:
        return (
            f"[SA-103] this torch is built for AMD GPUs (ROCm {torch.version.hip}), and the kernels are for NVIDIA GPUs"
        )
    if torch.version.cuda is None:
        return (
            f"[SA-103] torch {torch.__version__} is built without CUDA: on a machine with an NVIDIA GPU install a "
            "torch with CUDA into this Python (https://pytorch.org/get-started)"
        )
    try:
        supported = driver_cuda()
    except OSError:
        return (
            "[SA-101] no NVIDIA driver was found: install it; a container has to be started with access to the GPU "
            "(docker run --gpus all)"
        )
    except RuntimeError as error:
        return str(error)
    if supported[0] < int(torch.version.cuda.partition(".")[0]):
        return (
            "[SA-102] the NVIDIA driver is too old for this torch: it supports CUDA up to "
            f"{supported[0]}.{supported[1]}, and torch {torch.__version__} is built for CUDA {torch.version.cuda}; "
            "update the driver"
        )
    return (
        "[SA-103] the NVIDIA driver works, but torch finds no GPU: see whether nvidia-smi lists one, and whether the "
        "environment variable CUDA_VISIBLE_DEVICES hides it"
    )
