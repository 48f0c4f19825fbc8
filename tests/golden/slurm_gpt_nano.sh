#!/bin/bash
# Rendered by python -m launch slurm: the same command on every node, again and again until it is done.
#SBATCH --job-name=gpt_nano
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@300
#SBATCH --cpus-per-task=4
set -u
name=gpt_nano
command=(/opt/env/bin/python -m runner specs/gpt_nano.yaml)
own_python=/opt/env/bin/python
standby_line='{"variables": {"RUNNER_SUBMITTED": "@submit_time@"}, "words": ["specs/gpt_nano.yaml"]}'
step_options=(--label --kill-on-bad-exit=0 --wait=120 --cpus-per-task=4)
max_restarts=100
num_nodes=2
num_tasks=2
num_spare_nodes=0
standby_seconds=30

export PYTHONUNBUFFERED=1
# The time in the queue counts too: before the first start or, after a requeue, since that.
submit_time=$(timeout 20 squeue --noheader --states=all --format=%V --jobs="$SLURM_JOB_ID")
RUNNER_SUBMITTED=$([[ -z $submit_time ]] || date --date="$submit_time" +%s)
export RUNNER_SUBMITTED
# Where the command runs, which all nodes share. A line for each 76 since the last commit: the time of that commit.
restarts_file=$name-$SLURM_JOB_ID.restarts
# Nodes with defective devices, one a line, added by the command.
export RUNNER_FAULTY_HOSTS=$PWD/$name-$SLURM_JOB_ID.faulty
[[ ${SLURM_RESTART_COUNT:-0} != 0 ]] || rm -f -- "$restarts_file" "$RUNNER_FAULTY_HOSTS"

# Program of each node. srun ends with the largest code of its tasks, so the codes are ordered by what they say: a
# failure (202) and an invalid job (201), which only a person can fix, rank above 76, 75 and 0. A process that was
# killed is started again. SLURM signals this shell together with the command, which the shell has to outlive.
run_task='
is_told=0
trap "is_told=1" TERM HUP USR1 USR2
if [[ $0 == standby ]]; then
  # It has imported what the job needs, and waits on descriptor 3 for a line with arguments and submit time. If there is
  # no memory for it, or something has killed it before the line, this shell waits, and starts a process for the line.
  code=137
  has_memory="from runner.process import *; print((read_free_memory_bytes() or 0) >= STANDBY_BYTES)"
  if [[ $("$1" -c "$has_memory") == True ]]; then
    RUNNER_STANDBY=3 "$@" 3<&0 </dev/null
    code=$?
  fi
  # The line is the only one, so nothing is read here once the process has got it. An empty one ends a standby.
  if [[ $is_told == 0 ]] && read -r line; then
    code=0
    [[ -z $line ]] || { RUNNER_STANDBY=3 "$@" 3<<<"$line" </dev/null; code=$?; }
  fi
else
  "$@"
  code=$?
fi
case $code in
  0 | 75 | 76) exit $code ;;
  129 | 130 | 131 | 134 | 137 | 138 | 140 | 143) exit 76 ;;
  2) exit 201 ;;
  *) exit 202 ;;
esac'

# Time of the newest commit of the job in milliseconds: a later one shows that it makes progress.
find_last_commit='
import sys
from launch.supervisor import read_progress
print(int(1000 * max(read_progress(sys.argv[1], sys.argv[3::2]).commits, default=0)))'

quick_seconds=60  # an attempt that ends sooner has hardly begun to train
max_quick_ends=5  # in a row, after which the job may need other nodes
max_probes=64  # steps that test nodes at the same time; SLURM cannot start thousands within the timeout of one

say() { echo "launch: $*"; }

# SLURM signals the tasks itself whenever it ends the job. If the job goes on, this shell alone was signalled.
on_sigterm() {
  was_interrupted=1
  if [[ $(squeue --noheader --states=all --format=%T --jobs="$SLURM_JOB_ID") != RUNNING ]]; then
    is_ending=1
  elif [[ $is_told == 0 ]]; then  # a second signal would cut the last save short
    is_told=1
    scancel --signal=TERM "$SLURM_JOB_ID"  # to the tasks; this shell is not among them
  fi
}

