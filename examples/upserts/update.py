"""Articles and how many of each there are, as they change."""

import json

import tierlog

with tierlog.Client() as client, client.producer() as producer:
    for number in range(5_000):
        article = f"article-{number % 100}"
        producer.send("stock", json.dumps({"left": number}), key=article)
    producer.send("stock", None, key="article-7")  # a tombstone: the key is deleted
