"""`python -m autoamp`, the same as the command `autoamp`."""

from autoamp_cli import main

if __name__ == "__main__":
    main(prog_name="autoamp")
