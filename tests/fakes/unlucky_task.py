"""Tasks of a step on Spark that now and then fail when they have written, and are tried again."""

import random

from tierlog.tables.row_task import RowTask, Written


class UnluckyTask(RowTask):
    def __call__(self, number: int) -> Written:
        written = super().__call__(number)
        if random.SystemRandom().random() < 0.1:
            raise OSError("after it has written")
        return written
