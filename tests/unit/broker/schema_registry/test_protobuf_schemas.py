"""Protobuf schemas: their text, judged by protoc; what may follow what; and values."""

import base64
import resource
from pathlib import Path
from typing import Any

import grpc_tools
import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from tierlog.broker.schema_registry.formats import Source, parse_schema
from tierlog.broker.schema_registry.protobuf_schema import ProtobufSchema
from tierlog.record_format.proto_parser import parse_proto
from tierlog.record_format.schema_records import Malformed

PROTO = Path(grpc_tools.__file__).parent / "_proto"
GOOGLES = sorted(one.name for one in (PROTO / "google/protobuf").glob("*.proto"))
TWO = r"""
syntax = "proto2";
package two;  /* a comment */
import "google/protobuf/descriptor.proto";
import public "google/protobuf/any.proto";
option java_package = "a." "b";
message Flight {
  option deprecated = true;
  required string carrier = 1 [default = "U\x41\n\"", (note) = "x"];
  optional bytes raw = 2 [default = "\001\xff"];
  optional double delay = 3 [default = -1.50, json_name = "late"];
  repeated sint32 legs = 0x4 [packed = true, (rule) = { least: -2 [two.names]: ['a', "b"] }];
  optional Kind kind = 5 [default = BIG];
  optional float far = 6 [default = inf];
  repeated group Stop = 7 { optional string at = 1; }
  oneof when { int64 ms = 8; group Day = 9 { optional int32 number = 1; } }
  map<sfixed64, .two.Flight.Kind> kinds = 10;
  enum Kind { option allow_alias = true; SMALL = 0; BIG = -1; LARGE = -1; reserved 5 to max; }
  extensions 100 to 199, 500;
  reserved 20, 30 to 40, 1000 to max;
  reserved "old", "older";
  extend Flight { optional int32 more = 100; }
}
message Rule { optional int32 least = 1; extensions 2; }
extend Rule { repeated string names = 2; }
extend google.protobuf.FieldOptions { optional string note = 50000; optional Rule rule = 50001; }
service Flights {
  rpc Get(Flight) returns (stream .two.Flight) { option deprecated = true; }
  rpc Put(stream Flight) returns (Rule);
};
"""
THREE = """
syntax = 'proto3';
message Flight {
  optional string carrier = 1;
  optional int32 delay = 2;
  oneof when { int64 ms = 3; string message = 4; }
  repeated string enum = 5;
  map<string, google.protobuf.Timestamp> at = 6;
}
import "google/protobuf/timestamp.proto";
"""
EDITION = """
edition = "2023";
option features.field_presence = IMPLICIT;
message Flight { int32 delay = 1 [features.field_presence = EXPLICIT]; reserved old; }
"""


def linked(texts: dict[str, str], tmp_path: Path, name: str) -> Any:
    """By protoc."""
    for path, text in texts.items():
        (tmp_path / path).write_text(text)
    out = tmp_path / "out"
    arguments = ["protoc", f"-I{tmp_path}", f"-I{PROTO}", f"--descriptor_set_out={out}", name]
    assert protoc.main(arguments) == 0
    (found,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return found


def without_options(message: Any) -> Any:
    """Custom options are not interpreted here; names in JSON are shown where they are given."""
    for field, value in list(message.ListFields()):
        if field.name in ("options", "json_name"):
            message.ClearField(field.name)
        elif field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                without_options(one)
    return message


@pytest.mark.parametrize("name", [*GOOGLES, "two.proto", "three.proto", "edition.proto"])
def test_a_text_says_what_protoc_reads_in_it(name: str, tmp_path: Path) -> None:
    own = {"two.proto": TWO, "three.proto": THREE, "edition.proto": EDITION}
    path = name if name in own else f"google/protobuf/{name}"
    text = own.get(name) or (PROTO / path).read_text()
    theirs = linked({name: own[name]} if name in own else {}, tmp_path, path)
    schema = ProtobufSchema(text, [])
    ours = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(schema.serialized))
    sent = ProtobufSchema(base64.b64encode(theirs.SerializeToString()).decode(), [])
    theirs.ClearField("name")
    assert without_options(ours) == without_options(theirs)
    if name != "descriptor.proto":  # protoc leaves out what it alone needs
        assert sent.identity == schema.identity
    assert ProtobufSchema(sent.text, []).identity == sent.identity
    assert ProtobufSchema(schema.identity, []).identity == schema.identity


