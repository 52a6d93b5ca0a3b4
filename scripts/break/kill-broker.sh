#!/bin/sh
# Kill a broker of `tierlog cluster dev` as a crash would: kill-broker.sh N [FOLDER]
. "$(dirname "$0")/broker.sh"
pid=$(needed_pid)
kill -KILL "$pid"
wait_for_end "$pid"
echo "killed broker $number (process $pid)"
