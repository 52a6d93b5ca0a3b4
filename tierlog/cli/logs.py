"""A broker's log on stderr: coloured on a terminal (unless NO_COLOR is set), else JSON lines.

* Warnings of libraries (uvicorn, botocore, asyncio) and what ends a thread have the same format, so
  that a collector of JSON lines gets nothing else.
* Tracebacks never show the values of variables: tokens, keys, records.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

import structlog
from structlog.typing import EventDict, Processor

from tierlog.cli.output import printable

log = structlog.get_logger(__name__)


def configure_logs(*, verbose: bool = False) -> None:
    """Configure structlog and logging. Call once, before a broker is opened."""
    level = logging.DEBUG if verbose else logging.INFO
    human = sys.stderr.isatty()
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(
            colors=not os.environ.get("NO_COLOR"),
            exception_formatter=structlog.dev.plain_traceback,
        )
        if human
        else structlog.processors.JSONRenderer()
    )
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if human:
        processors.append(_printable)
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors.append(structlog.processors.ExceptionRenderer(frames))
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_library_handler(processors, renderer)])
    threading.excepthook = _log_end_of_thread


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    name = ended.thread.name if ended.thread else "?"
    log.error("a thread failed", thread=name, exc_info=ended.exc_value)


def _printable(_logger: object, _name: str, line: EventDict) -> EventDict:
    """Clients choose some of the text, such as a group's name: no control characters."""
    return {name: printable(text) if isinstance(text, str) else text for name, text in line.items()}


def _library_handler(processors: list[Processor], renderer: Processor) -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *processors],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    return handler
