# logged.sh LOG COMMAND...: what the command says goes into a file, and is shown where it fails.
log=$1
shift
"$@" >"$log" 2>&1 || {
  status=$?
  cat "$log" >&2
  exit $status
}
