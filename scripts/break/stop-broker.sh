#!/bin/sh
# Stop a broker of `tierlog cluster dev` cleanly, so that it hands all over: stop-broker.sh N [FOLDER]
. "$(dirname "$0")/broker.sh"
pid=$(needed_pid)
kill -TERM "$pid"
wait_for_end "$pid"
echo "stopped broker $number (process $pid)"
