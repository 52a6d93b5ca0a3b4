#!/bin/sh
# Start a broker of `tierlog cluster dev` that was killed or stopped: start-broker.sh N [FOLDER]
. "$(dirname "$0")/broker.sh"
if pid=$(running_pid); then
    echo "broker $number runs already (process $pid)" >&2
    exit 1
fi
nohup sh "$broker.command" </dev/null >>"$broker.log" 2>&1 &
echo $! >"$broker.pid"
echo "started broker $number (process $!)"
