"""`import tierlog` at an interactive prompt: completion, reprs, signatures, refusals."""

import asyncio
import inspect
import os
import subprocess
import sys

import httpx2
import pytest

import tierlog
from tierlog.cli.program import COMMANDS, load_command
from tierlog.client import calls, exchange, problems


def test_names_not_loaded_yet_are_completed():
    assert set(tierlog.__all__) <= set(dir(tierlog))


def test_a_type_checker_reports_a_name_that_does_not_exist(tmp_path):
    (tmp_path / "user.py").write_text("import tierlog\ntierlog.Client, tierlog.UnknownTopic\n")
    options = ("--config-file=", "--cache-dir=/dev/null", "--follow-imports=skip")
    command = [sys.executable, "-m", "mypy", *options, tierlog.__file__, "user.py"]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    error, _ = completed.stdout.splitlines()
    assert error.startswith("user.py:2: error:")
    assert "UnknownTopic" in error


@pytest.mark.parametrize("name", tierlog.__all__)
def test_every_public_name_can_be_loaded(name):
    assert getattr(tierlog, name) is not None


def test_tierlog_errors_has_every_error_of_the_client():
    for found in (*vars(problems).values(), *vars(exchange).values()):
        if isinstance(found, type) and issubclass(found, Exception):
            assert getattr(tierlog.errors, found.__name__) is found
            assert issubclass(found, (tierlog.errors.TierlogError, UserWarning))


@pytest.mark.parametrize("kind", [tierlog.Client, tierlog.AsyncClient])
def test_the_repr_of_a_client_has_its_server_and_no_secret(kind):
    shown = repr(kind("http://me:secret@localhost:8641/", token="hidden"))
    assert shown == f"<tierlog.{kind.__name__} http://localhost:8641>"


@pytest.mark.parametrize("kind", [tierlog.Client, tierlog.AsyncClient])
def test_methods_have_their_signature_and_docstring(kind):
    parameters = "topic: 'str', partition: 'int', *, before_offset: 'int'"
    assert str(inspect.signature(kind.trim)) == f"(self, /, {parameters}) -> 'int'"
    assert str(inspect.signature(kind().trim)) == f"({parameters}) -> 'int'"
    assert "Kafka's DeleteRecords" in kind.trim.__doc__


def test_files_may_be_given_as_text(tmp_path):
    (tmp_path / "token").write_text(" abc\n")
    sent = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        sent.append(request.headers["authorization"])
        return httpx2.Response(200, json={"topics": []})

    transport = httpx2.MockTransport(respond)
    with tierlog.Client(token_file=str(tmp_path / "token"), transport=transport) as client:
        client.list_topics()
    assert sent == ["Bearer abc"]
    with pytest.raises(tierlog.errors.ConfigurationError) as refused:
        tierlog.Client(token_file=str(tmp_path / "none"))
    assert str(refused.value) == f"token file {tmp_path / 'none'}: No such file or directory"


@pytest.mark.parametrize("kind", [tierlog.Client, tierlog.AsyncClient])
def test_arguments_default_to_the_environment(kind, tmp_path, monkeypatch):
    def sent(**given):
        authorizations = []

        def respond(request: httpx2.Request) -> httpx2.Response:
            authorizations.append(request.headers.get("authorization"))
            return httpx2.Response(200, json={"topics": []})

        client = kind(transport=httpx2.MockTransport(respond), **given)
        if asyncio.iscoroutine(listing := client.list_topics()):
            asyncio.run(listing)
        return repr(client).split()[1][:-1], *authorizations

    for name in ("SERVER", "TOKEN", "TOKEN_FILE", "CA_FILE"):
        monkeypatch.delenv(f"TIERLOG_{name}", raising=False)
    assert sent() == ("http://127.0.0.1:8640", None)
    monkeypatch.setenv("TIERLOG_SERVER", "broker:1")
    monkeypatch.setenv("TIERLOG_TOKEN", "of-the-environment\n")
    monkeypatch.setenv("TIERLOG_TOKEN_FILE", "/none")
    file = tmp_path / "token"
    file.write_text("of-the-file\n")
    assert sent() == ("http://broker:1", "Bearer of-the-environment")
    assert sent(server="other:2") == ("http://other:2", "Bearer of-the-environment")
    assert sent(token="given") == ("http://broker:1", "Bearer given")
    assert sent(token_file=file)[1] == "Bearer of-the-file", "an argument takes precedence"
    assert sent(token="")[1] is None
    monkeypatch.delenv("TIERLOG_TOKEN")
    monkeypatch.setenv("TIERLOG_TOKEN_FILE", str(file))
    assert sent()[1] == "Bearer of-the-file"
    for name in ("SERVER", "TOKEN", "TOKEN_FILE", "CA_FILE"):
        monkeypatch.setenv(f"TIERLOG_{name}", "")
    assert sent() == ("http://127.0.0.1:8640", None), "an empty variable is ignored"
    monkeypatch.setenv("TIERLOG_CA_FILE", "/none")
    with pytest.raises(tierlog.errors.ConfigurationError, match="CA file /none"):
        kind()