def test_custom_options_keep_their_names_where_their_definition_is_there(tmp_path: Path) -> None:
    theirs = linked({"two.proto": TWO}, tmp_path, "two.proto")
    sent = ProtobufSchema(base64.b64encode(theirs.SerializeToString()).decode(), [])
    assert '(two.note) = "x"' in sent.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "line 1: { is not expected"),
        ("\n\nmessage A { int32 a = 1; }", "line 3: a field of proto2 is optional, required"),
        ('syntax = "proto3"; message A {', "a name is expected, not the end"),
        ("message A { optional int32 a = 1 }", "line 1: ; is expected, not }"),
        ("message A { optional int32 a = 0; }", "0 is not from 1 to"),
        ("message A { optional int32 a = 19500; }", "are Protobuf's own"),
        ("message A { optional B a = 1; }", "couldn't resolve name 'B'"),
        ("message A { optional int32 a = 1; optional int32 a = 2; }", "duplicate"),
        ("message A { optional int32 a = 1; optional int32 b = 1; }", "duplicate field number"),
        ("message A { reserved 1 to 3; optional int32 a = 2; }", "A.a: the number 2 is reserved"),
        ('message A { reserved "a"; optional int32 a = 2; }', "the name 'a' is reserved"),
        ("message A { map<double, int32> a = 1; }", "the keys of a map"),
        ("message A { optional int32 a = 1 [nope = 1]; }", "there is no option nope"),
        ("message A { optional int32 a = 1 [packed = maybe]; }", "the option packed"),
        ("enum A { B = 1; C = 1; }", "two constants have one number"),
        ('syntax = "proto3"; enum A { B = 1; }', "must be zero"),
        ('syntax = "proto4";', "proto2 or proto3"),
        ('edition = "2099";', "there is no edition"),
        ('import "other.proto";', "'other.proto' is none of the references"),
        ('import "google/type/nope.proto";', "none of the references"),
        ('import "google/protobuf/../x.proto";', "none of the references"),
        ("message A { optional int32 a = 1abc; }", "needs space after it"),
        ('option java_package = "\\q";', "not expected"),
        ("message A {" * 40, "nested more than 32 times"),
        ("AAAA", "description"),
        ("# no", "'# no' is not expected"),
    ],
)
def test_what_is_no_protobuf_schema_is_refused(text: str, expected: str) -> None:
    with pytest.raises(Malformed) as info:
        ProtobufSchema(text, [])
    assert expected in str(info.value)


def three(*statements: str, package: str = "") -> str:
    named = f"package {package};" if package else ""
    return f'syntax = "proto3"; {named} {" ".join(statements)}'


def message(*fields: str, name: str = "M") -> str:
    return f"message {name} {{ {' '.join(fields)} }}"


