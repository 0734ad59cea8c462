"""The functions that graphs call in the place of kernels that torch has not."""
