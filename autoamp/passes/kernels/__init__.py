"""Kernels that take the place of several calls, or of one call of torch's.

Each kernel is one module, which finds the calls that compute the kernel, tells where
the kernel is allowed and faster, and puts it into the graph:

    chains.py        what torch has a kernel for, known by its spelling in spelled.py
    attention.py     attention that is written out
    causal_mask.py   attention that needs no mask
    rotary.py        rotary embeddings, in a graph with its casts
    norms.py         norms and softmax of our own

`functions/` has the functions that graphs then call, where torch has none.  `table.py`
has the names that `fuse=` takes, and one row for each kernel of torch's that a chain
of calls may be, with the ways in which libraries write it.  `fuse.py` is the pass that
runs before dtypes are chosen; the kernels that are put into a graph with its casts are
passes of their own (`autoamp/passes/list.py`).
"""
