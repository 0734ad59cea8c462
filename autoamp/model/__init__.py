"""A converted model: how it is called, copied, reported on and given back."""
