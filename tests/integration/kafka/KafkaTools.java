import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.util.Arrays;
import java.util.Map;
import org.apache.kafka.common.utils.Exit;

/**
 * Kafka's command lines, one after the other in one JVM.
 *
 * <p>From standard input a line each: the class and its arguments, with tabs between. For each it
 * prints a line of JSON: the exit code, and what the tool printed.
 */
public class KafkaTools {
  /** Ends a tool, as an exit would. Some catch it and exit again: the first code counts. */
  private static class Exited extends Error {
    Exited() {
      super(null, null, false, false);
    }
  }

  private static Integer code;

  public static void main(String[] args) throws Exception {
    Exit.Procedure exit =
        (status, message) -> {
          if (message != null) {
            System.err.println(message);
          }
          code = code == null ? status : code;
          throw new Exited();
        };
    Exit.setExitProcedure(exit);
    Exit.setHaltProcedure(exit);
    PrintStream out = System.out;
    ObjectMapper json = new ObjectMapper();
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      ByteArrayOutputStream printed = new ByteArrayOutputStream();
      PrintStream both = new PrintStream(printed, true);
      System.setOut(both);
      System.setErr(both);
      code = null;
      run(line.split("\t"));
      out.println(json.writeValueAsString(Map.of("code", code, "text", printed.toString())));
    }
    out.flush();
    Runtime.getRuntime().halt(0);
  }

  private static void run(String[] words) throws Exception {
    Object arguments = Arrays.copyOfRange(words, 1, words.length);
    try {
      Class.forName(words[0]).getMethod("main", String[].class).invoke(null, arguments);
      code = code == null ? 0 : code;
    } catch (InvocationTargetException error) {
      if (!(error.getCause() instanceof Exited)) {
        error.getCause().printStackTrace();
        code = -1;
      }
    }
  }
}
