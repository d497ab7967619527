"""Debian's CPythons for any architecture, unpacked into a folder without installing them, which needs no root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# CPython's version -> the Debian release that has it. No current release has 3.10 or 3.12.
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
MIRROR = "DEBIAN_MIRROR"  # this variable names a mirror to use in place of the one in apt's settings
_KEYRINGS = tuple(Path("/usr/share/keyrings", f"debian-archive-keyring.{suffix}") for suffix in ("pgp", "gpg"))
# apt with its own state: it ignores the packages installed here and needs no root. Tests accept an expired index. The
# hooks that Debian's images run after an update are cleared, because they act on this machine's state.
_SETTINGS = """\
Dir::State "{state}";
Dir::State::status "{state}/status";
Dir::Cache "{state}/cache";
Dir::Etc::sourcelist "{state}/sources.list";
Dir::Etc::sourceparts "/dev/null";
#clear APT::Architectures;
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Sandbox::User "";
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
"""


def _mirror() -> str:
    """The Debian mirror named by MIRROR, else the one in apt's settings."""
    mirror = os.environ.get(MIRROR)
    if mirror:
        return mirror
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for address in answer.splitlines():
        if address.rstrip("/").endswith("/debian"):
            return address
    raise RuntimeError(f"apt's settings name no Debian mirror: name one in the variable {MIRROR}")


def _keyring() -> Path:
    for path in _KEYRINGS:
        if path.exists():
            return path
    raise RuntimeError("the keys of Debian's archive are missing here (apt-get install debian-archive-keyring)")


def _prepare_apt(state: Path, architecture: str, suite: str) -> Path:
    """Write apt's settings and sources into the folder `state`; return the path of the settings."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    (state / "sources.list").write_text(f"deb [signed-by={_keyring()}] {_mirror()} {suite} main\n")
    settings = state / "apt.conf"
    settings.write_text(_SETTINGS.format(state=state, architecture=architecture))
    return settings


def python_root(version: str, architecture: str, folder: Path) -> Path:
    """The root folder of a Debian with the CPython of this version, one of SUITES; downloaded into `folder` once.

    architecture: Debian's name for it, such as "arm64".
    """
    root = folder / f"debian-{architecture}-{version}"
    if root.exists():
        return root
    partial, state = folder / f".{root.name}", folder / f".{root.name}-apt"
    for left_behind in (partial, state):
        shutil.rmtree(left_behind, ignore_errors=True)
    apt = ["apt-get", "--quiet", "--yes", f"--config-file={_prepare_apt(state, architecture, SUITES[version])}"]
    subprocess.run([*apt, "--option=APT::Update::Error-Mode=any", "update"], check=True)
    packages = (f"python{version}", f"libpython{version}-stdlib", "libc6", "libgcc-s1", "libstdc++6")
    subprocess.run([*apt, "--download-only", "--no-install-recommends", "install", *packages], check=True)
    for package in sorted((state / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(partial)], check=True)
    # Programs look for the dynamic linker in /lib; newer releases have it only in /usr/lib.
    if not (partial / "lib").exists():
        (partial / "lib").symlink_to("usr/lib")
    shutil.rmtree(state)
    partial.rename(root)
    return root
