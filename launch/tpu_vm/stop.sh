# End the job if it runs, at once if it must be, and forget how it ended: the next look starts it anew, as a job that
# did not wait for machines.
# Given: nothing.

if ! flock -n 9; then
  kill -TERM -- "-$(cat pid)"
  flock -w 30 9 || { kill -KILL -- "-$(cat pid)"; flock -w 10 9; }
fi
rm -f exit_code
: >submitted
[ ! -e log ] || mv log log.previous
answer stopped
