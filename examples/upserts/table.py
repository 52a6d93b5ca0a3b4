"""The table that the topic is: the last value of each key."""

import json

import tierlog

table = {}
records = 0
with tierlog.Client() as client:
    for record in client.consume("stock"):
        records += 1
        if record.value is None:
            table.pop(record.key, None)
        else:
            table[record.key] = json.loads(record.value)

print(f"{len(table)} articles out of {records} records")
print("article-6:", table[b"article-6"]["left"], "left; article-7:", table.get(b"article-7"))
