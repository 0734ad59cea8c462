"""The flight recorder: what a training did last, on disk, and what a replay needs."""
