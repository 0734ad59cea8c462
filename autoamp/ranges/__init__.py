"""How large the numbers in a running graph are, and which op left its dtype's range."""
