"""A partition folder as Kafka would leave it: plain records and transactions, in segments."""

import shutil

from tests.fakes.bucket import FIXTURES
from tests.fakes.control_markers import marker_key, marker_value
from tests.fakes.two_tiers import START_MS
from tierlog.record_format.encode import encode_batch


class KafkaFolder:
    def __init__(self, path):
        self.path, self.log, self.offset = path, None, 0
        shutil.copytree(FIXTURES / "empty-0", path, ignore=shutil.ignore_patterns("0*"))

    def roll(self):
        self.log = self.path / f"{self.offset:020d}.log"

    def put(self, *values, **fields):
        """Append plain records, or with `producer_id` those of a transaction."""
        fields |= {"producer_epoch": 0, "transactional": True} if fields else {}
        batch = encode_batch(
            list(values), timestamps=[START_MS] * len(values), base_offset=self.offset, **fields
        )
        with self.log.open("ab") as file:
            file.write(batch)
        self.offset += len(values)

    def end(self, producer_id, *, committed):
        marker = {"keys": [marker_key(committed=committed)], "control": True}
        self.put(marker_value(coordinator_epoch=0), producer_id=producer_id, **marker)
