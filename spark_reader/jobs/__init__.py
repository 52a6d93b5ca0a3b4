"""Work that outgrows one machine, on Spark: replay, verification, statistics."""
