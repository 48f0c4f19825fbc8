# Print the log until the job ends: from first_line on, or the last lines of it. The other of the two is left out.
# Given: name of the directory; first_line or last_lines.

cd "$HOME/@{name}" || exit
lines=$(wc -l <log)
first=@{first_line}
first=$((lines > @{last_lines} ? lines - @{last_lines} + 1 : 1))
echo "tpu-vm: log from $first"
flock -n -s lock true && exec tail -n "+$first" log
tail -n "+$first" -F log &
flock -s lock true
kill $!
