"""Low copies of fp32 weights, which graphs read; a step makes them stale."""
