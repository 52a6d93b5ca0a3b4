"""Every error that `tierlog` raises, in one place: those of a broker and those of its clients.

    try:
        client.produce("events", ["hello"])
    except tierlog.errors.RequestError: ...  # fix the request; nothing was appended
    except tierlog.errors.RetriableError: ...  # nothing was appended: try again later
    except tierlog.errors.OutcomeUnknownError: ...  # it may have been appended: check

A client has already retried when it raises a RetriableError: see `RetryPolicy`.
"""

# ruff: noqa: F403, PLC0414  every name is re-exported as it is
from tierlog.client.exchange import AnswerLost as AnswerLost
from tierlog.client.exchange import BrokerUnreachable as BrokerUnreachable
from tierlog.client.problems import AppendedInPart as AppendedInPart
from tierlog.client.problems import AppendWarning as AppendWarning
from tierlog.client.problems import BrokerFault as BrokerFault
from tierlog.client.problems import NotOfferedHere as NotOfferedHere
from tierlog.client.problems import RangeNotSatisfiable as RangeNotSatisfiable
from tierlog.client.problems import Unauthorized as Unauthorized
from tierlog.client.problems import UnexpectedAnswer as UnexpectedAnswer
from tierlog.record_format.errors import *
