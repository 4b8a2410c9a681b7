# Starts PostgreSQL. Before that: the cluster at the first start, then roles, passwords and
# databases as the Secret has them, over a socket that only this container sees.
set -eu
for folder in /usr/lib/postgresql/*/bin; do PATH="$PATH:$folder"; done
export PATH PGDATA=/var/lib/postgresql/data/pgdata
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  rm -rf "$PGDATA" # of a first start that was cut off
  initdb --pgdata="$PGDATA.new" --username=postgres --auth-local=trust --auth-host=scram-sha-256 \
    --encoding=UTF8 --locale=C.UTF-8
  echo "host all all all scram-sha-256" >> "$PGDATA.new/pg_hba.conf"
  mv "$PGDATA.new" "$PGDATA"
fi
pg_ctl --wait -D "$PGDATA" -o "-c listen_addresses='' -c unix_socket_directories=/tmp" start
psql -h /tmp -U postgres -v ON_ERROR_STOP=1 --quiet --no-psqlrc -f /etc/postgresql-setup/postgresql.sql
pg_ctl --wait -D "$PGDATA" -m fast stop
exec postgres -c listen_addresses='*' -c unix_socket_directories=/tmp
