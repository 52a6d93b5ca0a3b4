"""The configurations of single groups: Kafka's GROUP configs (KIP-848, KIP-932).

* `group_config_keys` is the only list of the keys. A group that says nothing has the broker's
  settings.
* They are durable before they count: a record for each group, its name and a JSON object, in
  `__group_configs`, which is an internal topic like the others: compacted, offloaded, restored.
  Kafka keeps them with its controllers.
* In a cluster its leader is asked: a change goes there, and the others follow it, within seconds.
  What is decided once for ever by a configuration asks first (`refresh`).

Thread-safe. `alter`, `load` and `refresh` may block.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec
import structlog

from tierlog.broker.group_coordinator.consumer_group import ConsumerLimits
from tierlog.broker.group_coordinator.share_group import ShareGroupLimits, ShareLimits
from tierlog.broker.membership.peers import GroupConfigCall, Peers
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.coordinator_log import CoordinatorLog, stored_records
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import NewTopic
from tierlog.hot_tier.log_config import INT_MAX, ConfigKey
from tierlog.record_format.errors import FieldProblem, InvalidConfig, NotLeader, Throttled
from tierlog.record_format.topic_rules import ConfigValue
from tierlog.record_format.workarounds import decode_json

log = structlog.get_logger(__name__)

TOPIC: Final = "__group_configs"
CONFIG: Final[Mapping[str, ConfigValue]] = {"cleanup.policy": "compact"}
CONFIGURED_MAX: Final = 100_000  # groups
# Kafka's defaults of the brokers' group.….min.… and max.… settings.
_SESSION_MS, _HEARTBEAT_MS, _ASSIGNMENT_MS = (45_000, 60_000), (5_000, 15_000), (0, 15_000)
_BY_DURATION: Final = re.compile(
    r"by_duration:P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?"
)
_FACTORS_MS: Final = (86_400_000, 3_600_000, 60_000, 1_000)


class GroupKey(NamedTuple):
    """`synonym`: the broker's setting that is its default, if there is one."""

    key: ConfigKey
    synonym: str | None

    @property
    def name(self) -> str:
        return self.key.name


class _ResetKey(ConfigKey):
    """`share.auto.offset.reset`: also by_duration:PnDTnHnMn.nS."""

    def _parse_text(self, value: object) -> str:
        if isinstance(value, str) and duration_ms(value) is not None:
            return value.strip()
        return super()._parse_text(value)


def duration_ms(text: str) -> int | None:
    """The milliseconds of `by_duration:…`; None if it is none."""
    found = _BY_DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        return None
    pairs = zip(found.groups(), _FACTORS_MS, strict=True)
    return int(sum(float(number) * factor for number, factor in pairs if number))


def group_config_keys(settings: BrokerSettings) -> dict[str, GroupKey]:
    """In Kafka's order of names."""
    keys = [
        _number("consumer.session.timeout.ms", settings, *_SESSION_MS),
        _number("consumer.heartbeat.interval.ms", settings, *_HEARTBEAT_MS),
        _number("consumer.assignment.interval.ms", settings, *_ASSIGNMENT_MS),
        _number("share.session.timeout.ms", settings, *_SESSION_MS),
        _number("share.heartbeat.interval.ms", settings, *_HEARTBEAT_MS),
        _number("share.assignment.interval.ms", settings, *_ASSIGNMENT_MS),
        _number(
            "share.record.lock.duration.ms",
            settings,
            settings.group_share_min_record_lock_duration_ms,
            settings.group_share_max_record_lock_duration_ms,
        ),
        _number(
            "share.delivery.count.limit",
            settings,
            settings.group_share_min_delivery_count_limit,
            settings.group_share_max_delivery_count_limit,
        ),
        _number(
            "share.partition.max.record.locks",
            settings,
            settings.group_share_min_partition_max_record_locks,
            settings.group_share_max_partition_max_record_locks,
        ),
        _text(
            "share.isolation.level",
            "read_uncommitted",
            "Whether records of transactions that are not committed are given to members.",
            choices=("read_committed", "read_uncommitted"),
        ),
        GroupKey(
            _ResetKey(
                "share.auto.offset.reset",
                "text",
                "latest",
                "Where a share group begins to read a partition: earliest, latest or "
                "by_duration:PnDTnHnMn.nS.",
                choices=("earliest", "latest"),
            ),
            None,
        ),
        GroupKey(
            ConfigKey(
                "share.renew.acknowledge.enable",
                "boolean",
                True,
                "Whether a member may keep records for longer (KIP-1222).",
            ),
            None,
        ),
    ]
    return {one.name: one for one in keys}


