"""Kernels that take the place of several calls, or of one call of torch's.

Each kernel is one folder, whose files are named by what they do; a kernel has only
those that it needs:

    recognise.py   which calls of a graph compute the kernel, with a proof
    condition.py   where the kernel is allowed and where it is faster
    emit.py        puts the call of the kernel into the graph
    function.py    the function that the graph then calls, where torch has none

`table.py` has the names that `unfused=` takes, and one row for each kernel of torch's
that a chain of calls may be.  The tests of a kernel are in `tests/kernels/<kernel>/`.
`fuse.py` is the pass that runs before dtypes are chosen; the kernels that are put into
a graph with its casts are passes of their own (`autoamp/pipeline/passes.py`).
"""
