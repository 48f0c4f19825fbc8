# Enter the job's directory and look up the number of this worker. Comes before attend.sh and stop.sh.
#
# Placeholder: name, that of the directory.

mkdir -p "$HOME/@{name}" && cd "$HOME/@{name}" || exit
url=http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number
worker=$(curl -sf --retry 5 -H "Metadata-Flavor: Google" "$url")
answer() { echo "tpu-vm: worker $worker $*"; }
exec 9>>lock
