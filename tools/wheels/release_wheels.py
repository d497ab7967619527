"""Put freshly built wheels into wheels/, with their checksums and the record of what they were built from.

    python -m tools.wheels.release_wheels [--wheelhouse build/wheelhouse]

The wheels of an architecture replace all that wheels/ had of it. Refuses to release what was built from sources that
are not committed.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import string
import subprocess
from pathlib import Path

import tomllib

from .. import kernel_table
from .stage_package import ROOT
from .wheel_folder import WHEELS, wheels_of

SOURCES = (
    "csrc",
    ":!csrc/*.md",
    ":!csrc/.clang-format",
    "packages/kernels",
    "tools/wheels/platform_wheels.py",
    "tools/wheels/stage_package.py",
    "tools/kernel_table.py",
)
MAX_FOLDER_BYTES = 22_000_000

README = string.Template("""\
# Kernel wheels

The compiled kernels that the pack loads by itself: it takes the wheel that fits the GPU and the platform, compares its
SHA-256 with `SHA256SUMS` and unpacks the module of the running Python once. Nothing here has to be installed by hand.

| wheel | for | MB |
| --- | --- | --- |
$rows

- Version $version, built from commit `$commit`.
- Tools: $tools.
- `make wheels` rebuilds them, `make wheels-verify` rebuilds them and compares them bit for bit with what lies here.
  How: `docs/dev/releasing.md`.
""")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def source_commit() -> str:
    """The last commit that changed what the wheels are made of. SystemExit when there are changes after it."""
    changed = _git("status", "--porcelain", "--", *SOURCES)
    if changed:
        raise SystemExit(f"commit the kernels' sources before releasing wheels of them:\n{changed}")
    return _git("log", "-1", "--format=%H", "--", *SOURCES)


def _readme(commit: str) -> str:
    rows = []
    for name in kernel_table.names():
        hardware = kernel_table.read(name).hardware
        rows += [f"| `{path.name}` | {hardware} | {path.stat().st_size / 1e6:.2f} |" for path in wheels_of(name)]
    template = tomllib.loads((ROOT / "packages" / "kernels" / "pyproject.toml.in").read_text())
    tools = [requirement.split(";")[0] for requirement in template["build-system"]["requires"]]
    return README.substitute(
        rows="\n".join(rows), version=kernel_table.version(), commit=commit, tools=", ".join(tools)
    )


def release(wheelhouse: Path) -> None:
    """Take over the wheels of the current version from `wheelhouse`. SystemExit when wheels/ would get too big."""
    commit = source_commit()
    WHEELS.mkdir(exist_ok=True)
    for name in kernel_table.names():
        built = [path for path in wheels_of(name, wheelhouse) if path.name.split("-")[1] == kernel_table.version()]
        for old in wheels_of(name) if built else []:
            old.unlink()
        for path in built:
            shutil.copyfile(path, WHEELS / path.name)
    wheels = sorted(WHEELS.glob("*.whl"))
    total = sum(path.stat().st_size for path in wheels)
    if total > MAX_FOLDER_BYTES:
        raise SystemExit(f"wheels/ would have {total / 1e6:.1f} MB, at most {MAX_FOLDER_BYTES / 1e6:.0f} MB are wanted")
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in wheels)
    (WHEELS / "SHA256SUMS").write_text("".join(sums))
    (WHEELS / "README.md").write_text(_readme(commit))
    print(f"{len(wheels)} wheels, {total / 1e6:.1f} MB, from commit {commit}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Put freshly built wheels into wheels/.")
    parser.add_argument("--wheelhouse", type=Path, default=ROOT / "build" / "wheelhouse")
    release(parser.parse_args().wheelhouse)


if __name__ == "__main__":
    main()
