# Start the job unless it runs or has ended; say which. One that was asked to stop (75) is started again.
# Given: commit; archive of it in the home directory, and its sha256; submitted, when the machines were asked for: its
# line is left out where that is not known; job, the text of job.sh as one word.

if ! flock -n 9; then answer running of "$(cat commit)"; exit; fi
if [ -e exit_code ] && [ "$(cat exit_code)" != 75 ]; then
  answer ended "$(cat exit_code)" of "$(cat commit)"
  exit
fi
if ! echo "@{sha256}  ../@{archive}" | sha256sum --check --status 2>/dev/null; then
  answer empty
  exit
fi
rm -f exit_code
[ -e submitted ] || echo @{submitted} >submitted
echo @{commit} >commit
setsid nohup bash -c @{job} >>log 2>&1 </dev/null &
echo $! >pid
answer started of @{commit}
