"""Traffic while lanes are killed, and whether a user could have noticed. The work behind `speclane chaos`."""
