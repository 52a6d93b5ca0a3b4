package org.apache.spark.kafka010;

import java.util.HashMap;
import java.util.Map;
import scala.Option;
import scala.Tuple2;
import scala.collection.Iterator;

/** Collects a consumer's settings; a broker without authentication needs no others. */
public class KafkaConfigUpdater {
  private final Map<String, Object> settings = new HashMap<>();

  public KafkaConfigUpdater(
      String module, scala.collection.immutable.Map<String, Object> parameters) {
    for (Iterator<Tuple2<String, Object>> left = parameters.iterator(); left.hasNext(); ) {
      Tuple2<String, Object> one = left.next();
      settings.put(one._1(), one._2());
    }
  }

  public KafkaConfigUpdater set(String name, Object value) {
    settings.put(name, value);
    return this;
  }

  public KafkaConfigUpdater setIfUnset(String name, Object value) {
    settings.putIfAbsent(name, value);
    return this;
  }

  public KafkaConfigUpdater setAuthenticationConfigIfNeeded() {
    return this;
  }

  public KafkaConfigUpdater setAuthenticationConfigIfNeeded(Option<?> cluster) {
    return this;
  }

  public Map<String, Object> build() {
    return settings;
  }
}