N = message("int32 n = 1;", name="N")
X = "oneof x { int32 a = 1; int32 b = 2; }"
COMPATIBILITY = [  # reader, writer, why the reader cannot read it
    (three(message("int32 a = 1;")), three(message("int32 b = 1;")), []),
    (three(message("int64 a = 1;")), three(message("bool a = 1;")), []),
    (three(message("E a = 1;"), "enum E { A = 0; }"), three(message("int32 a = 1;")), []),
    (three(message("bytes a = 1;")), three(message("string a = 1;")), []),
    (three(message("int32 a = 1;")), three(message("int32 a = 1; int32 b = 2;")), []),
    (three(message(), N), three(N, message()), []),
    (three("enum E { A = 0; }"), three("enum E { A = 0; B = 1; }"), []),
    (
        three(message("sint32 a = 1;")),
        three(message("int32 a = 1;")),
        ["FIELD_SCALAR_KIND_CHANGED #/M/1"],
    ),
    (three(message("N a = 1;"), N), three(message("int32 a = 1;")), ["FIELD_KIND_CHANGED #/M/1"]),
    (
        three(message("N a = 1;"), N, N.replace("N", "O")),
        three(message("O a = 1;"), N, N.replace("N", "O")),
        ["FIELD_NAMED_TYPE_CHANGED #/M/1"],
    ),
    (
        three(message("repeated int32 a = 1;")),
        three(message("optional int32 a = 1;")),
        ["FIELD_NUMERIC_LABEL_CHANGED #/M/1"],
    ),
    (
        three(message("map<string, N> a = 1;"), N),
        three(message("map<string, int32> a = 1;"), N),
        ["FIELD_KIND_CHANGED #/M/1"],
    ),
    (
        three(message("map<int32, string> a = 1;")),
        three(message("map<string, string> a = 1;")),
        ["FIELD_SCALAR_KIND_CHANGED #/M/1"],
    ),
    (three(N), three(message(), N), ["MESSAGE_REMOVED #/M"]),
    (three(message()), three(message(N)), ["MESSAGE_REMOVED #/M/N"]),
    (
        three(message(message("fixed32 n = 1;", name="N"))),
        three(message(N)),
        ["FIELD_SCALAR_KIND_CHANGED #/M/N/1"],
    ),
    (three(message(), package="a"), three(message(), package="b"), ["PACKAGE_CHANGED #/"]),
    (
        message("required int32 a = 1;"),
        message("optional int32 b = 2;"),
        ["REQUIRED_FIELD_ADDED #/M/1"],
    ),
    (
        message("optional int32 b = 2;"),
        message("required int32 a = 1;"),
        ["REQUIRED_FIELD_REMOVED #/M/1"],
    ),
    (three(message(X)), three(message("int32 a = 1;")), []),
    (
        three(message(X)),
        three(message("int32 a = 1; int32 b = 2;")),
        ["MULTIPLE_FIELDS_MOVED_TO_ONEOF #/M/x"],
    ),
    (
        three(message(X)),
        three(message("oneof x { int32 a = 1; } int32 b = 2;")),
        ["FIELD_MOVED_TO_EXISTING_ONEOF #/M/x"],
    ),
    (
        three(message("oneof x { int32 a = 1; }")),
        three(message(X)),
        ["ONEOF_FIELD_REMOVED #/M/x/2"],
    ),
    (three(message("int32 a = 1; int32 b = 2;")), three(message(X)), []),
    (three(message("int32 c = 3;")), three(message(X)), []),
    (
        three(message(X.replace("int32 b", "float b"))),
        three(message(X)),
        ["FIELD_SCALAR_KIND_CHANGED #/M/x/2"],
    ),
    (
        three(message("optional int32 a = 1; optional int32 b = 2;")),
        three(message("optional int32 a = 1; int32 b = 2;")),
        [],
    ),
]


def shown(problems: list[str]) -> list[str]:
    return [" ".join(one.split("'")[1:4:2]) for one in problems]


@pytest.mark.parametrize(("reader", "writer", "expected"), COMPATIBILITY)
def test_a_protobuf_schema_reads_what_confluents_rules_say(
    reader: str, writer: str, expected: list[str]
) -> None:
    found = ProtobufSchema(reader, []).incompatibilities(ProtobufSchema(writer, []))
    assert shown(found) == expected


def test_an_imported_message_is_compared_where_a_field_has_it() -> None:
    def importing(inner: str, package: str = "p") -> ProtobufSchema:
        text = three('import "n.proto";', message(f"{package}.N a = 1; {package}.N b = 2;"))
        return ProtobufSchema(text, [("n.proto", three(inner, package=package))])

    numbers, texts = importing(N), importing(N.replace("int32", "string"))
    assert not importing(N, "other").incompatibilities(numbers)
    assert shown(texts.incompatibilities(numbers)) == [
        "FIELD_SCALAR_KIND_CHANGED #/N/1",
        "FIELD_NAMED_TYPE_CHANGED #/M/1",
        "FIELD_NAMED_TYPE_CHANGED #/M/2",
    ]


def test_messages_that_contain_themselves_are_compared_once() -> None:
    tree = ProtobufSchema(three(message("M left = 1; M right = 2; N n = 3;"), N), [])
    assert not tree.incompatibilities(tree)
    imported = three(message("M left = 1; M right = 2;"), package="t")
    both = [
        ProtobufSchema(three('import "t.proto"; message A { t.M a = 1; }'), [("t.proto", one)])
        for one in (imported, imported.replace("M right", "repeated M right"))
    ]
    assert not both[0].incompatibilities(both[1])


