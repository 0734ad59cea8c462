"""The ATen ops that calls come to: found at the first call, reused at calls like it."""