requeue() {
  trap '' TERM HUP USR1 USR2
  end_standby ''
  for pause_seconds in 0 10 30 60; do
    sleep "$pause_seconds"
    scontrol requeue "$SLURM_JOB_ID" && {
      exclude_faulty_nodes
      exit "$code"
    }
  done
  say "cannot requeue job $SLURM_JOB_ID; requeue it by hand"
  exit "$code"
}

# Keep the job off its faulty nodes, besides those that it excludes already. SLURM changes the excluded nodes of pending
# jobs alone. The job is one after the requeue, and this script has SLURM's KillWait until it is killed.
exclude_faulty_nodes() {
  local faulty excluded
  faulty=$(grep -sxE '[A-Za-z0-9._-]+' "$RUNNER_FAULTY_HOSTS" | sort -u | paste -sd,)
  [[ -n $faulty ]] || return
  excluded=$(scontrol --oneliner show job "$SLURM_JOB_ID" | grep -o ' ExcNodeList=[^ ]*')
  excluded=${excluded#*=}
  [[ -z $excluded || $excluded == '(null)' ]] || faulty=$excluded,$faulty
  if scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$faulty"; then
    say "the queue gives the job other nodes than $faulty"
  else
    say "cannot exclude $faulty from job $SLURM_JOB_ID"
  fi
}

# Print the nodes of the job that are neither draining, not responding nor down; with spare nodes only those on which
# a step starts, because SLURM takes minutes to notice that a node has died.
list_healthy_nodes() {
  local names node
  names=$(squeue --noheader --states=all --format=%N --jobs="$SLURM_JOB_ID") || return
  for node in $(sinfo --noheader --Node --nodes="$names" --format='%N %T' | grep -E ' (allocated|mixed)[-+]?$' |
    cut -d ' ' -f 1 | sort -u); do
    ! grep -qsxF -- "$node" "$RUNNER_FAULTY_HOSTS" || continue
    while (($(jobs -rp | wc -l) >= max_probes)); do wait -n; done
    if ((num_spare_nodes == 0)) ||
      timeout 30 srun --quiet --overlap --nodes=1 --ntasks=1 --nodelist="$node" true 2>/dev/null; then
      echo "$node"
    fi &
  done
  wait
}

# Choose the nodes of the next start, first among those of the last one. Fails if too few are healthy.
choose_nodes() {
  local healthy
  healthy=$(list_healthy_nodes | sort -V)
  (($(grep -c . <<<"$healthy") >= num_nodes)) || return
  ((num_spare_nodes == 0)) || use_nodes "$(
    grep -xFf <(printf '%s\n' "$nodes") <<<"$healthy"
    grep -vxFf <(printf '%s\n' "$nodes") <<<"$healthy"
  )"
}

# Let the command run on the first nodes of a list.
use_nodes() {
  nodes=$(head -n "$num_nodes" <<<"$1" | sort -V)
  node_options=(--nodes="$num_nodes" --ntasks="$num_tasks" --nodelist="$(paste -sd, <<<"$nodes")")
}

# Start the standby of the attempt that begins now: after a while, a step whose tasks read one line from a pipe. Only
# this script holds the writing end, so they also end when the script has ended.
start_standby() {
  local directory holder reader
  ((standby_seconds > 0)) && directory=$(mktemp -d) || return
  # A named pipe that is open for both blocks no further opening.
  mkfifo "$directory/pipe" && exec {holder}<>"$directory/pipe" &&
    exec {standby_pipe}>"$directory/pipe" {reader}<"$directory/pipe" {holder}>&- && {
    {
      read -r -t "$standby_seconds"
      # Anything but a timeout is the end of the attempt.
      (($? > 128)) || exit
      exec srun "${step_options[@]}" --overlap "${node_options[@]}" bash -c "$run_task" standby "${command[@]:0:3}"
    } <&"$reader" {reader}<&- {standby_pipe}>&- &
    standby_pid=$!
    exec {reader}<&-
  }
  rm -rf -- "$directory"
}

