"""Training: loss scales, the runs that backwards reached, steps, fp32 masters."""
