"""The processes of a trial: a reaper above the script, records on disk, the end of all of them."""
