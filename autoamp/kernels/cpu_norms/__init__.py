"""Norms of our own on CPUs, where torch's are slow or not true."""
