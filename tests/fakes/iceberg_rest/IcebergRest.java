package org.apache.iceberg.rest;

import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.Executors;
import org.apache.iceberg.catalog.Namespace;
import org.apache.iceberg.catalog.TableIdentifier;
import org.apache.iceberg.exceptions.AlreadyExistsException;
import org.apache.iceberg.exceptions.CommitFailedException;
import org.apache.iceberg.exceptions.NoSuchNamespaceException;
import org.apache.iceberg.exceptions.NoSuchTableException;
import org.apache.iceberg.inmemory.InMemoryCatalog;
import org.apache.iceberg.rest.RESTCatalogProperties.SnapshotMode;
import org.apache.iceberg.rest.requests.CreateNamespaceRequest;
import org.apache.iceberg.rest.requests.CreateTableRequest;
import org.apache.iceberg.rest.requests.UpdateTableRequest;
import org.apache.iceberg.rest.responses.ErrorResponse;

/**
 * A REST catalog: Iceberg's own requests, answers and rules of commits (`CatalogHandlers`), over the
 * JDK's HTTP server. Metadata is in memory; data and manifests are where their writers put them.
 *
 * <p>Its argument is the warehouse. Prints its port.
 */
public final class IcebergRest {
  private static final InMemoryCatalog CATALOG = new InMemoryCatalog();

  public static void main(String[] arguments) throws IOException {
    CATALOG.initialize("rest", Map.of("warehouse", arguments[0]));
    HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 64);
    server.setExecutor(Executors.newFixedThreadPool(8));
    server.createContext("/v1/", IcebergRest::answer);
    server.start();
    System.out.println(server.getAddress().getPort());
  }

  private static void answer(HttpExchange exchange) throws IOException {
    byte[] body;
    int status = 200;
    try {
      Object found = answerOf(exchange);
      body = found == null ? new byte[0] : RESTObjectMapper.mapper().writeValueAsBytes(found);
      status = found == null ? 204 : 200;
    } catch (RuntimeException error) {
      status = statusOf(error);
      ErrorResponse found =
          ErrorResponse.builder()
              .responseCode(status)
              .withType(error.getClass().getSimpleName())
              .withMessage(error.getMessage())
              .build();
      body = RESTObjectMapper.mapper().writeValueAsBytes(found);
    }
    exchange.getResponseHeaders().set("Content-Type", "application/json");
    boolean isEmpty = status == 204 || exchange.getRequestMethod().equals("HEAD");
    exchange.sendResponseHeaders(status, isEmpty ? -1 : body.length);
    if (!isEmpty) {
      exchange.getResponseBody().write(body);
    }
    exchange.close();
  }

  private static int statusOf(RuntimeException error) {
    if (error instanceof NoSuchTableException || error instanceof NoSuchNamespaceException) {
      return 404;
    }
    boolean conflicts = error instanceof CommitFailedException;
    return conflicts || error instanceof AlreadyExistsException ? 409 : 400;
  }

  /** Null for an answer without a body. */
  private static Object answerOf(HttpExchange exchange) throws IOException {
    String[] path = exchange.getRequestURI().getRawPath().substring("/v1/".length()).split("/");
    String call = exchange.getRequestMethod() + " " + path[0] + " " + path.length;
    if (call.equals("GET config 1")) {
      return Map.of("defaults", Map.of(), "overrides", Map.of());
    }
    Namespace namespace =
        path.length < 2 ? Namespace.empty() : Namespace.of(decoded(path[1]).split("\u001f"));
    TableIdentifier table = path.length < 4 ? null : TableIdentifier.of(namespace, decoded(path[3]));
    switch (call) {
      case "GET namespaces 1":
        return CatalogHandlers.listNamespaces(CATALOG, namespace);
      case "POST namespaces 1":
        return CatalogHandlers.createNamespace(CATALOG, read(exchange, CreateNamespaceRequest.class));
      case "GET namespaces 2":
      case "HEAD namespaces 2":
        return CatalogHandlers.loadNamespace(CATALOG, namespace);
      case "GET namespaces 3":
        return CatalogHandlers.listTables(CATALOG, namespace);
      case "POST namespaces 3":
        return CatalogHandlers.createTable(
            CATALOG, namespace, read(exchange, CreateTableRequest.class));
      case "GET namespaces 4":
      case "HEAD namespaces 4":
        return CatalogHandlers.loadTable(CATALOG, table, SnapshotMode.ALL);
      case "POST namespaces 4":
        return CatalogHandlers.updateTable(CATALOG, table, read(exchange, UpdateTableRequest.class));
      case "DELETE namespaces 4":
        CatalogHandlers.dropTable(CATALOG, table);
        return null;
      default:
        throw new IllegalArgumentException("no such call: " + call);
    }
  }

  private static String decoded(String part) {
    return URLDecoder.decode(part, StandardCharsets.UTF_8);
  }

  private static <T> T read(HttpExchange exchange, Class<T> type) throws IOException {
    return RESTObjectMapper.mapper().readValue(exchange.getRequestBody(), type);
  }
}
