package org.apache.spark.kafka010;

import java.util.Map;
import org.apache.spark.SparkConf;
import scala.Option;

/** Delegation tokens: none. */
public class KafkaTokenUtil$ {
  public static final KafkaTokenUtil$ MODULE$ = new KafkaTokenUtil$();

  public boolean needTokenUpdate(Map<String, Object> settings, Option<?> cluster) {
    return false;
  }

  public Option<Object> findMatchingTokenClusterConfig(SparkConf conf, String servers) {
    return Option.empty();
  }
}
