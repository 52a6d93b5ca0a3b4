"""JVMs that start fast: a test's lives for seconds, in which the second compiler never pays, nor a
collector with threads of its own.
"""

from typing import Final

OPTIONS: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
ENVIRONMENT: Final = {"JAVA_TOOL_OPTIONS": " ".join(OPTIONS)}  # where something else starts it
