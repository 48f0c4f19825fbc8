# Stop the job if it is running, and delete its exit code, so that attend.sh starts it again.
#
# The job gets SIGTERM, and SIGKILL 30 s later. `submitted` is emptied, because the next job does not wait for machines.

if ! flock -n 9; then
  kill -TERM -- "-$(cat pid)"
  flock -w 30 9 || { kill -KILL -- "-$(cat pid)"; flock -w 10 9; }
fi
rm -f exit_code
: >submitted
[ ! -e log ] || mv log log.previous
answer stopped
