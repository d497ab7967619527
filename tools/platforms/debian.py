"""Debian's CPythons, unpacked into a folder without being installed: any user may do it, for any architecture."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# CPython's version -> the Debian release that has it. None of the present ones has 3.10 or 3.12.
SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
MIRROR = "DEBIAN_MIRROR"  # names a mirror where apt's own settings name none
_KEYRINGS = tuple(Path("/usr/share/keyrings", f"debian-archive-keyring.{suffix}") for suffix in ("pgp", "gpg"))
# apt with a state of its own: it knows nothing of what is installed here, and needs no rights. An index that is past
# its date is good enough for tests. What Debian's images do after an update concerns this machine's own state.
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
    """The Debian mirror that apt takes here."""
    named = os.environ.get(MIRROR)
    if named:
        return named
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for address in answer.splitlines():
        if address.rstrip("/").endswith("/debian"):
            return address
    raise RuntimeError(f"apt's settings name no Debian mirror here; the variable {MIRROR} can")


def _keyring() -> Path:
    for path in _KEYRINGS:
        if path.exists():
            return path
    raise RuntimeError("the keys of Debian's archive are missing here (apt-get install debian-archive-keyring)")


def _prepare_apt(state: Path, architecture: str, suite: str) -> Path:
    """Write apt's settings and sources into the folder `state`; the path of the settings."""
    for folder in ("lists/partial", "cache/archives/partial"):
        (state / folder).mkdir(parents=True)
    (state / "status").touch()
    (state / "sources.list").write_text(f"deb [signed-by={_keyring()}] {_mirror()} {suite} main\n")
    settings = state / "apt.conf"
    settings.write_text(_SETTINGS.format(state=state, architecture=architecture))
    return settings


def python_root(version: str, architecture: str, folder: Path) -> Path:
    """The root folder of a Debian with the CPython of a version in SUITES, fetched once into `folder`.

    architecture: Debian's name, such as "arm64".
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
    # Programs name the dynamic linker in /lib, which newer releases have in /usr/lib alone.
    if not (partial / "lib").exists():
        (partial / "lib").symlink_to("usr/lib")
    shutil.rmtree(state)
    partial.rename(root)
    return root
