import inspect

import pytest

from tierlog.api.http import problems
from tierlog.api.protocol import messages, service
from tierlog.record_format import errors

LONG = "a" * 1_000_000


def test_every_error_class_has_a_row_in_the_table() -> None:
    known = {
        errors.TierlogError,
        errors.RequestError,
        errors.ObjectExists,
        errors.OffsetOutOfRange,
        errors.TooLarge,
    }
    passed_on = (
        service.ClientDisconnected,
        service.ResponseCutShort,
        problems.AppendedInPart,
        problems.PeerProblem,
    )
    for module in (errors, problems, messages, service):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            own = issubclass(kind, Exception) and kind.__module__ == module.__name__
            if own and kind not in known and kind not in passed_on:
                found = next((base for base in kind.__mro__ if base in problems.TABLE), None)
                assert found is not None, kind


def test_an_internal_error_reveals_only_the_request_id() -> None:
    problem = problems.to_problem(KeyError("secret"), request_id="r-1")
    assert problem.status == 500
    assert problem.document["request_id"] == "r-1"
    assert b"secret" not in problem.body()


@pytest.mark.parametrize(
    "error",
    [
        errors.UnknownTopic(f"there is no topic {LONG!r}"),
        errors.InvalidConfig("no", problems=(errors.FieldProblem(LONG, LONG),)),
    ],
)
def test_a_problem_is_small_however_long_what_it_names(error: errors.RequestError) -> None:
    assert len(problems.to_problem(error, request_id="").body()) < 5_000


def test_retriable_problems_have_retry_after() -> None:
    for error in (errors.StoreUnavailable("x", retry_after_s=2.2), errors.Throttled("x")):
        headers = dict(problems.to_problem(error, request_id="").headers)
        assert int(headers[b"retry-after"]) >= 1
    assert (
        dict(
            problems.to_problem(
                errors.StoreUnavailable("x", retry_after_s=2.2), request_id=""
            ).headers
        )[b"retry-after"]
        == b"3"
    )


def test_a_write_to_a_log_that_went_offline_has_an_unknown_outcome() -> None:
    error = errors.LogOfflineError("t-0: the disk failed: '/var/lib/tierlog/data/t-0/00.log'")
    written = problems.to_problem(error, request_id="", writing=True)
    assert written.document["outcome"] == "unknown"
    assert written.document["detail"] == "t-0: the disk failed: 't-0/00.log'"
    assert "outcome" not in problems.to_problem(error, request_id="").document


def test_a_partial_append_is_reported_with_the_error() -> None:
    error = problems.AppendedInPart(errors.LogOfflineError("gone"), results=[{"partition": 0}])
    problem = problems.to_problem(error, request_id="", writing=True)
    assert problem.status == 503
    assert problem.document["results"] == [{"partition": 0}]
    assert problem.document["outcome"] == "unknown"


def test_corrupt_files_and_objects_are_named_without_local_paths() -> None:
    local = errors.CorruptBatch("bad", file="/srv/data/t-0/00000000000000000000.log", position=7)
    document = problems.to_problem(local, request_id="").document
    assert (document["code"], document["file"], document["position"]) == (
        "corrupt-log",
        "t-0/00000000000000000000.log",
        7,
    )
    missing = errors.MissingObject("gone", file="topics/t/id/0/segments/x.log")
    document = problems.to_problem(missing, request_id="", full_key="prefix/{}".format).document
    key = "topics/t/id/0/segments/x.log"
    assert (document["status"], document["object_key"]) == (502, f"prefix/{key}")
    assert document["detail"].startswith(f"{key}: gone; `tierlog storage verify t --deep`")


def test_a_corruption_is_reported_with_its_position_and_what_to_do() -> None:
    def detail(text: str, kind: type[errors.CorruptDataError] = errors.CorruptBatch) -> str:
        error = kind(text, file="/srv/data/a-b-0/00.log", position=7, offset=3)
        return str(problems.to_problem(error, request_id="").document["detail"])

    place = "a-b-0/00.log: position 7: offset 3: "
    assert detail("bad") == (
        f"{place}bad; `tierlog storage verify a-b --deep` reports what else is corrupt, "
        "`tierlog storage repair a-b` repairs it"
    )
    assert detail("bad; `rm` the file") == f"{place}bad; `rm` the file"
    newer = "version 9, this tierlog knows 1"
    assert detail(newer, errors.UnknownFormatVersion) == place + newer, "nothing is to be mended"
