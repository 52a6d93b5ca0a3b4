"""The schema registry, by Confluent's API."""
