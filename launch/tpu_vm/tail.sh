# Print the log until the job ends, either from a given line on or from the last few lines on.
#
# Placeholders: name, that of the directory; first_line or last_lines. The line of the other one is left out.

cd "$HOME/@{name}" || exit
lines=$(wc -l <log)
first=@{first_line}
first=$((lines > @{last_lines} ? lines - @{last_lines} + 1 : 1))
echo "tpu-vm: log from $first"
flock -n -s lock true && exec tail -n "+$first" log
tail -n "+$first" -F log &
flock -s lock true
kill $!
