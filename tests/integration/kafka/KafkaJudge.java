import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * The client's side of the judge.
 *
 * <p>`create SERVER`: topics from standard input, a line each: name, partitions, key=value settings.
 * `read SERVER OUT`: for each isolation level, OUT/ISOLATION.jsonl has a line for each record that a
 * consumer got, and OUT/offsets.json the log start, the high watermark and the last stable offset.
 */
public class KafkaJudge {
  private static final ObjectMapper JSON = new ObjectMapper();
  private static final String MAX_FETCH = "67108864";

  public static void main(String[] args) throws Exception {
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", args[1]))) {
      if (args[0].equals("create")) {
        create(admin);
      } else {
        read(admin, args[1], Path.of(args[2]));
      }
    }
  }

  private static void create(Admin admin) throws Exception {
    List<NewTopic> topics = new ArrayList<>();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      String[] words = line.split(" ");
      Map<String, String> settings = new HashMap<>();
      for (String word : Arrays.copyOfRange(words, 2, words.length)) {
        String[] pair = word.split("=", 2);
        settings.put(pair[0], pair[1]);
      }
      topics.add(
          new NewTopic(words[0], Integer.parseInt(words[1]), (short) 1).configs(settings));
    }
    admin.createTopics(topics).all().get();
  }

  private static void read(Admin admin, String server, Path out) throws Exception {
    List<TopicPartition> partitions = new ArrayList<>();
    for (var topic : admin.describeTopics(admin.listTopics().names().get()).allTopicNames().get().values()) {
      topic.partitions().forEach(p -> partitions.add(new TopicPartition(topic.name(), p.partition())));
    }
    Map<String, List<Long>> offsets = new HashMap<>();
    var starts = offsets(admin, partitions, OffsetSpec.earliest(), IsolationLevel.READ_UNCOMMITTED);
    var ends = offsets(admin, partitions, OffsetSpec.latest(), IsolationLevel.READ_UNCOMMITTED);
    var stable = offsets(admin, partitions, OffsetSpec.latest(), IsolationLevel.READ_COMMITTED);
    for (TopicPartition p : partitions) {
      offsets.put(p.toString(), List.of(starts.get(p), ends.get(p), stable.get(p)));
    }
    JSON.writeValue(out.resolve("offsets.json").toFile(), offsets);
    consume(server, ends, "read_uncommitted", out);
    consume(server, stable, "read_committed", out);
  }

  private static Map<TopicPartition, Long> offsets(
      Admin admin, List<TopicPartition> partitions, OffsetSpec spec, IsolationLevel isolation)
      throws Exception {
    Map<TopicPartition, OffsetSpec> asked = new HashMap<>();
    partitions.forEach(p -> asked.put(p, spec));
    Map<TopicPartition, Long> found = new HashMap<>();
    admin.listOffsets(asked, new ListOffsetsOptions(isolation)).all().get()
        .forEach((p, info) -> found.put(p, info.offset()));
    return found;
  }

  private static void consume(
      String server, Map<TopicPartition, Long> ends, String isolation, Path out) throws Exception {
    Map<String, Object> settings = Map.of(
        "bootstrap.servers", server, "isolation.level", isolation, "enable.auto.commit", "false",
        "max.partition.fetch.bytes", MAX_FETCH, "fetch.max.bytes", MAX_FETCH,
        "auto.offset.reset", "none", "check.crcs", "true", "max.poll.records", "100000");
    try (var consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        var lines = new PrintWriter(Files.newBufferedWriter(out.resolve(isolation + ".jsonl")))) {
      consumer.assign(ends.keySet());
      consumer.seekToBeginning(ends.keySet());
      while (ends.entrySet().stream().anyMatch(e -> consumer.position(e.getKey()) < e.getValue())) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
          lines.println(JSON.writeValueAsString(line(record)));
        }
      }
    }
  }

  /** topic-partition, offset, timestamp, its type, key, value, headers. */
  private static List<Object> line(ConsumerRecord<byte[], byte[]> record) {
    List<Object> headers = new ArrayList<>();
    for (Header header : record.headers()) {
      headers.add(Arrays.asList(header.key(), base64(header.value())));
    }
    return Arrays.asList(
        record.topic() + "-" + record.partition(), record.offset(), record.timestamp(),
        record.timestampType().name, base64(record.key()), base64(record.value()), headers);
  }

  private static String base64(byte[] bytes) {
    return bytes == null ? null : Base64.getEncoder().encodeToString(bytes);
  }
}
