"""Consumer groups and transactions."""
