"""From a topology file to running processes: what runs where, started, watched, restarted and drained."""
