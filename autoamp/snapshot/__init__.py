"""A snapshot of a training whose numbers are not finite any more, and its replay."""
