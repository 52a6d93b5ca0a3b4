"""Benchmarks, one file a claim. `README.md` beside this file says how to read them."""
