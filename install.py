"""ComfyUI's manager runs this after it has cloned the pack: it tells what works here, which unpacks the kernels.

It installs and downloads nothing. The exit code is 0 whatever doctor says, because the nodes also work on a machine
without a usable kernel, and say why they are slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

# The Python of ComfyUI's Windows portable does not look for modules beside the script that it runs.
sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    say: Callable[[str], None] = print
    # The nodes load even if this fails, but the manager would take an error for a failed installation.
    try:
        from comfy_sage2 import command_line

        say = command_line.say
        command_line.print_any_letters()
        from comfy_sage2 import doctor

        doctor.main([])
    except ImportError as error:
        say(f"[comfy-sage2] run install.py with ComfyUI's own Python; {sys.executable} lacks something: {error}")
    except Exception as error:
        say(f"[comfy-sage2] could not determine what works here: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
