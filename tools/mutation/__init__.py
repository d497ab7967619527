"""Mistakes put into the code one at a time: does a test notice?

    python -m tools.mutation [--part NAME] [--most N]

docs/results/reliability.md has the shares. mutmut and cosmic-ray start an interpreter with torch for each mistake, and
have none that leaves out an element of a key or an argument; here a trial is a fork, and meets the tests that execute
the place alone.
"""
