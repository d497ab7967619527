"""Finds and loads the compiled kernels. Uses neither torch nor pip, and downloads nothing.

`loader` takes a pip-installed package of kernels, or else wheels that the pack carries: one of an architecture's device
images and one of the launch code for this system. `bundled` chooses them, verifies their SHA-256 and unpacks them in
memory. `place` puts the one file that has to lie on disk, the extension module of the launch code, where only this user
or root can change it.
"""
