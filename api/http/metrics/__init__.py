"""Metrics: `table` has the names, `registry` counts and collects."""