def _number(name: str, settings: BrokerSettings, least: int, most: int) -> GroupKey:
    synonym = f"group.{name}"
    default: int = getattr(settings, synonym.replace(".", "_"))
    doc = f"Of this group, instead of the broker's {synonym}."
    return GroupKey(ConfigKey(name, "int", default, doc, least, min(most, INT_MAX)), synonym)


def _text(name: str, default: str, doc: str, *, choices: tuple[str, ...]) -> GroupKey:
    return GroupKey(ConfigKey(name, "text", default, doc, choices=choices), None)


class GroupConfigs:
    """`on_changed` is called with the name of a group whose configuration is another."""

    def __init__(
        self,
        topics: LiveTopics,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        peers: Peers | None = None,
    ) -> None:
        """`peers`: in a cluster."""
        self._settings = settings
        self.log = CoordinatorLog(
            topics,
            NewTopic(TOPIC, 1, CONFIG),
            load=self._load_partition,
            forget=lambda _: None,  # it is known until the next leader says otherwise
            clock=clock,
        )
        self.keys = group_config_keys(settings)
        self._set: dict[str, dict[str, ConfigValue]] = {}
        self._lock = threading.Lock()
        self._peers = peers
        self._followed: tuple[int, int | None] | None = None  # the leader's epoch, and its end
        self.on_changed: Callable[[str], None] = lambda _: None
        self._share_limits: dict[str, ShareLimits] = {}
        self._share_default = self._share_limits_of({})

    # --- reading ----------------------------------------------------------------------------------

    def load(self) -> None:
        """Raises what reads of the topic do; in a cluster PeerUnavailable, LeaderUnknown."""
        self.log.load()
        if (elsewhere := self._leader()) is not None:
            now = elsewhere.leader_epoch, self._end_elsewhere()
            if now != self._followed:
                self._replace(self._ask(elsewhere, GroupConfigCall()))
                self._followed = now

    def refresh(self, group: str) -> None:
        """Ask for what a group's is now. Raises as `load`."""
        self.log.load()
        if (elsewhere := self._leader()) is not None:
            found = self._ask(elsewhere, GroupConfigCall(group=group))
            self._change(group, found.get(group, {}))

    def _leader(self) -> NotLeader | None:
        """None: it is here, or there is none yet. Raises LeaderUnknown."""
        if self._peers is None or self.log.topic is None:
            return None
        try:
            self.log.check_here("")
        except NotLeader as elsewhere:
            return elsewhere
        return None

    def _end_elsewhere(self) -> int | None:
        topic = self.log.topic
        return None if topic is None else topic.end_elsewhere(0)

    def _ask(self, leader: NotLeader, call: GroupConfigCall) -> dict[str, dict[str, ConfigValue]]:
        assert self._peers is not None, "it is the cluster that says so"
        return self._peers.call_group_configs(leader.url, call)

    def answer(self, call: GroupConfigCall) -> dict[str, dict[str, ConfigValue]]:
        """For another broker of the cluster. Raises as `alter`."""
        if call.group is not None and call.config:
            self._alter_here(call.group, call.config)
        self.log.load()
        self.log.check_ready("")
        names = self.names() if call.group is None else [call.group]
        return {name: dict(found) for name in names if (found := self.overrides(name))}

    def _load_partition(self, partition: Partition) -> None:
        found: dict[str, dict[str, ConfigValue]] = {}
        for record in stored_records(partition):
            group, value = bytes(record.key or b"").decode(), record.value
            found[group] = {} if value is None else decode_json(value, dict[str, ConfigValue])
        self._replace(found)

    def _replace(self, configs: Mapping[str, Mapping[str, ConfigValue]]) -> None:
        for group in {*self._set, *configs}:
            self._change(group, configs.get(group, {}))

    def _change(self, group: str, values: Mapping[str, ConfigValue]) -> None:
        known = {name: one for name, one in values.items() if name in self.keys}
        if known == self._set.get(group, {}):
            return
        if known:
            self._set[group] = known
            self._share_limits[group] = self._share_limits_of(known)
        else:
            self._set.pop(group, None)
            self._share_limits.pop(group, None)
        self.on_changed(group)

    def names(self) -> list[str]:
        """The groups that have a configuration of their own."""
        return sorted(self._set)

    def overrides(self, group: str) -> Mapping[str, ConfigValue]:
        return self._set.get(group, {})

    def value(self, group: str, name: str) -> ConfigValue:
        return self.overrides(group).get(name, self.keys[name].key.default)

    def is_default(self, name: str) -> bool:
        """Whether the broker's setting for it, if there is one, is its default."""
        key, synonym = self.keys[name]
        if synonym is None:
            return True
        field = BrokerSettings.__dataclass_fields__[synonym.replace(".", "_")]
        return bool(field.default == key.default)

    # --- changing ---------------------------------------------------------------------------------

    def checked(
        self, group: str, changes: Mapping[str, ConfigValue | None]
    ) -> dict[str, ConfigValue]:
        """The configuration with these changes; None is the default. Raises InvalidConfig."""
        problems, found = [], dict(self.overrides(group))
        for name, value in changes.items():
            if name not in self.keys:
                problems.append(FieldProblem(name, f"Unknown group config name: {name}"))
            elif value is None:
                found.pop(name, None)
            else:
                try:
                    found[name] = self.keys[name].key.parse(value)
                except ValueError as error:
                    problems.append(FieldProblem(name, str(error)))
        for kind in "consumer", "share":
            heartbeat, session = f"{kind}.heartbeat.interval.ms", f"{kind}.session.timeout.ms"
            both = [found.get(one, self.keys[one].key.default) for one in (heartbeat, session)]
            if (
                not problems
                and changes.keys() & {heartbeat, session}
                and int(both[0]) >= int(both[1])
            ):
                problems.append(
                    FieldProblem(session, f"{session} must be greater than {heartbeat}")
                )
        if problems:
            raise InvalidConfig("; ".join(one.msg for one in problems), problems=tuple(problems))
        return found

    def alter(self, group: str, changes: Mapping[str, ConfigValue | None]) -> None:
        """Durable when this returns. Raises InvalidConfig, Throttled, what an append raises; in a
        cluster PeerUnavailable, LeaderUnknown.
        """
        self.checked(group, changes)
        self.log.ensure_topic()
        elsewhere = self._leader()
        if elsewhere is None:
            self._alter_here(group, changes)
        else:
            found = self._ask(elsewhere, GroupConfigCall(group=group, config=dict(changes)))
            self._change(group, found.get(group, {}))

    def _alter_here(self, group: str, changes: Mapping[str, ConfigValue | None]) -> None:
        self.log.load()
        with self._lock:
            found = self.checked(group, changes)
            if group not in self._set and len(self._set) >= CONFIGURED_MAX:
                raise Throttled(f"{CONFIGURED_MAX} groups have a configuration already")
            value = msgspec.json.encode(found) if found else None
            self.log.append(group, [(group.encode(), value)]).result()
            self._change(group, found)

    # --- what they mean ---------------------------------------------------------------------------

    def consumer_limits(self, group: str) -> ConsumerLimits:
        settings = self._settings
        return ConsumerLimits(
            max_size=settings.group_consumer_max_size,
            classic_max_size=settings.group_max_size,
            session_timeout_ms=self._int(group, "consumer.session.timeout.ms"),
            heartbeat_interval_ms=self._int(group, "consumer.heartbeat.interval.ms"),
            assignment_interval_ms=self._int(group, "consumer.assignment.interval.ms"),
            regex_refresh_interval_ms=settings.group_consumer_regex_refresh_interval_ms,
            migration=settings.group_consumer_migration_policy,
        )

    def share_group_limits(self, group: str) -> ShareGroupLimits:
        return ShareGroupLimits(
            max_size=self._settings.group_share_max_size,
            session_timeout_ms=self._int(group, "share.session.timeout.ms"),
            heartbeat_interval_ms=self._int(group, "share.heartbeat.interval.ms"),
            assignment_interval_ms=self._int(group, "share.assignment.interval.ms"),
        )

    def share_limits(self, group: str) -> ShareLimits:
        return self._share_limits.get(group, self._share_default)

    def _share_limits_of(self, values: Mapping[str, ConfigValue]) -> ShareLimits:
        found = {name: values.get(name, one.key.default) for name, one in self.keys.items()}
        return ShareLimits(
            int(found["share.record.lock.duration.ms"]),
            int(found["share.delivery.count.limit"]),
            int(found["share.partition.max.record.locks"]),
            bool(found["share.renew.acknowledge.enable"]),
        )

    def _int(self, group: str, name: str) -> int:
        return int(self.value(group, name))
