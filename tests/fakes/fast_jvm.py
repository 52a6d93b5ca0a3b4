"""JVM options for a fast start: in a test a JVM runs for seconds, too short for the second compiler
or a collector with its own threads to pay off. Nor are Spark's and Kafka's classes verified, which
takes a tenth of a start.
"""

from typing import Final

OPTIONS: Final = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
    *("-XX:+IgnoreUnrecognizedVMOptions", "-XX:+UnlockDiagnosticVMOptions"),
    "-XX:-BytecodeVerificationRemote",
)
ENVIRONMENT: Final = {"JAVA_TOOL_OPTIONS": " ".join(OPTIONS)}  # for JVMs started elsewhere
