"""The module `sageattention`, served by this library, for packs that import it and never ask a node.

`path` holds a module of that name. The pack's prestartup_script.py puts `path` last on Python's path if the user asks
for it and no other `sageattention` is installed.
"""
