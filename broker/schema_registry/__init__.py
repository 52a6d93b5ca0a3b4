"""Schemas by Confluent's API: what they are, what is compatible, and the topic that has them."""
