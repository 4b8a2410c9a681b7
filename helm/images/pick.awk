# awk -f pick.awk packages.txt requirements.lock: the entries of the lock that the list names.
FNR == NR { wanted[$1]; next }
/^[a-z0-9]/ { split($1, pin, "=="); inside = pin[1] in wanted }
inside
