"""One step of an optimizer: read, agree, decide, move."""
