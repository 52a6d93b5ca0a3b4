"""The messages of Kafka's wire protocol, and the records of its coordinators: bytes alone.

| file | what it is |
|---|---|
| `apis` | the table of APIs: which versions are known, which header goes with them |
| `codec` | frames to messages and back: the only door |
| `messages` | the types of the messages, made at their first use; `messages.pyi` is for mypy |
| `decoder`, `encoder` | write the source of one (message, version); `source` compiles it |
| `definitions` | Kafka's own definitions, from `message_definitions/` |

Nothing is parsed or compiled by an import: a broker without a Kafka client pays for none of it.
"""