def test_what_is_imported_may_be_in_base64_and_only_what_is_not_sent_along_is_known() -> None:
    inner = ProtobufSchema(three(N, package="p"), [])
    outer = three(
        'import "n.proto"; import "google/type/date.proto"; import "confluent/meta.proto";',
        message("p.N n = 1 [(confluent.field_meta).doc = 'x']; google.type.Date day = 2;"),
    )
    by_text = ProtobufSchema(outer, [("n.proto", inner.text)])
    by_base64 = ProtobufSchema(outer, [("n.proto", inner.serialized)])
    assert by_text.identity == by_base64.identity


VALUES = """
syntax = "proto3";
message First { string name = 1; message Inner { sint32 n = 1; } }
message Second { First first = 1; repeated fixed64 numbers = 2; }
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\0", ""),
        (b"\0\x0a\1a", ""),
        (b"\2\2\x0a\3\x0a\1a", ""),  # the second message
        (b"\4\0\0\x08\4", ""),  # the first's first
        (b"\0\x78\1", ""),  # a field that a later version may have
        (b"", "indexes"),
        (b"\x80", "indexes"),
        (b"\xff\xff\xff\xff\xff\xff", "indexes"),
        (b"\2", "indexes"),
        (b"\2\4", "no message with the index [2]"),
        (b"\2\1", "no message with the index [-1]"),
        (b"\4\2\0", "no message with the index [1, 0]"),
        (b"\1", "-1 message indexes"),
        (b"\xfe\xff\xff\x0f", "message indexes are not from 0 to"),
        (b"\0\x0a\2a", "it is no First"),  # truncated
        (b"\0\x0a\1\xff", "it is no First"),  # not UTF-8
        (b"\0\x0f", "it is no First"),  # there is no wire type 7
        (b"\0\x0b", "it is no First"),  # a group that does not end
        (b"\2\2\x12\3\1\2\3", "it is no Second"),
    ],
)
def test_a_value_is_the_message_that_its_indexes_name(value: bytes, expected: str) -> None:
    schema = parse_schema(Source("PROTOBUF", VALUES))
    if not expected:
        schema.check_value(value)
        return
    with pytest.raises(Malformed) as info:
        schema.check_value(value)
    assert expected in str(info.value)


def test_a_value_without_a_required_field_is_refused() -> None:
    with pytest.raises(Malformed, match="lacks required fields: a"):
        ProtobufSchema(message("required int32 a = 1;"), []).check_value(b"\0")


def test_the_parser_gives_up_on_damaged_text_in_words() -> None:
    for cut in range(0, len(TWO), 7):
        for text in (TWO[:cut], TWO[cut:], TWO[:cut] + "\x00" + TWO[cut:]):
            try:
                parse_proto(text)
            except Malformed:
                continue


WIDE = " ".join(f"optional int64 f{number} = {number + 1};" for number in range(300))
ROWS = f"""
    syntax = "proto2";
    message R {{
        repeated W rows = 1; map<int32, W> of = 2; repeated group G = 3 {{ {WIDE} }}
        extensions 100; optional string text = 4;
    }}
    message W {{ {WIDE} }}
    extend R {{ repeated W more = 100; }}
"""


@pytest.mark.parametrize(
    ("one", "field"),
    [(b"\x0a\0", "R.rows"), (b"\x12\0", "R.of"), (b"\x1b\x1c", "R.g"), (b"\xa2\6\0", "more")],
)
def test_a_value_of_very_many_wide_messages_is_refused_before_memory_is_taken(
    one: bytes, field: str
) -> None:
    schema = ProtobufSchema(ROWS, [])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        Malformed, match=rf"{field}: with its messages of \d+ fields the value takes"
    ):
        schema.check_value(b"\0" + one * 500_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
    schema.check_value(b"\0" + one * 100)
    schema.check_value(b"\0" + b"\x22\xc0\x84\x3d" + (one * 500_000)[:1_000_000])  # as text
    with pytest.raises(Malformed, match="it is no R"):
        schema.check_value(b"\0" + b"\x5b" * 1_000_000)
