"""One table: programs by options, and one oracle for them all.

A row is a program of a few lines, with its parts and inputs; a column is a set of the
options of `autoamp.convert`.  The oracle (`oracle.py`) runs each pair beside float64,
fp32 and `torch.autocast`, and holds it to every law that is told without looking
inside.  What is more to be said of a row (which kernel it becomes, which ops run in
which precision) stands in the row.

    rows.py        what a row is, and how one is written
    <theme>.py     the rows
    columns.py     the options
    oracle.py      the laws
    test_table.py  every row in the usual options, and in one of the others in turn
"""
