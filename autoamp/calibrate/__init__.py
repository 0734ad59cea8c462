"""The speeds of the device at hand: measured once, kept on disk, used as prices."""
