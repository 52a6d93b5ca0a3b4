package org.apache.spark.kafka010;

import scala.collection.immutable.Seq;

/** Redacts nothing of the logged settings: none is a secret. */
public class KafkaRedactionUtil$ {
  public static final KafkaRedactionUtil$ MODULE$ = new KafkaRedactionUtil$();

  public Seq<?> redactParams(Seq<?> parameters) {
    return parameters;
  }
}
