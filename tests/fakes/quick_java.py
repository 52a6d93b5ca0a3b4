"""JVMs that start fast: in a test they live for seconds, too short for the second compiler or a
collector with its own threads to pay off.
"""

from typing import Final

OPTIONS: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
ENVIRONMENT: Final = {"JAVA_TOOL_OPTIONS": " ".join(OPTIONS)}  # if something else starts it
