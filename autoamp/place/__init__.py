"""From verdicts and prices to an assignment.  Nothing here changes a graph."""
