"""The ways in which `peers.py` runs a case: ours, and one module for each peer; and the suites.

`chains` and `models` make a `Case` (programs in the forms that each needs, input, expected result);
`ours` and the modules of the peers make `Way`s of it, ready to be timed. A module of a peer imports
it at its top, so that a missing package shows as `ModuleNotFoundError`.
"""
