# Sourced by the others: `N [FOLDER]` names a broker of `tierlog cluster dev`.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 N [FOLDER]" >&2; exit 2; }
number=$1
folder=${2:-.tierlog-cluster}
broker="$folder/broker-$number"
[ -f "$broker.command" ] || { echo "no broker $number in $folder" >&2; exit 1; }

# The process of the broker, if it runs: a number in a file may be another's by now.
running_pid() {
    pid=$(cat "$broker.pid" 2>/dev/null) || return 1
    ps -ww -p "$pid" -o command= 2>/dev/null | grep -q -- "broker-$number/" && echo "$pid"
}

needed_pid() {
    running_pid || { echo "broker $number does not run" >&2; exit 1; }
}

wait_for_end() {
    while kill -0 "$1" 2>/dev/null && [ "$(ps -p "$1" -o stat= 2>/dev/null | cut -c1)" != Z ]; do
        sleep 0.1
    done
}