# Let the standby's step run the command, if it waits on the nodes of the next start; fails if it does not, also if the
# step has ended.
take_standby() {
  # In the first seconds of its life the step may not have begun.
  if [[ $nodes == "$former_nodes" ]] && ((age_seconds > standby_seconds + 1)); then
    srun_pid=$standby_pid
    end_standby "${standby_line/@submit_time@/$RUNNER_SUBMITTED}"
  else
    end_standby ''
    return 1
  fi
}

# Write a line to the standby, if there is one, and close the pipe. Fails if the standby has ended.
end_standby() {
  local status=1
  if [[ -n $standby_pid ]]; then
    (printf '%s\n' "$1" >&"$standby_pipe") 2>/dev/null && status=0  # a subshell, which may get SIGPIPE
    exec {standby_pipe}>&-
    former_standby_pid=$standby_pid standby_pid=''
  fi
  return "$status"
}

nodes='' node_options=() standby_pid='' former_standby_pid='' standby_pipe='' former_nodes='' age_seconds=0
((num_spare_nodes == 0)) || use_nodes "$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
is_ending=0 is_told=0 num_quick_ends=0 pause_seconds=0
trap on_sigterm TERM HUP USR1 USR2
while :; do
  # A signal ends `wait`, and so this pause, but not srun.
  ((pause_seconds == 0)) || { sleep "$pause_seconds" & wait $!; kill $! 2>/dev/null; }
  began_seconds=$SECONDS
  if [[ $is_ending == 1 || $is_told == 1 ]]; then  # in the pause
    code=75
  else
    take_standby || {
      srun "${step_options[@]}" "${node_options[@]}" bash -c "$run_task" task "${command[@]}" &
      srun_pid=$!
    }
    start_standby
    while :; do
      was_interrupted=0
      wait "$srun_pid"
      code=$?
      [[ $was_interrupted == 1 ]] || break
    done
  fi
  age_seconds=$((SECONDS - began_seconds))
  case $code in
    0 | 75) ;;
    202) code=1 ;;
    201) code=2 ;;
    *) code=76 ;;  # srun's own failures too
  esac
  if [[ $is_ending == 1 ]]; then
    say "ended with $code; SLURM decides whether the job starts again"
    exit "$code"
  fi
  if [[ $code == 75 ]]; then
    say "preempted; starting again"
    requeue
  fi
  [[ $code == 76 ]] || break
  RUNNER_SUBMITTED=$(date +%s)  # a restart on the same nodes begins now
  # No commits are read while the directory cannot be read.
  newest_commit=$(timeout 20 "$own_python" -c "$find_last_commit" "${command[@]:3}" 2>/dev/null)
  last_commit=$(tail -n 1 "$restarts_file" 2>/dev/null)
  if ((${newest_commit:-0} > ${last_commit:-0})); then
    rm -f -- "$restarts_file"
    last_commit=$newest_commit
  fi
  echo "${last_commit:-0}" >>"$restarts_file" || exit "$code"
  num_restarts=$(wc -l <"$restarts_file")
  if ((num_restarts > max_restarts)); then
    say "ended with $code after $max_restarts restarts without a commit; --max-restarts allows no more"
    break
  fi
  num_quick_ends=$((age_seconds < quick_seconds ? num_quick_ends + 1 : 1))
  pause_seconds=$((1 << num_quick_ends - 1))
  restart="ended with $code; restart $num_restarts of $max_restarts"
  former_nodes=$nodes
  if [[ $is_told == 1 ]] || ((num_quick_ends >= max_quick_ends)) || ! choose_nodes; then
    say "$restart, in the queue"
    requeue
  fi
  [[ $nodes == "$former_nodes" ]] && which="the same nodes" || which=$(paste -sd, <<<"$nodes")
  say "$restart, on $which in $pause_seconds s"
done
end_standby '' && timeout 10 tail --pid="$former_standby_pid" --sleep-interval=0.1 --follow /dev/null  # or SLURM kills it
rm -f -- "$restarts_file" "$RUNNER_FAULTY_HOSTS"
exit "$code"
