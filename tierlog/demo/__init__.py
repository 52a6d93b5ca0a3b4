"""The parts of `tierlog demo`: its data, its processes, and its use of Spark."""
