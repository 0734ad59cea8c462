"""Which op made a number that is not finite: a run is recorded, searched and cured."""
