"""Short programs that know nothing of autoamp, each a script of its own."""
