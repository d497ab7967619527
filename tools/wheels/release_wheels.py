"""Put freshly built wheels into wheels/, with their checksums and a record of what they were built from.

    python -m tools.wheels.release_wheels [--wheelhouse build/wheelhouse]

The wheel of an architecture, or of a platform's host modules, replaces the earlier one in wheels/. An earlier wheel
that differs only in its version stays, so that a clone does not fetch the same bytes again. Refuses to release wheels
while their sources have uncommitted changes.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import string
import subprocess
import zipfile
from pathlib import Path

import tomllib

from .. import kernel_table
from .stage_package import ROOT
from .wheel_folder import HOST, WHEELS, wheels_of

# The sources of the wheels. The ids of their git trees, which survive a rebase, identify a release.
TREES = ("csrc", "packages")
_TOOLS = ("tools/wheels/split_wheels.py", "tools/wheels/stage_package.py", "tools/kernel_table.py")
MAX_FOLDER_BYTES = 7_000_000

README = string.Template("""\
# Kernel wheels

The compiled kernels that the pack loads by itself: it takes the wheel with the device images for the GPU and the one
with the launch code for the system, compares their SHA-256 with `SHA256SUMS`, and unpacks the module of the
running Python once. Nothing here has to be installed by hand.

| wheel | for | MB |
| --- | --- | --- |
$rows

- Built from the git trees $trees. A wheel keeps its version until something else in it changes.
- Tools: $tools.
- `make wheels` rebuilds them, `make wheels-verify` rebuilds them and compares them bit for bit with what lies here.
  How: `docs/dev/releasing.md`.
""")


def git(*arguments: str, root: Path | None = None) -> str:
    """The output of a git command. CalledProcessError when it fails."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root or ROOT, check=True, capture_output=True, text=True).stdout.strip()


def source_trees() -> dict[str, str]:
    """The ids of the trees that the wheels are built from. SystemExit when there are uncommitted changes."""
    changed = git("status", "--porcelain", "--", *TREES, *_TOOLS)
    if changed:
        raise SystemExit(f"commit the kernels' sources before releasing wheels built from them:\n{changed}")
    return {name: git("rev-parse", f"HEAD:{name}") for name in TREES}


def recorded_trees(folder: Path) -> dict[str, str]:
    """The trees that the wheels in a folder were built from, by its README.md. SystemExit when it names none."""
    trees = dict(re.findall(r"`(\w+)` ([0-9a-f]{40})", (folder / "README.md").read_text()))
    if trees.keys() != set(TREES):
        raise SystemExit(f"{folder / 'README.md'} does not name the git trees that its wheels were built from")
    return trees


def _content_without_version(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel except RECORD, without its version."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith(".dist-info/RECORD")}
    unversioned = {}
    for name, content in files.items():
        folder, _, file = name.rpartition("/")
        if folder.endswith(".dist-info") and file == "METADATA":
            content = re.sub(rb"(?m)^Version: .*$", b"", content, count=1)
        unversioned[re.sub(r"^[^/]*\.dist-info/", ".dist-info/", name)] = content
    return unversioned


def is_the_same(released: Path, built: Path) -> bool:
    """Whether two wheels are for the same platform and differ in nothing but their version."""
    tags = {path.name.split("-", 2)[2] for path in (released, built)}
    return len(tags) == 1 and _content_without_version(released) == _content_without_version(built)


def _purposes() -> dict[str, str]:
    """Pattern in the name of a wheel -> what that wheel is for."""
    from .split_wheels import PLATFORMS

    hosts = {f"_{HOST}-.*-{platform['wheel_tag']}": platform["system"] for platform in PLATFORMS.values()}
    return {
        **{f"_{name}-": kernel_table.read(name).hardware for name in kernel_table.names()},
        **{pattern: f"{system}, with any of these GPUs" for pattern, system in hosts.items()},
    }


def _readme(trees: dict[str, str]) -> str:
    rows = []
    for pattern, purpose in _purposes().items():
        wheels = [path for path in sorted(WHEELS.glob("*.whl")) if re.search(pattern, path.stem)]
        rows += [f"| `{path.name}` | {purpose} | {path.stat().st_size / 1e6:.2f} |" for path in wheels]
    template = tomllib.loads((ROOT / "packages" / "kernels" / "pyproject.toml.in").read_text())
    tools = [requirement.split(";")[0] for requirement in template["build-system"]["requires"]]
    named = " and ".join(f"`{name}` {tree}" for name, tree in trees.items())
    return README.substitute(rows="\n".join(rows), trees=named, tools=", ".join(tools))


def _replace_wheels(part: str, wheelhouse: Path) -> None:
    """Replace the wheels of an architecture, or of HOST, with the new ones of csrc/'s version, if there are any."""
    built = [path for path in wheels_of(part, wheelhouse) if path.name.split("-")[1] == kernel_table.version()]
    old = wheels_of(part, WHEELS) if built else []
    same_wheel = {path: next((other for other in old if is_the_same(other, path)), None) for path in built}
    for path in set(old) - set(same_wheel.values()):
        path.unlink()
    for path, same in same_wheel.items():
        if same is None:
            shutil.copyfile(path, WHEELS / path.name)


def _manifest_line(wheel: Path) -> str:
    return f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n"


def release(wheelhouse: Path) -> None:
    """Copy the wheels of the current version from `wheelhouse`. SystemExit when wheels/ would get too big."""
    trees = source_trees()
    WHEELS.mkdir(exist_ok=True)
    for part in (*kernel_table.names(), HOST):
        _replace_wheels(part, wheelhouse)
    wheels = sorted(WHEELS.glob("*.whl"))
    total = sum(path.stat().st_size for path in wheels)
    if total > MAX_FOLDER_BYTES:
        raise SystemExit(f"wheels/ would have {total / 1e6:.1f} MB; the limit is {MAX_FOLDER_BYTES / 1e6:.0f} MB")
    (WHEELS / "SHA256SUMS").write_text("".join(map(_manifest_line, wheels)))
    (WHEELS / "README.md").write_text(_readme(trees))
    print(f"{len(wheels)} wheels, {total / 1e6:.1f} MB, from {trees}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Put freshly built wheels into wheels/.")
    parser.add_argument("--wheelhouse", type=Path, default=ROOT / "build" / "wheelhouse")
    release(parser.parse_args().wheelhouse)


if __name__ == "__main__":
    main()
