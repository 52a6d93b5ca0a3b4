"""Benchmarks, one file per claim. `README.md` beside this file says how to read them."""
