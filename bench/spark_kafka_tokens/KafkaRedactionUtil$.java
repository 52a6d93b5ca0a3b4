package org.apache.spark.kafka010;

import scala.collection.immutable.Seq;

/** What is logged of the settings: there is no secret among them. */
public class KafkaRedactionUtil$ {
  public static final KafkaRedactionUtil$ MODULE$ = new KafkaRedactionUtil$();

  public Seq<?> redactParams(Seq<?> parameters) {
    return parameters;
  }
}
