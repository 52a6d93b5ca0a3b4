from tests.fakes.partition_logs import *  # noqa: F403
from tests.simulation.worn_disk import wear  # noqa: F401
