# Start the job unless it is running or has ended, and print its status. A job that ended with 75 is started again.
#
# Placeholders: commit; digests, the SHA-256 and the name of each file of code in the home directory; submitted, the time
# of the request for the machines, whose line is left out if it is not known; job, the text of job.sh as one word.

if ! flock -n 9; then answer running of "$(cat commit)"; exit; fi
if [ -e exit_code ] && [ "$(cat exit_code)" != 75 ]; then
  answer ended "$(cat exit_code)" of "$(cat commit)"
  exit
fi
if ! printf '%s  ../%s\n' @{digests} | sha256sum --check --status 2>/dev/null; then
  answer empty
  exit
fi
rm -f exit_code
[ -e submitted ] || echo @{submitted} >submitted
echo @{commit} >commit
setsid nohup bash -c @{job} >>log 2>&1 </dev/null &
echo $! >pid
answer started of @{commit}
