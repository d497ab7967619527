"""CPythons of other platforms on this machine: Windows under wine, aarch64 under qemu."""
