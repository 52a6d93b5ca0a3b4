"""Metrics: `table` has the names, `registry` counts requests, `broker` samples the broker."""
