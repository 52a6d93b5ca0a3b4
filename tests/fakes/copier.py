"""An exactly-once copy of one topic to another, as a program: a test kills it at any moment.

python -m tests.fakes.copier HOST:PORT
"""

import sys

import confluent_kafka

BATCH = 7
ABORTED_EVERY = 5  # transactions


def main(address: str) -> None:
    common = {"bootstrap.servers": address, "log_level": 0}
    consumer = confluent_kafka.Consumer(
        {
            **common,
            "group.id": "copy",
            "group.instance.id": "copier",  # the next one takes its place at once
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    producer = confluent_kafka.Producer({**common, "transactional.id": "copy"})
    producer.init_transactions(60)
    consumer.subscribe(["in"])
    done = 0
    while True:
        messages = consumer.consume(BATCH, 1)
        if not messages or any(one.error() for one in messages):
            continue
        done += 1
        try:
            producer.begin_transaction()
            for one in messages:
                producer.produce("out", one.value(), partition=one.partition())
            producer.send_offsets_to_transaction(
                consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 60
            )
            if done % ABORTED_EVERY:
                producer.commit_transaction(60)
            else:
                producer.abort_transaction(60)
                go_back(consumer)
        except confluent_kafka.KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise  # the next one goes on
            producer.abort_transaction(60)
            go_back(consumer)


def go_back(consumer: confluent_kafka.Consumer) -> None:
    """Read again what was not committed."""
    for place in consumer.committed(consumer.assignment(), 60):
        place.offset = max(place.offset, 0)
        consumer.seek(place)


if __name__ == "__main__":
    main(sys.argv[1])
