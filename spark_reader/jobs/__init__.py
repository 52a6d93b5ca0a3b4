"""Spark jobs for work that exceeds one machine: replay, verification and statistics."""
