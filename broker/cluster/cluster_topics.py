"""The topics of a cluster: changed through the bucket, and followed by all brokers.

* The name's newest version in the bucket says what a topic is (`manifest.topic_names`). A broker
  changes that first, then follows it itself and tells the others; one that was not told follows at
  its next look.
* A partition exists once its first manifest says to which broker it is assigned; that broker opens
  and claims it. What a crash leaves undone, `Cluster.look_after` finds and does.
* Every change needs the bucket. Without it topics stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import structlog

from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.cluster.news import News
from tierlog.broker.cluster.placement import Led, place_new, place_replicas
from tierlog.broker.data_folder.data_folder import DataFolder, TopicIdPartition, new_id
from tierlog.broker.data_folder.topic_registry import TopicRecord, TopicRegistry
from tierlog.broker.replicas.replicas import Replicas
from tierlog.broker.topics.live_topics import (
    LiveTopics,
    check_partition_count,
    with_partitions,
)
from tierlog.broker.topics.topic_replicas import (
    ANYWHERE,
    Chosen,
    NewTopic,
    check_min_in_sync,
    choose_factor,
)
from tierlog.broker.topics.topics import Topic, check_topic_name
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.replica_sets import ReplicaSets
from tierlog.manifest.topic_names import TopicName, TopicNames
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import (
    ConfigurationError,
    FieldProblem,
    InvalidConfig,
    InvalidReplicationFactor,
    LeaderUnknown,
    TopicExists,
    UnknownTopic,
)
from tierlog.record_format.topic_rules import ConfigValue

log = structlog.get_logger(__name__)


class ClusterTopics:
    """Thread-safe. `led`: what each broker leads that may be given partitions; `has`: how many
    replicas each broker has; `on_followed`: a topic is new here or has more partitions, or, with
    True, it was deleted.
    """

    def __init__(
        self,
        topics: LiveTopics,
        bucket: Bucket,
        news: News,
        replicas: Replicas,
        *,
        led: Callable[[], Led],
        has: Callable[[], Mapping[int, int]],
        on_followed: Callable[[TopicRecord, bool], None],
        clock: Callable[[], int],
        default_factor: int,
    ) -> None:
        self._topics, self._bucket, self._news = topics, bucket, news
        self._replicas = replicas
        self.names = TopicNames(bucket.store)
        self._led, self._has, self._clock = led, has, clock
        self._default_factor = default_factor
        self._on_followed = on_followed

    def create(self, wanted: NewTopic) -> Topic:
        """Raises what `LiveTopics.create` does, and StoreUnavailable."""
        name, partitions = wanted.name, wanted.partitions
        check_topic_name(name)
        check_partition_count(partitions)
        factor = self.choose_factor(wanted.replication_factor, wanted.replicas)
        parsed = _checked(LogConfig.parse(wanted.config), factor=factor, given=wanted.config)
        self._bucket.store_status.require_store()
        topic_id, now_ms = new_id(), self._clock()

        def taken(before: TopicName | None) -> TopicName:
            if before is not None and before.topic_id is not None:
                raise TopicExists(f"topic {name!r} already exists")
            return TopicName(
                topic=name,
                topic_id=topic_id,
                partitions=partitions,
                config=dict(parsed.overrides),
                replication_factor=factor,
                created_ms=max(now_ms, before.created_ms + 1 if before is not None else 0),
            )

        named = self.names.change_name(name, taken)
        return self._carry_out(named, range(partitions), wanted.replicas)

    def alter(
        self,
        name: str,
        *,
        config: Mapping[str, ConfigValue | None],
        partitions: int | None,
        replicas: Chosen = ANYWHERE,
    ) -> Topic:
        """Raises what `LiveTopics.alter` does, and StoreUnavailable."""
        topic = self._topics.find(name)
        self._topics.check_added_replicas(name, replicas)
        role = topic.config.replace(config).replication_store
        if not topic.record.is_replicated and role != "none":
            self._check_placed(topic.record)
        if topic.record.is_replicated and (partitions or 0) > topic.record.partitions:
            self.choose_factor(topic.record.replication_factor, replicas)
        self._bucket.store_status.require_store()
        had = 0

        def altered(before: TopicName | None) -> TopicName:
            nonlocal had
            if before is None or before.topic_id != topic.record.topic_id:
                raise UnknownTopic(name)
            had, now = before.partitions, LogConfig.parse(before.config)
            factor = before.replication_factor
            changed = _checked(now.replace(config), factor=factor, given=config)
            for partition in topic.partitions.values():
                partition.check_change(now, changed)
            record = _record_of(before)
            record = record if partitions is None else with_partitions(record, partitions)
            return msgspec.structs.replace(
                before, config=dict(changed.overrides), partitions=record.partitions
            )

        named = self.names.change_name(name, altered)
        return self._carry_out(named, range(had, named.partitions), replicas)

    def note_factor(self, record: TopicRecord, factor: int) -> None:
        """A reassignment has given its first partition another number of replicas, which is from
        now on that of new ones, as in Kafka. Raises StoreUnavailable; LeaderUnknown if that would
        change how a partition comes to be whose creator has not said yet who has it.
        """
        self._bucket.store_status.require_store()
        noted = msgspec.structs.replace(record, replication_factor=factor)
        if noted.is_replicated is not record.is_replicated:
            self._check_placed(record)

        def with_factor(before: TopicName | None) -> TopicName:
            if before is None or before.topic_id != record.topic_id:
                raise UnknownTopic(record.name)
            if before.partitions != record.partitions:
                raise LeaderUnknown(f"{record.name} has more partitions now")
            return msgspec.structs.replace(before, replication_factor=factor)

        self.follow(self.names.change_name(record.name, with_factor), dirty=True)
        self._news.tell_all([record.name])

    def _check_placed(self, record: TopicRecord) -> None:
        """Raises LeaderUnknown unless the bucket says of each partition who has it."""

        def check(number: int) -> None:
            has_set = self._replicas.has_set(record, number)
            if not has_set and not self._bucket.folders_of(record, number):
                raise LeaderUnknown(f"nobody has {record.name}-{number} yet")

        self._news.in_threads([partial(check, number) for number in range(record.partitions)])

    def delete(self, name: str) -> None:
        """Raises UnknownTopic, StoreUnavailable."""
        topic = self._topics.find(name)
        self._bucket.store_status.require_store()

        def freed(before: TopicName | None) -> TopicName:
            if before is None or before.topic_id != topic.record.topic_id:
                raise UnknownTopic(name)
            return msgspec.structs.replace(before, topic_id=None, config={}, partitions=0)

        self.follow(self.names.change_name(name, freed))
        self._news.tell_all([name])

    def ensure(self, wanted: NewTopic) -> None:
        """Create it unless another broker has, and know it here. Raises LeaderUnknown while there
        are fewer brokers than it is to have replicas.
        """
        self.follow_names([wanted.name])
        if self._topics.registry.by_name(wanted.name) is None:
            try:
                self.create(wanted)
            except InvalidReplicationFactor as error:
                raise LeaderUnknown(f"{wanted.name} cannot be created yet: {error}") from error
            except TopicExists:
                pass  # another broker was faster
            self.follow_names([wanted.name])

    def choose_factor(self, given: int | None, replicas: Chosen) -> int:
        """The replication factor of a new topic. Raises InvalidReplicationFactor,
        InvalidReplicaAssignment.
        """
        default = self._default_factor
        return choose_factor(given, replicas, default=default, living=self._living())

    def _living(self) -> set[int]:
        """Raises LeaderUnknown if there are none."""
        if not (living := set(self._led())):
            raise LeaderUnknown("no broker of the cluster may be given partitions")
        return living

    def bring_own(self) -> None:
        """Give the topics that this folder had before it joined their names in the cluster. Raises
        ConfigurationError, also for one that the cluster has with replicas; StoreUnavailable.
        """
        for record in self._topics.registry.live():
            if record.version == 0:
                self.follow(_bring(self.names, record, self._bucket.store))

    # --- following --------------------------------------------------------------------------------

    def follow_names(self, names: Iterable[str]) -> None:
        """Look at these names in the bucket. Raises StoreUnavailable, CorruptDataError."""
        for name in names:
            if (named := self.names.find_name(name)) is not None:
                self.follow(named)

    def follow_all(self) -> None:
        """Look whether any name has changed: one LIST, if none has."""
        for named in self.names.list_names():
            self.follow(named)

    def follow(self, named: TopicName, *, dirty: bool = False) -> None:
        """Know the topic as the bucket says. `dirty`: its topic object has to follow."""
        known = self._topics.registry.by_name(named.topic)
        if known is not None and known.version >= named.version:
            return  # what was read is not newer than what is known
        if known is not None and known.topic_id != named.topic_id:
            self._replicas.drop_topic(known.topic_id)
            self._topics.forget_topic(known.topic_id)
            self._replicas.drop_topic(known.topic_id)  # opened between the two
            self._on_followed(known, True)
        if named.topic_id is not None:
            record = self._topics.follow_topic(_record_of(named, dirty=dirty)).record
            if known is None or known.partitions != record.partitions:
                self._on_followed(record, False)

    # --- details ----------------------------------------------------------------------------------

    def _carry_out(self, named: TopicName, new: Iterable[int], replicas: Chosen) -> Topic:
        """Make the new partitions of a change that is in the bucket, and tell the others. Who was
        chosen to lead and does not answer is replaced.
        """
        self.follow(named, dirty=True)
        topic = self._topics.find(named.topic)
        led, silent = dict(self._led()), set[int]()
        places = [(topic.record.topic_id, number) for number in new]
        leaders = {number: chosen[0] for number, chosen in replicas.items()}
        if places and not led:
            raise LeaderUnknown("no broker of the cluster may be given partitions")
        if topic.record.is_replicated:
            self._place_replicated(topic.record, place_new(places, led), replicas)
            return topic
        while True:
            placed = place_new(places, led)
            placed |= {one: leaders[one[1]] for one in places if leaders.get(one[1]) in led}
            self._assign(topic.record, placed, silent)
            silent |= self._news.tell_all([named.topic], placed=placed)
            led = {one: had for one, had in led.items() if one not in silent}
            places = [place for place, node_id in placed.items() if node_id in silent]
            if not (places and led):
                return topic

    def _place_replicated(
        self,
        record: TopicRecord,
        leaders: Mapping[TopicIdPartition, int],
        replicas: Mapping[int, Sequence[int]],
    ) -> None:
        """Write who has the replicas of new partitions, and have the first of each lead. Who does
        not answer finds out later, and another leads meanwhile.
        """
        may_have, had = self._led(), self._has()
        zones = {one.node_id: one.zone for one in self._news.alive() if one.node_id in may_have}
        placed = {
            **place_replicas(leaders, zones, had, factor=record.replication_factor),
            **{place: tuple(replicas[place[1]]) for place in leaders if place[1] in replicas},
        }
        create = partial(self._replicas.create, record, folders=self._news.folders())
        self._news.in_threads([partial(create, one[1], ids) for one, ids in placed.items()])
        for turn in range(record.replication_factor):  # the first leads before the others ask
            told = {place: ids[turn] for place, ids in placed.items() if turn < len(ids)}
            self._news.tell_all([record.name], placed=told)

    def place_replicas_again(self, record: TopicRecord, number: int) -> bool:
        """Write the first set of a partition that has none: its creator died. Whether it had."""
        if self._replicas.has_set(record, number):
            return False
        place = (record.topic_id, number)
        self._place_replicated(record, place_new([place], self._led()), {})
        return True

    def _assign(
        self, record: TopicRecord, placed: Mapping[TopicIdPartition, int], silent: set[int]
    ) -> None:
        """`silent`: brokers that did not answer when partitions were assigned to them."""
        folders = self._news.folders()
        taken = {folders[node_id] for node_id in silent}
        self._news.in_threads(
            [
                partial(
                    self._bucket.assign,
                    record,
                    number,
                    folders[node_id],
                    may_take_from=taken.__contains__,
                )
                for (_, number), node_id in placed.items()
            ]
        )


def _checked(
    config: LogConfig, *, factor: int, given: Mapping[str, ConfigValue | None]
) -> LogConfig:
    """A cluster moves partitions through the bucket. Raises InvalidConfig."""
    check_min_in_sync(config, factor=factor, given=given)
    if not config.remote_storage_enable:
        why = "the partitions of a cluster move through the bucket"
        raise InvalidConfig(
            f"remote.storage.enable: {why}",
            problems=(FieldProblem("config.remote.storage.enable", why),),
        )
    return config


def _has_sets(store: ObjectStore, named: TopicName) -> bool:
    assert named.topic_id is not None, "the name has a topic"
    keys = (PartitionKeys(named.topic, named.topic_id, one) for one in range(named.partitions))
    return any(ReplicaSets(store, one).load_newest().taken for one in keys)


def bring_before_joining(folder: DataFolder, store: ObjectStore) -> None:
    """Give the topics of the first folder that joins their names, before another broker can create
    topics. Raises ConfigurationError if the store has topics of a broker that has not joined.
    """
    names = TopicNames(store)
    own = TopicRegistry(folder.path, write=folder.write).live()
    for record in own:
        _bring(names, record, store)
    if not own and not names.list_names() and (topics := TopicObjects(store).names()):
        raise ConfigurationError(
            f"{store.url} has {len(topics)} topics of a broker that is alone, {topics[0]!r} for "
            "example: start that broker's data folder with --join first"
        )


def _bring(names: TopicNames, record: TopicRecord, store: ObjectStore) -> TopicName:
    found = names.find_name(record.name)
    if found is not None and found.topic_id == record.topic_id:
        if found.replication_factor > 1 or _has_sets(store, found):
            raise ConfigurationError(
                f"topic {record.name!r} has replicas in the cluster, and none of them is in this "
                "folder, which has it alone, as one that was restored: start it without --join"
            )
        return found
    return names.change_name(record.name, partial(_brought, record))


def _brought(record: TopicRecord, before: TopicName | None) -> TopicName:
    if before is not None and before.topic_id not in (None, record.topic_id):
        raise ConfigurationError(
            f"topic {record.name!r} of this data folder has the name of another of the cluster: "
            "start it alone, with another prefix, and copy its records"
        )
    return TopicName(
        topic=record.name,
        topic_id=record.topic_id,
        partitions=record.partitions,
        config=record.config,
        created_ms=record.created_ms,
        replication_factor=record.replication_factor,
    )


def _record_of(named: TopicName, *, dirty: bool = False) -> TopicRecord:
    assert named.topic_id is not None, "the name has a topic"
    return TopicRecord(
        name=named.topic,
        topic_id=named.topic_id,
        partitions=named.partitions,
        config=dict(named.config),
        created_ms=named.created_ms,
        replication_factor=named.replication_factor,
        dirty=dirty,
        version=named.version,
    )
