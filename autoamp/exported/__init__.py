"""Takes a mixed-precision model out of the process: exported programs and files."""
