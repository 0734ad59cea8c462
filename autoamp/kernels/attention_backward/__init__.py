"""Attention in 16 bits on CPUs gets a backward that computes in fp32."""
