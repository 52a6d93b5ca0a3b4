"""JVM options for a fast start: in a test a JVM runs for seconds, too short for the second compiler
or a collector with its own threads to pay off. Nor are Spark's and Kafka's classes verified, which
takes a tenth of a start. What the JVM itself has to say, of an archive of classes that it cannot
use, is no part of a program's output.
"""

from typing import Final

OPTIONS: Final = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
    *("-XX:+IgnoreUnrecognizedVMOptions", "-XX:+UnlockDiagnosticVMOptions"),
    *("-XX:-BytecodeVerificationRemote", "-Xlog:disable"),
)
ENVIRONMENT: Final = {"JAVA_TOOL_OPTIONS": " ".join(OPTIONS)}  # for JVMs started elsewhere
