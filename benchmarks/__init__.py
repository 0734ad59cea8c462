"""Measuring instruments and benchmarks: `python -m benchmarks.NAME` measures one table.

Nothing here reads autoamp's internals: casts, flops and saved bytes are counted at the
dispatcher and by autograd's hooks, the same way for every peer.
"""
