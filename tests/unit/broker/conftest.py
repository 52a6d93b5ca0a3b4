from tests.fakes.partition_logs import *  # noqa: F403
