#!/bin/bash
# Makes a local stand-in for cibuildwheel's manylinux image, for a machine that cannot pull the real one:
# Debian with CPython 3.10 to 3.13 of the local pyenv, Debian's CPython 3.14, auditwheel and patchelf. It has no
# compiler: the wheels are compiled with ziglang and NVRTC, which are build requirements.
#
#     tools/wheels/standin_image.sh [IMAGE]
#
# Needs root, podman, runc and mmdebstrap, and pyenv's interpreters linked against a glibc no newer than the suite's.
set -euo pipefail

image=${1:-localhost/manylinux-standin:latest}
suite=forky
pyenv=${PYENV_ROOT:-$HOME/.pyenv}
certificates=/etc/ssl/certs/ca-certificates.crt
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export pyenv certificates CONTAINERS_CONF=$here/containers.conf

# The newest patch release of each minor version, as "cp312 /path/to/3.12.x" lines.
interpreters=$(for minor in 10 11 12 13; do
  folder=$(ls -d "$pyenv/versions/3.$minor."* | sort -V | tail -n 1)
  echo "cp3$minor $folder"
done)
export interpreters

cat > "$work/inside.sh" <<'INSIDE'
set -euo pipefail
export PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1
while read -r tag folder; do "$folder/bin/python3" -m venv "/opt/python/$tag-$tag"; done <<< "$interpreters"
python3.14 -m venv /opt/python/cp314-cp314
for python in /opt/python/*/bin/python; do "$python" -m pip install --quiet --upgrade pip build virtualenv; done
# cibuildwheel runs this CPython to find out the image's platform.
ln -s cp311-cp311 /opt/python/cp39-cp39
/opt/python/cp311-cp311/bin/python -m venv /opt/tools
/opt/tools/bin/pip install --quiet auditwheel patchelf
ln -s /opt/tools/bin/auditwheel /opt/tools/bin/patchelf /usr/local/bin/
INSIDE

cat > "$work/customize.sh" <<'CUSTOMIZE'
set -euo pipefail
root=$1
mkdir -p "$root/opt/python"
while read -r tag folder; do
  mkdir -p "$root$folder"
  tar -C "$folder" --exclude=__pycache__ --exclude='./lib/python3*/test' --exclude='*.a' \
    --exclude='./lib/python3*/site-packages/*' --exclude=./share -cf - . | tar -C "$root$folder" -xf -
done <<< "$interpreters"
cp "$certificates" "$root$certificates"
# Debian's pyconfig.h includes <x86_64-linux-gnu/python3.14/pyconfig.h>, which only Debian's own compiler finds.
ln -s /usr/include/x86_64-linux-gnu "$root/usr/include/python3.14/x86_64-linux-gnu"
cp "$(dirname "$0")/inside.sh" "$root/inside.sh"
chroot "$root" bash /inside.sh
rm "$root/inside.sh"
CUSTOMIZE

packages=ca-certificates,python3.14-dev,python3.14-venv,libssl3t64,libffi8,libsqlite3-0,zlib1g,libbz2-1.0
packages+=,liblzma5,libreadline8t64,libncursesw6,libuuid1,libexpat1
mmdebstrap --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' --include="$packages" \
  --customize-hook="bash $work/customize.sh \"\$1\"" "$suite" "$work/root.tar"
podman import --change 'CMD ["/bin/bash"]' --change "ENV PIP_CERT=$certificates" \
  --change "ENV SSL_CERT_FILE=$certificates" "$work/root.tar" "$image"
