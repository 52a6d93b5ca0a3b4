"""JVM options for a fast start: in a test a JVM runs for seconds, too short for the second compiler
or a collector with its own threads to pay off.
"""

from typing import Final

OPTIONS: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
ENVIRONMENT: Final = {"JAVA_TOOL_OPTIONS": " ".join(OPTIONS)}  # for JVMs started elsewhere
