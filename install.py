"""Run by ComfyUI's manager after it has cloned the pack: tells what works here, and unpacks the kernels by that.

Nothing is installed and nothing is downloaded. The exit code is 0 whatever doctor says, because the nodes work, and say
why they are slow, on a machine without a usable kernel too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

# The Python of ComfyUI's Windows portable does not look for modules beside the script that it runs.
sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    say: Callable[[str], None] = print
    # The nodes load whatever is raised here, and the manager takes an error for a failed installation.
    try:
        from comfy_sage2 import command_line

        say = command_line.say
        command_line.print_any_letters()
        from comfy_sage2 import doctor

        doctor.main([])
    except ImportError as error:
        say(f"[comfy-sage2] run install.py with ComfyUI's own Python, {sys.executable} lacks something: {error}")
    except Exception as error:
        say(f"[comfy-sage2] what works here could not be found out: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
