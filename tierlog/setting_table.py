"""All settings of a broker in one table, for flags, `--help`, the reference and errors.

A row names the field that it sets; type and default are the field's, so that neither is written
twice. Names are those in the configuration file; the variable is `TIERLOG_` and the name in upper
case, the flag is the name with dashes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NamedTuple

from tierlog.setting_kinds import Kind

NODE_ID_MAX: Final = 2**31 - 1  # Kafka's node ids are int32
I64_MAX: Final = 2**63 - 1
CENTURY_MS: Final = 36_525 * 86_400_000  # the time-out of a lock cannot be longer than three
OFFSET_GAP_MIN: Final = 10**9  # it cannot be known how much was lost, and offsets cost nothing
OFFSET_GAP_MAX: Final = 10**15  # a thousand such gaps still leave valid offsets
REPLICATION_FACTOR_MAX: Final = 32767  # Kafka's is int16
KIB: Final = 1 << 10
MIB: Final = 1 << 20


class Part(Enum):
    """Which part of `Settings` the field is in."""

    SERVE = "serve"
    STORE = "store"
    BROKER = "broker"
    PRICE = "price"
    HTTP = "http"
    KAFKA = "kafka"


class Setting(NamedTuple):
    """One row. `flag_kind`: set if the flag's unit differs from the file's."""

    name: str
    kind: Kind
    part: Part
    field: str
    doc: str
    least: int = 0
    most: int = I64_MAX
    flag: str = ""
    flag_kind: Kind | None = None

    @property
    def flag_name(self) -> str:
        return self.flag or "--" + self.name.replace(".", "-")

    @property
    def variable(self) -> str:
        return "TIERLOG_" + self.name.replace(".", "_").upper()


# How a value is written, the least that it may be, and the most.
Allowed = Kind | tuple[Kind, int] | tuple[Kind, int, int]


def _rows(part: Part, *, prefix: str = "") -> Callable[..., Setting]:
    def row(name: str, allowed: Allowed, doc: str, **rest: Any) -> Setting:
        kind, *limits = (allowed,) if isinstance(allowed, Kind) else allowed
        field = name.removeprefix(prefix).replace(".", "_")
        unlimited = (0, CENTURY_MS if kind is Kind.MS else I64_MAX)
        least, most = (*limits, *unlimited[len(limits) :])
        return Setting(name, kind, part, field, doc, least, most)._replace(**rest)

    return row


_serve = _rows(Part.SERVE)
_store = _rows(Part.STORE, prefix="s3.")
_broker = _rows(Part.BROKER)
_http = _rows(Part.HTTP, prefix="http.")
_kafka = _rows(Part.KAFKA, prefix="kafka.")
_price = _rows(Part.PRICE, prefix="price.")
_FREE_ELSEWHERE: Final = "; 0 by default unless the store is s3://."

TABLE: Final[tuple[Setting, ...]] = (
    _broker("data.dir", Kind.PATH, "Folder of the broker's logs; required."),
    _store(
        "store",
        Kind.TEXT,
        "Store of sealed segments: s3://bucket/prefix, file:///folder or memory://name. Without "
        "one, all stays on local disk.",
        field="url",
    ),
    _serve(
        "listen",
        Kind.TEXT,
        "Host and port. An address other than loopback requires tokens, or --insecure-no-auth.",
    ),
    _store("s3.endpoint", Kind.TEXT, "URL of an S3 server that is not AWS."),
    _store("s3.region", Kind.TEXT, "Region, if AWS's own configuration does not name it."),
    _store("s3.profile", Kind.TEXT, "Profile in AWS's configuration files."),
    _store(
        "s3.path.style", Kind.SWITCH, "Put the bucket's name in the path, not in the host name."
    ),
    _store("s3.ca.bundle", Kind.TEXT, "PEM file of certificate authorities for the endpoint."),
    _store("s3.storage.class", Kind.TEXT, "Storage class of segment objects; STANDARD by default."),
    _store(
        "s3.server.side.encryption",
        Kind.TEXT,
        "AES256, aws:kms or aws:kms:dsse; the bucket's own by default.",
    ),
    _store("s3.sse.kms.key.id", Kind.TEXT, "KMS key for aws:kms; AWS's own by default."),
    _broker(
        "allow.single.writer.store",
        Kind.SWITCH,
        "Accept a store without atomic conditional writes; no other broker may write to it.",
    ),
    _broker(
        "take.over",
        Kind.SWITCH,
        "Take over partitions that another broker owns; that broker stops writing.",
    ),
    _broker(
        "cluster.join",
        Kind.SWITCH,
        "Be one of several brokers on the same store. A new data folder joins the store's cluster.",
        flag="--join",
    ),
    _serve(
        "cluster.token.file",
        Kind.TEXT,
        "File with the token, of scope cluster, that the brokers of the cluster show each other.",
    ),
    _http(
        "cluster.ca.file",
        Kind.TEXT,
        "PEM file of the certificate authorities that the brokers of the cluster trust, and no "
        "others, for each other; by default the system's.",
        field="peers_ca_file",
    ),
    _broker(
        "node.id",
        (Kind.COUNT, 0, NODE_ID_MAX),
        "The broker's number in the cluster; by default that of its data folder, or the lowest "
        "that is free.",
    ),
    _broker(
        "advertised.url",
        Kind.TEXT,
        "URL at which the other brokers of the cluster reach this one; by default that which it "
        "listens on.",
    ),
    _broker(
        "broker.zone",
        Kind.TEXT,
        "Where the broker stands, as in eu-1b: the cluster spreads over zones.",
    ),
    _broker(
        "heartbeat.interval.ms",
        (Kind.MS, 50),
        "How often a broker of a cluster tells the others, by a PUT, that it lives.",
    ),
    _broker(
        "session.timeout.ms",
        (Kind.MS, 100),
        "A broker of a cluster whose heartbeat does not change for so long is taken for dead.",
    ),
    _broker(
        "rebalance.interval.ms",
        (Kind.MS, 0),
        "How often the brokers of a cluster share out what they lead; 0: only when asked.",
    ),
    _broker(
        "default.replication.factor",
        (Kind.COUNT, 1, REPLICATION_FACTOR_MAX),
        "Replicas of each partition of a topic that is created without saying how many; above 1 "
        "only with --join.",
    ),
    _broker(
        "replica.lag.time.max.ms",
        (Kind.MS, 100),
        "A replica that has not caught up with its leader for so long is no longer in sync.",
    ),
    _broker(
        "replica.fetch.wait.max.ms",
        (Kind.MS, 1, 60_000),
        "How long a leader that has nothing new lets a replica wait for its answer.",
    ),
    _broker(
        "replica.fetch.max.bytes",
        (Kind.BYTES, KIB, 2**31 - 1),
        "Bytes of batches in one answer to a replica; one batch may be larger. A broker has one "
        "answer of each leader that it follows in memory.",
    ),
    _broker(
        "store.flush.ms",
        (Kind.MS, 10, 60_000),
        "How often what topics with `replication.store` have got is written to the bucket, by one "
        "PUT for all partitions that this broker leads.",
    ),
    _broker(
        "store.flush.max.bytes",
        (Kind.BYTES, KIB, 2**30),
        "Bytes of batches in one of these objects, of which four may be in memory; one batch may "
        "be larger. An object that is full is followed by the next at once.",
    ),
    _serve(
        "insecure.no.auth", Kind.SWITCH, "Listen on any address without tokens: anyone may call."
    ),
    _serve("tls.cert", Kind.TEXT, "PEM file with the server's certificate and its chain."),
    _serve("tls.key", Kind.TEXT, "PEM file with the certificate's private key."),
    _serve(
        "tokens.file",
        Kind.TEXT,
        "File of `tierlog token`; tierlog/tokens.json in the data folder by default. Where it "
        "exists, tokens are required.",
    ),
    _broker(
        "offload.concurrency",
        (Kind.COUNT, 1, 256),
        "Segments uploaded at the same time; others wait.",
    ),
    _broker(
        "offload.bandwidth",
        (Kind.BYTES, 1),
        "Bytes uploaded per second, all uploads together; no limit by default.",
    ),
    _broker(
        "offload.part.bytes",
        (Kind.BYTES, 5 * MIB, 5 << 30),
        "Size of a part of a multipart upload; what is smaller is one PUT.",
    ),
    _broker(
        "cache.bytes",
        Kind.BYTES,
        "Disk space for cached cold chunks; full, it evicts some. A tenth of the disk by default.",
    ),
    _broker(
        "cache.chunk.bytes",
        (Kind.BYTES, 64 * KIB, 64 * MIB),
        "Size of a chunk of a cold segment: of a ranged GET, of the cache, of a Spark split.",
    ),
    _broker(
        "cold.requests.max",
        (Kind.COUNT, 1, 4096),
        "GETs of cold chunks at the same time; others wait.",
    ),
    _broker(
        "cold.memory.max",
        (Kind.BYTES, MIB),
        "Memory for GETs of cold chunks, 1 MiB each: with less, fewer run at once. As much again "
        "for chunks that a full disk cannot cache; reads beyond that get 429.",
    ),
    _broker(
        "gc.grace.ms",
        (Kind.MS, 0),
        "How long an object is kept after the last manifest that named it, and so how long a read "
        "from the bucket may take.",
    ),
    _broker(
        "manifest.versions.min",
        (Kind.COUNT, 1),
        "Manifest versions that are always kept; older ones for 24 hours.",
    ),
    _broker(
        "fence.check.ms",
        (Kind.MS, 100),
        "How long ago an owner may have checked for a newer one when it acknowledges; it sends two "
        "HEADs in that time.",
    ),
    _broker(
        "store.start.timeout.ms",
        Kind.MS,
        "How long startup waits for the store before it serves hot data without it.",
    ),
    _broker(
        "restore.offset.gap",
        (Kind.COUNT, OFFSET_GAP_MIN, OFFSET_GAP_MAX),
        "Offsets skipped after a restore or take-over, so that none is assigned twice: more than a "
        "lost broker can have appended above the end of the log in the bucket.",
    ),
    _broker(
        "disk.reserve.bytes",
        Kind.BYTES,
        "Free disk space below which cached chunks and local segments that the bucket has are "
        "deleted; if that is not enough, writes get 507. 5% of the disk by default, 1 GiB at most.",
    ),
    _broker(
        "recovery.checkpoint.ms",
        (Kind.MS, 100),
        "How often recovery points are saved; after a crash, what came since is checked.",
    ),
    _broker(
        "producer.id.expiration.ms",
        (Kind.MS, 1000),
        "How long an idle producer is remembered; later, a repeated request is appended again.",
    ),
    _broker(
        "retention.check.interval.ms",
        (Kind.MS, 10),
        "How often expired segments are looked for.",
        flag="--retention-check-interval",
        flag_kind=Kind.SECONDS,
    ),
    _broker(
        "shutdown.timeout.ms",
        (Kind.MS, 1),
        "How long shutdown may take: four fifths for requests in progress, the rest for the store.",
        flag="--shutdown-timeout",
        flag_kind=Kind.SECONDS,
    ),
    _broker(
        "log.cleaner.dedupe.buffer",
        (Kind.BYTES, MIB),
        "Memory for the keys of a compaction pass, 12 bytes each; more keys take more passes.",
        field="log_cleaner_dedupe_buffer_bytes",
    ),
    _broker("log.cleaner.backoff.ms", (Kind.MS, 10), "How often compaction looks for work."),
    _broker(
        "append.threads",
        (Kind.COUNT, 1, 1024),
        "Threads that write and flush: so many partitions at the same time.",
    ),
    _broker(
        "group.commits.max",
        (Kind.COUNT, 1),
        "Committed offsets of all groups together, kept in memory; a new one beyond that gets 429. "
        "As many partitions may share groups read.",
    ),
    _broker(
        "group.min.session.timeout.ms",
        (Kind.MS, 1),
        "The shortest session time-out that a group's member may ask for.",
    ),
    _broker(
        "group.max.session.timeout.ms",
        (Kind.MS, 1),
        "The longest session time-out that a group's member may ask for.",
    ),
    _broker(
        "group.initial.rebalance.delay.ms",
        Kind.MS,
        "How long an empty group waits for more members before its first rebalance.",
    ),
    _broker("group.max.size", (Kind.COUNT, 1), "Members of a group; beyond it they are refused."),
    _broker(
        "group.consumer.session.timeout.ms",
        (Kind.MS, 1),
        "After this time without a heartbeat, a member of a consumer group (KIP-848) is removed.",
    ),
    _broker(
        "group.consumer.heartbeat.interval.ms",
        (Kind.MS, 1),
        "How often the members of a consumer group are told to send heartbeats.",
    ),
    _broker(
        "group.consumer.max.size",
        (Kind.COUNT, 1),
        "Members of a consumer group; beyond it they are refused.",
    ),
    _broker(
        "group.consumer.assignment.interval.ms",
        Kind.MS,
        "How long an assignment of a consumer group stands before there is a new one.",
    ),
    _broker(
        "group.consumer.regex.refresh.interval.ms",
        (Kind.MS, 10_000),
        "How long what a consumer group's patterns match is taken for known; new topics are "
        "looked at sooner.",
    ),
    _broker(
        "group.consumer.migration.policy",
        Kind.MIGRATION,
        "Which groups change between the classic protocol and that of KIP-848 while they have "
        "members: bidirectional, upgrade, downgrade or disabled.",
    ),
    _broker(
        "group.share.session.timeout.ms",
        (Kind.MS, 1),
        "After this time without a heartbeat, a member of a share group (KIP-932) is removed.",
    ),
    _broker(
        "group.share.heartbeat.interval.ms",
        (Kind.MS, 1),
        "How often the members of a share group are told to send heartbeats.",
    ),
    _broker(
        "group.share.max.size",
        (Kind.COUNT, 1, 1_000),
        "Members of a share group; beyond it they are refused.",
    ),
    _broker(
        "group.share.assignment.interval.ms",
        Kind.MS,
        "How long an assignment of a share group stands before there is a new one.",
    ),
    _broker(
        "group.share.record.lock.duration.ms",
        (Kind.MS, 1_000, 3_600_000),
        "How long a record that was given to a member of a share group is kept from the others.",
    ),
    _broker(
        "group.share.min.record.lock.duration.ms",
        (Kind.MS, 1_000, 30_000),
        "Least `share.record.lock.duration.ms` of a group.",
    ),
    _broker(
        "group.share.max.record.lock.duration.ms",
        (Kind.MS, 30_000, 3_600_000),
        "Largest `share.record.lock.duration.ms` of a group.",
    ),
    _broker(
        "group.share.delivery.count.limit",
        (Kind.COUNT, 2, 10),
        "How often a record is given to a member of a share group; then it is given up.",
    ),
    _broker(
        "group.share.min.delivery.count.limit",
        (Kind.COUNT, 2, 5),
        "Least `share.delivery.count.limit` of a group.",
    ),
    _broker(
        "group.share.max.delivery.count.limit",
        (Kind.COUNT, 5, 25),
        "Largest `share.delivery.count.limit` of a group.",
    ),
    _broker(
        "group.share.partition.max.record.locks",
        (Kind.COUNT, 100, 10_000),
        "Records of a partition, from the first that a share group has not done with, that are "
        "given to its members at a time.",
    ),
    _broker(
        "group.share.min.partition.max.record.locks",
        (Kind.COUNT, 100, 2_000),
        "Least `share.partition.max.record.locks` of a group.",
    ),
    _broker(
        "group.share.max.partition.max.record.locks",
        (Kind.COUNT, 2_000, 10_000),
        "Largest `share.partition.max.record.locks` of a group.",
    ),
    _broker(
        "share.coordinator.snapshot.update.records.per.snapshot",
        (Kind.COUNT, 0, 500),
        "Changes of a share partition that are written before its whole state is written again.",
    ),
    _broker(
        "share.coordinator.state.topic.num.partitions",
        (Kind.COUNT, 1, 10_000),
        "Partitions of `__share_group_state` when it is created: 1, or 12 "
        "in a cluster. One that exists stays as it is.",
    ),
    _broker(
        "share.coordinator.state.topic.replication.factor",
        (Kind.COUNT, 1, REPLICATION_FACTOR_MAX),
        "Replicas of `__share_group_state` when it is created; `default.replication.factor` by "
        "default.",
    ),
    _broker(
        "offset.metadata.max.bytes",
        (Kind.BYTES, 0, 32_767),
        "Largest metadata of a committed offset.",
    ),
    _broker(
        "offsets.topic.num.partitions",
        (Kind.COUNT, 1, 10_000),
        "Partitions of `__consumer_offsets` when it is created: 1, or 12 "
        "in a cluster. One that exists stays as it is.",
    ),
    _broker(
        "offsets.topic.replication.factor",
        (Kind.COUNT, 1, REPLICATION_FACTOR_MAX),
        "Replicas of `__consumer_offsets` when it is created; `default.replication.factor` by "
        "default.",
    ),
    _broker(
        "offsets.retention.minutes",
        (Kind.COUNT, 1),
        "How long a group's offsets are kept once nobody is in it. For ever by default.",
    ),
    _broker(
        "transaction.max.timeout.ms",
        (Kind.MS, 1),
        "Longest `transaction.timeout.ms` of a producer, after which its transaction is aborted.",
    ),
    _broker(
        "transactional.id.expiration.ms",
        (Kind.MS, 1),
        "How long a transactional id that is not used is remembered.",
    ),
    _broker(
        "transaction.state.log.num.partitions",
        (Kind.COUNT, 1, 10_000),
        "Partitions of `__transaction_state` when it is created. Transactions of several ids are "
        "committed together only within one.",
    ),
    _broker(
        "transaction.state.log.replication.factor",
        (Kind.COUNT, 1, REPLICATION_FACTOR_MAX),
        "Replicas of `__transaction_state` when it is created; `default.replication.factor` by "
        "default.",
    ),
    _price(
        "price.put.per.1000",
        Kind.DOLLARS,
        "Dollars for a thousand PUT, POST and COPY requests" + _FREE_ELSEWHERE,
    ),
    _price(
        "price.get.per.1000",
        Kind.DOLLARS,
        "Dollars for a thousand GET and HEAD requests" + _FREE_ELSEWHERE,
    ),
    _price(
        "price.list.per.1000",
        Kind.DOLLARS,
        "Dollars for a thousand LIST requests" + _FREE_ELSEWHERE,
    ),
    _price(
        "price.received.per.gb",
        Kind.DOLLARS,
        "Dollars for a gigabyte (10^9 bytes) read from the store.",
    ),
    _price(
        "price.stored.per.gb.month",
        Kind.DOLLARS,
        "Dollars for storing a gigabyte (10^9 bytes) for a month" + _FREE_ELSEWHERE,
    ),
    _http("http.body.max.bytes", (Kind.BYTES, 1), "Largest request body; beyond it 413."),
    _http(
        "http.expanded.max.bytes",
        (Kind.BYTES, 1),
        "Largest request body after decompression; beyond it 413. For JSON and NDJSON it is "
        "http.body.max.bytes, compressed or not. At most half of http.decoding.max.bytes.",
    ),
    _http(
        "http.decoding.max.bytes",
        (Kind.BYTES, 1),
        "Memory for records that are read as text, and for what is produced and expands to more "
        "than 32 MiB, of all requests together; beyond it they wait.",
    ),
    _http("http.records.max", (Kind.COUNT, 1), "Records of a request; beyond it 413."),
    _http(
        "http.connections.max",
        (Kind.COUNT, 1),
        "Open connections; beyond it 429, beyond twice as many they are closed.",
    ),
    _http(
        "http.inflight.max.bytes",
        (Kind.BYTES, 1),
        "Bytes of all requests in progress, once they are expanded; beyond it 429, and 413 for one "
        "that is larger by itself.",
    ),
    _http(
        "http.client.requests.max",
        (Kind.COUNT, 1),
        "Requests per second of one token, or of one client address; beyond it 429, and Kafka "
        "clients are throttled. No limit by default.",
    ),
    _http(
        "http.leader.wait.ms",
        Kind.MS,
        "In a cluster, how long a call waits while nobody leads what it is about, as during a "
        "hand-over; then 503.",
    ),
    _http("http.header.max.bytes", (Kind.BYTES, 1024), "Largest request head; beyond it 431."),
    _http(
        "http.header.timeout.ms",
        (Kind.MS, 1),
        "How long a request's head may take to arrive; then the connection is closed.",
    ),
    _http(
        "http.body.idle.timeout.ms",
        (Kind.MS, 1),
        "How long a request's body may stall; then the connection is closed.",
    ),
    _http(
        "http.body.rate.min",
        (Kind.BYTES, 1),
        "Bytes per second, on average, at which a request's body must arrive, or the connection is "
        "closed.",
    ),
    _http(
        "http.send.idle.timeout.ms",
        (Kind.MS, 1, 2**31 - 1),
        "How long a client may leave its response unread before it is disconnected (Linux).",
    ),
    _http(
        "http.read.threads",
        (Kind.COUNT, 1, 1024),
        "Threads for reads from disk, as many again for reads from the store; other reads wait.",
    ),
    _http(
        "http.keep.alive.ms", (Kind.MS, 1), "How long an idle connection is kept, in whole seconds."
    ),
    _serve(
        "catalog",
        Kind.TEXT,
        "Catalog of the topics' Iceberg tables, which the console shows: a URL or a name, as for "
        "`tierlog table`. Not with a password: that is for PyIceberg's configuration.",
    ),
    _serve(
        "warehouse",
        Kind.TEXT,
        "Where a catalog in a database has its tables: s3://bucket/prefix or file:///folder.",
    ),
    _http(
        "http.decode.max.bytes",
        (Kind.BYTES, 1),
        "A larger key or value is not decoded by its schema, nor one whose JSON has over eight "
        "times as much.",
    ),
    _http(
        "http.decode.max.ms",
        (Kind.MS, 1),
        "How long keys and values of a page are decoded by their schemas; the rest stays as it is.",
    ),
    _http(
        "http.search.max.bytes",
        (Kind.BYTES, 1),
        "How much a search of the console, or a fetch by key, may read before it ends; both can be "
        "continued.",
    ),
    _http(
        "http.search.max.ms",
        (Kind.MS, 1),
        "How long a search of the console, or a fetch by key, may take before it ends; both can be "
        "continued.",
    ),
    _http(
        "http.searches.max",
        (Kind.COUNT, 1),
        "Searches of the console at once; beyond it 429.",
    ),
    _serve(
        "kafka.listen",
        Kind.TEXT,
        "HOST:PORT for Kafka clients; they are not served without it. An address other than "
        "loopback requires tokens, or --insecure-no-auth.",
        field="kafka_listen",
    ),
    _serve(
        "kafka.advertised",
        Kind.TEXT,
        "HOST:PORT that Kafka clients are told to connect to; by default the address that they "
        "have connected to.",
        field="kafka_advertised",
    ),
    _kafka(
        "socket.request.max.bytes",
        (Kind.BYTES, KIB, 2**31 - 1),
        "Bytes of a Kafka request; beyond it the connection is closed.",
        field="request_max_bytes",
    ),
    _kafka(
        "queued.max.request.bytes",
        (Kind.BYTES, KIB),
        "Bytes of all Kafka requests in progress; beyond it connections are not read.",
        field="queued_max_bytes",
    ),
    _kafka(
        "fetch.max.bytes",
        (Kind.BYTES, KIB, 2**31 - 1),
        "Bytes of records in the answer to one Fetch of a Kafka client; one batch may be larger.",
        field="fetch_max_bytes",
    ),
    _kafka(
        "remote.fetch.max.wait.ms",
        (Kind.MS, 1),
        "How long a Fetch of a Kafka client waits for the disk or the bucket, if the client's own "
        "time is shorter.",
        field="remote_fetch_max_wait_ms",
    ),
    _kafka(
        "max.incremental.fetch.session.cache.slots",
        (Kind.COUNT, 0),
        "Fetch sessions of Kafka clients; beyond it a Fetch names all its partitions.",
        field="fetch_sessions_max",
    ),
    _kafka(
        "group.share.max.share.sessions",
        (Kind.COUNT, 1),
        "Share sessions: members of share groups that read here; others wait and try again.",
        field="share_sessions_max",
    ),
    _kafka(
        "max.connections",
        (Kind.COUNT, 1),
        "Open connections of Kafka clients; beyond it they are closed.",
        field="connections_max",
    ),
    _kafka(
        "connections.max.idle.ms",
        (Kind.MS, 1),
        "How long an idle connection of a Kafka client is kept.",
    ),
    _kafka(
        "connections.max.reauth.ms",
        Kind.MS,
        "How long a Kafka client is authenticated; then it has to show its token again. 0: as long "
        "as it is connected.",
    ),
    _kafka(
        "connection.failed.authentication.delay.ms",
        (Kind.MS, 0, 10_000),
        "How long a Kafka client that failed to authenticate waits for the answer.",
        field="failed_authentication_delay_ms",
    ),
    _kafka(
        "auto.create.topics.enable",
        Kind.SWITCH,
        "Create a topic that a Kafka client asks for; with tokens, if its token has `admin`.",
        field="auto_create_topics",
    ),
    _kafka(
        "num.partitions",
        (Kind.COUNT, 1, 10_000),
        "Partitions of a topic that a Kafka client creates without saying how many.",
    ),
)
