# Set up and run the job, and record its exit code. Runs detached, in the job's directory.
#
# JAX needs a newer Python than the images of TPU VMs have, so uv installs one if none is found.
#
# Placeholders: archive, the file of the commit in the home directory; digests, the SHA-256 and the name of each file of
# code there; packages, the arguments of pip; directory, that of the code in which the job runs; arguments of the worker;
# environment, a file of NAME=value lines in the home directory, whose line is left out if there is no such file.

archive=@{archive}
digests=(@{digests})
packages=(@{packages})
directory=@{directory}
trap : TERM INT
end() { echo "$1" >exit_code.new && mv exit_code.new exit_code; exit; }
make_venv() {
  for python in python3.13 python3.12 python3.11 python3; do
    "$python" -c "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || continue
    "$python" -m venv venv && return
    rm -rf venv
  done
  python3 -m pip install --quiet --user uv && python3 -m uv venv --seed --python 3.12 venv
}
setup() {
  [ "$(cat installed 2>/dev/null)" != "${digests[*]} ${packages[*]}" ] || return 0
  rm -rf code && mkdir code && tar -xzf "../$archive" -C code || return
  [ -x venv/bin/python ] || { rm -rf venv && make_venv; } || return
  # pip keeps an installed version if a wheel has the same, so the former runner goes first.
  venv/bin/python -m pip uninstall --quiet --yes runner 2>/dev/null
  (job=$PWD && cd "code/$directory" && "$job/venv/bin/python" -m pip install --quiet "${packages[@]}") || return
  echo "${digests[*]} ${packages[*]}" >installed
}
setup || { sleep 10; setup; } || { sleep 60; setup; } || end 76
RUNNER_SUBMITTED=$(cat submitted 2>/dev/null)
export RUNNER_SUBMITTED RUNNER_ENGINE=tpu-vm
chmod 600 ../@{environment} && set -a && . ../@{environment} && set +a || end 2
job=$PWD
cd "code/$directory"
"$job/venv/bin/python" -u -m launch.worker @{arguments}
code=$?
cd "$job"
end "$code"