@pytest.mark.parametrize("kind", [tierlog.Client, tierlog.AsyncClient])
@pytest.mark.parametrize(
    ("server", "variable", "value", "message"),
    [
        ("http://broker:1", "ALL_PROXY", "socks5://proxy:1", "the environment's proxy: .*socksio"),
        ("http://broker:1", "HTTP_PROXY", "ftp://proxy:1", "the environment's proxy: Unknown"),
        ("http://broker:1", "HTTP_PROXY", "http://[::1", "the environment's proxy: Invalid port"),
        ("https://broker:1", "SSL_CERT_FILE", "/none", "CA file /none: No such file"),
        ("http://a..b", "NO_PROXY", "", "server 'http://a..b': .*label"),
        ("http://broker:1/?a=b", "NO_PROXY", "", "expected http://HOST:PORT"),
    ],
)
def test_an_unusable_environment_is_a_configuration_error(
    kind, server, variable, value, message, monkeypatch
):
    for name in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(tierlog.errors.ConfigurationError, match=message):
        kind(server)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_reads_the_token_variables_itself(name):
    commands = [load_command(name)]
    for command in commands:
        commands.extend(getattr(command, "commands", {}).values())
        variables = {option.name: option.envvar for option in command.params}
        assert not {"TIERLOG_TOKEN", "TIERLOG_TOKEN_FILE"} & set(variables.values()), command.name


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_keeps_its_first_environment_even_after_a_fork(monkeypatch):
    def respond(request: httpx2.Request) -> httpx2.Response:
        if os.getpid() != parent_pid:
            os._exit(7 if request.headers.get("authorization") == "Bearer of-then" else 8)
        return httpx2.Response(200, json={"topics": []})

    parent_pid = os.getpid()
    monkeypatch.setenv("TIERLOG_SERVER", "broker:1")
    monkeypatch.setenv("TIERLOG_TOKEN", "of-then")
    with tierlog.Client(transport=httpx2.MockTransport(respond)) as client:
        monkeypatch.delenv("TIERLOG_SERVER")
        monkeypatch.delenv("TIERLOG_TOKEN")
        assert repr(client) == "<tierlog.Client http://broker:1>"
        assert "of-then" not in repr(vars(client)), "tracebacks may show variables"
        child = os.fork()
        if not child:
            try:
                client.list_topics()
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("token", ["hidden\nsecret", "hiddén", " \n"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token):
    with pytest.raises(tierlog.errors.ConfigurationError) as refused:
        tierlog.Client(token=token)
    assert str(refused.value) == "token: does not contain a token"


def test_the_program_runs_as_a_module():
    completed = subprocess.run(
        [sys.executable, "-m", "tierlog", "--version"], capture_output=True, text=True, check=True
    )
    assert completed.stdout == f"tierlog {tierlog.__version__}\n"


def test_a_single_partition_in_place_of_a_list_is_refused():
    with (
        tierlog.Client() as client,
        pytest.raises(TypeError, match=r"partitions: expected a list of numbers, as in \[3\]"),
    ):
        next(client.consume("t", partitions=3))


def test_acks_are_validated_before_sending():
    query = calls.produce("t", ["v"], partition=None, acks=1).request.query
    assert ("acks", "1") in query
    for acks in ("2", -1, "ALL"):
        with pytest.raises(tierlog.errors.InvalidRequest, match="acks must be one of 0, 1, all"):
            calls.produce("t", ["v"], partition=None, acks=acks)
        with pytest.raises(tierlog.errors.InvalidRequest, match="acks must be one of"):
            tierlog.Batching(acks=acks)
    with pytest.raises(tierlog.errors.InvalidRequest, match="acks=0 is not supported"):
        tierlog.Batching(acks=0)


def test_the_repr_of_a_producer_has_its_client():
    async def shown() -> str:
        async with tierlog.AsyncClient("http://broker:1") as client:
            return repr(client.producer())

    with tierlog.Client("http://broker:1") as client, client.producer() as producer:
        assert repr(producer) == "<Producer of <tierlog.Client http://broker:1>>"
    assert asyncio.run(shown()) == "<AsyncProducer of <tierlog.AsyncClient http://broker:1>>"
