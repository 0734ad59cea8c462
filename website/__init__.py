"""The documentation site: `python -m website` builds it, `make docs` too."""
