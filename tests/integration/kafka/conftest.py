import pytest

from tests.fakes import real_kafka


@pytest.fixture(scope="session")
def kafka() -> real_kafka.RealKafka:
    if not real_kafka.is_available():
        pytest.skip("needs mvn, java and javac")
    return real_kafka.RealKafka()
