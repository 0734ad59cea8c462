"""Reports that were written to files: read back, and compared with other reports."""
