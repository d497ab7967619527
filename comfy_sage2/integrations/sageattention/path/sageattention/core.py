"""Where `sageattention` 2.x has its functions: some packs import them from here. Its quantization is not offered."""

from . import *  # noqa: F403
